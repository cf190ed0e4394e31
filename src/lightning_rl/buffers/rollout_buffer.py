"""Hold one rollout between the synchronous collector and the learner."""

from tensordict import TensorDict

from lightning_rl.buffers.base import Buffer
from lightning_rl.rollout import validate


class RolloutBuffer(Buffer):
    """A buffer of one rollout, without a copy.

    What `get` returns is the collector's storage, until it collects again.

    Empty between iterations, so there is nothing to save.
    """

    def __init__(self) -> None:
        self._rollout: TensorDict | None = None

    def extend(self, rollout: TensorDict) -> None:
        """See `Buffer.extend`."""
        validate(rollout)
        if self._rollout is not None:
            raise RuntimeError(
                "The buffer still holds a rollout that nobody has taken; call get() first."
            )
        self._rollout = rollout

    def ready(self) -> bool:
        """See `Buffer.ready`."""
        return self._rollout is not None

    def get(self) -> TensorDict:
        """See `Buffer.get`."""
        if self._rollout is None:
            raise RuntimeError(
                "The buffer is empty: every rollout is given out once. Call extend() first."
            )
        rollout, self._rollout = self._rollout, None
        return rollout
