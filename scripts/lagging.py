"""A collector that is always as far ahead as it may be, for scripts/searches/staleness.yaml."""

import time

from tensordict import TensorDict

from lightning_rl import AsyncCollector


class Lagging(AsyncCollector):
    """Let the learner continue only when the collector is as far ahead as allowed.

    A collector on a fast machine may never lag. With this one, every rollout but the first few is
    trained on exactly max_staleness updates after its weights were published, on any machine.
    """

    def collect(self) -> TensorDict:
        first = self.env_steps == 0
        rollout = super().collect()
        ahead = 0 if first else self.max_staleness  # the collector pauses until the first update
        while self._buffer.statistics()["queue_depth"] < ahead and not self._buffer.closed:
            time.sleep(0.001)
        return rollout
