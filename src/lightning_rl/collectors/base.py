"""The collector interface, and the collector that runs in the learner's thread."""

import warnings
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDict

from lightning_rl.collectors.context import CollectorContext
from lightning_rl.collectors.loop import RolloutLoop
from lightning_rl.collectors.statistics import Episodes, EpisodeStatistics
from lightning_rl.functional import first_episode_mask
from lightning_rl.rollout.contract import clear_bootstrap_slot, env_steps, env_steps_in, first_steps
from lightning_rl.system import ranks
from lightning_rl.system.construction import NamedSettings


class Collector(ABC, NamedSettings):
    """Collects rollouts of batch shape [N, T+1].

    The constructor of a subclass takes the context first, then settings from the config.

    Args:
        context: env, policy and other inputs of collecting; made by the data module.

    Attributes:
        context, env, policy, num_steps: the context, and three of its members.
        statistics: returns and lengths of finished episodes of all processes.
        reports: averages of the envs' reward terms and metrics over the last rollout of all
            processes.
        reports_success: whether the env reports the success of an episode.
        env_steps: env steps of the rollouts returned so far, over all N envs of this process.
        max_staleness: largest lag, in updates, of a step's weights behind the learner's.
        may_drop_rollouts: whether a rollout may be dropped before its update.
        in_background: whether a thread or process collects while the learner trains.
        num_rollouts: number of rollouts with memory allocated.
        acted_by_policy: whether the policy chooses the actions of the rollouts.
        code_paths: class names of the actor and the stepper, for `run.json`.
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
        self.code_paths: dict[str, str] = {}
        self._skipped = False

    @abstractmethod
    def collect(self) -> TensorDict:
        """Return a rollout [N, T+1]; the next call may overwrite its storage."""

    def publish(self) -> None:  # a collector that shares the policy has nothing to do
        """Handle new weights of the policy, and possibly a new version."""

    def interrupt(self) -> None:  # a collector in the learner's thread does not wait
        """Make `collect` raise `ReadInterrupted` instead of waiting; for signal handlers."""

    def fail(self, error: Exception) -> bool:
        """Fail the pending `collect` with an error, because the collecting thread hangs.

        Called from another thread. Return whether a thread other than the learner's collects.
        """
        return False

    def metrics(self) -> dict[str, float]:
        """Return metrics by name."""
        episodes = {"charts/episodes": float(self.statistics.episodes)}
        return episodes | self.statistics.averages(self.reports_success) | self.reports

    def count_rollout(
        self,
        rollout: TensorDict,
        envs_were_reset: bool,
        reports: dict[str, float],
        episode_statistics: EpisodeStatistics | None = None,
    ) -> TensorDict:
        """Count a rollout [N, T+1] before its update, and return it; all processes call this.

        Args:
            rollout: [N, T+1], in the order of collection.
            envs_were_reset: whether its envs were reset, which drops the running episodes.
            reports: average reward terms and metrics of its envs.
            episode_statistics: the statistics of its envs. Default: `statistics`.
        """
        episode_statistics = episode_statistics or self.statistics
        continues = torch.tensor(not (envs_were_reset or self._skipped), device=rollout.device)
        # One flag in the batch shape, which all fields have.
        rollout["continues"] = continues.expand(rollout.batch_size)
        self._skipped = False
        if envs_were_reset:
            episode_statistics.restart_episodes()  # before `follow`, which adds to them
        reward, done, success = (rollout[key][:, :-1] for key in ("reward", "done", "success"))
        first_only = self.context.episode_settings.first_episode_only
        # The algorithm does not train on what follows a row's first episode.
        counted = first_episode_mask(done) if first_only else None
        intervened = rollout.get("intervened", None)
        if intervened is not None:
            intervened = intervened[:, :-1]  # without the bootstrap slot
            reports = reports | {"intervention/rate": float(intervened.float().mean())}
        steps = env_steps(rollout)
        if "padding" in rollout.keys():
            steps = (~rollout["padding"][:, :-1]).long()  # a padded step took no env step
        new_episodes = episode_statistics.follow(reward, done, success, steps, counted, intervened)
        # Every rank adds the episodes of all ranks in the same order: equal averages everywhere.
        for episodes in self._of_all_ranks(new_episodes, reports):
            self.statistics.add(episodes)
        self.env_steps += env_steps_in(rollout)
        return rollout

    def skip_rollout(self) -> None:
        """Mark that the next rollout does not continue the last one."""
        self.statistics.skip_rollout()
        self._skipped = True

    def _of_all_ranks(self, new_episodes: Episodes, reports: dict[str, float]) -> list[Episodes]:
        gathered = ranks.gather_over_ranks((new_episodes, reports, self.reports_success))
        # The envs of another process may have reported one first.
        self.reports_success = any(says for *_, says in gathered)
        values_by_name: dict[str, list[float]] = {}
        for _, averages, _ in gathered:
            for name, value in averages.items():
                values_by_name.setdefault(name, []).append(value)
        self.reports = {name: sum(values) / len(values) for name, values in values_by_name.items()}
        return [episodes for episodes, *_ in gathered]

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed run continues, bit for bit."""
        return {"statistics": self.statistics.state_dict(), "env_steps": self.env_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state before the first `collect`."""
        self.env_steps = int(state["env_steps"])
        if len(state["statistics"]["return"]) == self.env.num_envs:  # one running return per env
            self.statistics.load_state_dict(state["statistics"])

    def close(self) -> None:  # a collector without threads has nothing to stop
        """Stop the collector's threads and processes, not the env; may be called more than once."""


class SyncCollector(Collector):
    """Step the env T times with the current policy, in the learner's thread: policy lag is 0."""

    def __init__(self, context: CollectorContext) -> None:
        super().__init__(context)
        (self._segment,) = context.segments()
        self._loop = RolloutLoop(context, [self._segment])
        self.code_paths = self._loop.code_paths

    @property
    def start(self) -> dict[str, Any]:
        """State of the env at the start of the last rollout, with `keep_start`."""
        return self._loop.start

    def collect(self) -> TensorDict:
        sharding = self.policy.sharding
        with nullcontext() if sharding is None else sharding.acting_context():
            steps, notes = self._loop.run(self._segment)
        clear_bootstrap_slot(self._segment.steps[steps])
        self.reports_success = self._loop.reports_success
        # A rollout that ended early is shorter.
        return self.count_rollout(first_steps(self._segment.rollout, steps), **notes)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"loop": self._loop.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if unread := state.get("buffer", {}).get("windows"):
            warnings.warn(
                f"Dropped {len(unread)} rollouts of the checkpoint: an AsyncCollector collected "
                "them with older weights.",
                stacklevel=2,
            )
            self.skip_rollout()
        self._loop.load_state_dict(state["loop"])
