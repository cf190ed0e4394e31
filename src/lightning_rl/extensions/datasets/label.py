"""Label each step of a dataset with reward, return, value and advantage, for cloning and critics.

Source: RECAP, Physical Intelligence 2025, "pi*0.6: a VLA That Learns From Experience": rewards
for success and failure, a value fitted to their returns, and a policy conditioned on advantages
above a threshold. Steps of an intervention count as good.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.files import expanded
from lightning_rl.extensions.datasets import lerobot_format as lerobot
from lightning_rl.extensions.datasets.directory import (
    LOCK,
    complete_join,
    keep_other_files,
    lock_dataset,
    replacing_folders,
)
from lightning_rl.extensions.datasets.episode import Episode
from lightning_rl.extensions.datasets.lerobot_reader import LeRobotEpisodes
from lightning_rl.extensions.datasets.minari import minari_folder
from lightning_rl.extensions.datasets.statistics import (
    STATISTICS,
    ColumnStatistics,
    joined_statistics,
    quantiles_of,
)
from lightning_rl.extensions.datasets.tables import TableFile, with_column, write_tables
from lightning_rl.functional import reversed_scan

Rewards = Literal["success", "env"]
"""Reward of a step: time until success, or the recorded reward of the env."""

Values = Callable[[Path], Sequence[Tensor]]
"""Returns the values [L] of each episode of a dataset."""

Chosen = Sequence[int] | Literal["all"]
"""Episode numbers from 0. `all`: all episodes that the other list does not name."""

Labels = dict[str, list[Tensor]]
"""Labels [L] of each episode, by name."""

MOST_POSITIVE = 0.3
"""Default share of good steps, where at least as many episodes succeed."""

MOST_ERROR = 0.7
"""Largest error of a value, in units of the spread of returns, without a doubt."""

LEAST_SIGNAL = 0.5
"""Smallest share of signal in n-step advantages without a doubt; the largest is its inverse."""


@dataclass(frozen=True)
class TaskSummary:
    """Summary of the labels of one task.

    Attributes:
        task: in words.
        steps: number of steps.
        success_rate: share of successful episodes; None if unknown.
        share: share of good steps that was asked for, without interventions.
        positive: number of good steps, with interventions.
        threshold: of the advantage; NaN if all steps are interventions.
        error: root mean squared error between value and return.
        spread: standard deviation of the returns: the `error` of a constant value.
        signal: share of the variance of n-step advantages that is not error of the value, see
            `advantage_signal`; None without `n_steps` or a fitted value.
        fitted: whether the value is a fitted one.
    """

    task: str
    steps: int
    success_rate: float | None
    share: float
    positive: int
    threshold: float
    error: float
    spread: float
    signal: float | None
    fitted: bool

    @property
    def relative_error(self) -> float:
        """Error divided by spread; 0 if all returns are equal."""
        return self.error / self.spread if self.spread > 0 else 0.0

    def doubts(self) -> list[str]:
        """Return the reasons why cloning by these labels may do harm."""
        name = f"Task '{self.task}': " if self.task else ""
        cure = "record more episodes, or fit the value longer or with a better encoder."
        reasons = []
        # Luck after the n-th step is part of the error, but not of an n-step advantage.
        maximum, first = (MOST_ERROR, "set n_steps, ") if self.signal is None else (1.0, "")
        if self.fitted and self.relative_error > maximum:
            reasons.append(
                f"{name}the value does not explain the returns (error / spread "
                f"{self.relative_error:.2f}, above {maximum:g}), so advantages are mostly noise: "
                f"{first}{cure}"
            )
        low, high = LEAST_SIGNAL, 1 / LEAST_SIGNAL  # above, the value varies too little
        if self.fitted and self.signal is not None and not low <= self.signal <= high:
            reasons.append(
                f"{name}advantages are mostly errors of the value (signal {self.signal:.3g}, "
                f"outside [{low:g}, {high:g}]): raise n_steps, {cure}"
            )
        if self.success_rate is not None and self.share > self.success_rate:
            reasons.append(
                f"{name}positive={self.share:g} exceeds the success rate {self.success_rate:.2f}, "
                "so bad steps are labelled good: lower positive, or leave it out."
            )
        return reasons


@dataclass(frozen=True)
class LabelSummary:
    """Summary of `label_dataset`.

    Attributes:
        episodes: number of episodes.
        successes: number of episodes that succeeded.
        failures: number of episodes that failed; the others have no success label.
        tasks: summary of each task.
    """

    episodes: int
    successes: int
    failures: int
    tasks: list[TaskSummary]

    @property
    def steps(self) -> int:
        """Number of steps of all episodes."""
        return sum(task.steps for task in self.tasks)

    @property
    def positive(self) -> int:
        """Number of good steps."""
        return sum(task.positive for task in self.tasks)


def success_reward(length: int, success: bool, longest: int, failure_cost: float) -> Tensor:
    """Return the rewards [L] of an episode: -1 per step, with an end reward for success or failure.

    The last step has 0 for success, -`failure_cost` (in steps) for failure. All rewards are divided
    by the largest possible loss (a failure after `longest` steps), so returns lie in [-1, 0].
    """
    reward = torch.full((length,), -1.0, dtype=torch.float64)
    reward[-1] = 0.0 if success else -failure_cost
    return reward / max(1.0, longest - 1 + failure_cost)


def return_to_go(reward: Tensor, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma * G_{t+1}, [L], of the rewards [L] of one episode."""
    return reversed_scan(reward[None], torch.full_like(reward[None], gamma))[0]


