"""Mistakes that users make, and the whole message that each ends in: what, which value, what is allowed, the cure."""

import json
import os
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from lightning_rl import PPO, ActorCritic, RLTrainer
from lightning_rl.cli.app import run
from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.cli.help_pages import PROBES
from lightning_rl.system.errors import ConfigurationError
from tests.commands import rl_cli
from tests.helpers import make_data
from tests.variants import variant

MODULE = """
import gymnasium
from lightning_rl import Algorithm, Policy, VectorEnv

class HalfAlgorithm(Algorithm): pass
class HalfPolicy(Policy):
    def forward(self, td, deterministic=False, generator=None): ...
class HalfEnv(VectorEnv):
    def __init__(self, num_envs): ...
class Registered(gymnasium.Env): pass
class Unregistered(gymnasium.Env): pass
gymnasium.register("Mine-v0", Registered)
"""

POLICIES = (
    "ActorCritic, ActorOnly, ConditionedPolicy, CustomVLA, DeterministicActorCritic, DiscreteActorCritic, "
    "FlowActorCritic, GaussianResidualActorCritic, GripperActorCritic, LeRobotPolicy, NoiseActorCritic, NoisePolicy, OnnxPolicy, QPolicy, ResidualActorCritic, "
    "SlowPolicy, SquashedActorCritic, SteeredActorCritic, VLAPolicy"
)
ALGORITHMS = "APG, AWAC, BehaviorCloning, CuriousPPO, CuriousSAC, DQN, DiscreteSAC, FQL, FixedPolicy, GRPO, GripperSAC, IQL, NoiseSAC, PPO, QC, RewardClassifier, SAC, SHAC, StylePPO, SymmetricPPO, TD3, ValueFit"
ENVS = (
    "ActionChunk, CartPole, CartPoleSwingUp, EncodedObservations, EnvPoolEnv, GymnasiumEnv, "
    "LeggedRobot, LiberoEnv, MotionRobot, MujocoEnv, PointMass, PushBlocks, PushCube, Quadruped, Reach, ReturnFramesEnv, SuccessFramesEnv, TensorSimulator, TermWrapper"
)
OF_SB3 = "is a class of Stable-Baselines3; here it is"

PPO_YAML = "fit --config ppo.yaml"
NEEDS = f"fit needs a config or a checkpoint: --config FILE, or --ckpt_path last. Shipped: {', '.join(shipped_configs())}."
FRAMES = "gymnasium.wrappers.FrameStackObservation"
CART_POLE = "Box([-4.8               -inf -0.41887903        -inf], [4.8               inf 0.41887903        inf], (4,), float32)"

