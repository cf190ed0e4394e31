"""Record episodes of a person, a script or a policy in one env."""

import copy
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ActionChunk, ConfigurationError, GymnasiumEnv, VectorEnv
from lightning_rl.extend.collectors import FirstEpisodes
from lightning_rl.extend.envs import Observation, report_intervention
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.rollout import map_tree
from lightning_rl.extend.spaces import MASK, allowed_random_action, as_policy_counts, first_choice
from lightning_rl.extensions.datasets.ahead import ActionFunction
from lightning_rl.extensions.datasets.writer import EpisodeWriter
from lightning_rl.extensions.teleoperation.intervention import (
    Event,
    Intervention,
    InterventionSource,
    Pace,
)

MOST_FRAMES_AHEAD = 32
"""Maximum number of frames that wait for the writer thread; at the limit, the env waits."""


@dataclass
class RecordedEpisode:
    """Result of one played episode.

    Attributes:
        is_saved: whether the dataset holds the episode; otherwise record it again.
        steps: L.
        total: sum of the rewards.
        success: whether the episode succeeded; None if the env has never reported success.
        intervened: number of steps in which the source had taken over.
        missed: clock ticks that passed while a step was still running.
    """

    is_saved: bool
    steps: int = 0
    total: float = 0.0
    success: bool | None = None
    intervened: int = 0
    missed: int = 0


def single_env(env: VectorEnv) -> VectorEnv:
    """Return a batched env with one env as a `GymnasiumEnv`, which a `Recorder` can wrap."""
    if isinstance(env, GymnasiumEnv | ActionChunk) or env.num_envs > 1:
        return env
    return GymnasiumEnv(1, "lightning_rl/Task-v0", {"task": env}, vectorization="sync")


