"""Make observations from terms: groups, noise, delay and history."""

import zlib
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extend.errors import EnvFaultError, check_range, require
from lightning_rl.extend.spaces import named
from lightning_rl.extensions.managers.term import BoundTerm, Observation
from lightning_rl.extensions.managers.view import EnvView

PREFIX = "observation/"
"""State entries of the observations, `observation/<group>`."""


class Observations:
    """Groups of observation terms, which are computed in the step and stored in the state.

    A group is the concatenation of its terms [M, D]; a group of one term without history keeps the
    term's shape, for pictures. One group is the observation; several are a Dict.
    """

    def __init__(self, groups: Mapping[str, Mapping[str, Observation]], owner: str) -> None:
        self.groups: dict[str, list[_Channel]] = {}
        self._names: dict[str, list[str]] = {}
        for group, terms in groups.items():
            require(bool(terms), f"{owner}: the observation group '{group}' has no terms.")
            self.groups[group] = [
                _Channel(term, f"observations/{group}", name, owner) for name, term in terms.items()
            ]

    def __bool__(self) -> bool:
        return bool(self.groups)

    def compute(self, env: EnvView) -> None:
        for group, channels in self.groups.items():
            parts = [channel.value(env) for channel in channels]
            # Once, at the first start: a term's numbers are called by its name and an index.
            if env.at_reset and group not in self._names:
                sizes = {c.name: part[0].numel() for c, part in zip(channels, parts, strict=True)}
                self._names[group] = [f"{name}/{i}" for name in sizes for i in range(sizes[name])]
            # A single term keeps its shape, for pictures; several are flattened and joined.
            if len(parts) > 1 or parts[0].dim() == 1:
                parts = [torch.cat([part.flatten(1).float() for part in parts], 1)]
            observation = parts[0]
            # As in its space: only pictures keep their dtype.
            env.added_entries[PREFIX + group] = (
                observation if observation.dtype == torch.uint8 else observation.float()
            )

    def of(self, state: TensorDict) -> Any:
        groups = {group: state[PREFIX + group] for group in self.groups}
        if len(groups) == 1:
            return next(iter(groups.values()))
        return TensorDict(groups, state.batch_size)

    def space(self, state: TensorDict) -> gymnasium.Space[Any]:
        spaces: dict[str, gymnasium.Space[Any]] = {
            group: named(_space_of(state[PREFIX + group], channels), self._names[group])
            for group, channels in self.groups.items()
        }
        return next(iter(spaces.values())) if len(spaces) == 1 else gymnasium.spaces.Dict(spaces)


def _space_of(value: Tensor, channels: list["_Channel"]) -> gymnasium.spaces.Box:
    shape = tuple(value.shape[1:])
    if value.dtype == torch.uint8:
        return gymnasium.spaces.Box(0, 255, shape, np.uint8)
    low, high = -np.inf, np.inf
    # Encoders tell a picture of floats by its bounds.
    if len(channels) == 1 and (clip := channels[0].settings.clip) is not None:
        scale = channels[0].settings.scale
        low, high = sorted(bound * (1.0 if scale is None else scale) for bound in clip)
    return gymnasium.spaces.Box(low, high, shape, np.float32)


class _Channel:
    def __init__(self, term: Observation, kind: str, name: str, owner: str) -> None:
        self.term, self.name = BoundTerm(term, kind, name, owner), name
        label = self.term.label
        self.settings, self.history = term, term.history or 1
        check_range(f"{label}: history", self.history, minimum=1)
        self.min_delay, self.max_delay = term.delay or (0, 0)
        check_range(f"{label}: delay[0]", self.min_delay, minimum=0)
        check_range(f"{label}: delay[1]", self.max_delay, minimum=self.min_delay)
        self._queue, self._lag = f"{self.term.prefix}queue", f"{self.term.prefix}lag"
        self._noise_stream = zlib.crc32(f"{self.term.prefix}noise".encode())

    def value(self, env: EnvView) -> Tensor:
        value = self.term(env)
        if not isinstance(value, Tensor) or value.shape[:1] != (env.num_envs,):
            raise EnvFaultError(
                f"{self.term.label} returned {value!r:.60}: return a tensor [{env.num_envs}, ...]."
            )
        value = value[:, None] if value.dim() == 1 else value
        if self.max_delay == 0 and self.history == 1:
            return self._finished(env, value)
        return self._queued(env, value)

    def _queued(self, env: EnvView, value: Tensor) -> Tensor:
        # Noise and scale come before the queue.
        value = self._finished(env, value).flatten(1)[:, None]
        length = self.max_delay + self.history
        if env.at_reset:
            # An episode begins with copies of its first value.
            queue = value.repeat(1, length, 1)
            env.stream = zlib.crc32(self._lag.encode())
            steps = env.uniform(1)[:, 0] * (self.max_delay - self.min_delay + 1)
            # The product of a number below 1 may round up to the number of lags.
            lag = self.min_delay + steps.long().clamp_max(self.max_delay - self.min_delay)
        else:
            memory = env.memory_of(self.term.prefix)
            queue = torch.cat((memory["queue"][:, 1:], value), 1)
            lag = memory["lag"]
        env.added_entries[self._queue], env.added_entries[self._lag] = queue, lag
        if self.max_delay == 0:
            return queue.flatten(1)
        # queue [M, most + history]: the newest value is last; the window ends `lag` before it.
        index = torch.arange(self.max_delay, length, device=env.device) - lag[:, None]
        delayed = queue.gather(1, index[:, :, None].expand(-1, -1, queue.shape[2]))
        return delayed.flatten(1)

    def _finished(self, env: EnvView, value: Tensor) -> Tensor:
        settings = self.settings
        if (noise := settings.noise) is not None and (noise.std or noise.uniform):
            view = env.for_episode() if noise.per_episode else env
            # A stream of its own: noise must not change the draws of the term.
            view.stream = self._noise_stream
            flat = value.flatten(1)
            if noise.std:
                samples = view.normal(flat.shape[1]) * noise.std
            else:
                samples = (view.uniform(flat.shape[1]) * 2.0 - 1.0) * noise.uniform
            value = (flat + samples).reshape(value.shape)
        if settings.clip is not None:
            value = value.clamp(*settings.clip)
        return value if settings.scale is None else value * settings.scale
