"""Check an env: play it for some seconds, and report problems for training, with cures."""

import re
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.utils.env_checker import check_reset_options, check_reset_seed_determinism
from gymnasium.utils.passive_env_checker import env_reset_passive_checker, env_step_passive_checker
from torch import Tensor

from lightning_rl import ActionChunk, ConfigurationError, GymnasiumEnv, VectorEnv
from lightning_rl.extend.checkpoints import through_checkpoint
from lightning_rl.extend.envs import EnvFactory, EnvWatch, RestoreError, env_factory, make_env
from lightning_rl.extend.rollout import leaves_of_tree
from lightning_rl.extend.spaces import as_env_counts, first_choice, space_spec
from lightning_rl.extensions.checks.play import ArrayStatistics, Play, RandomPolicy, random_actions

if TYPE_CHECKING:
    EnvLike = EnvFactory | str
else:
    EnvLike = EnvFactory

Level = Literal["ok", "note", "warning", "error"]
"""Severity of a finding."""

LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "error")
"""Levels in order of severity: from information to an error that would end or spoil a run."""

LARGE = 100.0
"""Absolute value above which an observation or a reward needs scaling."""

PLAYED = 2_000
"""Maximum steps of each env to play, unless its time limit is longer."""

LONGEST = 20_000
"""Longest time limit that the check plays to the end, in steps of each env."""

CONTINUED = 20
"""Number of steps in the comparison of a restored env with the saved one."""

REPEATED = 50
"""Number of steps that are played twice from the same seeds."""

STARTS = 4
"""Minimum number of first observations to compare."""


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        topic: `observation`, `reward`, `speed`, ...
        level: `ok`, `note`, `warning` (training may suffer) or `error` (training would fail).
        text: the result, in one sentence.
        cure: what to do about it; may be empty.
    """

    topic: str
    level: Level
    text: str
    cure: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the attributes by name."""
        return asdict(self)


@dataclass(frozen=True)
class Scaling:
    """Whether observations and rewards are scaled between env and network.

    Attributes:
        observation: whether observations are scaled.
        reward: whether rewards are scaled, or their scale does not matter.
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
    """Play an env, and return problems that training on it would have.

    In a test of an env: `assert not [f for f in check_env(MyEnv) if f.level == "error"]`.

    Args:
        env: as in `RLDataModule`: the id of a Gymnasium env, the name of a task, or a class, a
            `partial` or another function that makes an env from `num_envs`.
        num_envs: N, number of parallel envs.
        seconds: approximate time to play; making and resetting envs takes additional time.
        timeout_s: seconds that making, a reset or a step of all N envs may take; None: no limit.
        seed: seed of the envs and of the actions.

    Raises:
        ConfigurationError: if `env` makes no envs.
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


Outcome = dict[str, np.ndarray]
"""Arrays [N, ...] of an observation by name; after a step also `reward` and `end`."""