class Recorder:
    """Play episodes in one env and write them to a dataset step by step.

    A frame holds the observation, the executed action, the reward, and the end of the episode. An
    episode with `info["rerecord"]` (gym-hil: `rerecord_episode`) in its last step is discarded.

    Args:
        env: one env, or a batched task of one env; the recorder adds a wrapper, so a Gymnasium env
            is rebuilt.
        source: person or script that may take over.
        in_charge: whether the source acts in every step, without a policy.
        extra: names of numbers in `info` that each frame also holds; 0 if a step does not report
            them.
        ask: called at the end of an episode, before the env resets, if the env reports no success;
            returns its event, or None if the success is unknown.

    Attributes:
        intervened: whether the last step of the episode was an intervention.

    Raises:
        ConfigurationError: for several envs, chunks of actions, or a batched version of an env.
    """

    def __init__(
        self,
        env: VectorEnv,
        source: InterventionSource | None = None,
        in_charge: bool = False,
        extra: Sequence[str] = (),
        ask: Callable[[], Event | None] | None = None,
    ) -> None:
        env = single_env(env)
        if not isinstance(env, GymnasiumEnv) or env.num_envs != 1 or env.vectorization != "sync":
            raise ConfigurationError(
                "Episodes are recorded in a single GymnasiumEnv with vectorization: sync, but this "
                f"is {getattr(env, 'num_envs', 1)} {type(env).__name__} "
                f"({getattr(env, 'vectorization', 'no Gymnasium env')}). Set "
                "{class_path: GymnasiumEnv, init_args: {id: ...}}, or name a task."
            )
        if source is not None and in_charge:
            source.take_charge()
        self.env, self._extra, self._ask = env, tuple(extra), ask
        self.intervened = False

        def watched(env: gymnasium.Env) -> gymnasium.Env:
            env = env if source is None else Intervention(env, source)
            self._watched = _Watched(env, self._judge)
            return self._watched

        # Around the single env, inside its vector env, which drops the final info.
        env.wrap_single_envs(watched)
        self.observation: Any = None
        self._running, self._action = torch.ones(1, dtype=torch.bool), torch.zeros(1)
        self._says_success = self._rerecord = False
        self._success: bool | None = None

    def record_episodes(
        self,
        writer: EpisodeWriter,
        episodes: int,
        choose_for: Callable[[int], ActionFunction],
        *,
        seed: int = 0,
        fps: float | None = None,
        max_steps: int | None = None,
    ) -> Generator[RecordedEpisode]:
        """Play until the dataset holds `episodes` new episodes; yield one result per episode.

        Args:
            writer: receives the episodes; the caller finalizes it.
            episodes: number of episodes to keep.
            choose_for: maps the episode's number, from 0, to its chooser of actions.
            seed: seed of the env.
            fps: steps per second of real time; None: without a pause.
            max_steps: maximum steps per episode. Default: the env's own limit.

        Raises:
            ConfigurationError: for frames that the writer refuses.
        """
        check_range("episodes", episodes, minimum=1)
        check_range("max_steps", max_steps, minimum=1)
        pace = Pace(fps)
        maximum = FirstEpisodes.MAX_STEPS if max_steps is None else max_steps
        self.observation, _ = self.env.reset(seed=seed)
        kept_count = played = 0
        with _BackgroundWriter(writer) as background:
            while kept_count < episodes:
                pace.restart()
                # The clock counts over all episodes; the difference is this episode's.
                missed = pace.missed
                result = self._play(background, choose_for(played), maximum, lambda _: pace.wait())
                result.missed = pace.missed - missed
                kept_count, played = kept_count + result.is_saved, played + 1
                yield result

    @torch.no_grad()
    def _play(
        self,
        writer: "_BackgroundWriter",
        choose: ActionFunction,
        maximum: int,
        before_step: Callable[[int], None],
    ) -> RecordedEpisode:
        self._choose, self.intervened = choose, False
        result = RecordedEpisode(is_saved=True)
        for t in range(maximum):
            before_step(t)
            self._act()
            self._step()
            terminated, truncated, info = self._terminated, self._truncated, self._watched.info
            self.intervened = bool(info["intervened"])
            executed = info["executed_action"]
            if isinstance(executed, dict | tuple):  # frames hold flat actions
                executed = cast(Any, self.env.single_action_space).flatten(executed)
            # A cut episode is truncated, although the env does not say so.
            is_cut = t + 1 == maximum and not (terminated or truncated)
            writer.add(
                self._acted_on,
                np.array(executed),  # a copy: the env may reuse its array
                self._reward,
                terminated,
                truncated or is_cut,
                self.intervened,
                {name: _number(info, name) for name in self._extra},
            )
            result.steps += 1
            result.total += self._reward
            result.intervened += self.intervened
            if terminated or truncated or is_cut:
                break
        # The env has reset itself after an end, but not after a cut.
        if is_cut:
            self._judge(info)
        result.success, result.is_saved = self._success, not self._rerecord
        if result.is_saved:
            writer.end_episode(self._watched.observation, result.success)
        else:
            writer.discard_episode()
        if is_cut:
            self.observation, _ = self.env.reset()
        return result

    def _act(self) -> None:
        # Copy, because the env reuses its observation arrays.
        self._acted_on = map_tree(lambda leaf: leaf[0].clone(), self.observation)
        self._action = self._choose(self.observation, self._running)

    def _step(self) -> None:
        self.observation, reward, terminated, truncated, _ = self.env.step(self._action)
        self._reward = float(reward[0])
        self._terminated, self._truncated = bool(terminated[0]), bool(truncated[0])

    def _judge(self, info: dict[str, Any]) -> None:
        """Find out by the info of the last step, or ask, how the episode ended.

        Before the env resets: the first observation of the next episode must be no older than the
        answer.
        """
        # gym-hil reports there that the person wants another try.
        self._rerecord = bool(info.get("rerecord") or info.get("rerecord_episode"))
        self._success = None if self._rerecord else self._reported_success(info)
        if not self._rerecord and self._success is None and self._ask:
            event = self._ask()
            self._success = None if event is None else event == "success"
            self._rerecord = event == "rerecord"

    def _reported_success(self, info: dict[str, Any]) -> bool | None:
        keys = [key for key in ("success", "is_success", "next.success") if key in info]
        self._says_success |= bool(keys)
        # Some envs report success only in successful episodes: after the first report, an episode
        # without a report counts as a failure.
        if not self._says_success:
            return None
        return bool(keys and info[keys[0]])


