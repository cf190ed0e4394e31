"""Train Stable-Baselines3's PPO with the hyperparameters of `configs/ppo_mujoco.yaml`.

As the reference beside ours.

Needs `pip install stable-baselines3 "gymnasium[mujoco]"`. Prints, and appends to `--output`, one
JSON line: the mean return of the last 100 training episodes and of 20 deterministic evaluation
episodes (raw rewards).
"""

import argparse
import json
import time
from pathlib import Path

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize


class Returns(BaseCallback):
    """Keep the raw return of every training episode."""

    def __init__(self) -> None:
        super().__init__()
        self.returns: list[float] = []

    def _on_step(self) -> bool:
        self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True


def normalized_env(env_id: str, training: bool) -> VecNormalize:
    """Make the env as CleanRL wraps it.

    Observations and rewards normalised, both clipped to ±10.
    """
    envs = DummyVecEnv([lambda: Monitor(gymnasium.make(env_id))])
    return VecNormalize(
        envs, training=training, norm_reward=training, gamma=0.99, clip_obs=10.0, clip_reward=10.0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--id", default="HalfCheetah-v5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total_env_steps", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, default=Path("reference_sb3.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)

    env, returns = normalized_env(args.id, training=True), Returns()
    model = PPO(
        "MlpPolicy",
        env,
        learning_rate=lambda progress_remaining: 3e-4 * progress_remaining,
        n_steps=2048,
        batch_size=64,
        n_epochs=10,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        clip_range_vf=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        seed=args.seed,
        device="cpu",
        policy_kwargs={
            "net_arch": {"pi": [64, 64], "vf": [64, 64]},
            "activation_fn": torch.nn.Tanh,
        },
    )
    start = time.perf_counter()
    model.learn(args.total_env_steps, callback=returns)
    seconds = time.perf_counter() - start

    eval_env = normalized_env(args.id, training=False)
    eval_env.obs_rms = env.obs_rms
    eval_env.seed(args.seed + 10_000)
    evaluation, _ = evaluate_policy(
        model, eval_env, n_eval_episodes=20, return_episode_rewards=True
    )
    row = {
        "library": f"stable-baselines3 {stable_baselines3.__version__}",
        "id": args.id,
        "seed": args.seed,
        "total_env_steps": args.total_env_steps,
        "train_return_last_100": float(np.mean(returns.returns[-100:])),
        "eval_return": float(np.mean(evaluation)),
        "seconds": round(seconds, 1),
    }
    print(json.dumps(row))
    with args.output.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
