"""The command line, as its user sees it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

import lightning_rl as rl
from lightning_rl.cli.app import run
from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.extensions.datasets.demonstrations import expert_episodes
from tests import helpers
from tests.commands import Command, rl_cli
from tests.golden.make_lerobot import fill
from tests.helpers import (
    SMALL_RUN,
    assert_same,
    assert_same_run,
    last,
    load,
    make_data,
    make_ppo,
    newest,
    parsed_config,
    scalars,
    train,
)
from tests.messages import assert_names, refused


def new_process(*arguments):
    """Run the command from the start of the interpreter; `rl_cli` does without that, which takes seconds."""
    command = [sys.executable, "-m", "lightning_rl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


GOLDEN = Path(__file__).parents[1] / "golden"
SMALL = ["--config", "ppo.yaml", *SMALL_RUN]
error_of = partial(helpers.error_of, alone=True)
STEPS = 4 * 16 * 6
pytestmark = pytest.mark.usefixtures("own_directory")


def fit(*arguments, steps=STEPS):
    run(["fit", *SMALL, "--data.total_env_steps", str(steps), *arguments])
    return newest()


@pytest.fixture
def short_run(finished_run):
    """Return the directory of a run of one iteration, below ./outputs."""
    return finished_run(*SMALL, "--data.total_env_steps", "64")


def python_run(policy=rl.ActorCritic, **model):
    """Train by the Python API, and return the run directory and what `validate` returned."""
    budget = {"buffer_size": 16, "total_env_steps": 64, "num_eval_episodes": 2}
    data = rl.RLDataModule("CartPole-v1", num_envs=4, seed=5, **budget)
    acting = policy(data.observation_space, data.action_space, hidden_sizes=(16,))
    trainer = rl.RLTrainer(exp_name="py", accelerator="cpu", enable_progress_bar=False)
    module = rl.PPO(acting, batch_size=32, n_epochs=1, **model)
    trainer.fit(module, data)
    (found,) = trainer.validate(module, data)
    return trainer.run_dir.relative_to(Path.cwd()), found


def test_what_was_trained_in_python_is_validated_and_goes_on(capsys):
    run_dir, found = python_run(optimizer=partial(torch.optim.AdamW, weight_decay=0.1))
    run(["validate", "--ckpt_path", "last"])
    evaluation = json.loads((run_dir / "checkpoints" / "evaluation.json").read_text())
    assert evaluation["avg_reward"] == found["eval/avg_reward"]
    assert evaluation["seeds"] == [15_000, 15_001]
    assert evaluation["env_steps"] == 64
    run(["fit", "--ckpt_path", str(last(run_dir)), "--data.total_env_steps", "128"])
    config = yaml.safe_load((newest() / "config.yaml").read_text())
    assert newest().name.startswith("py_")
    optimizer = config["model"]["init_args"]["optimizer"]
    assert optimizer["class_path"].endswith("AdamW")
    assert optimizer["init_args"]["weight_decay"] == 0.1
    assert load(last(newest()))["lightning_rl"]["env_steps"] == 128


def test_a_class_of_the_script_that_ran_is_named(capsys, monkeypatch):
    class InScript(rl.ActorCritic):
        pass

    InScript.__module__, InScript.__qualname__ = "__main__", "InScript"
    monkeypatch.setattr(sys.modules["__main__"], "InScript", InScript, raising=False)
    run_dir, _ = python_run(policy=InScript)
    monkeypatch.delattr(sys.modules["__main__"], "InScript")
    capsys.readouterr()
    error = error_of(capsys, "validate", "--ckpt_path", "last", "--trust_code", "true", status=1)
    assert_names(error, last(run_dir), "model.policy", "InScript", "--model.policy", "--config")


def test_test_on_another_env_and_other_seeds_and_with_drawn_actions(short_run, capsys):
    run_dir = short_run
    limited = ["--data.eval_env", "GymnasiumEnv", "--data.eval_env.id", "CartPole-v1"]
    limit = ["--data.eval_env.env_kwargs", "{max_episode_steps: 7}"]
    run(["test", "--ckpt_path", "last", *limited, *limit, "--data.eval_seed", "40"])
    found = json.loads((run_dir / "test.json").read_text())
    assert (found["seeds"], found["lengths"], found["truncations"]) == (
        [100_040, 100_041],
        [7, 7],
        2,
    )
    assert found["deterministic"]
    run(["validate", "--ckpt_path", "last", "--data.eval_deterministic", "false"])
    assert "stochastic" in capsys.readouterr().out
    assert not json.loads((run_dir / "evaluation.json").read_text())["deterministic"]
    other = [limited[0], limited[1], limited[2], "Acrobot-v1"]
    error = error_of(capsys, "validate", "--ckpt_path", "last", *other, status=1)
    assert_names(error, "spaces")


def test_a_flag_beats_the_checkpoint(short_run):
    run_dir = short_run
    run(["validate", "--ckpt_path", "best", "--data.num_eval_episodes", "5"])
    assert json.loads((run_dir / "evaluation.json").read_text())["episodes"] == 5
    more = ["--model.learning_rate", "0.5", "--data.total_env_steps", "128"]
    run(["fit", "--ckpt_path", "last", *more])
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert saved["model"]["init_args"]["learning_rate"] == 0.5
    assert scalars(run_dir)["train/learning_rate"][-1][1] == pytest.approx(0.25)  # halfway down


def test_last_and_best_mean_the_newest_run_of_the_name():
    first = fit("--exp_name", "a", steps=64)
    second = fit("--exp_name", "b", steps=64)
    run(["validate", "--ckpt_path", "last", "--exp_name", "a"])
    assert (first / "evaluation.json").is_file()
    run(["validate", "--ckpt_path", "best"])
    assert (second / "evaluation.json").is_file()
    run(["validate", "--ckpt_path", str(first)])


ELSEWHERE = [
    (("--trainer.run_dir", "b"), "b"),
    (("--output_dir", "c"), "c/ppo_*"),
    (("--exp_name", "d", "--trust_code", "true"), "outputs/d_*"),
]


@pytest.mark.parametrize(("options", "expected"), ELSEWHERE)
def test_a_directory_that_is_named_holds_the_resumed_run(options, expected):
    run(["fit", *SMALL, "--data.total_env_steps", "64", "--trainer.run_dir", "a"])
    run_dir = Path("a")
    before = {name: (run_dir / name).read_bytes() for name in ("config.yaml", "run.json")}
    run(["fit", "--ckpt_path", "a", "--data.total_env_steps", "128", *options])
    (there,) = Path().glob(expected)
    assert load(last(there))["global_step"] == 2
    assert load(last(run_dir))["global_step"] == 1
    assert before == {name: (run_dir / name).read_bytes() for name in before}


def test_a_run_from_an_earlier_checkpoint_keeps_the_later_ones(capsys):
    run_dir = fit("--trainer.checkpoint_every_n_iterations", "1")
    early = str(run_dir / "checkpoints" / "iteration_000004.ckpt")
    before = {path.name: path.read_bytes() for path in run_dir.glob("checkpoints/*.ckpt")}
    run(["fit", "--ckpt_path", early])
    (there,) = (path for path in Path("outputs").iterdir() if path != run_dir)
    assert_names(capsys.readouterr().out, last(run_dir), "128 env steps")
    assert before == {path.name: path.read_bytes() for path in run_dir.glob("checkpoints/*.ckpt")}
    assert_same(*(load(last(path))["optimizer_states"] for path in (run_dir, there)))
    run(["fit", "--ckpt_path", early, "--trainer.run_dir", str(run_dir)])  # goes back, as asked
    assert len(list(Path("outputs").iterdir())) == 2


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_a_run_without_a_whole_last_checkpoint_goes_on_from_another(damage):
    run_dir = fit("--trainer.checkpoint_every_n_iterations", "1")
    last(run_dir).unlink() if damage == "removed" else last(run_dir).write_bytes(b"PK")
    run(["fit", "--ckpt_path", str(run_dir / "checkpoints" / "iteration_000005.ckpt")])
    assert [path.name for path in Path("outputs").iterdir()] == [run_dir.name]
    assert load(last(run_dir))["global_step"] == 6


def test_an_evaluation_is_written_where_the_user_says(short_run):
    run(["validate", "--ckpt_path", str(short_run), "--trainer.run_dir", "b"])
    assert Path("b/evaluation.json").is_file()
    assert not (short_run / "evaluation.json").exists()


def test_a_run_does_not_replace_another(short_run, capsys):
    before = last(short_run).read_bytes()
    error = error_of(capsys, "fit", *SMALL, "--trainer.run_dir", short_run, status=1)
    assert_names(error, "trainer.run_dir", short_run, "best.ckpt, last.ckpt")
    other = shutil.copytree(short_run, "other")
    options = ["--ckpt_path", other, "--trainer.run_dir", short_run]
    assert_names(error_of(capsys, "fit", *options, status=1), "last.ckpt")
    data = rl.RLDataModule("CartPole-v1", total_env_steps=64)
    module = rl.PPO(rl.ActorCritic(data.observation_space, data.action_space))
    with refused(names="last.ckpt"):
        rl.RLTrainer(run_dir=str(short_run), accelerator="cpu").fit(module, data)
    assert last(short_run).read_bytes() == before


def test_a_python_run_resumes_by_the_aliases_of_lightning(tmp_path):
    train(tmp_path, data={"total_env_steps": 64})
    module, _, _ = train(tmp_path, data={"total_env_steps": 128}, ckpt_path="last")
    assert module.env_steps == 128
    assert load(last(tmp_path))["lightning_rl"]["env_steps"] == 128


def test_a_python_run_finds_the_checkpoints_that_the_command_line_finds():
    """A directory, and the aliases of an earlier run; without one no untrained policy is used."""
    data = make_data(total_env_steps=64, num_eval_episodes=1)
    runner = rl.RLTrainer(accelerator="cpu", enable_progress_bar=False)
    module = make_ppo(data)
    for method in (runner.fit, runner.validate, runner.test, runner.check):
        with refused(names=("last.ckpt", "outputs")):
            method(module, datamodule=data, ckpt_path="last")
    train("outputs/run_20260101_000000", data={"total_env_steps": 64})
    for spec in ("last", "best", Path("outputs/run_20260101_000000")):
        module = make_ppo(data)
        runner.validate(module, datamodule=data, ckpt_path=spec)
        assert module.policy.version > 0
    runner.fit(module, datamodule=make_data(total_env_steps=128), ckpt_path="last")
    assert module.env_steps == 128


def shipped(*prefixes):
    return [name for name in sorted(shipped_configs()) if name.startswith(prefixes)]


OFF_POLICY = shipped("dqn", "sac", "td3", "rlpd", "hil")
SEGMENTS = shipped("apg", "shac")  # their algorithms step the env themselves
FROM_DATA = shipped("awac", "iql")  # these learn from a dataset alone
FLOWS = shipped("fql")  # these have the dataset in a replay
BASES = {
    "sac_residual_push_cube.yaml": "push_cube_bc.yaml",
    "sac_two_doors_noise.yaml": "two_doors_bc.yaml",
}
"""Of configs that build on a frozen policy: the config that trains it."""
TWO_ITERATIONS = [
    *("--trainer.max_steps", "2", "--data.num_eval_episodes", "1"),
    *("--data.max_eval_episode_steps", "32"),
]


def write_demonstrations(name, env):
    """Record an episode of an expert in each row of an env, and return the episodes."""
    spaces = env.single_observation_space, env.single_action_space
    writer = rl.EpisodeWriter(f"demonstrations/{name}", *spaces, env.render_fps)
    episodes = list(expert_episodes(env, env.num_envs, 1))
    for episode in episodes:
        writer.write(episode)
    writer.finalise()
    return episodes


@pytest.mark.parametrize("name", OFF_POLICY)
def test_every_shipped_off_policy_config_trains(name):
    if name == "dqn_lunar_lander.yaml":
        pytest.importorskip("Box2D", reason="pip install -e '.[box2d]'")
    if name.startswith("hil"):
        pytest.importorskip(
            "gym_hil", reason="gym-hil has an environment of its own: constraints-robots.txt"
        )
    if name == "sac_humanoid.yaml":
        pytest.importorskip("envpool", reason="the extra envpool: scripts/environments.py")
    if "fetch" in name:
        pytest.importorskip("gymnasium_robotics", reason="as gym-hil: constraints-robots.txt")
    if name == "rlpd_push_cube.yaml":
        pytest.importorskip("pyarrow", reason="datasets: pip install -e '.[data]'")
        sparse = {term: float(term == "success") for term in rl.PushCube.default_rewards}
        for episode in write_demonstrations("push_cube_sparse", rl.PushCube(2, rewards=sparse)):
            assert episode.success
            assert episode.reward.sum() == 1.0
    small = ["--model.random_env_steps", "16", "--model.batch_size", "16"]
    small += ["--model.learning_starts", "16", "--model.compile", "false"]
    if name in BASES:
        few = ["--data.collector.episodes", "24", *TWO_ITERATIONS]
        run(["fit", "--config", BASES[name], *few, "--trainer.run_dir", "base"])
        small += ["--model.policy.checkpoint", "base", "--model.random_env_steps", "0"]
    if name.startswith("hil"):
        small += ["--data.replay.demonstrations", "null"]
    if name == "sac_push_cube_pixels.yaml":
        small += ["--data.num_envs", "32"]
    if name == "sac_humanoid.yaml":  # 8 updates in an iteration
        small += ["--model.updates_per_env_step", "0.03125"]
    if name == "sac_robot.yaml":  # of 10 steps per second
        text = shipped_configs()[name].read_text()
        assert "fps: 10.0" in text
        Path(name).write_text(text.replace("fps: 10.0", "fps: 200.0"))
    run(["fit", "--config", name, *small, *TWO_ITERATIONS])
    state = load(last(newest()))["lightning_rl"]
    passed = {objective: count["passed"] for objective, count in state["guards"].items()}
    settings = yaml.safe_load((newest() / "config.yaml").read_text())["model"]["init_args"]
    due = max(0, int((state["env_steps"] - 16) * settings["updates_per_env_step"]))
    delayed = due // settings.get("policy_delay", 1)
    always = ("critic", "noise_critic", "gripper", "q")
    assert due >= 16 or name.startswith(
        ("hil", "sac_two_doors")
    )  # which has two env steps in two iterations
    assert passed == {key: due if key in always else delayed for key in passed}


@pytest.mark.parametrize("name", SEGMENTS)
def test_every_shipped_config_of_gradients_through_steps_trains(name):
    run(["fit", "--config", name, *TWO_ITERATIONS])
    state = load(last(newest()))["lightning_rl"]
    assert state["guards"]["actor"]["passed"] == 2
    assert state["env_steps"] == 2 * 64 * (16 if "swing" in name else 32)


@pytest.mark.parametrize("name", FROM_DATA)
def test_the_shipped_config_of_a_dataset_alone_trains(name):
    pytest.importorskip("pyarrow", reason="datasets: pip install -e '.[data]'")
    write_demonstrations("push_cube_mixed", rl.PushCube(3))
    run(["fit", "--config", name, *TWO_ITERATIONS])
    state = load(last(newest()))["lightning_rl"]
    counts = {count["passed"] for count in state["guards"].values()}
    assert counts == {2 * -(-state["env_steps"] // 2 // 256)}


@pytest.mark.parametrize("name", FLOWS)
def test_the_shipped_config_of_a_dataset_in_a_replay_trains(name):
    pytest.importorskip("pyarrow", reason="datasets: pip install -e '.[data]'")
    if "cubes" in name:
        pytest.importorskip("ogbench", reason="OGBench: constraints-ogbench.txt")
        script = Path(__file__).parents[2] / "scripts/ogbench_data.py"
        options = ["--cubes", "double", "--steps", "1000", "--tasks", "2"]
        subprocess.run([sys.executable, script, "demonstrations", *options], check=True)
    else:
        write_demonstrations("push_cube_mixed", rl.PushCube(3))
    small = ["--model.batch_size", "16", "--model.updates_per_env_step", "0.1"]
    run(["fit", "--config", name, *small, *TWO_ITERATIONS])
    state = load(last(newest()))["lightning_rl"]
    counts = {count["passed"] for count in state["guards"].values()}
    assert counts == {int((state["env_steps"] - 16) * 0.1)}


OTHERS = shipped_configs().keys() - {*OFF_POLICY, *SEGMENTS, *FROM_DATA, *FLOWS}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_every_shipped_config_trains_two_iterations_with_a_first_ratio_of_one(name, monkeypatch):
    config = parsed_config(name)
    if "mujoco" in name or name.startswith("tuned/"):
        box2d = config["data"]["env"]["init_args"]["id"].startswith(("Lunar", "Bipedal"))
        pytest.importorskip("Box2D" if box2d else "mujoco")
    algorithm = getattr(rl, config["model"]["class_path"].removeprefix("lightning_rl."))
    clones = algorithm is rl.BehaviorCloning  # no ratio: an expert has acted
    firsts, original = [], algorithm.loss
    background = "AsyncCollector" in str(config["data"].get("collector"))

    def watching(self, minibatch):
        if len(self.objectives[""].statistics) == 0:
            new = self.policy.evaluate_actions(minibatch)["sample_log_prob"]
            # A stale update begins at another policy than the sampling one, and clips around it.
            name = "proximal_log_prob" if background else "sample_log_prob"
            old = minibatch.get(name, new)  # a replay of labels has none
            firsts.append((new - old).detach().expm1().abs().max())
        return original(self, minibatch)

    monkeypatch.setattr(algorithm, "loss", watching)
    options = [*TWO_ITERATIONS]
    if name == "vla_grpo.yaml":
        options += ["--model.filter_groups", "false"]  # untaught, it never succeeds
    if "smolvlm" in name:
        pytest.importorskip("transformers")
    if name == "smolvla_ppo.yaml":
        pytest.importorskip("peft")
        shutil.copytree(GOLDEN / "tiny_smolvlm", "tiny_smolvlm")
        fill(GOLDEN / "smolvla", Path("smolvla"))
        options += ["--model.policy.path", "smolvla"]
    # The shipped numbers fit each other. Those of rows, of which all else is each, are less here, as are passes over them.
    settings, data = config["model"]["init_args"], config["data"]
    length = settings.get("sequence_length") or 1
    assert settings["batch_size"] <= data["num_envs"] * data["buffer_size"]
    assert data["num_envs"] % settings.get("group_size", 1) == 0
    assert data["buffer_size"] % length == 0
    options += ["--model.n_epochs", "1"]
    envs = data["num_envs"]
    if "vla" in name or "pixels" in name:
        envs = settings.get("group_size", 4)
        options += ["--data.num_envs", str(envs), "--model.batch_size", str(8 * envs)]
    if name.startswith("two_doors"):
        options += ["--data.num_envs", "24", "--model.batch_size", "24"]
    if name.startswith(("ppo", "tuned/")):
        rows = 8 if "pixels" in name else -(-settings["batch_size"] // envs)
        rows = max(rows, length if length > 1 else 8)
        options += ["--data.buffer_size", str(rows)]
    if name == "two_doors_noise.yaml":
        few = ["--data.collector.episodes", "24", "--trainer.max_steps", "1"]
        run(["fit", "--config", "two_doors_bc.yaml", *options, *few])
        options += ["--model.policy.checkpoint", str(newest())]
    if name.startswith("quadruped_student"):
        options += ["--data.num_envs", "32"]
    if settings.get("teacher"):
        one = ["--trainer.run_dir", settings["teacher"], "--trainer.max_steps", "1"]
        run(["fit", "--config", "ppo_quadruped.yaml", *options, *one])
    elif clones:
        options += ["--data.collector.episodes", "24"]
    run(["fit", "--config", name, *options])
    assert load(last(newest()))["global_step"] == 2
    assert len(firsts) == 2
    assert clones or max(firsts) < 1e-5


BAD_OPTIONS = [
    (
        ["--model.clip_coeff", "0.1"],
        2,
        "Unknown setting 'clip_coeff' of PPO; close matches: model.clip_coef of PPO",
    ),
    (["--data.num_envs", "many"], 2, "data.num_envs must be a whole number, got 'many'"),
    (["--data.num_envs", "0"], 1, "data.num_envs must be at least 1, got 0"),
    (["--data.env.id", "CartPole-v7"], 1, "CartPole-v1"),
    (["--data.env.id", ""], 1, "The env id is empty"),
    (["--trainer.precision", "bf16-true"], 1, "Use 32-true or bf16-mixed"),
    (["--config", "."], 2, "--config . is a directory: name a file in it, or write --ckpt_path ."),
    (["--ckpt_path", "nowhere.ckpt"], 1, "No checkpoint at nowhere.ckpt"),
    (["--ckpt_path", "last"], 1, "No run of 'ppo' with a checkpoint last.ckpt in 'outputs'"),
]


@pytest.mark.parametrize(("options", "status", "message"), BAD_OPTIONS)
def test_a_wrong_option_ends_in_one_readable_message(options, status, message, capsys):
    assert message in error_of(capsys, "fit", "--config", "ppo.yaml", *options, status=status)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        (lambda c: c["data"].pop("env"), 1, "Missing setting: data.env, or data.offline"),
        (lambda c: c["data"]["env"].pop("init_args"), 2, "Missing setting: data.env.id"),
        (lambda c: c["model"]["init_args"].pop("policy"), 2, "Missing setting: model.policy"),
    ],
)
def test_a_wrong_config_ends_in_one_readable_message(change, status, message, capsys):
    config = yaml.safe_load(shipped_configs()["ppo.yaml"].read_text())
    change(config)
    Path("bad.yaml").write_text(yaml.safe_dump(config))
    assert message in error_of(capsys, "fit", "--config", "bad.yaml", status=status)


def test_a_file_that_is_no_config_or_no_checkpoint_says_so(capsys):
    Path("bad.yaml").write_text(": : [")
    assert_names(error_of(capsys, "fit", "--config", "bad.yaml", status=1), "bad.yaml", "YAML")
    assert_names(
        error_of(capsys, "fit", "--config", "pppo.yaml", status=2),
        "pppo.yaml",
        "close matches: ppo.yaml",
    )
    assert_names(error_of(capsys, "fit", status=2), "fit", "--config FILE", "--ckpt_path last")
    assert_names(error_of(capsys, "validate", status=2), "validate", "--ckpt_path")
    Path("garbage.ckpt").write_bytes(b"not a checkpoint")
    assert_names(
        error_of(capsys, "validate", "--ckpt_path", "garbage.ckpt", status=1), "garbage.ckpt"
    )
    torch.save({"state_dict": {}}, "other.ckpt")
    assert_names(error_of(capsys, "validate", "--ckpt_path", "other.ckpt", status=1), "other.ckpt")
    train("plain")
    content = load(last("plain"))
    del content["rl_config"], content["lightning_rl"]["contents"]  # as runs in Python once had none
    torch.save(content, last("plain"))
    error = error_of(capsys, "validate", "--ckpt_path", str(last("plain")), status=1)
    assert_names(error, "rl-cli", "configuration")


def test_actions_that_are_no_numbers_are_refused(capsys):
    Path("dict_env.py").write_text(
        "import gymnasium\n"
        "class DictActions(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1, 1, (2,))\n"
        "    action_space = gymnasium.spaces.Dict(a=gymnasium.spaces.Text(2))\n"
        "gymnasium.register('DictActions-v0', DictActions)\n"
    )
    option = ["--data.env.id", "dict_env:DictActions-v0"]
    error = error_of(capsys, "fit", "--config", "ppo.yaml", *option, status=1)
    assert "The action's part 'a' is Text(" in error
    assert_names(error, "MultiBinary")


ALGORITHM = '''
"""Advantage-weighted regression in one file outside the package (Peng et al. 2019)."""

from lightning_rl import OnPolicyAlgorithm, Policy
from lightning_rl.functional import gae, value_loss
from lightning_rl.rollout.contract import add_transition_field


class AWR(OnPolicyAlgorithm):
    def __init__(self, policy: Policy, temperature: float = 1.0, **kwargs):
        super().__init__(policy, **kwargs)
        self.temperature = temperature

    def training_step(self, rollout, batch_idx):
        self.evaluate_values(rollout)
        now = rollout[:, :-1]
        advantage, target = gae(
            self.rewards(rollout), rollout["value"], now["terminated"], now["truncated"], now["final_value"],
            gamma=self.gamma, gae_lambda=0.95,
        )
        add_transition_field(rollout, "advantage", advantage)
        add_transition_field(rollout, "return", target)
        for batch in self.minibatches(rollout, ("observation", "action", "advantage", "return")):
            self.update(batch)
        self.finish_iteration(rollout)

    def loss(self, batch):
        new = self.policy.evaluate_actions(batch)
        weight = (batch["advantage"] / self.temperature).exp().clamp(max=20)
        actor = -(weight * new["sample_log_prob"]).mean()
        return actor + value_loss(new["value"], batch["return"]), {"actor": actor}
'''


def test_an_algorithm_in_one_file_and_one_yaml_trains_checkpoints_and_resumes(
    tmp_path, monkeypatch
):
    (tmp_path / "awr.py").write_text(ALGORITHM)
    config = yaml.safe_load(shipped_configs()["ppo.yaml"].read_text())
    policy = config["model"]["init_args"]["policy"]
    config["model"] = {"class_path": "awr.AWR", "init_args": {"policy": policy, "temperature": 0.5}}
    Path("awr.yaml").write_text(yaml.safe_dump(config))

    def awr(name, steps):
        options = [*SMALL_RUN, "--data.total_env_steps", steps, "--exp_name", name]
        run(["fit", "--config", "awr.yaml", *options])
        return newest()

    whole, part = awr("whole", "384"), awr("part", "192")
    more = ["--data.total_env_steps", "384", "--trust_code", "true"]
    outcome = rl_cli("fit", "--ckpt_path", str(part), *more)  # which has not imported it yet
    assert outcome.returncode == 0, outcome.stderr
    assert_same_run(whole, part)
    assert "train/actor" in scalars(part)


def test_help_is_answered_at_once_and_without_torch():
    assert "rl-cli fit --config ppo.yaml" in new_process("--help").stdout
    check = "import sys; sys.argv = ['rl-cli', '--help']; import lightning_rl.__main__ as m; m.main(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], capture_output=True, check=True)
    assert new_process("--version").stdout.startswith("lightning-rl ")
    wrong = new_process("fti")
    assert wrong.returncode == 2
    assert_names(wrong.stderr, "fti", "fit")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signalled_process_saves_exits_and_resumes_exactly(number):
    settings = [*SMALL, "--data.total_env_steps", "38400", "--data.env.vectorization", "async"]
    process = Command("fit", *settings)
    process.wait_for("/38,400 env steps")  # the first evaluation has come
    children = process.children()
    os.kill(process.pid, number)
    assert process.wait(60).returncode == 128 + number
    assert "Resume: rl-cli fit --ckpt_path" in process.stderr
    assert len(children) >= 4
    assert not [child for child in children if os.path.exists(f"/proc/{child}")]
    stopped = newest()
    reached = load(last(stopped))["lightning_rl"]["env_steps"]
    assert 0 < reached < 38400
    more = ["--data.total_env_steps", str(reached + 320), "--model.lr_schedule", "constant"]
    run(["fit", "--ckpt_path", "last", *more])
    assert load(last(stopped))["lightning_rl"]["env_steps"] == reached + 320


def test_an_env_that_fails_ends_the_run_with_its_own_traceback_and_leaves_no_process():
    Path("faulty.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Faulty(CartPoleEnv):\n"
        "    count = 0\n"
        "    def step(self, action):\n"
        "        self.count += 1\n"
        "        if self.count > 50:\n"
        "            raise ZeroDivisionError('the motor is on fire')\n"
        "        return super().step(action)\n"
        "gymnasium.register('Faulty-v0', Faulty)\n"
    )
    for vectorization in ("sync", "async"):
        env = ["--data.env.id", "faulty:Faulty-v0", "--data.env.vectorization", vectorization]
        outcome = rl_cli("fit", *SMALL, "--data.total_env_steps", STEPS, *env)
        assert outcome.returncode == 1
        assert "the motor is on fire" in outcome.stderr
        assert "faulty.py" in outcome.stderr


REFUSED_LATER = [
    *("--trainer.init_from nowhere.ckpt", "--trainer.plugins foo", "--exp_name a/b"),
    *("--data.env.id Nope-v1", "--trainer.devices x.y", "--trainer.logger CometLogger"),
]


@pytest.mark.parametrize("options", REFUSED_LATER)
def test_a_refused_run_leaves_nothing(options, capsys):
    error = error_of(capsys, "fit", *SMALL, *options.split(), status=1)
    assert not Path("outputs").exists(), error


def test_a_refused_run_leaves_what_others_have_made():
    ran = fit(steps=64)
    before = sorted(Path("outputs").rglob("*"))
    for options in (["--model.batch_size", "100000"], ["--trainer.precision", "64"]):
        with pytest.raises(SystemExit):
            fit(*options)
        with pytest.raises(SystemExit):
            run(["fit", "--ckpt_path", str(ran), *options, "--data.total_env_steps", "640"])
    assert [path for path in sorted(Path("outputs").rglob("*")) if "logs" not in path.parts] == [
        path for path in before if "logs" not in path.parts
    ]
    empty = Path("empty")
    empty.mkdir()
    (empty / "logs").mkdir()
    (empty / "logs" / "mine").touch()
    with pytest.raises(SystemExit):
        fit("--trainer.run_dir", "empty", "--model.batch_size", "100000")
    assert (empty / "logs" / "mine").is_file(), "a directory that the run was given"


def test_a_run_that_fails_after_its_first_iteration_keeps_its_directory(capsys):
    options = ["--data.total_env_steps", "384", "--trainer.best_metric", "eval/nope"]
    error_of(capsys, "fit", *SMALL, *options, status=1)
    assert (newest() / "run.json").is_file()