TYPED = {
    "fit --confg ppo.yaml": "fit has no option --confg; close matches: config. rl-cli fit --help lists them.",
    "fit ppo.yaml": "'ppo.yaml' belongs to no option: write --config ppo.yaml.",
    "export .": "'.' belongs to no option: write --ckpt_path ..",
    "validate .": "'.' belongs to no option: write --ckpt_path ..",
    "fit --config": "--config needs a value.",
    "fit": NEEDS,
    f"{PPO_YAML} --trainer.precision fp16": "trainer.precision must be 32-true or bf16-mixed, got 'fp16'.",
    f"{PPO_YAML} --data.env my_mod.Unregistered": "'my_mod.Unregistered' for data.env is a Gymnasium env: call "
    "gymnasium.register('Unregistered-v0', Unregistered) in my_mod, and write --data.env GymnasiumEnv --data.env.id "
    "my_mod:Unregistered-v0.",
    f"{PPO_YAML} --data.env my_mod.Registered": "'my_mod.Registered' for data.env is a Gymnasium env: write --data.env "
    "GymnasiumEnv --data.env.id my_mod:Mine-v0.",
    f"{PPO_YAML} --data.env CartPole-v1": "'CartPole-v1' for data.env is the id of a Gymnasium env: write --data.env "
    "GymnasiumEnv --data.env.id CartPole-v1.",
    f"{PPO_YAML} --model.policy my_mod.HalfPolicy": "'my_mod.HalfPolicy' for model.policy is abstract: define "
    f"evaluate_actions, get_value, or name a class that defines them; known here: {POLICIES}.",
    f"{PPO_YAML} --model my_mod.HalfAlgorithm": "'my_mod.HalfAlgorithm' for model is abstract: define "
    f"configure_objectives, or name a class that defines them; known here: {ALGORITHMS}.",
    "sweep --config ppo.yaml --sweep sweep.yaml": "sweep.yaml has an unknown setting 'model.lr'. Put settings of the "
    "trials below space: space: {model.lr: [...]}. A sweep has seeds, space, search, search_args, trials, first, "
    "pruner, pruner_args, score, jobs, seed.",
    "sweep --config ppo.yaml --sweep space.yaml": "Unknown setting 'lr' of PPO; here it is --model.learning_rate.",
    f"{PPO_YAML} --model.n_steps 128": "Unknown setting 'n_steps' of PPO; here it is --data.buffer_size.",
    f"{PPO_YAML} --total_timesteps 1000": "Unknown setting 'total_timesteps'; here it is --data.total_env_steps.",
    f"{PPO_YAML} --seed 3": "Unknown setting 'seed'; here it is --seed_everything.",
    f"{PPO_YAML} --model.policy MlpPolicy": f"'MlpPolicy' for model.policy {OF_SB3} --model.policy ActorCritic for PPO, ActorOnly for "
    "GRPO, SquashedActorCritic for SAC, DeterministicActorCritic for TD3.",
    f"{PPO_YAML} --model SAC": "Missing setting: model.policy. ActorCritic was given, but SAC does not take it; it "
    "takes GripperActorCritic, NoiseActorCritic, ResidualActorCritic, SquashedActorCritic, SteeredActorCritic.",
    f"{PPO_YAML} --data.env.wrappers [FrameStack]": "Unknown class 'FrameStack' for data.env.wrappers: give its name, or "
    "an import path such as my_module.MyClass; close matches: FrameStackObservation.",
    f"{PPO_YAML} --data.env.wrappers FrameStackObservation": "data.env.wrappers must be a list or null, got "
    "'FrameStackObservation': write [FrameStackObservation].",
    f"{PPO_YAML} --data.env.wrappers [{FRAMES}]": "Missing setting: data.env.wrappers.stack_size of "
    "FrameStackObservation, a whole number: write {class_path: FrameStackObservation, init_args: {stack_size: ...}}.",
    f"{PPO_YAML} --trainer.callbacks EarlyStopping": "Missing setting: trainer.callbacks.monitor of "
    "EarlyStopping, a text: write {class_path: EarlyStopping, init_args: {monitor: eval/avg_reward}}.",
    f"{PPO_YAML} --trainer.strategy nope": "trainer.strategy must be auto, ddp or fsdp, got 'nope'.",
    f"{PPO_YAML} --trainer.profiler nope": "trainer.profiler must be simple, advanced, pytorch or null, got 'nope'.",
    f"{PPO_YAML} --data.env my_mod.HalfEnv": "'my_mod.HalfEnv' for data.env is abstract: define reset, step, or name "
    f"a class that defines them; known here: {ENVS}.",
    f"{PPO_YAML} --model.gamma null": "model.gamma must be a number, got null; leave it out for 0.99.",
    f"{PPO_YAML} --data.iterations_per_epoch 9999999999999999999": "data.iterations_per_epoch must lie below 2**63, got "
    "9999999999999999999.",
    f"{PPO_YAML} --data.num_envs=": "data.num_envs must be a whole number, got ''.",
    "fit --config beside.yaml": "model in beside.yaml has gamma next to class_path: settings of a class belong "
    "below init_args: {class_path: ..., init_args: {gamma: ...}}.",
    "fit --config deeper.yaml": "model.init_args in deeper.yaml has class_path or init_args, which name a class one level "
    "higher: {class_path: ..., init_args: {...}}.",
    "fit --config time.yaml": "trainer.max_time must be a text or a timedelta or a mapping, such as {name: value} or null, "
    "got '216000' (YAML converts 1:30:00, 2025_01 and 1e3 to numbers: put the text in quotes).",
    "fit --config number.yaml": "data.env.class_path in number.yaml must be the name of a class, got 3.",
}
"""What was typed, or stands in a config, and is not there: exit code 2."""

