"""Time skrl's PPO."""

import contextlib
import sys
import tempfile
from typing import Any

import gymnasium
import numpy as np
import torch
from common import ON_POLICY, Clock, Run, parse
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from pendulum import ACTION_SIZE, OBSERVATION_SIZE, Pendulum
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import Wrapper, wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from torch import Tensor, nn

ACTIVATIONS = {"tanh": nn.Tanh, "elu": nn.ELU}


def mlp(inputs: int, hidden: tuple[int, ...], activation: str, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class Gaussian(GaussianMixin, Model):
    def __init__(self, hidden: tuple[int, ...], activation: str, **kwargs: Any) -> None:
        Model.__init__(self, **kwargs)
        GaussianMixin.__init__(self)
        self.net = mlp(self.num_observations, hidden, activation, self.num_actions)
        self.log_std = nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs: dict[str, Tensor], role: str = "") -> tuple[Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Categorical(CategoricalMixin, Model):
    def __init__(self, hidden: tuple[int, ...], activation: str, **kwargs: Any) -> None:
        Model.__init__(self, **kwargs)
        CategoricalMixin.__init__(self)
        self.net = mlp(self.num_observations, hidden, activation, self.num_actions)

    def compute(self, inputs: dict[str, Tensor], role: str = "") -> tuple[Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    def __init__(self, hidden: tuple[int, ...], activation: str, **kwargs: Any) -> None:
        Model.__init__(self, **kwargs)
        DeterministicMixin.__init__(self)
        self.net = mlp(self.num_observations, hidden, activation, 1)

    def compute(self, inputs: dict[str, Tensor], role: str = "") -> tuple[Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


class PendulumEnv(Wrapper):
    state_space = None
    num_agents = 1
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (OBSERVATION_SIZE,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTION_SIZE,), np.float32)

    def __init__(self, env: Pendulum) -> None:
        super().__init__(env)

    def reset(self) -> tuple[Tensor, dict[str, Any]]:
        return self._env.reset(), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = self._env.step(actions)
        columns = (column.unsqueeze(-1) for column in (reward, terminated, truncated))
        return observation, *columns, {}

    def state(self) -> None:
        return None

    def render(self) -> None: ...

    def close(self) -> None: ...


def make_env(run: Run) -> Wrapper:
    work = run.workload
    if run.name == "W3":
        return PendulumEnv(Pendulum(work.num_envs, run.device, run.seed))

    def one() -> gymnasium.Env:
        env = gymnasium.make(work.env)
        if isinstance(env.action_space, gymnasium.spaces.Box):
            env = gymnasium.wrappers.ClipAction(env)
        return env

    if work.num_envs == 1:
        env = one()
        if work.normalize:
            env = gymnasium.wrappers.NormalizeReward(env, gamma=work.gamma)
        return wrap_env(env, wrapper="gymnasium", verbose=False)
    envs: Any = SyncVectorEnv([one] * work.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    if work.normalize:
        envs = gymnasium.wrappers.vector.NormalizeReward(envs, gamma=work.gamma)
    return wrap_env(envs, wrapper="gymnasium", verbose=False)


def train(run: Run, clock: Clock, directory: str) -> None:
    work = run.workload
    set_seed(run.seed)
    env = make_env(run)
    spaces = {
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "device": run.device,
    }
    actor = Gaussian if isinstance(env.action_space, gymnasium.spaces.Box) else Categorical
    scaler = {"size": env.observation_space, "device": run.device}
    agent = PPO(
        models={
            "policy": actor(work.hidden, work.activation, **spaces),
            "value": Value(work.hidden, work.activation, **spaces),
        },
        memory=RandomMemory(memory_size=work.steps, num_envs=work.num_envs, device=run.device),
        cfg=PPO_CFG(
            rollouts=work.steps,
            learning_epochs=work.epochs,
            mini_batches=work.minibatches,
            discount_factor=work.gamma,
            gae_lambda=work.gae_lambda,
            learning_rate=work.learning_rate,
            observation_preprocessor=RunningStandardScaler if work.normalize else None,
            observation_preprocessor_kwargs=scaler if work.normalize else {},
            grad_norm_clip=work.max_grad_norm,
            ratio_clip=work.clip,
            value_clip=0.0,
            entropy_loss_scale=work.ent_coef,
            value_loss_scale=work.vf_coef,
            time_limit_bootstrap=True,
            experiment={"directory": directory, "write_interval": 0, "checkpoint_interval": 0},
        ),
        **spaces,
    )
    timesteps = run.total * work.steps
    trainer = SequentialTrainer(
        env=env,
        agents=agent,
        cfg={"timesteps": timesteps, "headless": True, "disable_progressbar": True},
    )
    clock.wrap(agent, "update", "update", after=clock.end_iteration)
    clock.start()
    trainer.train()


def main() -> None:
    run = parse(ON_POLICY)
    clock = Clock(run)
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        train(run, clock, directory)
    clock.report("skrl", "skrl")


if __name__ == "__main__":
    main()