def step_advantage(
    returns: Tensor, value: Tensor, gamma: float, n_steps: int | None = None
) -> Tensor:
    """Return the n-step advantage [L] of each step of one episode.

    A_t = r_t + ... + gamma^(n-1) r_{t+n-1} + gamma^n V_{t+n} - V_t. The sum stops at the episode's
    end.

    Args:
        returns: [L], of `return_to_go`.
        value: [L].
        gamma: discount per step.
        n_steps: n; None: up to the episode's end.
    """
    advantage = returns - value
    if n_steps is not None:
        # The rewards after n steps cancel: (G_t - V_t) - gamma^n (G_{t+n} - V_{t+n}).
        beyond = (returns - value)[n_steps:]
        advantage[: len(beyond)] -= gamma**n_steps * beyond
    return advantage


def advantage_signal(
    returns: Sequence[Tensor], values: Sequence[Tensor], advantages: Sequence[Tensor], n_steps: int
) -> float | None:
    """Return the share of the variance of n-step advantages that is signal, not value error.

    It is 1 for an exact value, about 0 if differences of the value are noise, and above 1 for a
    value that varies too little. It is 2 b of the least-squares fit G_t = a + b A_t + c M_t, where
    M_t = V_t + A_t / 2 is the mean of the predictions at t and n steps later. Luck after these
    steps does not change it.

    Args:
        returns: [L] of each episode, G.
        values: [L] of each episode, V.
        advantages: [L] of each episode, A.
        n_steps: n. Advantages that reach the episode's end do not count.

    Returns:
        the share; None if all advantages reach the end.
    """
    rows = [
        torch.stack((torch.ones_like(a), a, v + a / 2, g), 1)[:-n_steps]
        for g, v, a in zip(returns, values, advantages, strict=True)
    ]
    samples = torch.cat(rows)
    # No sample is left if each advantage reaches its episode's end.
    if not len(samples):
        return None
    return 2 * float(torch.linalg.lstsq(samples[:, :3], samples[:, 3:], driver="gelsd").solution[1])


def positive_steps(advantage: Tensor, intervened: Tensor, share: float) -> tuple[Tensor, float]:
    """Return a mask [L] of the good steps and their threshold.

    A step is good if its advantage is above the threshold, or if it is an intervention.

    Args:
        advantage: [L], of one task.
        intervened: [L] bool.
        share: share of good steps among those without intervention; the threshold is the quantile
            1 - share of their advantages.
    """
    policy_advantages = advantage[~intervened]
    # A task of interventions alone has no advantage of the policy to compare with.
    if not len(policy_advantages):
        return intervened.clone(), float("nan")
    # torch.quantile takes at most 2^24 numbers.
    threshold = float(np.quantile(policy_advantages.numpy(), 1 - share))
    return (advantage > threshold) | intervened, threshold


@dataclass(frozen=True)
class LabelSettings:
    """Settings of `label_dataset`.

    Attributes:
        reward: `success` (see `success_reward`; every episode needs a success label) or `env`.
        failure_cost: cost of a failure, in steps. Default: the longest episode of the task.
        gamma: discount per step.
        n_steps: number of rewards in an advantage before the value follows. Default: all rewards
            up to the episode's end.
        positive: share of good steps per task, see `positive_steps`. Default: the task's success
            rate, at most 0.3.
        doubtful: warn, or refuse to write, if advantages of a fitted value are mostly noise (signal
            outside [0.5, 2] or error / spread above 1; without `n_steps` above 0.7), or if
            `positive` exceeds the success rate.
    """

    reward: Rewards = "success"
    failure_cost: float | None = None
    gamma: float = 1.0
    n_steps: int | None = None
    positive: float | None = None
    doubtful: Literal["warn", "refuse"] = "warn"

    def __post_init__(self) -> None:
        check_range("failure_cost", self.failure_cost, minimum=0)
        check_range("gamma", self.gamma, minimum=0, maximum=1)
        check_range("n_steps", self.n_steps, minimum=1)
        check_range("positive", self.positive, above=0, below=1)

    def share(self, success_rate: float | None) -> float:
        """Return the share of good steps of a task with this success rate."""
        if self.positive is not None:
            return self.positive
        return MOST_POSITIVE if success_rate is None else min(MOST_POSITIVE, success_rate)


