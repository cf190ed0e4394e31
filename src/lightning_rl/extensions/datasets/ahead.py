"""Execute a chunk of actions while the policy computes the next chunk."""

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import gymnasium
import torch
from torch import Tensor

from lightning_rl.extend.collectors import Computing
from lightning_rl.extend.envs import Observation
from lightning_rl.extend.errors import check_range
from lightning_rl.extend.rollout import map_tree
from lightning_rl.extend.spaces import named, names_of

LAST_DELAYS = 10
"""Number of measured delays whose largest is the estimate of the next one."""

ActionFunction = Callable[[Observation, Tensor], Tensor]
"""Chooses actions [N, *A] for observations [N, ...] and the rows that run, [N] bool."""


class ChunksAhead:
    """Chooses single actions from a policy's chunks, so that a slow policy never stops the env.

    After `execute` actions of a chunk, a thread computes the next chunk from the newest observation
    while the env executes the rest. The first actions of the new chunk are skipped, because these
    steps have passed (asynchronous inference, Shukor et al. 2025, "SmolVLA", section 3.3). If a
    chunk ends before the next one is computed, the step waits.

    A policy with `real_time` lets the new chunk begin with the old one's actions, instead of
    skipping its own.

    Args:
        chunk_size: K, actions in a chunk.
        execute: actions of a chunk after which the next one is computed. Default: half of them.

    Attributes:
        skipped: skipped actions of each chunk, in env steps, except for an episode's first chunk.
        waited: number of steps that waited for a chunk, except for an episode's first chunk.

    Raises:
        ConfigurationError: `execute` is not in [1, K].
    """

    def __init__(self, chunk_size: int, execute: int | None = None) -> None:
        check_range("execute", execute, minimum=1, maximum=chunk_size)
        self._size = chunk_size
        self._execute = max(1, chunk_size // 2) if execute is None else execute
        # One thread for all episodes: two inferences must not overlap.
        self._thread = ThreadPoolExecutor(1, "inference", Computing.here().apply)
        self.skipped: list[int] = []
        self.waited = 0

    def episode(
        self,
        choose: ActionFunction,
        is_outdated: Callable[[], bool] = lambda: False,
        continue_after: Callable[[int, int | None], None] | None = None,
    ) -> ActionFunction:
        """Return a function that chooses actions [N, *A] through one episode.

        Args:
            choose: returns chunks [N, K, *A] for observations [N, ...].
            is_outdated: as for `ChunkActor`; the old chunk executes until the next one is there.
            continue_after: called before `choose` with the env steps since the old chunk began (0
                if there is none, or if it is outdated), and with the longest of the last delays.
        """
        step = chunk_start = request_step = 0
        chunk: Tensor | None = None
        pending: Future[Tensor] | None = None

        @torch.no_grad()  # gradient mode is per thread
        def infer(observation: Observation, running: Tensor) -> Tensor:
            return choose(observation, running)

        def act(observation: Observation, running: Tensor) -> Tensor:
            nonlocal step, chunk_start, request_step, chunk, pending
            begins_anew = chunk is None or is_outdated()
            if pending is None and (begins_anew or step - chunk_start >= self._execute):
                age = 0 if begins_anew else step - chunk_start
                if continue_after is not None:
                    continue_after(age, max(self.skipped[-LAST_DELAYS:], default=None))
                # Copy, because the env reuses its observation arrays.
                copies = map_tree(lambda leaf: leaf.clone(), observation), running.clone()
                request_step, pending = step, self._thread.submit(infer, *copies)
            # Only a used-up chunk makes the env wait.
            used_up = chunk is None or step - chunk_start >= self._size
            if pending is not None and (used_up or pending.done()):
                if chunk is not None:
                    self.waited += not pending.done()  # before `result`, which waits
                    self.skipped.append(step - request_step)
                chunk, chunk_start, pending = pending.result(), request_step, None
            assert chunk is not None
            action = chunk[:, step - chunk_start]  # skips actions whose steps have passed
            step += 1
            return action

        return act

    def close(self) -> None:
        """Wait for the current inference, and end the thread."""
        self._thread.shutdown(cancel_futures=True)


def single(space: gymnasium.Space[Any], count: int | None) -> gymnasium.Space[Any]:
    """Return the space of one action from the space of `count` actions; None: unchanged."""
    if count is None:
        return space
    if isinstance(space, gymnasium.spaces.Box):
        box = gymnasium.spaces.Box(space.low[0], space.high[0], dtype=space.dtype.type)
        return named(box, names_of(space))
    assert isinstance(space, gymnasium.spaces.MultiDiscrete)
    return gymnasium.spaces.Discrete(int(space.nvec[0]))


def without_keys(space: gymnasium.Space[Any], keys: Collection[str]) -> gymnasium.Space[Any]:
    """Return a Dict space without some keys, and other spaces unchanged."""
    if not isinstance(space, gymnasium.spaces.Dict):
        return space
    return gymnasium.spaces.Dict({key: part for key, part in space.items() if key not in keys})
