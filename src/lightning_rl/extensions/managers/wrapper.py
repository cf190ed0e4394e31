"""Add terms to any env by its observations: rewards, ends, metrics, observations, action scale."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ConfigurationError, VectorEnv, VectorEnvWrapper
from lightning_rl.extend.envs import Observation as Observed
from lightning_rl.extend.envs import RestoreError, Seed, key_of
from lightning_rl.extend.errors import EnvFaultError, require
from lightning_rl.extend.rollout import map_tree
from lightning_rl.extend.spaces import named, names_of
from lightning_rl.extensions.managers.actions import (
    ActionTerm,
    Force,
    Position,
    Velocity,
    require_all_drives,
)
from lightning_rl.extensions.managers.observations import Observations
from lightning_rl.extensions.managers.outcome import Metrics, Rewards, Terminations
from lightning_rl.extensions.managers.term import Metric, Observation, Reward, Termination, merged
from lightning_rl.extensions.managers.view import EnvView, SeesNoState, entries_of


class TermWrapper(VectorEnvWrapper, SeesNoState):
    """An env with further terms, which see its observations and rewards instead of its state.

    In the view of a term, `state` is the observation: an entry for each key of a Dict, otherwise
    the entry `observation`. `measured["reward"]` is the env's reward. The env's state includes
    random numbers, memories and queues of the terms.

    Args:
        num_envs: N.
        env: makes the env from `num_envs`.
        rewards: terms by name. The env's own reward is the term `env` with weight 1.
        terminations: terms by name, for a `GymnasiumEnv`: other envs cannot reset single rows.
        metrics: terms by name.
        observations: groups of terms, instead of the env's observation.
        rewards_per_second: multiply all weights of rewards by the seconds of a step.
        action: a `Position`, `Velocity` or `Force` whose target is the env's action. Default: the
            env's own actions.

    Raises:
        ConfigurationError: for a term that this env cannot have; see also `BoundTerm`.
    """

    def __init__(
        self,
        num_envs: int,
        env: Callable[[int], VectorEnv],
        rewards: dict[str, float | Reward | None] | None = None,
        terminations: dict[str, Termination] | None = None,
        metrics: dict[str, Metric] | None = None,
        observations: dict[str, dict[str, Observation]] | None = None,
        action: ActionTerm | None = None,
        rewards_per_second: bool = False,
    ) -> None:
        super().__init__(env(num_envs))
        name = f"{type(self).__name__} around {type(self.env).__name__}"
        self.step_dt = self.env.steps_per_action / self.env.render_fps
        require(
            "step_reward" not in self.env.extra_fields or not (rewards or rewards_per_second),
            f"{name} has rewards, but learners read a chunk's reward of each step: put the wrapper "
            "inside of ActionChunk.",
        )
        require(
            not rewards_per_second or self.env.known_fps is not None,
            f"{name}: rewards_per_second needs the env's step rate, which it does not say: give it "
            "metadata = {'render_fps': env steps per second}, or remove rewards_per_second.",
        )
        if terminations:
            # An end must precede the autoreset: the terms wrap the single envs.
            self._end_each(terminations, name)
        # As a term, the env's own reward can be weighted or removed.
        defaults = {"env": Reward("measurement", {"name": "reward"}, weight=1.0)}
        factor = self.step_dt if rewards_per_second else 1.0
        self._rewards = Rewards(merged(Reward, defaults, rewards, name, "weight"), name, factor)
        self._metrics = Metrics(merged(Metric, {}, metrics, name), name)
        self._observations = Observations(observations or {}, name)
        # Only these: observations are computed at a reset, and begin their memories there.
        self._with_memory = [
            term
            for term in (*(term for *_, term in self._rewards.terms), *self._metrics.terms.values())
            if term.has_memory
        ]
        self._action = action
        if action is not None:
            names = names_of(self.env.single_action_space)
            self._action = action.ordered(names, f"{name}: the action")
            self.single_action_space = named(_scaled(self.env, self._action, name), names)
        self.seed = self.episode = self.elapsed = torch.zeros(num_envs, dtype=torch.int64)
        self._seeds(0)
        self._before: dict[str, Any] = {}
        # Zeros show the shapes of the terms without a reset of the env.
        first = self._start(_zeros(self.env.single_observation_space), slice(0, 1))
        if self._observations:
            self.single_observation_space = self._observations.space(first)
        self._memory: TensorDict = TensorDict({}, [num_envs])

    def reset(self, seed: Seed = None, options: Any = None) -> tuple[Observed, dict[str, Any]]:
        observation, info = self.env.reset(seed, options)
        self._seeds(seed)
        self._memory = self._start(observation, slice(None))
        return self._observed(self._memory, observation), info

    def step(self, action: Tensor) -> tuple[Observed, Tensor, Tensor, Tensor, dict[str, Any]]:
        env_action = action
        if self._action is not None:
            clipped = self._action.clipped_action(action)
            # The allowed terms ignore the position, for which any tensor of this shape will do.
            env_action = self._action.target(clipped, clipped)
        observation, reward, terminated, truncated, info = self.env.step(env_action)
        done = terminated | truncated
        # In this step, terms see the last observation of an episode, not the first of the next.
        env = self._view(self._last_of(observation, info, done), action)
        # In the view, memories stand next to the observation, as in the state of a task.
        previous = self._before | entries_of(self._memory)
        env.previous_state = TensorDict(previous, [self.num_envs])
        env.measurements["reward"] = reward
        env.outcome = {"terminated": terminated, "truncated": truncated}
        env.outcome |= {key: info[key] for key in ("success", "fail") if key in info}
        total, terms = self._rewards.total(env)
        info = info | {"rewards": info.get("rewards", {}) | terms}
        info["metrics"] = info.get("metrics", {}) | self._metrics.values(env)
        self._observations.compute(env)
        memory = TensorDict(env.added_entries, [self.num_envs])
        if "final_obs" in info:
            # `memory` still belongs to the ended episodes; `starts`, below, to the next ones.
            info["final_obs"] = self._observed(memory, info["final_obs"])
        # A simulator that resets a step late returns the first observation after a padding step.
        late = info.get("padding", torch.zeros_like(done))
        total, begins = total.masked_fill(late, 0.0), done | late
        self.elapsed = (self.elapsed + 1).masked_fill_(begins, 0)
        self.episode = self.episode + done
        # After the counters, from which the draws of the new episodes follow.
        starts = self._start(observation, slice(None))
        self._memory = TensorDict(_where(begins, starts, memory), [self.num_envs])
        observed = self._observed(self._memory, observation)
        return observed, total, terminated, truncated, info

    def state_dict(self) -> dict[str, Any] | None:
        inner = self.env.state_dict()
        if inner is None:
            return None
        counters = {key: getattr(self, key).clone() for key in ("seed", "episode", "elapsed")}
        memory = {key: value.clone() for key, value in entries_of(self._memory).items()}
        return {"env": inner, "memory": memory, **counters}

    def load_state_dict(self, state: dict[str, Any]) -> Observed:
        if "memory" not in state:
            raise RestoreError("the state was saved by an env without these terms")
        observation = self.env.load_state_dict(state["env"])
        self.seed, self.episode, self.elapsed = (
            state[key].to(self.device, copy=True) for key in ("seed", "episode", "elapsed")
        )
        self.stream_key = key_of(self.seed)
        self._before = _entries(map_tree(torch.clone, observation))
        memory = {key: value.to(self.device, copy=True) for key, value in state["memory"].items()}
        self._memory = TensorDict(memory, [self.num_envs])
        return self._observed(self._memory, observation)

    def _end_each(self, terminations: Mapping[str, Termination], name: str) -> None:
        wrap_single_envs = getattr(self.env, "wrap_single_envs", None)
        if wrap_single_envs is None:
            raise ConfigurationError(
                f"{name} has terminations ({', '.join(terminations)}), but an env of this kind "
                "cannot reset single rows: use terminations with a GymnasiumEnv; tasks and "
                "MujocoEnv have their own setting terminations."
            )
        terms = merged(Termination, {}, terminations, name)
        wrap_single_envs(partial(EndsByTerms, terms=terms, step_dt=self.step_dt, owner=name))

    def _seeds(self, seed: Seed) -> None:
        # Without a seed, the streams continue with the next episode.
        rows = torch.arange(self.num_envs, device=self.device)
        if seed is None:
            self.episode = self.episode + 1
        else:
            self.seed = torch.tensor(self.seeds_of(seed), device=self.device)
            self.episode = torch.zeros_like(rows)
            self.stream_key = key_of(self.seed)
        self.elapsed = torch.zeros_like(rows)

    def _view(self, observation: Any, action: Tensor | None, rows: slice = slice(None)) -> EnvView:
        entries = _entries(observation)
        count = len(self.episode[rows])
        state = TensorDict(entries, [count])
        return EnvView(self, state, self.stream_key[:, rows], self.episode[rows], action)

    def _start(self, observation: Any, rows: slice) -> TensorDict:
        env = self._view(observation, None, rows)
        self._before = _entries(map_tree(torch.clone, observation))  # envs reuse their memory
        for term in self._with_memory:
            term.start(env)
        self._observations.compute(env)
        return TensorDict(env.added_entries, [env.num_envs])

    def _observed(self, memory: TensorDict, observation: Observed) -> Observed:
        if not self._observations:
            return observation
        observed: Observed = self._observations.of(memory)
        return observed

    def _last_of(self, observation: Observed, info: dict[str, Any], done: Tensor) -> Any:
        if "final_obs" in info:
            return _where(done, info["final_obs"], observation)
        if bool(done.any()):
            raise EnvFaultError(
                f"{type(self.env).__name__} ended an episode without info['final_obs']: terms "
                "would see the observation of the next episode. Return it from step."
            )
        return observation


class EndsByTerms(gymnasium.Wrapper, SeesNoState):
    """One Gymnasium env with termination terms, which see its observations.

    Args:
        env: the env.
        terms: termination terms by name.
        step_dt: seconds per step.
        owner: name of the env, for messages.
    """

    def __init__(
        self, env: gymnasium.Env, terms: Mapping[str, Termination], step_dt: float, owner: str
    ) -> None:
        super().__init__(env)
        self._ends = Terminations(terms, owner)
        self.step_dt, self.single_action_space = step_dt, env.action_space
        self.max_episode_steps = env.spec.max_episode_steps if env.spec else None
        self._with_memory = [term for _, term in self._ends.terms.values() if term.has_memory]
        self.seed = self.episode = self.elapsed = torch.zeros(1, dtype=torch.int64)
        self.stream_key = key_of(self.seed)

    def state_dict(self) -> dict[str, int]:
        """Return what the draws of the next episodes depend on."""
        return {"seed": int(self.seed), "episode": int(self.episode)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the episodes after a state."""
        self.seed, self.episode = (torch.tensor([state[key]]) for key in ("seed", "episode"))
        self.stream_key = key_of(self.seed)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self.episode = self.episode + 1
        if seed is not None:
            self.seed, self.episode = torch.tensor([seed]), torch.zeros_like(self.episode)
            self.stream_key = key_of(self.seed)
        self.elapsed = torch.zeros_like(self.episode)
        env = self._view(observation, None)
        for term in self._with_memory:
            term.start(env)
        self._before = entries_of(env.state) | env.added_entries
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        env = self._view(observation, torch.as_tensor(np.asarray(action))[None])
        env.previous_state = TensorDict(self._before, [1])
        env.measurements["reward"] = torch.tensor([float(reward)])
        ends = {key: bool(flags) for key, flags in self._ends.judge(env).items()}
        self._before = entries_of(env.state) | env.added_entries
        self.elapsed = self.elapsed + 1
        terminated = bool(terminated) or bool(env.terminated)
        # The env's own ends remain; `judge` returns no `terminated`.
        truncated = bool(truncated) or ends.pop("truncated", False)
        # Success by the env or by a term suffices; a failure by a term outweighs both.
        by_env = bool(info.get("success", info.get("is_success", False)))
        if by_env or "success" in ends:
            ends["success"] = (by_env or ends.get("success", False)) and not ends.get("fail")
        return observation, reward, terminated, truncated, info | ends

    def _view(self, observation: Any, action: Tensor | None) -> EnvView:
        batch = map_tree(lambda x: torch.as_tensor(np.asarray(x))[None], observation)
        state = TensorDict(_entries(batch), [1])
        return EnvView(self, state, self.stream_key, self.episode, action)