def label_dataset(
    path: str | Path,
    settings: LabelSettings | None = None,
    *,
    success: Chosen = (),
    failure: Chosen = (),
    value: Values | None = None,
) -> LabelSummary:
    """Write labels of all steps into a LeRobotDataset v3.0: the whole dataset or nothing.

    The columns are `complementary_info.` plus `reward`, `return`, `value`, `advantage` and
    `advantage_positive` (1 or 0); existing columns are replaced. A return counts recorded rewards
    only: a truncated episode is not bootstrapped.

    Args:
        path: dataset directory.
        settings: of the labels. Default: `LabelSettings()`.
        success: episodes that succeeded; replaces the recorded success.
        failure: episodes that failed; replaces the recorded success.
        value: baseline of the advantage, such as `ValueFit.values`. Default: the mean return of the
            task.

    Raises:
        ConfigurationError: for doubtful labels (see `LabelSettings`), an unknown episode, a dataset
            without the needed columns, a Minari dataset, and a dataset that another process is
            writing.
        WriteError: if the disk is full: labelling needs room for a copy.
    """
    directory = expanded(path)
    require(
        minari_folder(directory) is None,
        f"{directory} is a Minari dataset, and labels are written into a LeRobotDataset v3.0: copy "
        "it into one, for episode in read_episodes(...): EpisodeWriter.write(episode).",
    )
    LeRobotEpisodes(directory)  # check the dataset before the lock file is created
    release = lock_dataset(directory)
    try:
        complete_join(directory)
        reader = LeRobotEpisodes(directory)
        # Labels need no pictures, and decoding videos would take most of the time.
        reader.leaves = [leaf for leaf in reader.leaves if not leaf.picture]
        episodes = list(reader)
        corrections = _success_labels(directory, len(episodes), success, failure)
        for number, succeeded in corrections.items():
            episodes[number].success = succeeded
        settings = settings or LabelSettings()
        rewards = _rewards(directory, episodes, settings)
        values = None if value is None else value(directory)
        labels, tasks = _labels(episodes, rewards, values, settings)
        _report_doubts(directory, tasks, settings)
        success_column = reader.columns.get("success")
        _write(directory, reader.places(), episodes, labels, success_column)
    finally:
        # Before the lock opens: afterwards it could be the lock of another process.
        (directory / LOCK).unlink(missing_ok=True)
        release()
    successes = [episode.success for episode in episodes]
    return LabelSummary(len(successes), successes.count(True), successes.count(False), tasks)


def _report_doubts(path: Path, tasks: Sequence[TaskSummary], settings: LabelSettings) -> None:
    doubts = [doubt for task in tasks for doubt in task.doubts()]
    require(
        not doubts or settings.doubtful == "warn",
        f"The labels of {path} are not written (doubtful: refuse): {' '.join(doubts)}",
    )
    for doubt in doubts:
        rank_zero_warn(doubt)


def by_task(episodes: Sequence[Episode]) -> dict[str, list[int]]:
    """Return the numbers of the episodes of each task, in the order of the tasks' names."""
    numbers: dict[str, list[int]] = {}
    for i, episode in enumerate(episodes):
        task = ", ".join(dict.fromkeys(episode.tasks or (episode.task,)))
        numbers.setdefault(task, []).append(i)
    return {task: numbers[task] for task in sorted(numbers)}


