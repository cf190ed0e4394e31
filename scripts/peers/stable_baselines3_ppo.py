"""Time Stable-Baselines3's PPO."""

import gymnasium
import torch
from common import CLASSIC, Clock, parse
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize


def main() -> None:
    run = parse(CLASSIC)
    work, clock = run.workload, Clock(run)
    env: VecEnv = DummyVecEnv([lambda: Monitor(gymnasium.make(work.env))] * work.num_envs)
    if work.normalize:
        env = VecNormalize(env, gamma=work.gamma)
    model = PPO(
        "MlpPolicy",
        env,
        learning_rate=work.learning_rate,
        n_steps=work.steps,
        batch_size=work.batch_size,
        n_epochs=work.epochs,
        gamma=work.gamma,
        gae_lambda=work.gae_lambda,
        clip_range=work.clip,
        ent_coef=work.ent_coef,
        vf_coef=work.vf_coef,
        max_grad_norm=work.max_grad_norm,
        seed=run.seed,
        device=run.device,
        policy_kwargs={
            "net_arch": {"pi": list(work.hidden), "vf": list(work.hidden)},
            "activation_fn": torch.nn.Tanh,
        },
    )
    clock.wrap(model, "collect_rollouts", "collect")
    clock.wrap(model, "train", "update", after=clock.end_iteration)
    model.learn(run.total * work.env_steps)
    clock.report("stable-baselines3", "stable-baselines3")


if __name__ == "__main__":
    main()