MOST = max(8, os.cpu_count())
REFUSED = {
    f"{PPO_YAML} --trainer.accelerator cuda": "trainer.accelerator must be one of auto, cpu on this machine, got "
    "'cuda': torch finds no such device. By default a GPU is used if "
    "there is one.",
    f"{PPO_YAML} --trainer.devices 1000": f"trainer.devices must be at most {MOST} on this machine without GPU, got 1000: "
    "on a CPU each device is a process.",
    f"{PPO_YAML} --model.policy VLAPolicy": "A VLA observes a Dict with rgb, uint8 [H, W, 3] or [cameras, H, W, "
    f"3], and optionally depth, language and proprio, but the space is {CART_POLE}. Give the env the wrapper VLAObservation "
    "(data.env.wrappers), or another policy.",
    "fit --config sac.yaml --model.learning_starts 60 --data.total_env_steps 60": "The first update would come after "
    "256 env steps, but the run has 64 (data.total_env_steps). The update needs model.learning_starts=60, and a "
    "minibatch in the replay (model.batch_size=256) or, with a memory, a sequence of each env. Lower these settings, "
    "or raise data.total_env_steps.",
    "fit --config grpo.yaml --model.policy ActorCritic": "GRPO does not train a critic: the critic of ActorCritic "
    "would stay untrained. Use ActorOnly, without the "
    "critic's settings, or PPO.",
}
"""Values that are out of range, or do not go together: exit code 1."""

SAY_EACH = f"""
import contextlib, io, json
from lightning_rl.cli.app import run
found = []
for line in {[*TYPED, *REFUSED]!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            run(line.split())
            status = 0
        except SystemExit as stop:
            status = stop.code
    found.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""


def test_each_mistake_ends_in_one_message_that_says_the_cure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_mod.py").write_text(MODULE)
    Path("all.py").write_text(SAY_EACH)
    Path("sweep.yaml").write_text("model.lr: [0.1]")
    Path("space.yaml").write_text("space: {model.lr: [0.1]}")
    Path("beside.yaml").write_text("model: {class_path: PPO, gamma: 0.9}")
    Path("deeper.yaml").write_text("model: {class_path: PPO, init_args: {class_path: GRPO}}")
    Path("time.yaml").write_text("trainer: {max_time: 1:00:00:00}")
    Path("number.yaml").write_text("data: {env: {class_path: 3}}")
    # In a process of its own, which knows no class of other tests.
    said = rl_cli(program=tmp_path / "all.py", env={"CUDA_VISIBLE_DEVICES": ""})
    assert said.returncode == 0, said.stderr
    found = dict(zip([*TYPED, *REFUSED], json.loads(said.stdout), strict=True))
    wanted = {line: [2, "", f"rl-cli: error: {text}\n"] for line, text in TYPED.items()}
    wanted |= {line: [1, "", f"rl-cli: error: {text}\n"] for line, text in REFUSED.items()}
    wrong = {line: ends for line, ends in found.items() if ends != wanted[line]}
    assert not wrong
    assert not Path("outputs").exists()


def test_a_box_of_many_bounds_takes_one_line():
    high = np.arange(348.0, dtype=np.float32).reshape(6, 58)
    space = gymnasium.spaces.Dict(
        {"a": gymnasium.spaces.Box(-high, high + 1), "b": gymnasium.spaces.Box(-1.0, 1.0, (2,))}
    )
    assert "\n" in str(space)
    assert str(ConfigurationError(f"The observation space is {space}: hide it.")) == (
        "The observation space is Dict('a': Box(..., (6, 58), float32), 'b': Box(-1.0, 1.0, (2,), float32)): hide it."
    )


def test_an_estimate_of_memory_ends_no_run(tmp_path):
    """An algorithm of one's own may have no use for `evaluate_actions`."""

    def refuse(policy, td):
        raise NotImplementedError

    data = make_data(total_env_steps=64, iterations_per_epoch=1, num_eval_episodes=1)
    policy = variant(ActorCritic, evaluate_actions=refuse)(
        data.observation_space, data.action_space, (16,)
    )
    trainer = RLTrainer(run_dir=str(tmp_path), accelerator="cpu", enable_checkpointing=False)
    skip = lambda module, rollout, batch_idx: module.finish_iteration(rollout)  # noqa: E731
    trainer.fit(variant(PPO, training_step=skip)(policy, batch_size=32), data)
    assert trainer.global_step == 1


def test_no_probe_is_offered(capsys):
    with pytest.raises(SystemExit):
        run(["fit", "--data.help"])
    told = capsys.readouterr().out
    assert "GymnasiumEnv" in told
    assert not set(PROBES) & set(re.findall(r"\w+", told))  # tests have some of their own
