"""Say what buffers are: where rollouts wait for the learner, or are kept to be sampled from."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict

from lightning_rl.rollout import validate


class BufferClosed(RuntimeError):  # noqa: N818  # no error, but a stop that was asked for
    """The buffer was closed: whoever waits at it, or comes to it, is to stop."""


class ReadInterrupted(RuntimeError):  # noqa: N818  # no error, but an answer to `interrupt`
    """The reader was asked to wait no more; nothing is lost, and what comes stays in the buffer."""


class WriterError(RuntimeError):
    """The writer failed; its own exception, with its own traceback, is the cause."""


class Buffer(ABC):
    """Takes rollouts of batch shape [N, T+1] in, and gives each of them out exactly once."""

    @abstractmethod
    def extend(self, rollout: TensorDict) -> None:
        """Take a rollout [N, T+1] in.

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


class RolloutBuffer(Buffer):
    """A buffer of one rollout, without a copy.

    What `get` returns is the collector's storage, until it collects again.

    Empty between iterations, so there is nothing to save.
    """

    def __init__(self) -> None:
        self._rollout: TensorDict | None = None

    def extend(self, rollout: TensorDict) -> None:
        validate(rollout)
        if self._rollout is not None:
            raise RuntimeError(
                "The buffer still holds a rollout that nobody has taken; call get() first."
            )
        self._rollout = rollout

    def ready(self) -> bool:
        return self._rollout is not None

    def get(self) -> TensorDict:
        if self._rollout is None:
            raise RuntimeError(
                "The buffer is empty: every rollout is given out once. Call extend() first."
            )
        rollout, self._rollout = self._rollout, None
        return rollout


class Replay(ABC):
    """What an off-policy algorithm samples from: fresh rollouts go in, minibatches come out.

    The data module makes it, by `data.replay`, and saves it; the algorithm finds it as
    `Algorithm.replay`.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return how many transitions it holds."""

    @abstractmethod
    def extend(self, rollout: TensorDict) -> None:
        """Take a fresh rollout [N, T+1] in; it is copied."""

    @abstractmethod
    def sample(self, batch_size: int, generator: torch.Generator) -> TensorDict:
        """Return transitions [B], drawn by a generator on the learner's device."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain numbers, texts and tensors."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""


ReplayFactory = Callable[
    [gymnasium.Space[Any], gymnasium.Space[Any], int, torch.device | str], Replay
]
"""Makes a replay from the spaces of one env, `num_envs`, and the device of the learner.

In YAML the class and its other arguments.
"""