class EnvCheck:
    """Play an env by random actions, and collect findings; see `check_env`.

    Args:
        make: makes a new env by `EnvWatch.make`.
        timeout_s: seconds that a call into the env may take; None: no limit.
        seconds: approximate time to play.
        seed: seed of the envs and of the actions.
        scaling: whether observations and rewards are scaled.

    Attributes:
        findings: all findings so far.
        play: with random actions; None before `run`, or if the env raised an error.
        reproducible: whether the same seeds and actions gave the same steps, bit for bit.
        same_starts: whether the same seeds gave the same first observations.
        failed: whether the env raised an error, which ends the check.
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
        # Set once: by the end of the work, or when a call into the env hangs.
        self._outcome: Future[None] = Future()
        self._calls = EnvWatch("the check", timeout_s, self._fail)
        self.findings: list[Finding] = []
        self.play: Play | None = None
        self.reproducible = self.same_starts = False
        self.failed = False
        self._env: VectorEnv | None = None
        self._observation: Any = None  # of the last reset or step

    def run(self) -> None:
        """Make the env and run all checks; an error of the env is the last finding."""
        # In another thread, so that this one can return if the env hangs.
        threading.Thread(target=self._work, name="check of the env", daemon=True).start()
        try:
            self._outcome.result()
        except Exception as error:
            if not _is_of_the_env(error):
                raise
            self.failed = True
            self.add("env", "error", _described(error), "Correct the env: training would end here.")

    def _work(self) -> None:
        try:
            self._check()
        # Any exception, because the waiting thread needs an outcome.
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)

    def _fail(self, error: Exception) -> bool:
        self._end(error)
        return True

    def _end(self, error: BaseException | None) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error) if error else self._outcome.set_result(None)

    def _check(self) -> None:
        try:
            began = time.perf_counter()
            env = self._env = self._make(self._calls)
            making_s = time.perf_counter() - began
            duration = f"; making it took {making_s:.0f} s" if making_s >= 1 else ""
            self.add("env", "ok", f"{_named(env)}{duration}")
            limit = env.max_episode_steps or 0
            # One step more than the limit, to see whether the env truncates there.
            max_steps = max(PLAYED, 1 + limit if limit <= LONGEST else 0)
            policy = RandomPolicy(env, self._seed)
            # A chunk is one action of several env steps.
            max_steps = -(-max_steps // env.steps_per_action)
            play = self.play = Play(
                env, policy, self._seed, 0.4 * self._seconds, max_steps, self._calls
            )
            text = f"played by random actions for {play.env_steps:,} env steps"
            self.add("env", "ok", text)
            self._check_actions(env, play)
            for array in play.arrays.values():
                self._check_array(array)
            self._check_rewards(env, play)
            self._check_ends(env, play)
            self._play_twice(env, play)
            self._check_starts(env)
            self._restore(env)
            self._run_gymnasium_checker()
        finally:
            self._close()

    def add(self, topic: str, level: Level, text: str, cure: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(topic, level, text, cure))

    def _reset(self, env: VectorEnv, seed: int | None = None) -> Outcome:
        with self._calls("reset"):
            self._observation, _ = env.reset(seed=seed)
        return _copy(self._observation)

    def _step(self, env: VectorEnv, action: Tensor) -> tuple[Outcome, dict[str, Any]]:
        with self._calls("step"):
            self._observation, reward, terminated, truncated, info = env.step(action)
        done = terminated | truncated
        outcome = _copy(self._observation) | {"reward": _array(reward), "end": _array(done)}
        return outcome, info

    def _random_actions(self, env: VectorEnv, seed: int) -> Callable[[Any], Tensor]:
        spaces = env.single_observation_space, env.single_action_space
        return random_actions(*spaces, env.num_envs, seed)

    def _difference(
        self, env: VectorEnv, begin: Outcome, actions: Sequence[Tensor], expected: list[Outcome]
    ) -> str | None:
        """Repeat actions until an outcome differs: a mask may forbid the actions after that."""
        outcomes = [begin]
        for action, outcome in zip(actions, expected[:-1], strict=True):
            if not _same(outcome, outcomes[-1]):
                break
            outcomes.append(self._step(env, action)[0])
        return _first_difference(expected[: len(outcomes)], outcomes)

    def _close(self) -> None:
        if self._env is not None:
            with self._calls("close"):
                self._env.close()
            self._calls.close()
            self._env = None

    # --- one play with random actions ---

    def _check_actions(self, env: VectorEnv, play: Play) -> None:
        space = env.single_action_space
        self.add("action", "ok", described(space))
        if env.steps_per_action > 1:
            text = f"a chunk, of which the first {env.steps_per_action} env steps are executed"
            self.add("action", "ok", text)
        if isinstance(space, gymnasium.spaces.Box):
            bounded = np.isfinite([space.low, space.high]).all(0)
            if not bounded.all():
                subject = "some entries have" if bounded.any() else "it has"
                self.add(
                    *("action", "note", f"{subject} no bounds: a policy may choose any value"),
                    "Announce the limits of the env as low and high of a Box.",
                )
        if env.reports_interventions:
            text = "the env reports actions of a person or a script (executed_action)"
            self.add("action", "ok", text)
        if play.interventions:
            share = f"{play.interventions:,} of {play.env_steps:,} env steps"
            self.add("action", "ok", f"a person or a script intervened in {share}")

    def _check_array(self, array: ArrayStatistics) -> None:
        topic, name = "observation", array.name.removeprefix("observation").removeprefix(".")
        prefix = f"{name}: " if name else ""
        is_box = isinstance(array.space, gymnasium.spaces.Box)
        value_range = f"seen {array.minimum.min():.4g} to {array.maximum.max():.4g}"
        self.add(topic, "ok", f"{prefix}{described(array.space)}; {value_range}")
        if array.not_finite is not None:
            self.add(
                *(topic, "error", f"{array.not_finite} is not finite: an update would fail"),
                "Look for a division by zero, or an uninitialised state, in the env.",
            )
        if array.outside is not None:
            cure = "Clip it in the env, or announce wider bounds in observation_space."
            self.add(topic, "warning" if is_box else "error", array.outside, cure)
        is_picture = is_box and len(array.shape) == 3
        if is_picture and array.space.dtype != np.uint8:
            self.add(
                *(topic, "note", f"{array.name} is a picture of {array.space.dtype}"),
                "Return uint8 pictures: a rollout then takes a quarter of the memory.",
            )
        if is_box and not is_picture and array.largest > LARGE and not self._scaling.observation:
            self.add(
                *(topic, "warning", f"{array.name} is as large as {array.largest:.3g}"),
                "Scale it: model.policy.normalize_observation: true, or in the env itself.",
            )
        constant = array.still
        if constant.all():
            text = f"{array.name} never changed: it holds no information for a policy"
            self.add(topic, "warning", text, "Check that the env updates it in every step.")
        elif constant.any() and np.issubdtype(array.space.dtype, np.floating) and not is_picture:
            places = ", ".join(str(list(map(int, at))) for at in np.argwhere(constant)[:4])
            dots = ", ..." if constant.sum() > 4 else ""
            text = f"{int(constant.sum())} of {constant.size} numbers never changed: {places}{dots}"
            self.add(
                topic,
                "note",
                f"{prefix}{text}",
                ("Remove these numbers if they are always constant."),
            )

    def _check_rewards(self, env: VectorEnv, play: Play) -> None:
        reward = play.rewards
        if not np.isfinite(reward).all():
            row, step = np.argwhere(~np.isfinite(reward))[0]
            self.add(
                *("reward", "error", f"it was {reward[row, step]} at step {step} of env {row}"),
                "Look for a division by zero in the env: an update would fail.",
            )
            return
        unit = "action" if env.steps_per_action > 1 else "step"
        self.add("reward", "ok", f"per {unit}, with random actions: {_numbers(reward)}")
        returns = np.array(play.statistics.returns)
        if returns.size:
            self.add("reward", "ok", f"per episode: {_numbers(returns)}, of {returns.size}")
        # Rounded, because equal sums may differ in their last digits.
        if reward.min() == reward.max() and len(np.unique(returns.round(6))) < 2:
            constant = float(reward.flat[0])
            # A constant cost, or 0 until a success.
            sparse = constant < 0 or (constant == 0 and play.reports_success)
            self.add(
                *("reward", "note" if sparse else "warning"),
                f"it was {constant:.6g} at each of {reward.size:,} steps: random actions found no "
                "other reward",
                "For a sparse reward, try longer episodes, a reward for progress, or "
                "demonstrations. Otherwise check that step returns the reward.",
            )
        largest = float(np.abs(reward).max())
        if largest > LARGE and not self._scaling.reward:
            self.add(
                *("reward", "warning", f"it is as large as {largest:.3g}: values would be huge"),
                "Set model.normalize_reward: true, or scale the reward in the env.",
            )
        if play.reports:
            report = ", ".join(f"{name} {value:.3g}" for name, value in play.reports.items())
            self.add("reward", "ok", f"the env reports, on average: {report}")

    def _check_ends(self, env: VectorEnv, play: Play) -> None:
        limit, played = env.max_episode_steps, play.steps * env.steps_per_action
        rule = f"the time limit is {limit:,} env steps" if limit else "no time limit is known"
        ends = play.terminated + play.truncated
        if play.statistics.lengths:
            self.add(
                *("episodes", "ok"),
                f"{play.terminated} terminated, {play.truncated} truncated; length "
                f"{_numbers(np.array(play.statistics.lengths))} env steps; {rule}",
            )
        elif limit is None:
            self.add(
                *("episodes", "warning"),
                f"none ended within {played:,} env steps, and {rule}: an evaluation may never end",
                "Set a time limit: data.env.env_kwargs: {max_episode_steps: 1000} for a Gymnasium "
                "env, or truncate in the env itself.",
            )
        else:
            level: Level = "error" if played > limit * 1.5 else "note"
            self.add(
                *("episodes", level, f"none ended within {played:,} env steps; {rule}"),
                "Check that the env truncates." if level == "error" else "Play longer: seconds=20.",
            )
        # An env that never changes has equal observations in any case.
        constant = all(array.still.all() for array in play.arrays.values())
        if play.stale_finals and play.stale_finals == ends and not constant:
            self.add(
                *("episodes", "error"),
                "info['final_obs'] is the first observation of the next episode, at each of "
                f"{ends} ends: value targets would use the wrong state",
                "Take the observation before the reset.",
            )

    # --- reproducibility ---

    def _play_twice(self, env: VectorEnv, play: Play) -> None:
        """Play the same actions from the same seeds twice and compare; also check dtypes."""
        until = time.perf_counter() + 0.1 * self._seconds
        first, mid_episode = [self._reset(env, self._seed)], False
        for name, space in leaves_of_tree("observation", env.single_observation_space):
            # A rollout stores some dtypes in another one, such as float64 in float32: both are
            # right.
            dtype, spec = first[0][name].dtype, torch.empty(0, dtype=space_spec(space)[1]).numpy()
            if dtype not in (space.dtype, spec.dtype):
                text = f"{name} is {dtype}, but its space has {space.dtype}"
                cure = f"Return it as {space.dtype}, or announce {dtype}."
                self.add("observation", "warning", text, cure)
        draw, actions = self._random_actions(env, self._seed), list[Tensor]()
        for _ in range(REPEATED):
            actions.append(draw(self._observation))
            outcome, info = self._step(env, actions[-1])
            first.append(outcome)
            mid_episode |= "success" in info and not outcome["end"].all()
            if time.perf_counter() > until:
                break
        if play.reports_success:
            often = "at every step" if mid_episode else "at ends of episodes"
            successes = play.statistics.successes
            rate = f", {np.mean(successes):.0%} of episodes" if successes else ""
            self.add("success", "ok", f"reported {often}{rate}")
        else:
            text = "not reported (info['success']): there will be no success rate"
            self.add("success", "ok", text)
        second_start = self._reset(env, self._seed)
        differs = self._difference(env, second_start, actions, first)
        self.reproducible, self.same_starts = differs is None, _same(first[0], second_start)
        if differs is None:
            text = f"the same seeds and actions gave the same {len(actions)} steps, bit for bit"
            self.add("seeds", "ok", text)
        else:
            self.add(
                *("seeds", "warning", f"the same seeds and actions gave a different {differs}"),
                "Draw all random numbers from self.np_random, which reset(seed=...) seeds, and set "
                "the whole state in reset; otherwise evaluations and runs cannot be repeated.",
            )

    def _check_starts(self, env: VectorEnv) -> None:
        # Several rounds, so that few envs also give enough starts.
        rounds = max(2, -(-STARTS // env.num_envs))
        # Env i gets seed + i: the seeds of two rounds must not overlap.
        seeds = [self._seed + 1_000 * k for k in range(rounds)]
        starts = [self._reset(env, seed) for seed in seeds]
        # Without a seed, the envs draw the next episodes of their own streams.
        later_start = self._reset(env)
        alike = env.num_envs > 1 and all(
            (array == array[:1]).all() for start in starts for array in start.values()
        )
        by_seed = all(_same(start, starts[0]) for start in starts[1:])
        if by_seed and (env.num_envs == 1 or alike) and _same(later_start, starts[0]):
            text = "every episode begins with the same observation for every seed"
            cure = "If this is not intended, draw the start from self.np_random in reset."
            self.add("seeds", "note", text, cure)
        elif alike:
            text = f"all {env.num_envs} envs begin with the same observation: they share a seed"
            cure = "Give each env another seed: reset(seed=...) of env i gets seed + i."
            self.add("seeds", "warning", text, cure)
        elif by_seed:
            text = "different seeds gave the same starts: reset ignores its seed"
            cure = "Call super().reset(seed=seed), and draw from self.np_random."
            self.add("seeds", "warning", text, cure)
        else:
            self.add(
                "seeds", "ok", "different seeds give different starts, and each env has its own"
            )

    def _restore(self, env: VectorEnv) -> None:
        self._reset(env, self._seed)
        self._reset(env)  # save in the second episode, when the generators have changed
        draw = self._random_actions(env, self._seed + 1)
        for _ in range(CONTINUED):
            self._step(env, draw(self._observation))
        with self._calls("state_dict"):
            state = env.state_dict()
        cure = (
            "Only the running episodes are lost. To continue them, add state_dict and "
            "load_state_dict to the env."
        )
        if state is None:
            text = "the env does not save its state: a resumed run begins new episodes"
            self.add("resume", "warning", text, cure)
            return
        try:
            state = through_checkpoint(state, "state_dict")
        except ConfigurationError as error:
            self.add("resume", "error", str(error))
            return
        expected, actions = [_copy(self._observation)], list[Tensor]()
        for _ in range(CONTINUED):
            actions.append(draw(self._observation))
            expected.append(self._step(env, actions[-1])[0])
        # Close first: a device may allow one env at a time.
        self._close()
        self._env = env = self._make(self._calls)
        try:
            with self._calls("load_state_dict"):
                restored = _copy(env.load_state_dict(state))
        except RestoreError as error:
            text = f"the env could not be restored ({error}): a resumed run begins new episodes"
            if isinstance(_base(env), GymnasiumEnv):
                cure = (
                    "A Gymnasium env is restored by replaying its actions: draw all random numbers "
                    "from self.np_random, and set the whole state in reset."
                )
            self.add("resume", "warning", text, cure)
            return
        differs = self._difference(env, restored, actions, expected)
        if differs is None:
            text = "a state saved in an episode, restored in a second env, continues bit for bit"
            self.add("resume", "ok", text)
        else:
            # An env that never repeats itself would differ in any case.
            level: Level = "error" if self.reproducible else "warning"
            cure = "Save the whole state of the env in state_dict, including its random generators."
            self.add("resume", level, f"the restored env gave a different {differs}", cure)

    # --- one env ---

    def _run_gymnasium_checker(self) -> None:
        """Run Gymnasium's checks on one env: a vector env has already converted its values."""
        assert self._env is not None
        base = _base(self._env)
        outermost = base.first_env if isinstance(base, GymnasiumEnv) else None
        if outermost is None:
            return
        env = outermost.env  # type: ignore[attr-defined]  # our wrapper, which converts values
        for check in GYMNASIUM_CHECKS:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    with self._calls("check by Gymnasium"):
                        check(env)
                except (AssertionError, gymnasium.error.Error) as error:
                    warnings.warn(str(error), stacklevel=2)
            if caught:  # report only the first: it usually causes the others
                text = re.sub("\x1b.*?m|WARN: ", "", str(caught[0].message))
                cure = "Change the env so that gymnasium.utils.env_checker.check_env(env) passes."
                self.add("gymnasium", "warning", text, cure)
                return