def script_action_function(
    script: Callable[[Any], Any], space: gymnasium.Space[Any]
) -> ActionFunction:
    """Return a chooser of actions [1, *A] by `script`.

    `script` maps the observation of one env (arrays) to an action [*A]; None: the neutral action.

    Raises:
        ConfigurationError: from the chooser, for an action of another shape than the space's.
    """
    nothing = neutral_action(space)
    first = first_choice(space)

    def choose(observation: Observation, running: Tensor) -> Tensor:
        output = script(map_tree(lambda leaf: leaf[0].numpy(), observation))
        action = nothing if output is None else np.asarray(output, dtype=space.dtype)
        require(
            action.shape == space.shape,
            f"The script gave the action {output!r}, which is not in {space}.",
        )
        policy_action = torch.as_tensor(as_policy_counts(action, first))[None]
        # The neutral action may be forbidden by the mask; an action of the script is executed as it
        # is.
        if output is None and isinstance(observation, TensorDict) and MASK in observation.keys():
            return allowed_random_action(space, policy_action, observation[MASK])
        return policy_action

    return choose


def neutral_action(space: gymnasium.Space[Any]) -> np.ndarray:
    """Return the neutral action [*A]: middle of the bounds (0 if unbounded), or first choice."""
    if isinstance(space, gymnasium.spaces.Box):
        bounded = np.isfinite(space.low) & np.isfinite(space.high)
        low, high = (np.where(bounded, bound, 0.0) for bound in (space.low, space.high))
        return ((low + high) / 2).astype(space.dtype)
    return np.full(space.shape or (), first_choice(space), dtype=space.dtype)


def _number(info: dict[str, Any], name: str) -> float:
    value = info.get(name, 0.0)
    number = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    if number.size != 1 or number.dtype.kind not in "biuf":
        raise ConfigurationError(
            f"info['{name}'] is {value!r}, but a frame holds one number of that name: remove the "
            "name from extra."
        )
    return float(number.item())


class _BackgroundWriter:
    """Write the frames in a thread while the env steps."""

    # Compressing pictures between steps would slow down a real-time env. The encoder releases
    # Python's lock.
    def __init__(self, writer: EpisodeWriter) -> None:
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, "recorder", _yield_to_others)
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> "_BackgroundWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        self._thread.shutdown(cancel_futures=True)

    def add(self, *frame: Any) -> None:
        self._waiting.append(self._thread.submit(self._writer.add, *frame))
        # Waiting for a finished frame raises the writer's error at the next step, not at the end.
        while self._waiting[0].done() or len(self._waiting) > MOST_FRAMES_AHEAD:
            self._waiting.popleft().result()
            if not self._waiting:
                break

    def end_episode(self, final_observation: Any, success: bool | None) -> None:
        self._catch_up()
        self._writer.end_episode(final_observation, success)

    def discard_episode(self) -> None:
        self._catch_up()
        self._writer.discard_episode()

    def _catch_up(self) -> None:
        while self._waiting:
            self._waiting.popleft().result()


def _yield_to_others() -> None:
    """Lower the priority of this thread, and of its encoder threads."""
    if sys.platform == "linux":  # only Linux has a priority per thread
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 10)


class _Watched(gymnasium.Wrapper):
    """Keep the final observation and the whole info of a step, which a vector env drops.

    `judge` is called with the info of an episode's last step.
    """

    observation: Any = None
    info: dict[str, Any]

    def __init__(self, env: gymnasium.Env, judge: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(env)
        self._judge = judge

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        is_end = terminated or truncated
        # Copy, because the env may reuse the arrays in its reset.
        self.observation = copy.deepcopy(observation) if is_end else observation
        self.info = report_intervention(info, action, False)
        if is_end:
            self._judge(self.info)
        return observation, reward, terminated, truncated, info
