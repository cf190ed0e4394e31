"""Check an env: play it for some seconds, and say what training would meet, each with its cure."""

import io
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
import torch
from torch import Tensor

from lightning_rl.audit.random_play import (
    ArraySeen,
    RandomPlay,
    bounds,
    named_spaces,
    random_actions,
)
from lightning_rl.envs.chunks import ActionChunk
from lightning_rl.envs.factories import EnvFactory, env_factory, make_env
from lightning_rl.envs.gymnasium.adapter import GymnasiumEnv
from lightning_rl.envs.vector_env import RestoreError, VectorEnv
from lightning_rl.envs.watch import EnvWatch
from lightning_rl.rollout.contract import map_tree, space_spec
from lightning_rl.system.errors import ConfigurationError

if TYPE_CHECKING:
    EnvLike = EnvFactory | str
else:
    EnvLike = EnvFactory

Level = Literal["ok", "note", "warning", "error"]
"""How bad a finding is."""

LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
"""From what is as it should be to what a run would fail of, or learn nothing by."""

LARGE = 100.0
"""An observation, or a reward, beyond which a network that gets it as it is learns badly."""

CONTINUED = 20
"""Steps by which a restored env is compared with the one that was saved."""

REPEATED = 50
"""Steps that are played twice from the same seeds."""

STARTS = 4
"""How many starts are compared, at least."""

SINGLE = 100
"""Steps of a single env whose own dtypes are looked at."""


