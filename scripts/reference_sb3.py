"""Train Stable-Baselines3 as the reference for our results.

PPO with the hyperparameters of `configs/ppo_mujoco.yaml`, or SAC with `configs/sac.yaml`'s.

Needs `pip install stable-baselines3 "gymnasium[mujoco]"`. Prints one JSON line, and appends it to
`--output`: the mean return of the last 100 training episodes and of 20 deterministic evaluation
episodes (raw rewards). SAC's curve, of 10 deterministic episodes every 10,000 env steps, is added
to the file of `--curves`.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from curves import add
from scripting import parser_of


def normalized_env(env_id: str, training: bool) -> VecNormalize:
    """Make the env with CleanRL's wrappers: observations and rewards normalised, clipped to ±10."""
    envs = DummyVecEnv([lambda: Monitor(gymnasium.make(env_id))])
    return VecNormalize(
        envs, training=training, norm_reward=training, gamma=0.99, clip_obs=10.0, clip_reward=10.0
    )


def ppo(args: argparse.Namespace) -> tuple[PPO, VecNormalize]:
    env = normalized_env(args.id, training=True)
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
    eval_env = normalized_env(args.id, training=False)
    eval_env.obs_rms = env.obs_rms
    return model, eval_env


def sac(args: argparse.Namespace) -> tuple[SAC, Monitor]:
    model = SAC(
        "MlpPolicy",
        Monitor(gymnasium.make(args.id)),
        learning_rate=3e-4,
        buffer_size=1_000_000,
        learning_starts=5_000,
        batch_size=256,
        tau=0.005,
        gamma=0.99,
        train_freq=1,
        gradient_steps=1,
        seed=args.seed,
        device="cpu",
        policy_kwargs={"net_arch": [256, 256]},
    )
    return model, Monitor(gymnasium.make(args.id))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--algorithm", choices=("ppo", "sac"), default="ppo")
    parser.add_argument("--id", default="HalfCheetah-v5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total_env_steps", type=int, default=1_000_000)
    parser.add_argument("--curves", type=Path, default=Path("curves.json"), help="of SAC")
    parser.add_argument("--output", type=Path, default=Path("reference_sb3.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)

    curve = None
    if args.algorithm == "ppo":
        model, eval_env = ppo(args)
        eval_env.seed(args.seed + 10_000)
    else:
        model, eval_env = sac(args)
        scratch = tempfile.TemporaryDirectory()
        settings = {"n_eval_episodes": 10, "eval_freq": 10_000, "verbose": 0}
        env = Monitor(gymnasium.make(args.id))
        curve = EvalCallback(env, log_path=scratch.name, **settings)
        eval_env.reset(seed=args.seed + 10_000)
    start = time.perf_counter()
    # Of all finished episodes SB3 keeps the raw returns of the last hundred.
    model.learn(args.total_env_steps, callback=curve)
    seconds = time.perf_counter() - start
    evaluation, _ = evaluate_policy(
        model, eval_env, n_eval_episodes=20, return_episode_rewards=True
    )
    row = {
        "library": f"stable-baselines3 {stable_baselines3.__version__}",
        "id": args.id,
        "seed": args.seed,
        "total_env_steps": args.total_env_steps,
        "train_return_last_100": float(np.mean([each["r"] for each in model.ep_info_buffer])),
        "eval_return": float(np.mean(evaluation)),
        "seconds": round(seconds, 1),
    }
    if curve is not None:
        steps = map(int, curve.evaluations_timesteps)
        points = dict(zip(steps, map(np.mean, curve.evaluations_results), strict=True))
        name = "Stable-Baselines3, SAC"
        add(args.curves, points, name, "eval/avg_reward", args.id, args.seed)
    print(json.dumps(row))
    with args.output.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
