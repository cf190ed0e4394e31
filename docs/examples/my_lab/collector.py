"""A collector: hands out every second, third, ... rollout."""

from tensordict import TensorDict

from lightning_rl import CollectorContext, SyncCollector


class Thinned(SyncCollector):
    """Collect as in the foreground, and skip rollouts between two updates."""

    def __init__(self, context: CollectorContext, every: int = 2) -> None:
        super().__init__(context)
        self.every = every

    def collect(self) -> TensorDict:
        for _ in range(self.every - 1):
            super().collect()
        return super().collect()
