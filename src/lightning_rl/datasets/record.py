"""Record what somebody does in an env: a person, a script or a policy, episode by episode."""

import copy
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl.collectors.evaluation import MAX_EPISODE_STEPS
from lightning_rl.collectors.loop import Chooser, step_through
from lightning_rl.datasets.writer import EpisodeWriter
from lightning_rl.envs import GymnasiumEnv, InterventionSource
from lightning_rl.envs.people.intervention import Intervention, Pace
from lightning_rl.envs.step_results import EXECUTED_ACTION, INTERVENED, one_number, say_intervention
from lightning_rl.envs.vector_env import Observation
from lightning_rl.rollout.contract import map_tree
from lightning_rl.rollout.structured_actions import as_policy_counts, first_choice
from lightning_rl.system.errors import ConfigurationError, check_range, require

MOST_FRAMES_AHEAD = 32
"""How many frames may wait to be written while the env goes on."""


@dataclass
class Recorded:
    """What became of an episode that was played.

    Attributes:
        kept: whether it is in the dataset; else it is to be recorded again.
        steps: L.
        total: the sum of its rewards.
        success: whether it succeeded; None where nobody has said.
        intervened: in how many steps somebody had taken over.
        missed: how many ticks of the clock passed in it while a step was still under way.
    """

    kept: bool
    steps: int = 0
    total: float = 0.0
    success: bool | None = None
    intervened: int = 0
    missed: int = 0


class Recorder:
    """Play episodes in one env, and write them to a dataset as they are played.

    A frame holds the observation that was acted on, the action that was executed, and the reward
    and the ends that followed. Iterate to record: each episode hands out what became of it, once it
    is safe. One that somebody wants to be recorded again (`info["rerecord"]`, or gym-hil's
    `rerecord_episode`) is left out and does not count.

    Args:
        env: one env; it is made anew, with a wrapper more.
        source: who may take over.
        in_charge: whether the source acts all the time, as nobody else does.
        extra: names of numbers in the info of a step that a frame holds too, 0 where the env does
            not say them.

    Raises:
        ConfigurationError: for several envs, chunks of actions, or a batched version of an env.
    """

    def __init__(
        self,
        env: GymnasiumEnv,
        source: InterventionSource | None = None,
        in_charge: bool = False,
        extra: Sequence[str] = (),
    ) -> None:
        if not isinstance(env, GymnasiumEnv) or env.num_envs != 1 or env.vectorization != "sync":
            raise ConfigurationError(
                "Episodes are recorded in a single GymnasiumEnv with vectorization: sync, and this "
                f"is {getattr(env, 'num_envs', 1)} {type(env).__name__} "
                f"({getattr(env, 'vectorization', 'no Gymnasium env')}). Name that: "
                "{class_path: GymnasiumEnv, init_args: {id: ...}}; the tasks of this package have "
                "ids too, such as lightning_rl/PushCube-v0."
            )
        if source is not None and in_charge:
            source.take_charge()
        self.env, self._extra = env, tuple(extra)

        def watched(env: gymnasium.Env) -> gymnasium.Env:
            self._watched = _Watched(env if source is None else Intervention(env, source))
            return self._watched

        env.wrap_each(watched)
        self.observation: Any = None
        self._running, self._action = torch.ones(1, dtype=torch.bool), torch.zeros(1)
        self._says_success = False

    def record(
        self,
        writer: EpisodeWriter,
        episodes: int,
        choose_for: Callable[[int], Chooser],
        *,
        seed: int = 0,
        fps: float | None = None,
        max_steps: int | None = None,
    ) -> Generator[Recorded]:
        """Play until so many episodes are in the dataset.

        Args:
            writer: takes them in; whoever made it finalises it.
            episodes: how many.
            choose_for: returns what chooses the actions of an episode, by its number, from 0.
            seed: of the env.
            fps: steps per second of real time; None for as fast as it goes.
            max_steps: after which time cuts an episode; the env's own limit where not given.

        Raises:
            ConfigurationError: for a number out of range, and for what the writer refuses.
        """
        check_range("episodes", episodes, least=1)
        check_range("max_steps", max_steps, least=1)
        pace = Pace(fps)
        most = MAX_EPISODE_STEPS if max_steps is None else max_steps
        self.observation, _ = self.env.reset(seed=seed)
        kept = played = 0
        with _WrittenBehind(writer) as behind:
            while kept < episodes:
                pace.restart()
                missed = pace.missed
                result = self._play(behind, choose_for(played), most, lambda _: pace.wait())
                result.missed = pace.missed - missed
                kept, played = kept + result.kept, played + 1
                yield result

    @torch.no_grad()
    def _play(
        self, writer: "_WrittenBehind", choose: Chooser, most: int, before: Callable[[int], None]
    ) -> Recorded:
        self._choose = choose
        result = Recorded(kept=True)
        for t, _ in step_through(self, self, most, before=before):
            terminated, truncated, info = self._terminated, self._truncated, self._watched.info
            is_cut = t + 1 == most and not (terminated or truncated)
            writer.add(
                self._acted_on,
                np.array(info[EXECUTED_ACTION]),  # a copy, of what the env may write again
                self._reward,
                terminated,
                truncated or is_cut,
                bool(info[INTERVENED]),
                {name: _number(info, name) for name in self._extra},
            )
            result.steps += 1
            result.total += self._reward
            result.intervened += bool(info[INTERVENED])
            if terminated or truncated or is_cut:
                break
        result.kept = not (info.get("rerecord") or info.get("rerecord_episode"))
        if result.kept:
            result.success = self._success(info)
            writer.end_episode(self._watched.observation, result.success)
        else:
            writer.discard_episode()
        if is_cut:
            self.observation, _ = self.env.reset()
        return result

    def act(self, t: int) -> None:
        """Choose the action of a step; see `step_through`."""
        # A copy: the env writes its next observation into the same arrays.
        self._acted_on = map_tree(lambda leaf: leaf[0].clone(), self.observation)
        self._action = self._choose(self.observation, self._running)

    def step(self, t: int) -> dict[str, Any]:
        """Step by the chosen action; see `step_through`."""
        self.observation, reward, terminated, truncated, info = self.env.step(self._action)
        self._reward = float(reward[0])
        self._terminated, self._truncated = bool(terminated[0]), bool(truncated[0])
        return info

    def _success(self, info: dict[str, Any]) -> bool | None:
        """Return whether an episode succeeded; False without a word, once the env has said it."""
        keys = [key for key in ("success", "is_success", "next.success") if key in info]
        self._says_success |= bool(keys)
        if not self._says_success:
            return None
        return bool(keys and info[keys[0]])