def _labels(
    episodes: Sequence[Episode],
    rewards: Sequence[Tensor],
    values: Sequence[Tensor] | None,
    settings: LabelSettings,
) -> tuple[Labels, list[TaskSummary]]:
    """Return labels and a summary of each task; without `values` by the mean return of the task."""
    gamma = settings.gamma
    returns = [return_to_go(reward, gamma) for reward in rewards]
    # The copies only have the right length: the loop fills them task by task.
    base, advantages, positive, summaries = list(returns), list(returns), list(returns), []
    for task, rows in by_task(episodes).items():
        lengths = [len(episodes[i]) for i in rows]
        joined = torch.cat([returns[i] for i in rows])
        for i in rows:
            base[i] = joined.mean().expand_as(returns[i]) if values is None else values[i].double()
            advantages[i] = step_advantage(returns[i], base[i], gamma, settings.n_steps)
        successes = [success for i in rows if (success := episodes[i].success) is not None]
        rate = sum(successes) / len(successes) if successes else None
        share = settings.share(rate)
        advantage = torch.cat([advantages[i] for i in rows])
        intervened = torch.cat([episodes[i].intervened for i in rows])
        is_good, threshold = positive_steps(advantage, intervened, share)
        # Back from the task's steps to its episodes.
        for i, part in zip(rows, is_good.double().split(lengths), strict=True):
            positive[i] = part
        error = (joined - torch.cat([base[i] for i in rows])).square().mean().sqrt()
        spread = float(joined.std(correction=0))
        # A mean return predicts no step, and without n_steps luck reaches into each advantage.
        signal = None
        if values is not None and settings.n_steps is not None:
            of_task = [[column[i] for i in rows] for column in (returns, base, advantages)]
            signal = advantage_signal(of_task[0], of_task[1], of_task[2], settings.n_steps)
        summaries.append(
            TaskSummary(
                task=task,
                steps=len(joined),
                success_rate=rate,
                share=share,
                positive=int(is_good.sum()),
                threshold=threshold,
                error=float(error),
                spread=spread,
                signal=signal,
                fitted=values is not None,
            )
        )
    labels = (rewards, returns, base, advantages, positive)
    return dict(zip(lerobot.LABELS, map(list, labels), strict=True)), summaries


def returns_of(
    path: str | Path, episodes: Sequence[Episode], settings: LabelSettings
) -> list[Tensor]:
    """Return the returns [L] of each episode; see `label_dataset` for the errors."""
    rewards = _rewards(Path(path), episodes, settings)
    return [return_to_go(reward, settings.gamma) for reward in rewards]


def _rewards(path: Path, episodes: Sequence[Episode], settings: LabelSettings) -> list[Tensor]:
    rewards = [episode.reward.double() for episode in episodes]
    if settings.reward == "env":
        require(
            all(bool(reward.isfinite().all()) for reward in rewards),
            f"The dataset at {path} holds no rewards, or some that are not finite: label it by "
            "success (--reward success).",
        )
        return rewards
    unknown = [str(i) for i, episode in enumerate(episodes) if episode.success is None]
    require(
        not unknown,
        f"There is no success label for {_listed(unknown)} of {path}, but rewards of success need "
        "all labels. Set --success and --failure to the numbers of episodes (or all, for the "
        "other episodes), or use the recorded rewards: --reward env.",
    )
    # The scale is one per task: longer tasks have lower returns per step.
    for rows in by_task(episodes).values():
        longest = max(len(episodes[i]) for i in rows)
        cost = longest if settings.failure_cost is None else settings.failure_cost
        for i in rows:
            length, success = len(episodes[i]), bool(episodes[i].success)
            rewards[i] = success_reward(length, success, longest, cost)
    return rewards


def _success_labels(path: Path, count: int, success: Chosen, failure: Chosen) -> dict[int, bool]:
    """Return the success of the episodes that the two lists name, by episode number."""
    lists = {"success": success, "failure": failure}
    episodes = {
        name: set[int]() if numbers == "all" else {int(n) for n in numbers}
        for name, numbers in lists.items()
    }
    require(
        not (success == "all" == failure) and not episodes["success"] & episodes["failure"],
        f"success is {success} and failure is {failure}: an episode of both is neither. Name it "
        "once.",
    )
    for name, numbers in episodes.items():
        for number in sorted(numbers):
            require(
                0 <= number < count,
                f"{name} names episode {number}, and {path} has {count}: give numbers from 0 to "
                f"{count - 1}.",
            )
    # `all` means the episodes that the other list does not name.
    for name, other in (("success", "failure"), ("failure", "success")):
        if lists[name] == "all":
            episodes[name] = set(range(count)) - episodes[other]
    return dict.fromkeys(episodes["success"], True) | dict.fromkeys(episodes["failure"], False)


def _listed(numbers: Sequence[str]) -> str:
    names = ", ".join(numbers[:10])
    suffix = f" and {len(numbers) - 10} more" if len(numbers) > 10 else ""
    return f"episode{'s' if len(numbers) > 1 else ''} {names}{suffix}"


