"""Time Stable-Baselines3's SAC; with `--jax` that of SBX, which has the same interface in JAX."""

import os
from typing import Any

import gymnasium
import numpy as np
import torch
from common import OFF_POLICY, SAC_LEARNING_STARTS, Clock, parse
from pendulum import ACTION_SIZE, OBSERVATION_SIZE, Pendulum
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv


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


def main() -> None:
    run = parse(OFF_POLICY, "jax")
    work, clock = run.workload, Clock(run)
    if run.flags.jax:
        # JAX takes a thread for each core that it may run on, and no other number.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: work.threads])
        from sbx import SAC

        library, package, more = "SBX (JAX)", "sbx-rl", {}
    else:
        from stable_baselines3 import SAC

        library = package = "stable-baselines3"
        more = {"device": run.device}
    env: VecEnv
    if run.name == "S64":
        env = PendulumEnv(work.num_envs, run.seed)
    else:
        env = DummyVecEnv([lambda: Monitor(gymnasium.make(work.env))] * work.num_envs)
    model = SAC(
        "MlpPolicy",
        env,
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
    model.learn(run.total * work.env_steps)
    clock.report(library, package)


if __name__ == "__main__":
    main()