@dataclass(frozen=True)
class Finding:
    """One thing that a check has found.

    Attributes:
        topic: what it is about: `observation`, `reward`, `speed`.
        level: `ok`, `note` (worth knowing), `warning` (training is likely to suffer) or `error` (it
            would end, or be wrong).
        text: what was found, in a sentence.
        cure: what to do about it; empty where nothing is to be done.
    """

    topic: str
    level: Level
    text: str
    cure: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return it as plain texts, by the names of the attributes."""
        return asdict(self)


@dataclass(frozen=True)
class Scaling:
    """What of an env is scaled before it reaches a network.

    Attributes:
        observation: whether observations are.
        reward: whether rewards are, or their scale does not matter.
    """

    observation: bool = False
    reward: bool = False


def check_env(
    env: EnvLike,
    num_envs: int = 4,
    *,
    seconds: float = 5.0,
    timeout_s: float | None = 60.0,
    seed: int = 1,
) -> list[Finding]:
    """Play an env, and return what training on it would meet.

    For a test of one's own env: `assert not [f for f in check_env(MyEnv) if f.level == "error"]`.
    Envs are made, played by random actions, made anew from a saved state, and closed.

    Args:
        env: what makes one from `num_envs`, as `RLDataModule` takes it: the id of a Gymnasium env,
            the name of a task, a class, a `partial` or another function.
        num_envs: N, how many are played side by side.
        seconds: how long it takes, about; what makes and resets the envs comes on top.
        timeout_s: how many seconds making, a reset or a step of all N envs may take before they
            count as hung; None for any number.
        seed: of the envs and of the actions.

    Returns:
        the findings, by topic. What an env raises is a finding too, an error.

    Raises:
        ConfigurationError: where `env` makes no envs.
    """
    factory = env_factory(env, "env")
    check = EnvCheck(
        lambda calls: calls.make(lambda count: make_env(factory, count, "env"), num_envs),
        timeout_s,
        seconds=seconds,
        seed=seed,
    )
    check.run()
    return check.findings


class EnvCheck:
    """Plays an env and keeps what it found.

    Args:
        make: makes the env by `EnvWatch.make`, each time another one, which the check closes.
        timeout_s: how long a call into the env may take, in seconds; None for any time.
        seconds: how long to play, about.
        seed: of the envs and of the actions.
        scaling: what of the env is scaled before a network gets it.

    Attributes:
        findings: so far.
        play: what random actions brought; None before, or where that failed.
        reproducible: whether the same seeds and actions gave the same, bit for bit.
        same_starts: whether the same seeds gave the same starts.
        failed: whether the env raised something, so that nothing more can be asked of it.
    """

    def __init__(
        self,
        make: Callable[[EnvWatch], VectorEnv],
        timeout_s: float | None,
        *,
        seconds: float,
        seed: int,
        scaling: Scaling = Scaling(),
    ) -> None:
        self._make, self._seconds, self._seed, self._scaling = make, seconds, seed, scaling
        self._outcome: Future[None] = Future()
        self._calls = EnvWatch("the check", timeout_s, self._fail)
        self.findings: list[Finding] = []
        self.play: RandomPlay | None = None
        self.reproducible = self.same_starts = False
        self.failed = False
        self._env: VectorEnv | None = None

    def run(self) -> None:
        """Make the env, and play it in every way; what it raises ends that, and is a finding.

        It is played in a thread of its own: this one goes on where it hangs there.
        """
        threading.Thread(target=self._work, name="check of the env", daemon=True).start()
        try:
            self._outcome.result()
        except Exception as error:
            if not _is_of_the_env(error):
                raise
            self.failed = True
            self.add("env", "error", _told(error), "Mend the env: training would end here too.")

    def _work(self) -> None:
        try:
            self._play_in_every_way()
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _fail(self, error: Exception) -> bool:
        """Have `run` return, though its thread hangs."""
        self._end(error)
        return True

    def _end(self, error: BaseException | None) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error) if error else self._outcome.set_result(None)

    def _play_in_every_way(self) -> None:
        try:
            began = time.perf_counter()
            self._env = self._make(self._calls)
            made = time.perf_counter() - began
            took = f"; making it took {made:.0f} s" if made >= 1 else ""
            self.add("env", "ok", f"{_named(self._env)}{took}")
            self.play = RandomPlay(self._env, self._seed, 0.4 * self._seconds, self._calls)
            text = f"played by random actions for {self.play.env_steps:,} env steps"
            self.add("env", "ok", text)
            self._look_at_actions(self._env)
            self._look_at_play(self._env, self.play)
            self._play_twice(self._env)
            self._look_at_starts(self._env)
            self._restore(self._env)
            self._look_at_one(self._env)
        finally:
            self._close()

    def add(self, topic: str, level: Level, text: str, cure: str = "") -> None:
        """Keep a finding."""
        self.findings.append(Finding(topic, level, text, cure))

    def _reset(self, env: VectorEnv, seed: int | None = None) -> Any:
        """Return a copy of the first observation [N, ...]."""
        with self._calls("reset"):
            return _copy(env.reset(seed=seed)[0])

    def _step(self, env: VectorEnv, action: Tensor) -> dict[str, Any]:
        """Return copies of what a step gives."""
        with self._calls("step"):
            observation, reward, terminated, truncated, _ = env.step(action)
        return {
            "observation": _copy(observation),
            "reward": _copy(reward),
            "end": _copy(terminated | truncated),
        }

    def _close(self) -> None:
        if self._env is not None:
            with self._calls("close"):
                self._env.close()
            self._calls.close()
            self._env = None

    # --- what random play says ---

    def _look_at_actions(self, env: VectorEnv) -> None:
        space = env.single_action_space
        self.add("action", "ok", described(space))
        if env.steps_per_action > 1:
            text = f"it is a chunk, of which {env.steps_per_action} env steps are executed"
            self.add("action", "ok", text)
        if isinstance(space, gymnasium.spaces.Box):
            low, high = bounds(space)
            bounded = np.isfinite(low) & np.isfinite(high)
            if not bounded.all():
                some = "some of it has" if bounded.any() else "it has"
                self.add(
                    *("action", "note", f"{some} no bounds: a policy may ask for anything"),
                    "Where the env has limits of its own, announce them as low and high of a Box.",
                )
        if env.reports_interventions:
            text = "the env says where a person or a script takes over (executed_action)"
            self.add("action", "ok", text)

    def _look_at_play(self, env: VectorEnv, play: RandomPlay) -> None:
        for array in play.arrays:
            self._look_at_array(array)
        self._look_at_rewards(env, play)
        self._look_at_ends(env, play)
        self._look_at_success(play)
        if play.interventions:
            text = f"somebody took over in {play.interventions:,} of {play.env_steps:,} env steps"
            self.add("action", "ok", text)

    def _look_at_array(self, array: ArraySeen) -> None:
        topic = "observation"
        seen = (
            f"seen {_span(array.least, array.greatest)}, mean {array.mean:.3g}, std {array.std:.3g}"
        )
        name = array.name.removeprefix("observation").removeprefix(".")
        begin = f"{name}: " if name else ""
        self.add(topic, "ok", f"{begin}{described(array.space)}; {seen}")
        if array.not_finite is not None:
            self.add(
                *(topic, "error", f"{array.not_finite} is not finite; an update ends at that"),
                "Look for a division by zero, or a state that was never set, in the env.",
            )
        if array.outside is not None:
            value, bound, place = array.outside
            low = value < bound
            is_box = isinstance(array.space, gymnasium.spaces.Box)
            self.add(
                *(topic, "warning" if is_box else "error"),
                f"{place} was {value:.6g}, {'below' if low else 'above'} its "
                f"{'low' if low else 'high'} of {bound:.6g}",
                "Clip it in the env, or announce wider bounds in observation_space.",
            )
        self._look_at_scale(array)
        still = array.still
        if still.all():
            text = f"{array.name} never changed: a policy sees nothing by it"
            self.add(topic, "warning", text, "See that the env writes what it observes.")
        elif still.any() and np.issubdtype(array.space.dtype, np.floating) and len(array.shape) < 3:
            which = ", ".join(str(list(map(int, at))) for at in np.argwhere(still)[:4])
            more = ", ..." if still.sum() > 4 else ""
            text = f"{int(still.sum())} of {still.size} numbers never changed: {which}{more}"
            self.add(topic, "note", f"{begin}{text}", "Leave them out where they never will.")

    def _look_at_scale(self, array: ArraySeen) -> None:
        if not isinstance(array.space, gymnasium.spaces.Box):
            return
        if len(array.shape) == 3:
            if array.space.dtype != np.uint8:
                self.add(
                    *("observation", "note", f"{array.name} is a picture of {array.space.dtype}"),
                    "Observe uint8: a rollout then takes a quarter of the memory.",
                )
        elif array.largest > LARGE and not self._scaling.observation:
            self.add(
                *("observation", "warning", f"{array.name} is as large as {array.largest:.3g}"),
                "Scale it: model.policy.normalize_observation: true, or in the env itself.",
            )

    def _look_at_rewards(self, env: VectorEnv, play: RandomPlay) -> None:
        reward = play.rewards
        if not np.isfinite(reward).all():
            step, row = np.argwhere(~np.isfinite(reward))[0]
            self.add(
                *("reward", "error", f"it was {reward[step, row]} at step {step} of env {row}"),
                "Look for a division by zero in the env: an update ends at that.",
            )
            return
        self.add(
            *("reward", "ok"),
            f"per {'action' if env.steps_per_action > 1 else 'step'}, with random actions: "
            f"{_numbers(reward.ravel())}",
        )
        if play.returns:
            text = f"per episode: {_numbers(np.array(play.returns))}, of {len(play.returns)}"
            self.add("reward", "ok", text)
        if reward.min() == reward.max() and len(np.unique(np.round(play.returns, 6))) < 2:
            self._look_at_constant_reward(play, float(reward.flat[0]))
        largest = float(np.abs(reward).max())
        if largest > LARGE and not self._scaling.reward:
            self.add(
                *("reward", "warning", f"it is as large as {largest:.3g}: values would be huge"),
                "Set model.normalize_reward: true, or scale the reward in the env.",
            )
        for kind, said in (("terms", play.terms), ("metrics", play.metrics)):
            if said:
                listed = ", ".join(f"{name} {value:.3g}" for name, value in said.items())
                self.add("reward", "ok", f"{kind} that the env reports, on average: {listed}")

    def _look_at_constant_reward(self, play: RandomPlay, reward: float) -> None:
        """Say that no action made a difference; a sparse reward is like that at first."""
        sparse = reward < 0 or (reward == 0 and play.success_steps > 0)
        self.add(
            *("reward", "note" if sparse else "warning"),
            f"it was {reward:.6g} at each of {play.rewards.size:,} steps, whatever was done: until "
            "chance brings something else, there is nothing to learn",
            "Where it is sparse: longer episodes, a reward for progress, or demonstrations. Where "
            "it is not: see that step returns it.",
        )

    def _look_at_ends(self, env: VectorEnv, play: RandomPlay) -> None:
        limit, played = env.max_episode_steps, play.steps * env.steps_per_action
        known = f"the time limit is {limit:,} env steps" if limit else "no time limit is known of"
        if play.lengths:
            lengths = np.array(play.lengths)
            text = (
                f"{play.terminated} terminated, {play.truncated} truncated; length "
                f"{_numbers(lengths)} env steps; {known}"
            )
            self.add("episodes", "ok", text)
        elif limit is None:
            self.add(
                *("episodes", "warning"),
                f"none ended within {played:,} env steps, and {known}: an evaluation may never end",
                "Set one: data.env.env_kwargs: {max_episode_steps: 1000} for a Gymnasium env, or "
                "truncate in the env itself.",
            )
        else:
            level: Level = "error" if played > limit * 1.5 else "note"
            self.add(
                *("episodes", level, f"none ended within {played:,} env steps; {known}"),
                "See that the env truncates." if level == "error" else "Look longer: seconds=20.",
            )
        if play.missing_end is not None:
            self.add("episodes", "error", str(play.missing_end))
        elif (
            play.alike_ends
            and play.alike_ends == play.episodes
            and not all(array.still.all() for array in play.arrays)
        ):
            self.add(
                *("episodes", "error"),
                "info['final_obs'] is the observation with which the next episode begins, at each "
                f"of {play.episodes} ends: values would be of the wrong state",
                "Take the observation before the reset.",
            )

    def _look_at_success(self, play: RandomPlay) -> None:
        if not play.success_steps:
            text = "not reported (info['success']): there will be no success rate"
            self.add("success", "ok", text)
            return
        often = "at every step" if play.success_steps == play.steps else "at ends of episodes"
        if play.success_steps not in (play.steps,) and play.success_steps > play.episodes:
            often = f"at {play.success_steps:,} of {play.steps:,} steps"
        rate = f", {np.mean(play.successes):.0%} of episodes" if play.successes else ""
        self.add("success", "ok", f"reported {often}{rate}")

    # --- whether it is the same again ---

    def _play_twice(self, env: VectorEnv) -> None:
        """Play the same actions from the same seeds, and compare."""
        draw = random_actions(env.single_action_space, env.num_envs, self._seed)
        actions = [draw() for _ in range(REPEATED)]
        until = time.perf_counter() + 0.1 * self._seconds
        first = [self._reset(env, self._seed)]
        self._look_at_dtypes(env, first[0])
        for action in actions:
            first.append(self._step(env, action))
            if time.perf_counter() > until:
                break
        again = [self._reset(env, self._seed)]
        again += [self._step(env, action) for action in actions[: len(first) - 1]]
        differs = _first_difference(first, again)
        self.reproducible, self.same_starts = differs is None, _same(first[0], again[0])
        if differs is None:
            text = (
                f"the same seeds and actions gave the same for {len(first) - 1} steps, bit for bit"
            )
            self.add("seeds", "ok", text)
        else:
            self.add(
                *("seeds", "warning", f"the same seeds and actions gave another {differs}"),
                "Draw all that is random from self.np_random, which reset(seed=...) seeds, and set "
                "the whole state in reset; else no evaluation and no run can be repeated.",
            )

    def _look_at_starts(self, env: VectorEnv) -> None:
        """Compare how episodes begin: of one env and of its neighbours, of other seeds."""
        rounds = max(2, -(-STARTS // env.num_envs))
        seeds = [self._seed + 1_000 * k for k in range(rounds)]
        starts = [self._reset(env, seed) for seed in seeds]
        following = self._reset(env)
        alike = env.num_envs > 1 and all(_rows_alike(start) for start in starts)
        by_seed = all(_same(start, starts[0]) for start in starts[1:])
        fixed = by_seed and (env.num_envs == 1 or alike) and _same(following, starts[0])
        if fixed:
            text = "every episode begins with the same observation, whatever the seed"
            cure = "Where it should not: draw the start from self.np_random in reset."
            self.add("seeds", "note", text, cure)
        elif alike:
            text = (
                f"all {env.num_envs} envs begin alike: they share a seed, and bring one env's data"
            )
            cure = "Seed each with its own: reset(seed=...) of env i gets seed + i."
            self.add("seeds", "warning", text, cure)
        elif by_seed:
            text = "other seeds gave the same starts: reset ignores its seed"
            cure = "Call super().reset(seed=seed), and draw from self.np_random."
            self.add("seeds", "warning", text, cure)
        else:
            self.add("seeds", "ok", "other seeds give other starts, and each env has its own")

    def _restore(self, env: VectorEnv) -> None:
        """Save in the middle of an episode, and go on in another env."""
        draw = random_actions(env.single_action_space, env.num_envs, self._seed + 1)
        actions = [draw() for _ in range(2 * CONTINUED)]
        self._reset(env, self._seed)
        self._reset(env)  # the second episode of a seed: generators have moved on
        for action in actions[:CONTINUED]:
            last = self._step(env, action)
        with self._calls("state_dict"):
            state = env.state_dict()
        cure = (
            "It costs the episodes under way, no more. To have them go on, give the env state_dict "
            "and load_state_dict."
        )
        if state is None:
            text = "the env does not save its state: a resumed run begins new episodes"
            self.add("resume", "warning", text, cure)
            return
        try:
            state = _through_a_checkpoint(state)
        except Exception as error:
            text = f"its state cannot be read from a checkpoint: {_first_line(error)}"
            cure = "Have state_dict return plain numbers, strings, lists, dicts and tensors."
            self.add("resume", "error", text, cure)
            return
        here = last["observation"]
        expected = [here, *(self._step(env, action) for action in actions[CONTINUED:])]
        self._close()
        self._env = env = self._make(self._calls)
        try:
            with self._calls("load_state_dict"):
                restored = _copy(env.load_state_dict(state))
        except RestoreError as error:
            text = f"the env could not be restored ({error}): a resumed run begins new episodes"
            if isinstance(_base(env), GymnasiumEnv):
                cure = (
                    "A Gymnasium env is brought back by replaying its actions: draw all that is "
                    "random from self.np_random, and set the whole state in reset."
                )
            self.add("resume", "warning", text, cure)
            return
        going_on = [restored, *(self._step(env, action) for action in actions[CONTINUED:])]
        differs = _first_difference(expected, going_on)
        if differs is None:
            text = "saved in an episode, another env goes on bit for bit"
            self.add("resume", "ok", text)
        else:
            level: Level = "error" if self.reproducible else "warning"
            cure = "Save in state_dict all that the env depends on, its generators too."
            self.add("resume", level, f"restored, the env gave another {differs}", cure)

    # --- what an env returns before it is stored ---

    def _look_at_dtypes(self, env: VectorEnv, observation: Any) -> None:
        """Compare the dtypes that come out of an env to those of its spaces."""
        for path, space in named_spaces(env.single_observation_space):
            name, value = ".".join(path), observation
            for key in path[1:]:
                value = value[key]
            stored = torch.empty(0, dtype=space_spec(space)[1]).numpy().dtype
            if value.dtype not in (space.dtype, stored):
                self._refuse_dtype(name, value.dtype, space.dtype)

    def _refuse_dtype(self, name: str, got: Any, announced: Any) -> None:
        self.add(
            *("observation", "warning", f"{name} is {got}, and its space says {announced}"),
            f"Return it as {announced}, or announce {got}.",
        )

    def _look_at_one(self, env: VectorEnv) -> None:
        """Look at a single Gymnasium env: arrays of several have the right dtype in any case."""
        base = _base(env)
        if not isinstance(base, GymnasiumEnv) or base.vectorization != "sync":
            return
        self._close()
        seen: dict[tuple[str, ...], np.dtype[Any]] = {}
        self._env = alone = base.alone(lambda one: _Looking(one, seen))
        draw = random_actions(alone.single_action_space, 1, self._seed)
        until = time.perf_counter() + 0.05 * self._seconds
        self._reset(alone, self._seed)
        for _ in range(SINGLE):
            self._step(alone, draw())
            if time.perf_counter() > until:
                break
        spaces = dict(named_spaces(alone.single_observation_space))
        for path, dtype in seen.items():
            if dtype != spaces[path].dtype:
                self._refuse_dtype(".".join(path), dtype, spaces[path].dtype)


class _Looking(gymnasium.Wrapper):
    """Notes the dtypes of a single env's observations, by name."""

    def __init__(self, env: gymnasium.Env, seen: dict[tuple[str, ...], np.dtype[Any]]) -> None:
        super().__init__(env)
        self._seen = seen

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result: tuple[Any, Any, bool, bool, dict[str, Any]] = self.env.step(action)
        for path, _ in named_spaces(self.env.observation_space):
            value: Any = result[0]
            for key in path[1:]:
                value = value[key]
            if isinstance(value, np.ndarray):
                self._seen[path] = value.dtype
        return result


