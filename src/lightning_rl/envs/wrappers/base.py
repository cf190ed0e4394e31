"""Wrap a vector env: forward everything that a subclass does not override."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lightning_rl.envs.vector_env import Info, Observation, Options, Seed, VectorEnv
from lightning_rl.rollout.contract import FieldSpec
from lightning_rl.rollout.goals import GoalFunction


class VectorEnvWrapper(VectorEnv):
    """Base class of wrappers: forwards everything that a subclass does not override.

    The constructor of a subclass takes `num_envs` and the env as configured, and passes the built
    env to this constructor.
    """

    @abstractmethod
    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        for attribute in VectorEnv.__annotations__:
            setattr(self, attribute, getattr(env, attribute))

    @property
    def progress(self) -> int:
        return self.env.progress

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        return self.env.extra_fields

    @property
    def goals(self) -> GoalFunction | None:
        return self.env.goals

    def reset(self, seed: Seed = None, options: Options = None) -> tuple[Observation, Info]:
        return self.env.reset(seed, options)

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        return self.env.step(action)

    def state_dict(self) -> dict[str, Any] | None:
        return self.env.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        return self.env.load_state_dict(state)

    def make_renderable(self) -> None:
        self.env.make_renderable()

    def render(self, rows: Sequence[int]) -> np.ndarray:
        return self.env.render(rows)

    def show(self) -> None:
        self.env.show()

    def stop_interventions(self) -> None:
        self.env.stop_interventions()

    def add_events(self, events: Mapping[str, Any]) -> None:
        self.env.add_events(events)

    def keep_info(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.env.keep_info(shapes)
        self.info_fields = shapes

    def close(self) -> None:
        self.env.close()
