"""Names that users of other libraries type: what the message names."""

import re
from pathlib import Path

import pytest

import lightning_rl
from lightning_rl.cli import checking
from lightning_rl.cli.first_check import first_check
from lightning_rl.cli.names import foreign_libraries
from tests.cli.test_first_check import known, names  # noqa: F401  # fixtures
from tests.messages import refused

ROOT = Path(__file__).parents[2]
PPO, SAC = "--config ppo.yaml ", "--config sac.yaml "
TYPED = {
    # rsl_rl and Isaac Lab
    PPO + "--max_iterations 1500": ["max_iterations", "data.total_env_steps", "iterations × num_envs × buffer_size"],
    PPO + "--model.policy.init_noise_std 1.0": ["init_noise_std", "model.policy.log_std_init", "logarithm"],
    PPO + "--model.policy.class_name ActorCritic": ["class_name", "--model.policy ActorCritic", "class_path"],
    PPO + "--model.policy ActorCriticRecurrent": ["ActorCriticRecurrent", "rsl_rl", "ActorCritic", "--model.policy.memory LSTM"],
    # LeRobot
    PPO + "--policy.type act": ["policy.type", "model.policy", "LeRobotPolicy"],
    PPO + "--policy.path me/act": ["policy.path", "model.policy.path", "LeRobotPolicy"],
    SAC + "--model.utd_ratio 2": ["utd_ratio", "model.updates_per_env_step"],
    SAC + "--model.temperature_init 0.01": ["temperature_init", "model.init_alpha"],
    # EmbodiChain
    PPO + "--trainer.gym_config task.json": ["gym_config", "data.env"],
    PPO + "--algorithm.name ppo": ["algorithm.name", "model", "PPO"],
    # Stable-Baselines3, CleanRL and TorchRL
    PPO + "--model.policy_kwargs.net_arch [64]": ["policy_kwargs", "model.policy.hidden_sizes"],
    PPO + "--model.policy CnnPolicy": ["CnnPolicy", "Stable-Baselines3", "NatureCNN"],
    PPO + "--env-id Hopper-v5": ["env-id", "data.env.id"],
    PPO + "collector.total_frames=1000": ["collector.total_frames", "data.total_env_steps"],
    # Switches without a value, other sections, the names of classes, settings of other algorithms
    PPO + "--headless": ["headless", "none here", "rl-cli play"],
    "--task Isaac-Ant-v0 --headless --num_envs 64": ["task", "--data.env TensorSimulator --data.env.make"],
    PPO + "--resume": ["resume", "--ckpt_path last"],
    PPO + "--algo ppo": ["algo", "--model PPO"],
    "--algo PPO": ["algo", "--model PPO"],
    PPO + "--policy.type=sac": ["policy.type", "--model SAC --model.policy SquashedActorCritic"],
    PPO + "--policy=act": ["policy", "--model.policy LeRobotPolicy --model.policy.path"],
    PPO + "--policy.use_vae false": ["policy.use_vae", "--model.policy.overrides '{use_vae: ...}'"],
    PPO + "--policy.kl_weight 10": ["policy.kl_weight", "policy is --model.policy"],
    PPO + "--algorithm.class_name PPO": ["algorithm.class_name", "--model PPO", "class_path: PPO"],
    PPO + "--model.name grpo": ["name", "PPO", "--model GRPO"],
    PPO + "--logger wandb": ["logger", "--trainer.logger WandbLogger"],
    PPO + "--trainer.logger wandb": ["wandb", "--trainer.logger WandbLogger"],
    PPO + "--env.type pusht": ["env.type", "--data.env GymnasiumEnv --data.env.id gym_pusht:gym_pusht/PushT-v0"],
    PPO + "--data.env Isaac-Ant-v0": ["Isaac-Ant-v0", "--data.env GymnasiumEnv --data.env.id my_module:Isaac-Ant-v0"],
    PPO + "--model.policy lerobot/smolvla_base": ["lerobot/smolvla_base", "LeRobotPolicy", "--model.policy.path"],
    PPO + "--algorithm.cfg.group_size 4": ["algorithm.cfg.group_size", "--model.group_size"],
    PPO + "--model.cfg.gamma 0.9": ["cfg", "--model.gamma"],
    PPO + "--trainer.learning_env.id Task": ["learning_env", "--data.env.id"],
    PPO + "--model.algorithm.clip_param 0.2": ["algorithm", "--model.clip_coef"],
    PPO + "--data.scene.num_envs 64": ["scene", "--data.num_envs"],
    PPO + "agent.max_iterations=100": ["agent.max_iterations", "--data.total_env_steps"],
    PPO + "--robot.port /dev/tty0": ["robot.port", "lightning_rl/Robot-v0"],
    PPO + "--policy_class_name ActorCritic": ["policy_class_name", "--model.policy ActorCritic"],
    PPO + "--env.processor.reward_classifier.path x": ["reward_classifier.path", "RewardClassifierWrapper"],
    PPO + "--data.repo_id me/demos": ["repo_id", "--data.collector.path DIRECTORY"],
    PPO + "--cpu": ["cpu", "--trainer.accelerator cpu"],
    PPO + "--trainer.callbacks+=DatasetStatistics --trainer.callbacks.pth x": ["pth", "DatasetStatistics", "trainer.callbacks.path"],
    PPO + "--model.utd_ratio 2": ["utd_ratio", "--model.updates_per_env_step", "of SAC and others, not of PPO"],
    PPO + "--model.folds 2": ["folds", "PPO", "close matches: model.folds of ValueFit"],
    SAC + "--model.num_learning_epochs 5": ["num_learning_epochs", "--model.n_epochs", "not of SAC"],
}  # fmt: skip


