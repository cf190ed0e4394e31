"""Say what a collector is, and collect in the learner's own thread, with the learner's weights."""

import warnings
from abc import ABC, abstractmethod
from typing import Any

import torch
from tensordict import TensorDict

from lightning_rl.collectors.loop import CollectorContext, RolloutLoop, segments_for
from lightning_rl.collectors.statistics import Episodes, EpisodeStatistics
from lightning_rl.functional import first_episode_mask
from lightning_rl.rollout.contract import clear_bootstrap_slot, env_steps, env_steps_in, first_steps
from lightning_rl.system import ranks


class Collector(ABC):
    """Collects rollouts of batch shape [N, T+1].

    The constructor of a subclass takes the context first, then settings of its own, which the
    config sets.

    Args:
        context: the env, the policy, and all else that collecting takes; the data module makes it.

    Attributes:
        context, env, policy, num_steps: as given, the last three of them in the context.
        statistics: returns and lengths of finished episodes, of all processes.
        reports: what the envs of all processes said of rewards and metrics, averaged over the last
            rollout.
        reports_success: whether the env says of an episode that it succeeded or not.
        env_steps: steps of the rollouts handed out so far, over all N envs of this process.
        max_staleness: by how many updates the weights behind a step may lag the learner's when it
            is trained on.
        may_drop_rollouts: whether a rollout may be thrown away before it is trained on.
        in_background: whether a thread collects while the learner goes on.
        num_rollouts: how many rollouts there is memory for.
        acted_by_policy: whether the actions of its rollouts are the policy's own, so that their
            log-probs are too.
        ways: the names of the classes that act and step, for `run.json`; empty where none does.
    """

    max_staleness: int = 0
    may_drop_rollouts: bool = False
    in_background: bool = False
    num_rollouts: int = 1
    acted_by_policy: bool = True

    def __init__(self, context: CollectorContext) -> None:
        self.context = context
        self.env, self.policy, self.num_steps = context.env, context.policy, context.num_steps
        self.statistics = EpisodeStatistics(context.env.num_envs)
        self.reports: dict[str, float] = {}
        self.reports_success = False
        self.env_steps = 0
        self.ways: dict[str, str] = {}
        self._skipped = False

    @abstractmethod
    def collect(self) -> TensorDict:
        """Return a rollout of batch shape [N, T+1]; its storage holds until the next call."""

    def publish(self) -> None:  # noqa: B027  # a collector that shares the policy has nothing to do
        """Take notice that the policy has new weights, and maybe a new version."""

    def interrupt(self) -> None:  # noqa: B027  # who collects in the learner's thread waits for none
        """Have `collect` raise `ReadInterrupted` where it would wait; for a signal handler."""

    def fail(self, error: Exception) -> bool:
        """Raise an error from the pending `collect`, because the thread that collects hangs.

        Another thread calls this. Returns whether there is such a thread apart from the learner's.
        """
        return False

    def metrics(self) -> dict[str, float]:
        """Return what there is to log, under the names of the charts."""
        episodes = {"charts/episodes": float(self.statistics.episodes)}
        return episodes | self.statistics.averages(self.reports_success) | self.reports

    def account_for(
        self,
        rollout: TensorDict,
        begins_anew: bool,
        reports: dict[str, float],
        follower: EpisodeStatistics | None = None,
    ) -> TensorDict:
        """Count a rollout [N, T+1] that is about to be trained on, and return it.

        All processes do so at the same time.

        Args:
            rollout: [N, T+1], in the order in which they were collected.
            begins_anew: whether its envs were reset, and the episodes under way were lost.
            reports: what its envs said, on average.
            follower: what follows the episodes of its envs, `statistics` where there are no others.
        """
        follower = follower or self.statistics
        follows = torch.tensor(not (begins_anew or self._skipped), device=rollout.device)
        rollout["continues"] = follows.expand(rollout.batch_size)
        self._skipped = False
        if begins_anew:
            follower.restart_episodes()
        reward, done, success = (rollout[key][:, :-1] for key in ("reward", "done", "success"))
        counted = first_episode_mask(done) if self.context.plan.first_episode_only else None
        intervened = rollout.get("intervened", None)
        if intervened is not None:
            intervened = intervened[:, :-1]
            reports = reports | {"intervention/rate": float(intervened.float().mean())}
        steps = env_steps(rollout)
        if "padding" in rollout.keys():
            steps = (~rollout["padding"][:, :-1]).long()
        ended = follower.follow(reward, done, success, steps, counted, intervened)
        for episodes in self._of_all_ranks(ended, reports):
            self.statistics.add(episodes)
        self.env_steps += env_steps_in(rollout)
        return rollout

    def skip_rollout(self) -> None:
        """Take note that what comes next does not go on where the last rollout ended."""
        self.statistics.skip_rollout()
        self._skipped = True

    def _of_all_ranks(self, ended: Episodes, reports: dict[str, float]) -> list[Episodes]:
        """Set what envs say, on average over ranks; return the ranks' finished episodes."""
        gathered = ranks.gather_over_ranks((ended, reports, self.reports_success))
        self.reports_success = any(says for *_, says in gathered)
        said: dict[str, list[float]] = {}
        for _, averages, _ in gathered:
            for name, value in averages.items():
                said.setdefault(name, []).append(value)
        self.reports = {name: sum(values) / len(values) for name, values in said.items()}
        return [episodes for episodes, *_ in gathered]

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to collect on, bit for bit."""
        return {"statistics": self.statistics.state_dict(), "env_steps": self.env_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state before the first `collect`."""
        self.env_steps = state["env_steps"]
        if len(state["statistics"]["return"]) == self.env.num_envs:
            self.statistics.load_state_dict(state["statistics"])

    def close(self) -> None:  # noqa: B027  # a collector without threads has nothing to stop
        """Stop threads and processes of the collector.

        May be called more than once; the env is not its to close.
        """


class SyncCollector(Collector):
    """Step the env T times with the current policy; policy lag is 0.

    The rollout lives in one preallocated storage on the policy's device, written through views that
    are made once.

    Args:
        context: see `Collector`.
    """

    def __init__(self, context: CollectorContext) -> None:
        super().__init__(context)
        (self._segment,) = segments_for(context)
        self._loop = RolloutLoop(context, [self._segment])
        self.ways = self._loop.ways

    def collect(self) -> TensorDict:
        """Step the env; fewer than T times where the plan ends the rollout early."""
        steps, notes = self._loop.run(self._segment)
        clear_bootstrap_slot(self._segment.steps[steps])
        self.reports_success = self._loop.reports_success
        return self.account_for(first_steps(self._segment.rollout, steps), **notes)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"loop": self._loop.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if unread := state.get("buffer", {}).get("windows"):
            warnings.warn(
                f"{len(unread)} rollouts of the checkpoint, which an AsyncCollector had collected "
                "ahead, are dropped: they are of older weights.",
                stacklevel=2,
            )
            self.skip_rollout()
        self._loop.load_state_dict(state["loop"])
