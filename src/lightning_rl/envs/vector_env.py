"""The API of envs: Gymnasium's `VectorEnv` with tensors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.steppers import RolloutStepper, StepwiseStepper
from lightning_rl.rollout.allocation import intervention_fields
from lightning_rl.rollout.contract import INFO, FieldSpec
from lightning_rl.rollout.goals import GoalFunction
from lightning_rl.system.construction import NamedSettings
from lightning_rl.system.errors import ConfigurationError, require

Observation = Tensor | TensorDict
"""[N, ...], or a tree of such tensors."""

Seed = int | Sequence[int] | None
"""An int seeds env i with seed + i; a sequence has one seed per env; None keeps the generators."""

Info = dict[str, Any]
"""Further results of `reset` and `step`, by name."""

Options = dict[str, Any] | None
"""Options of `reset`, as in Gymnasium; most envs have none."""

PENALTY_FIELD: dict[str, FieldSpec] = {"penalty": ((), torch.float32)}
"""Extra rollout field of envs that report a penalty of part of the action."""


class RestoreError(RuntimeError):
    """An env cannot restore a saved state; the message says why."""


class VectorEnv(ABC, NamedSettings):
    """N copies of an env that are stepped together, with same-step autoreset.

    Success and failure are `terminated`; the time limit is `truncated`. Returned tensors stay valid
    until the next step. `num_envs` must be the first constructor argument.
    """

    num_envs: int
    device: torch.device
    single_observation_space: gymnasium.Space[Any]
    single_action_space: gymnasium.Space[Any]
    render_fps: float = 30.0
    """Env steps per second of real time, for videos."""

    metadata: Mapping[str, Any] = {}  # of a class or an instance, never written
    """Metadata as in Gymnasium, such as `control_period` (s), `render_fps` or `joint_names`."""

    max_episode_steps: int | None = None
    """Time limit in env steps; None: no limit, or unknown."""

    steps_per_action: int = 1
    """Maximum env steps per action: more than 1 for action chunks."""

    chunk_size: int | None = None
    """Actions of a chunk, executed or not; None: an action is single."""

    persistent_state: tuple[str, ...] = ()
    """State entries that stay when an episode ends; a seeded reset restarts them."""

    reports_interventions: bool = False
    """Whether a person or a script may take over, and rollouts store it; see `step`."""

    reports_penalty: bool = False
    """Whether `step` reports the penalty of part of the action, and rollouts store it."""

    info_fields: Mapping[str, tuple[int, ...]] = {}
    """Shapes of the info entries that rollouts store, by name; see `record_info`."""

    @property
    def progress(self) -> int:
        """Progress counter that rises during long calls, such as a replay of episodes.

        While the counter rises, the call does not count as hanging; see `data.env_timeout_s`.
        """
        return 0

    @property
    def known_fps(self) -> float | None:
        """`render_fps`, or None if it is the default that no env and no metadata set."""
        # By identity: an env of exactly 30 steps per second has a known rate.
        is_set = self.render_fps is not VectorEnv.render_fps or self.metadata.get("render_fps")
        return self.render_fps if is_set else None

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        """Additional rollout fields of each step, which `info` contains."""
        space = self.single_action_space
        taken_over = intervention_fields(space) if self.reports_interventions else {}
        infos = {INFO + name: (shape, torch.float32) for name, shape in self.info_fields.items()}
        return taken_over | (PENALTY_FIELD if self.reports_penalty else {}) | infos

    @property
    def goals(self) -> GoalFunction | None:
        """The function that judges other goals; None if the env is no goal env."""
        return None

    @abstractmethod
    def reset(self, seed: Seed = None, options: Options = None) -> tuple[Observation, Info]:
        """Begin an episode in every env; return observation [N, ...] and info."""

    @abstractmethod
    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        """Step every env, and reset the finished envs.

        Args:
            action: [N, *A], flat for spaces of several parts. Choices count from 0, also
                in a space with a `start`; `as_env_action` converts.

        Returns:
            observation [N, ...] (finished envs: of the next episode), reward [N] float, terminated
            [N] bool, truncated [N] bool, and info. Info entries are optional and describe the step
            before the reset:

            - `final_obs` [N, ...]: true final observations of finished envs; other rows have no
              meaning. Required for truncated episodes.
            - `success` [N] bool: the outcome of finished episodes.
            - `rewards` (reward terms), `metrics`, `final_metrics` (metrics of finished episodes
              only): dicts of tensors [N], NaN for missing values.
            - `log`: dict of tensors [] by chart name, averaged over the steps of a rollout.
            - `executed_action` [N, *A] (default: `action`) and `intervened` [N] bool, whether a
              person or a script had taken over (default: whether the actions differ); read if the
              env `reports_interventions`.
            - `penalty` [N] float32: the reward of part of the action (see `GripperSAC`), usually at
              most 0; required at every step if the env `reports_penalty`.
        """

    def rollout_stepper(self, rollout: TensorDict) -> RolloutStepper:
        """Return the stepper of this env for the storage of a rollout [N, T+1].

        Override it if copying the results of `step` is too slow.
        """
        return StepwiseStepper(self, rollout)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for an exact (bit for bit) `load_state_dict`, or None if not supported.

        The state holds plain numbers, strings and tensors.
        """
        return None

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """Restore a saved state; return its observation [N, ...].

        Raises:
            RestoreError: the env cannot restore this state.
        """
        raise RestoreError(f"{type(self).__name__} does not save its state")

    def make_renderable(self) -> None:  # most envs can always be drawn, or never
        """Prepare for `render`. Call before a seeded `reset`; may restart all envs.

        Raises:
            ConfigurationError: this env cannot be drawn.
        """

    def render(self, rows: Sequence[int]) -> np.ndarray:
        """Return pictures uint8 [M, H, W, 3] of M envs; `rows` are their indices.

        Raises:
            ConfigurationError: this env cannot be drawn.
        """
        raise ConfigurationError(
            f"{type(self).__name__} cannot be drawn: it has no render(rows). Define the method, or "
            "turn videos off."
        )

    def film(self, rows: Sequence[int], every: int) -> dict[int, dict[int, np.ndarray]]:
        """Return pictures from within the last action; see `ActionChunk.film`."""
        return {}

    def show(self) -> None:
        """Open a window that shows every step after the next `reset`; restarts all envs.

        Raises:
            ConfigurationError: this env has no window.
        """
        raise ConfigurationError(
            f"{type(self).__name__} cannot open a window: film it, --video true."
        )

    def seeds_of(self, seed: Any) -> list[int]:
        """Return the seed of each env for a `Seed` that is not None.

        Raises:
            ConfigurationError: for another number of seeds.
        """
        if isinstance(seed, int | np.integer):
            return [int(seed) + i for i in range(self.num_envs)]
        count = f"Expected {self.num_envs} seeds, one per env, got {len(seed)}."
        require(len(seed) == self.num_envs, count)
        return [int(s) for s in seed]

    def stop_interventions(self) -> None:  # most envs have no interventions
        """Disable interventions before the first `reset`, for evaluations.

        Interventions that the env cannot prevent are still reported.
        """

    def add_events(self, events: Mapping[str, Any]) -> None:
        """Add events by name (`Event`), such as training events, before the first `reset`.

        Raises:
            ConfigurationError: this env does not take these events.
        """
        raise ConfigurationError(
            f"{type(self).__name__} takes no events ({', '.join(events)}). Envs with events: "
            "a Task, a MujocoEnv, your own ManagedEnv, and a TensorSimulator."
        )

    def randomize_first_episodes(self, limit: int) -> None:
        """Begin the first episode after a seeded reset at a random step below the time limit.

        The time limit then truncates it early. Call before the first `reset`.

        Args:
            limit: time limit, in env steps.

        Raises:
            ConfigurationError: this env cannot begin at a later step.
        """
        raise ConfigurationError(
            f"{type(self).__name__} takes no data.random_first_episode_length: remove it. Envs "
            "that take it: a GymnasiumEnv with vectorization sync or async, a TorchEnv such as a "
            "task or a MujocoEnv, and a TensorSimulator whose simulator has episode_length_buf [N]."
        )

    def record_info(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Store entries of each step's info in rollouts, as float32; call before the first `reset`.

        Args:
            shapes: shape of each entry in one env, by name.

        Raises:
            ConfigurationError: this env keeps no entries of its info.
        """
        self.info_fields = shapes

    def close(self) -> None:  # most envs hold nothing that needs closing
        """Free processes and windows. May be called more than once."""