def _write(
    path: Path,
    places: Sequence[tuple[Path, int, Path, int]],
    episodes: Sequence[Episode],
    labels: Labels,
    success_column: str | None,
) -> None:
    """Rewrite tables and descriptions with labels; `places`: see `LeRobotEpisodes.places`."""
    columns = {
        f"{lerobot.EXTRA}{name}": [part.to(torch.float32).numpy() for part in parts]
        for name, parts in labels.items()
    }
    statistics = {key: [_statistics(part) for part in parts] for key, parts in columns.items()}
    success = [episode.success for episode in episodes]
    info = lerobot.read_json(path / lerobot.INFO)
    info["features"] |= {key: lerobot.number_feature("float32") for key in columns}
    # The column of steps that the reader reads; LeRobot's own datasets have none.
    marks = {key: info["features"][key]["dtype"] for key in [success_column] if key is not None}
    with replacing_folders(path) as copy:
        for file in path.glob("data/**/*.parquet"):
            # A data file may hold several episodes: their first rows tell which.
            begins = {begin: i for i, (at, begin, *_) in enumerate(places) if at == file}
            added = _of_steps(file, begins, columns, success, marks)
            _rewrite(file, copy / file.relative_to(path), added)
        for file in lerobot.files_of(path / lerobot.EPISODES):
            rows = {row: i for i, (*_, at, row) in enumerate(places) if at == file}
            added = _of_episodes(file, rows, statistics, success)
            _rewrite(file, copy / file.relative_to(path), added)
        lerobot.write_json(copy / lerobot.INFO, info)
        if (path / lerobot.STATISTICS).is_file():
            dataset_statistics = lerobot.read_json(path / lerobot.STATISTICS)
            for key, parts in statistics.items():
                values = np.concatenate(columns[key])[:, None]
                dataset_statistics[key] = joined_statistics(parts) | quantiles_of(values)
            lerobot.write_json(copy / lerobot.STATISTICS, dataset_statistics)
        keep_other_files(path, copy)


def _of_steps(
    file: Path,
    begins: Mapping[int, int],
    labels: Mapping[str, Sequence[np.ndarray]],
    success: Sequence[bool | None],
    marks: Mapping[str, str],
) -> dict[str, Any]:
    """Return the label columns of a data file.

    `begins` maps first rows to episode numbers, `marks` the column of success to its dtype.
    """
    count = sum(TableFile(file, []).counts)
    columns = {key: np.full(count, np.nan, np.float32) for key in labels}
    columns |= {key: np.zeros(count, dtype) for key, dtype in marks.items()}
    for begin, i in begins.items():
        for key, parts in labels.items():
            columns[key][begin : begin + len(parts[i])] = parts[i]
        # Success stands at the last step alone, as the writer of this package has it.
        for key in marks:
            columns[key][begin + len(parts[i]) - 1] = bool(success[i])
    return {key: lerobot.as_column(values) for key, values in columns.items()}


def _of_episodes(
    file: Path,
    rows: Mapping[int, int],
    statistics: Mapping[str, Sequence[Any]],
    success: Sequence[bool | None],
) -> dict[str, Any]:
    """Return success and statistics columns; `rows` maps table rows to episode numbers."""
    arrow = lerobot.import_extra("pyarrow")
    # None: a row without steps, which the reader ignores.
    numbers = [rows.get(row) for row in range(sum(TableFile(file, []).counts))]
    columns = {}
    for key, parts in statistics.items():
        for name in STATISTICS:
            values = [None if i is None else parts[i][name] for i in numbers]
            kind = arrow.int64() if name == "count" else arrow.float64()
            columns[f"stats/{key}/{name}"] = arrow.array(values, arrow.list_(kind))
    successes = [None if i is None else success[i] for i in numbers]
    return columns | {"success": arrow.array(successes, arrow.bool_())}


def _statistics(values: np.ndarray) -> dict[str, list[float]]:
    statistics = ColumnStatistics((1,), picture=False)
    statistics.add(values)
    return {name: value.tolist() for name, value in statistics.result().items()}


def _rewrite(source: Path, target: Path, columns: Mapping[str, Any]) -> None:
    def tables() -> Iterator[Any]:
        first = 0
        for table in TableFile(source).groups():
            for key, column in columns.items():
                table = with_column(table, key, column.slice(first, len(table)))
            first += len(table)
            metadata = {
                k: v for k, v in (table.schema.metadata or {}).items() if k != b"huggingface"
            }
            yield table.replace_schema_metadata(metadata)  # `huggingface` lists the old columns

    write_tables(target, tables())