def script_chooser(script: Callable[[Any], Any], space: gymnasium.Space[Any]) -> Chooser:
    """Return what chooses actions [1, *A] by a function of one observation.

    Args:
        script: given the observation of one env, arrays, returns an action [*A], or None for the
            neutral one.
        space: of actions.

    Raises:
        ConfigurationError: when it is asked, for an action that is none of the space.
    """
    nothing = neutral_action(space)
    first = first_choice(space)

    def choose(observation: Observation, running: Tensor) -> Tensor:
        given = script(map_tree(lambda leaf: leaf[0].numpy(), observation))
        action = nothing if given is None else np.asarray(given, dtype=space.dtype)
        require(
            action.shape == space.shape,
            f"The script gave the action {given!r}, which is none of {space}.",
        )
        return torch.as_tensor(as_policy_counts(action, first))[None]

    return choose


def neutral_action(space: gymnasium.Space[Any]) -> np.ndarray:
    """Return what is done where nobody acts, [*A].

    That is the middle of the bounds, 0 where there are none, and the first of numbered actions.
    """
    if isinstance(space, gymnasium.spaces.Box):
        bounded = np.isfinite(space.low) & np.isfinite(space.high)
        low, high = (np.where(bounded, bound, 0.0) for bound in (space.low, space.high))
        return ((low + high) / 2).astype(space.dtype)
    return np.full(space.shape or (), first_choice(space), dtype=space.dtype)


def _number(info: dict[str, Any], name: str) -> float:
    value = info.get(name, 0.0)
    number = one_number(value)
    if number is None:
        raise ConfigurationError(
            f"info['{name}'] is {value!r}, and a frame holds one number of that name: leave it out "
            "of extra."
        )
    return number


class _WrittenBehind:
    """Has a thread write the frames, in their order, while the env goes on.

    To compress pictures takes its time, and would be added to the period of an env that keeps a
    pace of its own; the encoder works without Python's lock.
    """

    def __init__(self, writer: EpisodeWriter) -> None:
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, "recorder", _yield_to_others)
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> "_WrittenBehind":
        return self

    def __exit__(self, *error: Any) -> None:
        self._thread.shutdown(cancel_futures=True)

    def add(self, *frame: Any) -> None:
        """Take a frame in; raise what the writer had against one before."""
        self._waiting.append(self._thread.submit(self._writer.add, *frame))
        while self._waiting[0].done() or len(self._waiting) > MOST_FRAMES_AHEAD:
            self._waiting.popleft().result()
            if not self._waiting:
                break

    def end_episode(self, final_observation: Any, success: bool | None) -> None:
        """Finish the episode, once all its frames are written."""
        self._catch_up()
        self._writer.end_episode(final_observation, success)

    def discard_episode(self) -> None:
        """Forget the episode."""
        self._catch_up()
        self._writer.discard_episode()

    def _catch_up(self) -> None:
        while self._waiting:
            self._waiting.popleft().result()


def _yield_to_others() -> None:
    """Have this thread, and those of the encoder that it starts, wait for the one that steps."""
    if sys.platform == "linux":  # where threads have priorities of their own
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 10)


class _Watched(gymnasium.Wrapper):
    """Keeps the info of a step, with what was executed, and the observation that followed.

    A vector env passes on only what learning reads.
    """

    observation: Any = None
    info: dict[str, Any]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        ended = terminated or truncated
        # A copy: the env may write the first one of the next episode into the same arrays.
        self.observation = copy.deepcopy(observation) if ended else observation
        self.info = say_intervention(info, action, False)
        return observation, reward, terminated, truncated, info