def described(space: gymnasium.Space[Any]) -> str:
    """Return dtype, shape and bounds of a space, in short."""
    if isinstance(space, gymnasium.spaces.Dict):
        return "; ".join(f"{key}: {described(child)}" for key, child in space.items())
    if isinstance(space, gymnasium.spaces.Discrete):
        first = f" from {space.start}" if space.start else ""
        return f"one of {space.n}{first}"
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        choices = np.unique(space.nvec)
        of = str(choices[0]) if len(choices) == 1 else f"{choices[0]} to {choices[-1]}"
        return f"{list(space.shape)}, each one of {of}"
    if not isinstance(space, gymnasium.spaces.Box):
        return str(space)
    return f"{space.dtype} {list(space.shape)}, {_bounds_in_words(space)}"


def _bounds_in_words(space: gymnasium.spaces.Box) -> str:
    finite = np.isfinite(space.low) & np.isfinite(space.high)
    if not finite.any():
        return "no bounds"
    some = "" if finite.all() else ", some without bounds"
    return f"bounds {_span(space.low[finite], space.high[finite])}{some}"


def _span(low: np.ndarray, high: np.ndarray) -> str:
    return f"{float(np.min(low)):.4g} to {float(np.max(high)):.4g}"


def _numbers(values: np.ndarray) -> str:
    """Return least, mean and greatest value, and standard deviation."""
    least, mean, greatest, std = values.min(), values.mean(), values.max(), values.std()
    if least == greatest:
        return f"always {least:.4g}"
    return f"{least:.4g} to {greatest:.4g}, mean {mean:.4g}, std {std:.3g}"


