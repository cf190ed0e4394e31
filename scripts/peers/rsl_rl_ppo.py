"""Time RSL-RL's PPO."""

import contextlib
import sys
from typing import Any

import torch
from common import Clock, parse
from pendulum import ACTION_SIZE, TIME_LIMIT, Pendulum
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor


class PendulumEnv(VecEnv):
    """Pendulums as RSL-RL wants them; it bootstraps time limits from the value before the step."""

    def __init__(self, num_envs: int, device: str, seed: int) -> None:
        self.num_envs = num_envs
        self.num_actions = ACTION_SIZE
        self.max_episode_length = TIME_LIMIT
        self.device = device
        self.cfg: dict[str, Any] = {}
        self.pendulum = Pendulum(num_envs, device, seed)
        self.observation = self.pendulum.reset()

    @property
    def episode_length_buf(self) -> Tensor:  # type: ignore[override]
        return self.pendulum.elapsed

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": self.observation}, [self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        self.observation, reward, terminated, truncated, _ = self.pendulum.step(actions)
        done = (terminated | truncated).long()
        return self.get_observations(), reward, done, {"time_outs": truncated}


def main() -> None:
    run = parse(("W3",), "compile")
    work, clock = run.workload, Clock(run)
    torch.manual_seed(run.seed)
    network = {"hidden_dims": list(work.hidden), "activation": work.activation}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    settings = {
        "num_steps_per_env": work.steps,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {"class_name": "MLPModel", **network, "distribution_cfg": gaussian},
        "critic": {"class_name": "MLPModel", **network},
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": work.epochs,
            "num_mini_batches": work.minibatches,
            "clip_param": work.clip,
            "gamma": work.gamma,
            "lam": work.gae_lambda,
            "value_loss_coef": work.vf_coef,
            "entropy_coef": work.ent_coef,
            "learning_rate": work.learning_rate,
            "max_grad_norm": work.max_grad_norm,
            "use_clipped_value_loss": False,
            "schedule": "fixed",
            "normalize_advantage_per_mini_batch": True,
        },
    }
    if run.flags.compile:
        settings["torch_compile_mode"] = "default"
    with contextlib.redirect_stdout(sys.stderr):
        env = PendulumEnv(work.num_envs, run.device, run.seed)
        runner = OnPolicyRunner(env, settings, log_dir=None, device=run.device)
        clock.wrap(runner.alg, "update", "update", after=clock.end_iteration)
        clock.start()
        runner.learn(run.total)
    clock.report("rsl_rl, compiled" if run.flags.compile else "rsl_rl", "rsl-rl-lib")


if __name__ == "__main__":
    main()
