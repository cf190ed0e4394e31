"""Compute episode statistics and averages of env reports, once per rollout."""

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.envs.steppers import named_reports

WINDOW = 100
"""Number of last episodes in the averages."""


class Episodes(NamedTuple):
    """Finished episodes; see `EpisodeStatistics`."""

    returns: list[float]
    lengths: list[int]
    successes: list[bool]
    takeovers: list[tuple[int, int]]


class EpisodeStatistics:
    """Statistics of the episodes of N envs, updated once per rollout.

    Attributes:
        returns, lengths: of the last 100 finished episodes: undiscounted sum of raw rewards, and
            env steps.
        successes: of the last 100 finished episodes; false without a report.
        takeovers: of the last 100 finished episodes, number of interventions and total actions in
            them; empty if the env does not report them.
        episodes: number of finished episodes.
    """

    def __init__(self, num_envs: int) -> None:
        self._return = torch.zeros(num_envs, dtype=torch.float64)
        self._length = torch.zeros(num_envs, dtype=torch.int64)
        self._incomplete = torch.zeros(num_envs, dtype=torch.bool)
        self.returns: deque[float] = deque(maxlen=WINDOW)
        self.lengths: deque[int] = deque(maxlen=WINDOW)
        self.successes: deque[bool] = deque(maxlen=WINDOW)
        self.takeovers: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        # For running episodes: interventions, actions in interventions, whether the last action was
        # one.
        self._taken = torch.zeros(num_envs, 3, dtype=torch.int64)
        self.episodes = 0

    def follow(
        self,
        reward: Tensor,
        done: Tensor,
        success: Tensor | None = None,
        env_steps: Tensor | None = None,
        counted: Tensor | None = None,
        intervened: Tensor | None = None,
    ) -> Episodes:
        """Process the next T actions of all envs; return the ended episodes, for `add`.

        Args:
            reward: [N, T].
            done: [N, T] bool, every end of an episode; a missing end would join two episodes.
            success: [N, T] bool or None, read where `done`.
            env_steps: [N, T], env steps of each action; None for one each.
            counted: [N, T] bool, which ends to return. Default: all.
            intervened: [N, T] bool, where a person or script had taken over; None if not reported.
        """
        rewards = reward.double().cpu()  # a float32 sum of thousands would drift
        ends = done.t().nonzero().tolist()
        counted = done if counted is None else done & counted
        batch = Episodes([], [], [] if success is None else success.t()[counted.t()].tolist(), [])
        if intervened is not None:
            batch.takeovers.extend(self._follow_takeovers(intervened, done, counted))
        begins = [0] * len(rewards)
        if ends:  # five times as fast on plain numbers as on tensors
            rows, sums, lengths = rewards.numpy(), self._return.numpy(), self._length.numpy()
            incomplete = self._incomplete.numpy()
            sizes = None if env_steps is None else env_steps.cpu().numpy()
            counts = counted.cpu().numpy()
            for t, n in ends:
                begin = begins[n]
                steps = t + 1 - begin if sizes is None else int(sizes[n, begin : t + 1].sum())
                # The beginning of an incomplete episode was in a dropped rollout.
                if counts[n, t] and not incomplete[n]:
                    batch.returns.append(float(sums[n] + rows[n, begin : t + 1].sum()))
                    batch.lengths.append(int(lengths[n]) + steps)
                incomplete[n] = False  # its next episode is seen from the beginning
                sums[n], lengths[n], begins[n] = 0.0, 0, t + 1
        # Mask rewards before the last end instead of subtracting them: they may be NaN.
        under_way = torch.arange(rewards.shape[1]) >= torch.tensor(begins)[:, None]
        self._return += torch.where(under_way, rewards, 0.0).sum(1)
        taken_since = under_way if env_steps is None else under_way * env_steps.cpu()
        self._length += taken_since.sum(1)
        return batch

    def _follow_takeovers(
        self, intervened: Tensor, done: Tensor, counted: Tensor
    ) -> list[tuple[int, int]]:
        if not (intervened.any() or self._taken.any()):
            return [(0, 0)] * int(counted.sum())  # fast path without interventions
        takeovers = []
        flags, ends, counts = (x.t().cpu().tolist() for x in (intervened, done, counted))
        rows = self._taken.tolist()
        for now, over, is_counted in zip(flags, ends, counts, strict=True):
            # row: interventions, actions in interventions, whether the last action was one.
            for n, row in enumerate(rows):
                if now[n]:
                    row[0] += not row[2]
                    row[1] += 1
                row[2] = int(now[n])
                if over[n]:
                    if is_counted[n]:
                        takeovers.append((row[0], row[1]))
                    rows[n][:] = 0, 0, 0
        self._taken = torch.tensor(rows)
        return takeovers

    def add(self, episodes: Episodes) -> None:
        """Add finished episodes, in the order of their ends."""
        self.returns.extend(episodes.returns)
        self.lengths.extend(episodes.lengths)
        self.successes.extend(episodes.successes)
        self.takeovers.extend(episodes.takeovers)
        self.episodes += len(episodes.returns)

    def averages(self, reports_success: bool = False) -> dict[str, float]:
        """Return averages by metric name; empty before the first finished episode."""
        if not self.returns:
            return {}
        averages = {
            "charts/episode_reward_avg_100": sum(self.returns) / len(self.returns),
            "charts/episode_length_avg_100": sum(self.lengths) / len(self.lengths),
        }
        if reports_success and self.successes:
            averages["charts/success_rate_avg_100"] = sum(self.successes) / len(self.successes)
        return averages | self._takeover_averages(reports_success)

    def _takeover_averages(self, reports_success: bool) -> dict[str, float]:
        if not self.takeovers:
            return {}
        helped = [count > 0 for count, _ in self.takeovers]
        averages = {"intervention/episodes": sum(helped) / len(helped)}
        if any(helped):
            times, actions = (sum(column) for column in zip(*self.takeovers, strict=True))
            averages["intervention/length"] = actions / times
        if reports_success and len(self.successes) == len(helped):  # both of the same episodes
            for name, with_help in {"with": True, "without": False}.items():
                outcomes = [
                    success
                    for success, is_helped in zip(self.successes, helped, strict=True)
                    if is_helped is with_help
                ]
                if outcomes:
                    averages[f"intervention/success_{name}"] = sum(outcomes) / len(outcomes)
        return averages

    def restart_episodes(self) -> None:
        """Drop the running episodes, because their envs were reset."""
        self._return.zero_()
        self._length.zero_()
        self._incomplete.zero_()
        self._taken.zero_()

    def skip_rollout(self) -> None:
        """Mark the running episodes as incomplete, because a rollout was dropped."""
        self._incomplete.fill_(True)

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as plain numbers and tensors."""
        return {
            "return": self._return.clone(),
            "length": self._length.clone(),
            "incomplete": self._incomplete.clone(),
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "successes": list(self.successes),
            "takeovers": list(self.takeovers),
            "taken": self._taken.clone(),
            "episodes": self.episodes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        self._return.copy_(state["return"])
        self._length.copy_(state["length"])
        # Older checkpoints lack the entries with a default.
        self._incomplete.copy_(state.get("incomplete", torch.tensor(False)))
        self.returns.extend(map(float, state["returns"]))
        self.lengths.extend(map(int, state["lengths"]))
        self.successes.extend(map(bool, state["successes"]))
        self.takeovers.extend((int(a), int(b)) for a, b in state.get("takeovers", ()))
        self._taken.copy_(state.get("taken", torch.tensor(0)))
        self.episodes = int(state["episodes"])


class EnvReports:
    """Average `info["rewards"]`, `info["metrics"]` and `info["log"]` of an env over a rollout.

    NaN is a missing value. Sums stay on the device and are read once per rollout.
    """

    def __init__(self) -> None:
        # Sums and counts [K] by the tuple of names, which rarely changes.
        self._sums: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def add(self, info: dict[str, Any]) -> None:
        """Add the values of a step: tensors [N], of `log` any; others are ignored."""
        logged = {
            name: value.float().nanmean()[None] for name, value in info.get("log", {}).items()
        }
        for report in filter(None, (named_reports(info), logged)):
            values = torch.stack(list(report.values()))
            # Do not branch on NaN, which would synchronize.
            self.add_sums(tuple(report), values.nansum(1), (values == values).sum(1))

    def add_sums(self, names: tuple[str, ...], sums: Tensor, counts: Tensor) -> None:
        """Add sums [K] over envs (and possibly steps), and their numbers of summands [K]."""
        if names not in self._sums:
            zeros = sums.new_zeros(len(names))
            self._sums[names] = zeros, zeros.clone()
        total, count = self._sums[names]
        total += sums
        count += counts

    def close_rollout(self) -> dict[str, float]:
        """Return the averages since the last call, by chart name: `rewards/<term>`."""
        if not self._sums:
            return {}
        # A name may occur in several tuples, if the env does not report it at each step.
        names = [name for together in self._sums for name in together]
        totals, counts = (torch.cat(parts) for parts in zip(*self._sums.values(), strict=True))
        added: dict[str, tuple[float, float]] = {}
        # Stacked, so that there is one wait for the device.
        for name, total, count in zip(names, *torch.stack((totals, counts)).tolist(), strict=True):
            old = added.get(name, (0.0, 0.0))
            added[name] = old[0] + total, old[1] + count
        self._sums = {}
        return {name: total / count for name, (total, count) in added.items() if count}
