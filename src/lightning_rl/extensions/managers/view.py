"""Show a step of a batched env to the terms of its task."""

import copy
import math
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extend.envs import uniforms
from lightning_rl.extend.errors import require

ENDLESS = 2**31
"""Time limit that terms see if the env has none."""


def names_of(state: TensorDict) -> list[str]:
    """Return the names of the entries of a state [M]."""
    return [str(key) for key in state.keys()]


def entries_of(state: TensorDict) -> dict[str, Tensor]:
    """Return the entries of a state [M] by name."""
    return {name: state[name] for name in names_of(state)}


class SeesNoState:
    """Base class of envs without a state for terms, which see observations or a simulator."""

    step_dt: float
    elapsed: Tensor

    def observe(self, state: TensorDict) -> Tensor:
        """Return the observation [M, ...] of an env without keys, for the term `task_observation`.

        Raises:
            ConfigurationError: it has keys.
        """
        require(
            "observation" in names_of(state),
            f"{type(self).__name__} has the observations {', '.join(names_of(state))}: use "
            "the term `entry` with one of these names, not `task_observation`.",
        )
        return state["observation"]  # type: ignore[no-any-return]  # a tensor

    def parameters(self) -> dict[str, Tensor]:
        """Return nothing: terms see no physics."""
        return {}


class EnvView:
    """The view that a term gets of M rows of an env: all N in a step, the reset rows at a reset.

    A subclass adds named views of a simulator's state. Terms do not write into the view.

    Attributes:
        env: the env; terms read its constants.
        rows_shape: [M], the shape of a term's value.
        state: [M], the state after the step, or the start of the episode. `simulate` sees the state
            before the step.
        at_reset: whether the rows begin an episode; otherwise they have taken a step.
        previous_state: [M], the state before the step; at a reset the first state.
        episode: [M] int64, index of the episode.
        measurements: quantities of this step, [M, ...] by name; see `ManagedEnv.measure`.
            `simulate` may add quantities that it computes anyway.
        outcome: flags [M] bool of the termination terms, by name. Rewards and metrics read them by
            `success`, `fail`, `terminated` and `truncated`.
    """

    stream = 0  # of the current term

    def __init__(
        self,
        env: Any,
        state: TensorDict,
        key: Tensor,
        episode: Tensor,
        action: Tensor | None = None,
    ) -> None:
        self.env, self.state, self.previous_state = env, state, state
        self.at_reset = action is None
        self.rows_shape = episode.shape
        self.episode = episode
        if action is not None:
            # Replaces the cached property below, which is for resets.
            self.action = action
        self.measurements: dict[str, Tensor] = {}
        self.outcome: dict[str, Tensor] = {}
        self.added_entries: dict[str, Tensor] = {}  # what terms add to the state
        self._key = key

    @property
    def num_envs(self) -> int:
        """The number of rows, M."""
        return self.rows_shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.episode.device

    @property
    def step_dt(self) -> float:
        """Seconds per env step."""
        dt: float = self.env.step_dt
        return dt

    @property
    def max_episode_steps(self) -> int:
        """Time limit, in steps."""
        return self.env.max_episode_steps or ENDLESS

    @cached_property
    def action(self) -> Tensor:
        """The policy's action, [M, A]; zeros at a reset."""
        shape = self.env.single_action_space.shape or ()
        action: Tensor = torch.zeros((self.num_envs, *shape), device=self.device)
        return action

    @cached_property
    def elapsed(self) -> Tensor:
        """Steps of the episode, including this one, [M] int64; 0 at a reset."""
        elapsed: Tensor = torch.zeros_like(self.episode) if self.at_reset else self.env.elapsed + 1
        return elapsed

    @property
    def last_step(self) -> Tensor:
        """Whether the step is the last one within the time limit, [M] bool."""
        return self.elapsed >= self.max_episode_steps

    @property
    def success(self) -> Tensor:
        """Whether the step is a success, [M] bool."""
        flags = self.outcome.get("success")
        return self._flags("success") if flags is None else flags

    @property
    def fail(self) -> Tensor:
        """Whether the step is a failure, [M] bool."""
        return self._flags("fail")

    @property
    def terminated(self) -> Tensor:
        """Whether the episode is terminated, so that its return is not bootstrapped, [M] bool."""
        flags = self.outcome.get("terminated")
        return self._flags("terminated") if flags is None else flags

    @property
    def truncated(self) -> Tensor:
        """Whether the episode is truncated, by the time limit or by a term, [M] bool."""
        return self.last_step | self._flags("truncated")

    def level(self, name: str) -> Tensor:
        """Return the level [M] float32 of a curriculum term."""
        level: Tensor = self.previous_state[f"curriculum/{name}"]
        return level

    def uniform(self, count: int, part: int = 0) -> Tensor:
        """Draw numbers in [0, 1): [M, count].

        They depend on the env's seed, the episode, the step, the name of the term and `part` only,
        the index of the draw within the term: a second call returns the same numbers.
        """
        # Most terms draw once: part 0 needs no second hash.
        streams = [self.stream, part] if part else [self.stream]
        return uniforms(self._key, self.episode, self.elapsed, count, streams)

    def normal(self, count: int, part: int = 0) -> Tensor:
        """Draw numbers of the standard normal distribution: [M, count]; see `uniform`.

        Box and Muller 1958, "A note on the generation of random normal deviates".
        """
        radius, angle = self.uniform(2 * count, part).split(count, 1)
        # 1 - u lies in (0, 1], so that the logarithm is finite.
        normals: Tensor = (-2.0 * (1.0 - radius).log()).sqrt() * (angle * (2.0 * math.pi)).cos()
        return normals

    def nominal(self, name: str) -> Tensor | None:
        """Return the nominal value [...] of a parameter or quantity; None if there is none."""
        value: Tensor | None = self.env.parameters().get(name)
        return value

    def number_names(self, name: str, size: int) -> list[str]:
        """Return the name of each of the `size` numbers of an entry or parameter, or []."""
        return []

    def entries_for(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Return the entries for a value [M, ...]: also those that depend on it."""
        return {name: value}

    def memory_of(self, prefix: str) -> dict[str, Tensor]:
        """Return the memory of a term before the step, by its keys."""
        state = self.previous_state
        keys = [key for key in names_of(state) if key.startswith(prefix)]
        return {key.removeprefix(prefix): state[key] for key in keys}

    def _flags(self, name: str) -> Tensor:
        # Several terms may ask for a flag that none has set.
        if name not in self.outcome:
            self.outcome[name] = torch.zeros_like(self.episode, dtype=torch.bool)
        flags: Tensor = self.outcome[name]
        return flags

    def for_startup(self) -> "EnvView":
        """Return a view of the same start that draws the same numbers in every episode."""
        view = copy.copy(self)
        view.episode = torch.zeros_like(self.episode)
        return view

    def for_episode(self) -> "EnvView":
        """Return this view, drawing the same numbers at every step of an episode."""
        view = copy.copy(self)
        view.elapsed = torch.zeros_like(self.elapsed)
        return view