def _check_step(env: gymnasium.Env) -> None:
    draw = random_actions(env.observation_space, env.action_space, 1, 0)
    action, first = draw(env.reset()[0])[0].numpy(), first_choice(env.action_space)
    env_step_passive_checker(env, as_env_counts(action, first)[()])


GYMNASIUM_CHECKS: tuple[Callable[[gymnasium.Env], object], ...] = (
    env_reset_passive_checker,
    _check_step,
    check_reset_seed_determinism,
    check_reset_options,
)
"""Parts of Gymnasium's `check_env`, which stops at the first fault."""


def described(space: gymnasium.Space[Any]) -> str:
    """Return Gymnasium's text of a space, on one line."""
    return " ".join(str(space).split())


def _numbers(values: np.ndarray) -> str:
    low, mean, high, std = values.min(), values.mean(), values.max(), values.std()
    if low == high:
        return f"always {low:.4g}"
    return f"{low:.4g} to {high:.4g}, mean {mean:.4g}, std {std:.3g}"


def _named(env: VectorEnv) -> str:
    base = _base(env)
    id = getattr(base, "id", None)
    name = type(base).__name__ + (f" {id}" if id else "")
    mode = getattr(base, "vectorization", None)
    return f"{env.num_envs} × {name}{f', vectorization: {mode}' if mode else ''}"


