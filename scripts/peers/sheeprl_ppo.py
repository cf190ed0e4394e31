"""Time SheepRL's PPO: its own command line, with its training function timed."""

import contextlib
import sys
import tempfile

import gymnasium
import numpy as np
import sheeprl.algos.ppo.ppo
from common import CLASSIC, Clock, Run, parse
from sheeprl.cli import run as sheeprl_cli


def normalized(id: str, render_mode: str | None = None, gamma: float = 0.99) -> gymnasium.Env:
    """Make one env with normalised observations and rewards, which SheepRL leaves to wrappers."""
    env = gymnasium.wrappers.ClipAction(gymnasium.make(id, render_mode=render_mode))
    env = gymnasium.wrappers.NormalizeObservation(env)
    space = gymnasium.spaces.Box(-10.0, 10.0, env.observation_space.shape, np.float32)
    env = gymnasium.wrappers.TransformObservation(
        env, lambda x: np.clip(x, -10.0, 10.0).astype(np.float32), space
    )
    env = gymnasium.wrappers.NormalizeReward(env, gamma=gamma)
    return gymnasium.wrappers.TransformReward(env, lambda r: np.clip(r, -10.0, 10.0))


def overrides(run: Run, directory: str) -> dict[str, object]:
    work = run.workload
    settings = {
        "exp": "ppo_mujoco",  # the one with separate networks; all that differs is set below
        "env.id": work.env,
        "env.num_envs": work.num_envs,
        "env.sync_env": True,
        "env.capture_video": False,
        "env.wrapper.render_mode": "rgb_array",
        "++distribution.type": "normal" if work.normalize else "auto",
        "algo.total_steps": run.total * work.env_steps,
        "algo.rollout_steps": work.steps,
        "algo.per_rank_batch_size": work.batch_size,
        "algo.update_epochs": work.epochs,
        "algo.gamma": work.gamma,
        "algo.gae_lambda": work.gae_lambda,
        "algo.clip_coef": work.clip,
        "algo.ent_coef": work.ent_coef,
        "algo.vf_coef": work.vf_coef,
        "algo.max_grad_norm": work.max_grad_norm,
        "algo.optimizer.lr": work.learning_rate,
        "algo.anneal_lr": False,
        "algo.run_test": False,
        "algo.compile.enabled": run.flags.compile,
        "buffer.memmap": False,
        "checkpoint.every": 0,
        "checkpoint.save_last": False,
        "metric.log_level": 0,
        "metric.disable_timer": True,
        "fabric.accelerator": run.device,
        "num_threads": run.workload.threads,
        "seed": run.seed,
        "log_root": directory,
        "hydra.run.dir": directory,
    }
    for network in ("actor", "critic"):
        settings[f"algo.{network}.mlp_layers"] = len(work.hidden)
        settings[f"algo.{network}.dense_units"] = work.hidden[0]
    if work.normalize:
        settings["env.wrapper._target_"] = "sheeprl_ppo.normalized"
    return settings


def main() -> None:
    run = parse(CLASSIC, "compile")
    clock = Clock(run)
    # An iteration begins by setting the coefficients, and ends with `train`.
    clock.wrap(sheeprl.algos.ppo.ppo, "anneal", "begin")
    clock.wrap(sheeprl.algos.ppo.ppo, "train", "update", after=clock.end_iteration)
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        settings = overrides(run, directory)
        sys.argv = [sys.argv[0], *(f"{key}={value}" for key, value in settings.items())]
        sheeprl_cli()
    clock.report("sheeprl, compiled player" if run.flags.compile else "sheeprl", "sheeprl")


if __name__ == "__main__":
    main()
