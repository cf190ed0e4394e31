"""Time Stable-Baselines3's PPO and SAC; with `--jax` SBX's SAC, of the same interface in JAX."""

import os
from typing import Any

import gymnasium
import numpy as np
import torch
from common import CLASSIC, OFF_POLICY, SAC_LEARNING_STARTS, Clock, Run, parse
from pendulum import ACTION_SIZE, OBSERVATION_SIZE, Pendulum
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize


class PendulumEnv(VecEnv):
    """Pendulums in torch as Stable-Baselines3 wants them."""

    def __init__(self, num_envs: int, seed: int) -> None:
        high = np.full(OBSERVATION_SIZE, np.inf, np.float32)
        observations = gymnasium.spaces.Box(-high, high)
        actions = gymnasium.spaces.Box(-1.0, 1.0, (ACTION_SIZE,), np.float32)
        super().__init__(num_envs, observations, actions)
        self.pendulum = Pendulum(num_envs, "cpu", seed)

    def reset(self) -> np.ndarray:
        return self.pendulum.reset().numpy()

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = torch.from_numpy(actions)

    def step_wait(self) -> Any:
        observation, reward, terminated, truncated, final = self.pendulum.step(self.actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in truncated.nonzero().flatten().tolist():
            infos[i] = {"TimeLimit.truncated": True, "terminal_observation": final[i].numpy()}
        done = terminated | truncated
        return observation.numpy(), reward.numpy(), done.numpy(), infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        pass

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        raise AttributeError(method_name)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def make_env(run: Run) -> VecEnv:
    work = run.workload
    if run.name == "S64":
        return PendulumEnv(work.num_envs, run.seed)
    env = DummyVecEnv([lambda: Monitor(gymnasium.make(work.env))] * work.num_envs)
    return VecNormalize(env, gamma=work.gamma) if work.normalize else env


def ppo_of(run: Run, clock: Clock) -> Any:
    from stable_baselines3 import PPO

    work = run.workload
    networks = {"pi": list(work.hidden), "vf": list(work.hidden)}
    model = PPO(
        "MlpPolicy",
        make_env(run),
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
        policy_kwargs={"net_arch": networks, "activation_fn": torch.nn.Tanh},
    )
    clock.wrap(model, "collect_rollouts", "collect")
    clock.wrap(model, "train", "update", after=clock.end_iteration)
    return model


def sac_of(run: Run, clock: Clock) -> Any:
    work = run.workload
    more = {} if run.flags.jax else {"device": run.device}
    if run.flags.jax:
        # JAX takes a thread for each core that it may run on, and no other number.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: work.threads])
        from sbx import SAC
    else:
        from stable_baselines3 import SAC
    model = SAC(
        "MlpPolicy",
        make_env(run),
        learning_rate=work.learning_rate,
        learning_starts=SAC_LEARNING_STARTS,
        batch_size=work.replay_batch_size,
        gamma=work.gamma,
        train_freq=1,
        gradient_steps=work.updates // work.steps,
        seed=run.seed,
        policy_kwargs={"net_arch": list(work.hidden)},
        **more,
    )

    def end_iteration() -> None:
        if model.num_timesteps % work.env_steps == 0:
            clock.end_iteration()

    # It updates after every step: one iteration ends where the collecting of its last step does.
    clock.wrap(model, "collect_rollouts", "collect", after=end_iteration)
    return model


def main() -> None:
    run = parse((*CLASSIC, *OFF_POLICY), "jax")
    clock = Clock(run)
    model = (ppo_of if run.name in CLASSIC else sac_of)(run, clock)
    model.learn(run.total * run.workload.env_steps)
    if run.flags.jax:
        clock.report("SBX (JAX)", "sbx-rl")
    else:
        clock.report("stable-baselines3", "stable-baselines3")


if __name__ == "__main__":
    main()
