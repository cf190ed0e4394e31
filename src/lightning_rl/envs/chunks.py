"""Act by chunks of K actions, which the env executes one after the other."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.chunk_wrapper import ChunkWrapper, repeated
from lightning_rl.envs.pictures import one_picture, picture_or_error
from lightning_rl.envs.steppers import interventions
from lightning_rl.envs.vector_env import Info, Observation, Options, Seed, VectorEnv
from lightning_rl.envs.wrapper import VectorEnvWrapper
from lightning_rl.rollout.contract import FieldSpec
from lightning_rl.system.errors import ConfigurationError, require


@runtime_checkable
class StepsActiveRows(Protocol):
    """An env that can step some rows while the others wait."""

    def advance(self, action: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor, Info]:
        """Step the rows in `active` [N] bool by `action` [N, *A], without resetting finished rows.

        Return reward, terminated and truncated, [N], 0 and false for inactive rows; and info.
        """

    def reset_finished(self, done: Tensor) -> tuple[Observation, Observation]:
        """Reset rows `done` [N] bool; return observations [N, ...] after and before the reset."""


@runtime_checkable
class WrapsSingleEnvs(Protocol):
    """An env made of single Gymnasium envs, which can be wrapped."""

    def wrap_single_envs(self, wrapper: Callable[[gymnasium.Env], gymnasium.Env]) -> None:
        """Add one wrapper around each env; restarts all envs and updates the spaces."""

    def swap_pictures(self, every: Sequence[int]) -> Sequence[Sequence[tuple[int, Any]]]:
        """Return each env's pictures with their env step, and take others each `every` [N] steps.

        0 takes none. See `ChunkWrapper`.
        """


class ActionChunk(VectorEnvWrapper):
    """An env whose action is a chunk of K actions, executed open loop.

    An env that finishes within a chunk skips the rest and waits for the other envs. So every action
    acts on the episode for which it was chosen.

    `reward` is the sum of a chunk's rewards. For discounting, `extra_fields` has `step_reward` [N,
    K] and `executed` [N, K] bool: algorithms discount by gamma^k over the k executed actions of a
    chunk. Episode lengths and budgets count env steps.

    In `info`, success and metrics belong to the last executed action. Reward terms are summed.
    `executed_action` is a chunk too; `intervened` is true if a person took over any of its actions.

    Args:
        num_envs: N.
        env: makes the env from `num_envs`: a `GymnasiumEnv`, a `TorchEnv`, or another env with
            `StepsActiveRows`.
        chunk_size: K, actions in a chunk.
        execute: number of executed actions per chunk; default: all.

    Raises:
        ConfigurationError: a number is out of range, or the env supports neither.
    """

    chunk_size: int

    def __init__(
        self,
        num_envs: int,
        env: Callable[[int], VectorEnv],
        chunk_size: int = 4,
        execute: int | None = None,
    ) -> None:
        require(chunk_size >= 1, f"chunk_size must be at least 1, got {chunk_size}.")
        require(
            execute is None or 1 <= execute <= chunk_size,
            f"execute must lie in [1, chunk_size={chunk_size}], got {execute}.",
        )
        super().__init__(env(num_envs))
        self.chunk_size = chunk_size
        self.steps_per_action = chunk_size if execute is None else execute
        self._film: tuple[Sequence[int], int] = ((), 1)
        self._pictures: dict[int, dict[int, Any]] = {}
        self._elapsed = 0  # env steps since the reset of all envs
        self.reports_penalty = False  # no algorithm reads penalties of chunks
        if isinstance(self.env, WrapsSingleEnvs):
            self.env.wrap_single_envs(partial(ChunkWrapper, chunk_size=chunk_size, execute=execute))
            spaces = cast(gymnasium.spaces.Dict, self.env.single_observation_space)
            self.single_observation_space = spaces["observation"]
            self.single_action_space = self.env.single_action_space
        elif isinstance(self.env, StepsActiveRows):
            self.single_action_space = repeated(self.env.single_action_space, chunk_size)
        else:
            raise ConfigurationError(
                "ActionChunk needs an env whose rows can wait for each other, but "
                f"{type(self.env).__name__} always steps all rows: add the methods advance(action, "
                "active) and reset_finished(done) of lightning_rl.envs.StepsActiveRows, or use a "
                "GymnasiumEnv or a TorchEnv."
            )
        # Policies of real-time chunks depend on it, and see nothing but the spaces.
        cast(Any, self.single_action_space).executed_actions = self.steps_per_action

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        shape = (self.chunk_size,)
        chunk_fields: dict[str, FieldSpec] = {
            "step_reward": (shape, torch.float32),
            "executed": (shape, torch.bool),
        }
        # Skip the wrapped env's fields: their shapes fit single actions.
        return chunk_fields | super(VectorEnvWrapper, self).extra_fields

    @property
    def goals(self) -> None:
        """No goals: the rewards between the observations of a chunk cannot be computed again."""

    def record_info(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        raise ConfigurationError(
            f"data.extra_fields keeps {', '.join(shapes)} of each step, but a step of ActionChunk "
            "is several steps of the env: remove one of the two."
        )

    def reset(self, seed: Seed = None, options: Options = None) -> tuple[Observation, Info]:
        observation, info = self.env.reset(seed, options)
        self._elapsed, self._pictures = 0, {}
        return self._inner(observation), info

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        if isinstance(self.env, WrapsSingleEnvs):
            return self._step_wrapped(action)
        env = cast(StepsActiveRows, self.env)
        active = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        terminated, truncated = torch.zeros_like(active), torch.zeros_like(active)
        step_reward = torch.zeros(self.num_envs, self.chunk_size, device=self.device)
        executed = torch.zeros_like(step_reward, dtype=torch.bool)
        merged: dict[str, Any] = {}
        self._pictures = {}
        for k in range(self.steps_per_action):
            reward, step_terminated, step_truncated, info = env.advance(action[:, k], active)
            step_reward[:, k], executed[:, k] = reward, active
            if self.reports_interventions:
                self._take_over(merged, action, k, info, active)
            _merge(merged, info, active)
            self._take_pictures(active)
            terminated, truncated = terminated | step_terminated, truncated | step_truncated
            active = active & ~(step_terminated | step_truncated)
            if self.device.type == "cpu" and not active.any():  # elsewhere it would wait
                break
        observation, final = env.reset_finished(~active)  # together, after the chunk
        fields = {"final_obs": final, "step_reward": step_reward, "executed": executed}
        return observation, step_reward.sum(1), terminated, truncated, merged | fields

    def film(self, rows: Sequence[int], every: int) -> dict[int, dict[int, np.ndarray]]:
        """Return the pictures of the last chunk, and begin the pictures of the next chunk.

        Args:
            rows: envs of which the next chunk takes pictures.
            every: env steps of an episode between two pictures.

        Returns:
            uint8 [H, W, 3] by row, by env step of the episode.
        """
        by_step = self._pictures
        if isinstance(self.env, WrapsSingleEnvs):
            turns = [every if row in rows else 0 for row in range(self.num_envs)]
            by_step = {}
            for row, pictures in enumerate(self.env.swap_pictures(turns)):
                for step, picture in pictures:
                    by_step.setdefault(step, {})[row] = picture
        self._film = (rows, every)
        name = type(self.env).__name__
        return {
            step: {row: one_picture(name, picture) for row, picture in pictures.items()}
            for step, pictures in by_step.items()
        }

    def _take_pictures(self, active: Tensor) -> None:
        self._elapsed += 1
        rows, every = self._film
        if rows and self._elapsed % every == 0 and (rows := [i for i in rows if active[i]]):
            pictures = picture_or_error(partial(self.env.render, rows))
            if isinstance(pictures, str):
                pictures = [pictures] * len(rows)
            self._pictures[self._elapsed] = dict(zip(rows, pictures, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        return self._inner(self.env.load_state_dict(state))

    def _take_over(
        self, merged: dict[str, Any], action: Tensor, k: int, info: dict[str, Any], active: Tensor
    ) -> None:
        report = interventions(self.env, action[:, k], info)
        if k == 0:
            merged["executed_action"] = action.clone()
            merged["intervened"] = torch.zeros_like(active)
        executed = merged["executed_action"][:, k]  # a view: written below
        mask = active.view(-1, *[1] * (executed.dim() - 1))
        executed.copy_(torch.where(mask, report["executed_action"], executed))
        merged["intervened"] |= active & report["intervened"]

    def _step_wrapped(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        """Let each env execute its chunk; its report is part of the observation."""
        step: tuple[Any, ...] = self.env.step(action)
        next_observation, reward, terminated, truncated, info = step
        # A finished env returns its next episode: its chunk's report is in `final_obs`.
        last, done = next_observation, terminated | truncated
        if "final_obs" in info:
            last = info["final_obs"]
            info["final_obs"] = self._inner(last)
        for key, kind in {"step_reward": torch.float32, "executed": torch.bool}.items():
            info[key] = torch.where(done[:, None], last[key], next_observation[key]).to(kind)
        return self._inner(next_observation), reward, terminated, truncated, info

    def _inner(self, observation: Observation) -> Observation:
        if not isinstance(self.env, WrapsSingleEnvs):
            return observation
        return cast(TensorDict, observation)["observation"]  # type: ignore[no-any-return]  # TensorDict


def _merge(merged: dict[str, Any], info: dict[str, Any], active: Tensor) -> None:
    """Merge the info of an action into the chunk's, for the rows [N] that executed it."""
    if "success" in info or "success" in merged:
        silent = torch.zeros_like(active)
        report, previous = info.get("success", silent), merged.get("success", silent)
        merged["success"] = torch.where(active, report, previous)
    for name, value in _numbers(info, "rewards").items():
        terms = merged.setdefault("rewards", {})
        terms[name] = terms.get(name, 0.0) + torch.where(active, value, 0.0)
    for kind in ("metrics", "final_metrics"):
        metrics, old = _numbers(info, kind), merged.get(kind, {})
        if metrics or old:
            silence = torch.full(active.shape, torch.nan, device=active.device)  # not reported
            merged[kind] = {
                name: torch.where(active, metrics.get(name, silence), old.get(name, silence))
                for name in old | metrics
            }
    if "log" in info:
        merged["log"] = info["log"]


def _numbers(info: dict[str, Any], kind: str) -> dict[str, Tensor]:
    return {name: value for name, value in info.get(kind, {}).items() if value.dim() == 1}