def _entries(observation: Any) -> dict[str, Any]:
    if isinstance(observation, Tensor):
        return {"observation": observation}
    return {str(key): observation[key] for key in observation.keys()}


def _where(done: Tensor, done_tree: Any, running_tree: Any) -> Any:
    def choose(running_leaf: Tensor, done_leaf: Tensor) -> Tensor:
        # `done` [N] needs the dimensions of a leaf [N, ...].
        return torch.where(done.view(-1, *[1] * (running_leaf.dim() - 1)), done_leaf, running_leaf)

    return map_tree(choose, running_tree, done_tree)


def _zeros(space: gymnasium.Space[Any]) -> Any:
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: _zeros(child) for key, child in space.items()}
    return torch.from_numpy(np.zeros((1, *(space.shape or ())), space.dtype))


def _scaled(env: VectorEnv, action: ActionTerm, owner: str) -> gymnasium.spaces.Box:
    space = env.single_action_space
    require(
        isinstance(action, Position | Velocity | Force),
        f"{owner} cannot be driven by {type(action).__name__}, which needs the env's state; "
        "allowed: Position, Velocity, Force.",
    )
    require(
        isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1,
        f"{owner}: an action term needs a flat Box, but the action space is {space}.",
    )
    require(
        not env.reports_interventions,
        f"{owner}: an env with interventions cannot scale actions: remove `action`.",
    )
    require_all_drives(action, owner)
    assert space.shape is not None
    return action.space(space.shape[0])