def _base(env: VectorEnv) -> VectorEnv:
    return env.env if isinstance(env, ActionChunk) else env


def _copy(observation: Any) -> Outcome:
    leaves = leaves_of_tree("observation", observation)
    return {name: _array(tensor) for name, tensor in leaves}


def _array(tensor: Tensor) -> np.ndarray:
    # A copy, because an env may return the same array at each step.
    return tensor.detach().cpu().numpy().copy()


def _same(first: Outcome, second: Outcome) -> bool:
    return all(_equal(array, second[name]) for name, array in first.items())


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    # NumPy knows no NaN of texts and objects.
    return np.array_equal(first, second, equal_nan=first.dtype.kind == "f")


def _first_difference(expected: list[Outcome], outcomes: list[Outcome]) -> str | None:
    for step, (a, b) in enumerate(zip(expected, outcomes, strict=True)):
        for name, array in a.items():
            if not _equal(array, b[name]):
                return f"{name} {f'after {step} steps' if step else 'at the start'}"
    return None


def _is_of_the_env(error: Exception) -> bool:
    if isinstance(error, ConfigurationError):
        return True
    # An error of this package must not count as the env's.
    kinds = (VectorEnv, gymnasium.Env, gymnasium.vector.VectorEnv)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    makes = make_env.__code__
    return any(
        isinstance(frame.f_locals.get("self"), kinds) or frame.f_code is makes for frame in frames
    )


def _described(error: Exception) -> str:
    if isinstance(error, ConfigurationError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    place = next((f for f in reversed(frames) if not f.filename.startswith(ours)), frames[-1])
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
    at = f"{place.filename}, line {place.lineno}"
    return f"it raised {type(error).__name__}: {error}, at {at}{notes}"