@pytest.mark.parametrize("typed", TYPED)
def test_a_name_of_another_library_is_answered_with_the_name_here(typed):
    with refused(names=tuple(TYPED[typed])):
        first_check(["fit", *typed.split()])


SEED = """{"trainer": {"exp_name": "push", "gym_config": "task.json", "iterations": 500, "buffer_size": 64, "num_envs": 64},
"policy": {"name": "actor_critic", "actor": {"network_cfg": {"hidden_sizes": [256]}}},
"algorithm": {"name": "ppo", "cfg": {"learning_rate": 0.0001, "n_epochs": 3}}}"""
RSL_RL = """
seed: 42
num_steps_per_env: 24
max_iterations: 1500
policy: {class_name: ActorCritic, init_noise_std: 1.0, actor_hidden_dims: [128]}
algorithm: {class_name: PPO, num_mini_batches: 4, clip_param: 0.2}
"""
LEROBOT = """{"dataset": {"repo_id": "me/demos"}, "policy": {"type": "act"}, "steps": 100000, "job_name": "act", "batch_size": 8}"""
ZOO = "CartPole-v1: {n_envs: 8, n_timesteps: 1e5, policy: MlpPolicy, n_steps: 32, gae_lambda: 0.8, clip_range: lin_0.2}\n"


@pytest.mark.parametrize(
    ("content", "library", "named_too"),
    [
        (
            SEED,
            "EmbodiChain",
            ["trainer.gym_config", "data.env", "data.total_env_steps", "model.policy.hidden_sizes"],
        ),
        (
            RSL_RL,
            "rsl_rl",
            ["algorithm.num_mini_batches", "model.batch_size", "model.policy.log_std_init"],
        ),
        (
            LEROBOT,
            "LeRobot",
            ["policy.type", "LeRobotPolicy", "steps", "data.total_env_steps", "exp_name"],
        ),
        (
            ZOO,
            "Stable-Baselines3",
            ["CartPole-v1.n_timesteps", "data.total_env_steps", "model.clip_coef"],
        ),
    ],
    ids=["EmbodiChain", "rsl_rl", "LeRobot", "zoo"],
)
def test_a_config_of_another_library_is_one_message_that_names_the_page(
    content, library, named_too, tmp_path
):
    (tmp_path / "theirs.json").write_text(content)
    page = foreign_libraries()[library]["page"]
    with refused(names=(library, page, "ppo.yaml", *named_too)):
        first_check(["fit", "--config", "theirs.json"])
    assert (ROOT / page).is_file()


def test_every_counterpart_exists(names):  # noqa: F811  # a fixture
    """Each text begins with an option, and each option and class in it exists, or it is `none:`."""
    settings = {
        f"{path}.{name}"
        for path, cls in checking.configurable()
        for name in checking.parameters_of(cls)
    }
    settings |= {*checking.kinds_of("fit"), "video"}
    below = tuple(f"trainer.{name}." for name in ("video", "logger", "machine", "callbacks"))
    below += ("data.env.env_kwargs.", "data.env.wrappers.")
    below += ("data.replay.online.", "data.replay.offline.")
    settings |= {name for options in names["options"].values() for name in options}
    classes = {name for family in names["families"].values() for name in family["classes"]}
    classes |= {*lightning_rl.__all__, "DIRECTORY", "PATH", "FILE", "NAME", "CHECKPOINT"}
    counterparts = [
        pair
        for content in foreign_libraries().values()
        for pair in (content["settings"] | content["classes"]).items()
    ]
    unknown = [
        (name, option, cls)
        for name, text in counterparts
        for option, cls in re.findall(
            r"--([\w.]+)\+? ?\[?((?:[A-Z]\w*[a-z]\w*|[A-Z]{3,4}\d?)\b)?", text
        )
        if (option not in settings and not option.startswith(below)) or (cls and cls not in classes)
    ]
    assert not unknown
    begins = ("--", "none: ", "class_path", "data and trainer: ")
    assert not [text for _, text in counterparts if not text.startswith(begins)]
