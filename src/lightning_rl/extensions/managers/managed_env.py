"""Write a batched torch env as physics and terms: rewards, ends, observations and events."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import TorchEnv
from lightning_rl.extend.envs import Event, RestoreError, Transition
from lightning_rl.extend.envs import Observation as Observed
from lightning_rl.extend.errors import require
from lightning_rl.extensions.managers.events import Events
from lightning_rl.extensions.managers.observations import Observations
from lightning_rl.extensions.managers.outcome import Metrics, Rewards, Terminations, checked
from lightning_rl.extensions.managers.term import (
    BoundTerm,
    Curriculum,
    Metric,
    Observation,
    Reward,
    Termination,
    merged,
)
from lightning_rl.extensions.managers.view import EnvView, entries_of, names_of

Groups = Mapping[str, Mapping[str, Observation]]
"""Observation terms by name, by group."""


@dataclass
class TermSettings:
    """A user's terms, over the defaults of a task; see `ManagedEnv`.

    Attributes:
        rewards: terms, or weights of the task's terms.
        observations: groups of terms, instead of the task's observation.
        rewards_per_second: multiply the weights of rewards by the seconds of a step.
    """

    rewards: Mapping[str, float | Reward | None] | None = None
    terminations: Mapping[str, Termination | None] | None = None
    metrics: Mapping[str, Metric | None] | None = None
    observations: Groups | None = None
    events: Mapping[str, Event | None] | None = None
    curriculum: Mapping[str, Curriculum | None] | None = None
    rewards_per_second: bool = False


class ManagedEnv(TorchEnv):
    """A torch env whose rewards, ends, observations and events are terms.

    A subclass writes the physics, `simulate`, next to `initial_state` and `observe`. It sets their
    attributes before `super().__init__`, or in `make_constants`: the constructor begins an episode
    of one env to find the shapes.

    `info` has `success` [N] bool, `rewards` {term: [N], weighted} and `metrics` {name: [N]}, from
    before the resets.

    Args:
        num_envs: N.
        observation_space: space of `observe`.
        action_space: space of the actions.
        max_episode_steps: time limit, in steps.
        device: device of the state.
        terms: the user's terms.

    Attributes:
        step_dt: seconds per env step.
        view_class: class of the view for terms.
        default_rewards, default_terminations, default_metrics, default_observations,
            default_events, default_curriculum: the task's own terms.

    Raises:
        ConfigurationError: an unknown term or parameter.
    """

    step_dt: float
    view_class: ClassVar[type[EnvView]] = EnvView
    default_rewards: ClassVar[Mapping[str, Reward]] = {}
    default_terminations: ClassVar[Mapping[str, Termination]] = {}
    default_metrics: ClassVar[Mapping[str, Metric]] = {}
    default_observations: ClassVar[Groups] = {}
    default_events: ClassVar[Mapping[str, Event]] = {}
    default_curriculum: ClassVar[Mapping[str, Curriculum]] = {}

    def __init__(
        self,
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        max_episode_steps: int,
        device: torch.device | str = "cpu",
        terms: TermSettings | None = None,
    ) -> None:
        super().__init__(num_envs, observation_space, action_space, max_episode_steps, device)
        terms = TermSettings() if terms is None else terms
        name = type(self).__name__
        rewards = merged(Reward, self.default_rewards, terms.rewards, name, "weight")
        ends = merged(Termination, self.default_terminations, terms.terminations, name)
        metrics = merged(Metric, self.default_metrics, terms.metrics, name)
        levels = merged(Curriculum, self.default_curriculum, terms.curriculum, name)
        self._event_terms = merged(Event, self.default_events, terms.events, name)
        factor = self.step_dt if terms.rewards_per_second else 1.0
        self.rewards, self.terminations = Rewards(rewards, name, factor), Terminations(ends, name)
        self.metrics = Metrics(metrics, name)
        self.observations = Observations(terms.observations or self.default_observations, name)
        self._levels = {
            key: (term.start or 0.0, BoundTerm(term, "curriculum", key, name, 2))
            for key, term in levels.items()
        }
        # `TorchEnv` passes these entries on to the next episode.
        self.persistent_state = tuple(f"curriculum/{key}" for key in levels)
        for key, reward in rewards.items():
            require(
                reward.level is None or reward.level in levels,
                f"{name}: the reward '{key}' has the level '{reward.level}', which is no "
                f"curriculum term: {', '.join(levels) or 'none'}.",
            )
        terms_in_use = [
            *(term for _, term in self._levels.values()),
            *(term for *_, term in self.rewards.terms),
            *(term for _, term in self.terminations.terms.values()),
            *self.metrics.terms.values(),
        ]
        self._with_memory = [term for term in terms_in_use if term.has_memory]
        self.events = Events(self._event_terms, name)
        # Most tasks measure in `simulate`: save them the call per step.
        self._measures = type(self).measure is not ManagedEnv.measure
        # Most runs need no entries of terms in the state, and skip these steps.
        self._adds_entries = bool(
            self._levels or self.events or self._with_memory or self.observations
        )
        self.make_constants()
        # This start also checks what the events return.
        first = self.draw_starts(self.stream_key[:, :1], self.episode[:1].clamp_min(0))
        if self.observations:
            self.single_observation_space = self.observations.space(first)

    @abstractmethod
    def simulate(self, env: EnvView) -> TensorDict:
        """Return the next state [N] from `env.state` and `env.action`.

        `ManagedEnv` adds the entries of terms, which have a slash in their name. A physical
        parameter that an event has replaced is in the state: `env.state.get(name, nominal)`.
        """

    def make_constants(self) -> None:  # most envs have none
        """Make the tensors that do not change, on the device, before the first start."""

    def measure(self, env: EnvView) -> dict[str, Tensor]:
        """Return quantities [N, ...] that several terms of a step need."""
        return {}

    def parameters(self) -> Mapping[str, Tensor]:
        """Return the nominal values [...] of the physical parameters that events may replace."""
        return {}

    def with_derived_entries(self, state: TensorDict) -> TensorDict:
        """Return first states [M] with derived entries recomputed, after events changed them."""
        return state

    def add_events(self, events: Mapping[str, Event | None]) -> None:
        name = type(self).__name__
        self._event_terms = merged(Event, self._event_terms, events, name)
        self.events = Events(self._event_terms, name)
        self._adds_entries = True
        self.draw_starts(self.stream_key[:, :1], self.episode[:1].clamp_min(0))

    def draw_starts(
        self, key: Tensor, episode: Tensor, persistent: Mapping[str, Tensor] | None = None
    ) -> TensorDict:
        state = super().draw_starts(key, episode)
        if not self._adds_entries:
            return state
        env = self.view_class(self, state, key, episode)
        for name, (first, _) in self._levels.items():
            level = torch.full((env.num_envs,), first, device=self.device)
            env.state[f"curriculum/{name}"] = level
        for name, value in (persistent or {}).items():
            env.state[name] = value
        if self.events:
            # Events come first: memories and observations begin with the changed state.
            self.events.start(env)
            env.state = env.previous_state = self.with_derived_entries(env.state)
        for term in self._with_memory:
            term.start(env)
        self.observations.compute(env)
        return self._with_added_entries(env)

    def transition(self, state: TensorDict, action: Any) -> Transition:
        env = self.view_class(self, state, self.stream_key, self.episode, action)
        next_state = self.simulate(env)
        env.state = next_state
        if self._measures:
            env.measurements |= self.measure(env)
        # Ends come first: rewards and metrics may read `success` and `fail`.
        info = self.terminations.judge(env)
        reward, info["rewards"] = self.rewards.total(env)
        info["metrics"] = self.metrics.values(env)
        if self._adds_entries:
            self._next_levels(env, info["metrics"])
            self._keep_entries(env)
            # As in Isaac Lab: a reward is for the command that the policy has observed, and the
            # next observation shows what the events have changed.
            self.events.after_step(env)
            self.observations.compute(env)
            next_state = self._with_added_entries(env)
        return next_state, reward, env.terminated, info

    def load_state_dict(self, state: dict[str, Any]) -> Observed:
        # A state with other entries comes from an env with other terms.
        names = names_of(self.draw_starts(self.stream_key[:, :1], self.episode[:1].clamp_min(0)))
        differences = sorted({*names} ^ {*state["state"]})
        if differences:
            raise RestoreError(
                f"the state was saved with other terms or events: {', '.join(differences)}"
            )
        return super().load_state_dict(state)

    def observation_of(self, state: TensorDict) -> Observed:
        if self.observations.groups:
            observation: Observed = self.observations.of(state)
            return observation
        return super().observation_of(state)

    def _next_levels(self, env: EnvView, metrics: dict[str, Tensor]) -> None:
        for name, (_, term) in self._levels.items():
            metrics[name] = level = env.level(name)
            # A term returns levels for all envs; the levels of running episodes are not used.
            next_level = checked(term, term(env, level), env)
            done = env.terminated | env.truncated
            env.added_entries[f"curriculum/{name}"] = torch.where(done, next_level, level)

    def _keep_entries(self, env: EnvView) -> None:
        """Copy the entries that events have added, because `simulate` does not return them."""
        if not self.events:
            return
        names = set(names_of(env.state))
        for name, value in entries_of(env.previous_state).items():
            if name not in names and name not in env.added_entries:
                env.state[name] = value

    def _with_added_entries(self, env: EnvView) -> TensorDict:
        state = env.state
        # After all terms: no term may read the new memory of another term.
        for name, value in env.added_entries.items():
            state[name] = value
        return state
