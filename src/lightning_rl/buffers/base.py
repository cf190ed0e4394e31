"""Say what a buffer is: where rollouts wait for the learner, each handed out once."""

from abc import ABC, abstractmethod
from typing import Any

from tensordict import TensorDict


class BufferClosed(RuntimeError):  # noqa: N818  # no error, but a stop that was asked for
    """The buffer was closed: whoever waits at it, or comes to it, is to stop."""


class ReadInterrupted(RuntimeError):  # noqa: N818  # no error, but an answer to `interrupt`
    """The reader was asked to wait no more; nothing is lost, and what comes stays in the buffer."""


class WriterError(RuntimeError):
    """The writer failed; its own exception, with its own traceback, is the cause."""


class Buffer(ABC):
    """Takes rollouts of batch shape [N, T+1] in, and gives each of them out exactly once.

    One between two threads waits where one within a thread raises for want of room or rollouts.
    """

    @abstractmethod
    def extend(self, rollout: TensorDict) -> None:
        """Take a rollout in.

        Raises:
            ValueError: where it is no rollout.
            RuntimeError: where there is no room.
        """

    @abstractmethod
    def ready(self) -> bool:
        """Tell whether `get` has something to give."""

    @abstractmethod
    def get(self) -> TensorDict:
        """Give out the oldest rollout, which is then no longer in the buffer.

        Raises:
            RuntimeError: where there is none.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what waits in the buffer, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # most buffers are empty between iterations
        """Take up a saved state."""
