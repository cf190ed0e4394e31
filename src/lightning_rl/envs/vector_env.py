"""Say what an env is: the API of Gymnasium's `VectorEnv`, with tensors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.stepping import RolloutStepper, StepwiseStepper
from lightning_rl.errors import ConfigurationError
from lightning_rl.rollout import FieldSpec

Observation = Tensor | TensorDict
Seed = int | Sequence[int] | None


class RestoreError(RuntimeError):
    """An env cannot be brought back to a saved state; the message says why."""


class VectorEnv(ABC):
    """N copies of an env stepped together.

    Finished ones reset inside `step` ("same-step autoreset").

    Failure or success is `terminated`; running out of time is `truncated`. Tensors that an env
    returns hold until its next step. The first argument of a subclass's constructor is `num_envs`;
    the command line fills it in.
    """

    num_envs: int
    device: torch.device
    single_observation_space: gymnasium.Space[Any]
    single_action_space: gymnasium.Space[Any]
    render_fps: float = 30.0
    """Env steps per second of real time, where pictures of them are to move as fast."""

    steps_per_action: int = 1
    """Env steps that an action takes at most: more than 1 where it is a chunk of actions."""

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        """What a rollout holds of each step beside what every env says; found in `info`."""
        return {}

    @abstractmethod
    def reset(
        self, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in every env.

        Args:
            seed: an int seeds env i with `seed + i`, a sequence gives one seed per env, None goes
                on with the generators as they are.
            options: passed on to the envs.

        Returns:
            observation [N, ...], info.
        """

    @abstractmethod
    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step every env, and reset those that finish.

        Args:
            action: [N, *A].

        Returns:
            observation [N, ...] (of the next episode where one finished), reward [N] float,
            terminated [N] bool, truncated [N] bool, and info. Where an env finished,
            `info["final_obs"]` [N, ...] holds its true final observation (other rows mean nothing;
            the key may be absent where no env finished); an episode that was truncated without one
            is refused. What else `info` says is read where present, at every step, and is of the
            step taken, from before a reset: `success` [N] bool, where an episode ended its outcome;
            `rewards`, what each term added, and `metrics`, both dicts of tensors [N], NaN where an
            env says nothing. Metrics known of finished episodes alone may stand in `final_metrics`.
        """

    def rollout_stepper(self, rollout: TensorDict) -> RolloutStepper:
        """Return what steps this env on the storage of a rollout [N, T+1].

        Called once by the collector. An env with a faster way than copying what `step` returns
        gives it.
        """
        return StepwiseStepper(self, rollout)

    def state_dict(self) -> dict[str, Any] | None:
        """Return what `load_state_dict` needs to go on bit for bit, or None.

        It holds plain numbers, strings and tensors, so that a checkpoint loads without unpickling.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """Go on from a saved state, and return the observation [N, ...] it was saved with.

        Raises:
            RestoreError: where that is not possible.
        """
        raise RestoreError(f"{type(self).__name__} does not save its state")

    def make_renderable(self) -> None:  # noqa: B027  # most envs can always be drawn, or never
        """Get ready for `render`. Called before a `reset` with seeds; may begin all envs anew.

        Raises:
            ConfigurationError: where this env cannot be drawn.
        """

    def render(self, rows: Sequence[int]) -> np.ndarray:
        """Return a picture of each of M envs as it is now, uint8 [M, H, W, 3].

        Args:
            rows: which envs.

        Raises:
            ConfigurationError: where this env cannot be drawn.
        """
        raise ConfigurationError(
            f"{type(self).__name__} cannot be drawn: it has no render(rows). Give it one, or make "
            "no videos of it."
        )

    def close(self) -> None:  # noqa: B027  # most envs hold nothing that needs closing
        """Free processes and windows. May be called more than once."""