def _named(env: VectorEnv) -> str:
    """Return the class of an env, its id, and how many there are."""
    base = _base(env)
    id = getattr(base, "id", None)
    name = type(base).__name__ + (f" {id}" if id else "")
    way = getattr(base, "vectorization", None)
    return f"{env.num_envs} × {name}{f', vectorization: {way}' if way else ''}"


def _base(env: VectorEnv) -> VectorEnv:
    """Return the env whose actions are not chunks."""
    return env.env if isinstance(env, ActionChunk) else env


def _copy(tree: Any) -> Any:
    """Copy tensors [N, ...], which hold until the next step, to arrays."""
    return map_tree(lambda tensor: tensor.detach().cpu().numpy().copy(), tree)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return all(_same(value, other[key]) for key, value in one.items())


def _rows_alike(tree: Any) -> bool:
    if isinstance(tree, np.ndarray):
        return _same(tree, np.broadcast_to(tree[:1], tree.shape))
    return all(map(_rows_alike, tree.values()))


def _first_difference(one: list[Any], other: list[Any]) -> str | None:
    """Say what differs first between two plays, from their first entries on; None if nothing."""
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        if not isinstance(a, dict) or "reward" not in a:
            a, b = {"observation": a}, {"observation": b}
        for name in a:
            if not _same(a[name], b[name]):
                return f"{name} {f'after {step} steps' if step else 'at once'}"
    return None


def _through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """Write a state as a checkpoint does, and read it without unpickling."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read: dict[str, Any] = torch.load(file, weights_only=True)
    return read


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _is_of_the_env(error: Exception) -> bool:
    """Tell whether an env raised it, or what makes one: anything else is a fault of the check."""
    if isinstance(error, ConfigurationError):
        return True
    kinds = (VectorEnv, gymnasium.Env, gymnasium.vector.VectorEnv)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    makes = make_env.__code__
    return any(
        isinstance(frame.f_locals.get("self"), kinds) or frame.f_code is makes for frame in frames
    )


def _told(error: Exception) -> str:
    """Say what an env raised, and where."""
    if isinstance(error, ConfigurationError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)] or list(frames)
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
    at = f"{theirs[-1].filename}, line {theirs[-1].lineno}" if theirs else ""
    return f"it raised {type(error).__name__}: {error}, at {at}{notes}"
