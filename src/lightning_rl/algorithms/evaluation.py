"""Play the evaluation episodes of an algorithm, and summarize them over all ranks."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lightning_rl.algorithms.training_data import TrainingData
from lightning_rl.collectors.evaluation import Episode, Watcher, run_episodes, summarize
from lightning_rl.policies import Policy
from lightning_rl.policies.precision import autocast
from lightning_rl.system import ranks
from lightning_rl.system.output import tell
from lightning_rl.system.sharded import PolicySharding

PlayFunction = Callable[[list[int], Sequence[Watcher]], list[Episode]]
"""Plays one episode per seed: `Algorithm.play`, which a subclass may override."""


class Evaluation:
    """The episodes of an evaluation, played in batches.

    Attributes:
        watchers: called at each step of the next batch.
    """

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self._episodes: list[Episode] = []
        self._reported_cuts = False

    def begin(self) -> None:
        """Forget the episodes of an evaluation that was interrupted by an error."""
        self._episodes = []

    def play_batch(
        self, play: PlayFunction, sharding: PolicySharding | None, seeds: list[int]
    ) -> None:
        """Play one episode per seed by `play`, with the shards of the policy, if any."""
        watchers, self.watchers = self.watchers, []
        with nullcontext() if sharding is None else sharding.acting_context():
            if seeds:  # a rank may have no episodes
                self._episodes += play(seeds, watchers)

    def summary(self, data: TrainingData) -> dict[str, Any]:
        """Summarize the episodes of all ranks, see `summarize`, and begin another evaluation."""
        gathered = ranks.gather_over_ranks(self._episodes)
        self._episodes = []
        episodes = [episode for part in gathered for episode in part]  # rank order is seed order
        summary = summarize(episodes, data.eval_env_reports_success)
        if (cut := summary["cut"]) and not self._reported_cuts:
            self._reported_cuts = True
            rank_zero_only(tell)(
                f"{cut} of {len(episodes)} evaluation episodes were cut after "
                f"{data.max_eval_episode_steps:,} env steps and count as truncated. Give the "
                "env a time limit, or set data.max_eval_episode_steps."
            )
        return summary | {"deterministic": data.eval_deterministic}


def play(
    policy: Policy, data: TrainingData, seeds: list[int], watchers: Sequence[Watcher]
) -> list[Episode]:
    """Play one episode per seed in the evaluation env; equal seeds give equal episodes."""
    with autocast(policy.version.device, policy.autocast_dtype):
        return run_episodes(
            policy,
            data.eval_env,
            seeds,
            deterministic=data.eval_deterministic,
            max_steps=data.max_eval_episode_steps,
            watchers=watchers,
            calls=data.eval_calls,
        )
