"""Say what buffers are: where rollouts wait for the learner, or are kept to be sampled from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.rollout.contract import validate
from lightning_rl.system.errors import ConfigurationError


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


class GivenRewards(NamedTuple):
    """The rewards of transitions that were not collected, such as demonstrations.

    Attributes:
        share: of the samples of each minibatch that are of these, from 0 to 1.
        reward: [M] float32, in the order of the steps.
        ends: [M] bool, after which of them an episode or a piece of one ends.
    """

    share: float
    reward: Tensor
    ends: Tensor


class Replay(ABC):
    """What an off-policy algorithm samples from: fresh rollouts go in, minibatches come out.

    The data module makes it, by `data.replay`, and saves it; the algorithm finds it as
    `Algorithm.replay`. A subclass's constructor begins with these first five arguments, and takes
    `directory` by name; the config sets the rest.

    Args:
        observation_space: of one env.
        action_space: likewise.
        num_envs: N, envs of this process.
        device: of the learner, where minibatches go.
        seed: of what it draws.
        directory: of the run, in which it may keep files that end with it.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return how many transitions it holds that may be drawn."""

    @abstractmethod
    def extend(self, rollout: TensorDict) -> None:
        """Take a fresh rollout [N, T+1] in; it is copied."""

    @abstractmethod
    def batches(
        self, count: int, batch_size: int, *, n_steps: int = 1, gamma: float = 0.99
    ) -> Iterator[TensorDict]:
        """Yield minibatches [B], drawn by a generator of its own, whose state is saved.

        Their fields are `observation`; `action`, what the env executed; `reward` [B], the sum of
        n rewards, discounted; `next_observation`, what followed the last of them; `discount` [B],
        of the value of that, 0 where the episode terminated; and `intervened` [B] and `penalty`
        [B], summed as rewards are, where rollouts have them. A sum has fewer rewards where an
        episode ends, or what is held.

        Args:
            count: of the minibatches.
            batch_size: B.
            n_steps: of one env, whose rewards are summed.
            gamma: discount per env step.
        """

    def sequences(
        self,
        count: int,
        num_sequences: int,
        length: int,
        *,
        burn_in: int = 0,
        n_steps: int = 1,
        gamma: float = 0.99,
    ) -> Iterator[TensorDict]:
        """Yield minibatches [S*L] like those of `batches`, of sequences of L steps in a row.

        Next to the samples lie the steps before and after them, see
        `lightning_rl.rollout.sequences`. A sequence may continue from one episode into the next,
        whose state is zero; it begins with the state that was stored before its first step. A
        sequence that contains a break of the stream is not drawn.

        Args:
            count: of the minibatches.
            num_sequences: S.
            length: L.
            burn_in: C, steps before each sequence, fewer where what is held begins.
            n_steps: see `batches`.
            gamma: see `batches`.

        Raises:
            ConfigurationError: where the replay keeps no sequences, or rollouts have no state.
            RuntimeError: where there is no sequence to draw, and where a rollout came in between.
        """
        raise ConfigurationError(
            f"{type(self).__name__} hands out single transitions, and a policy with a memory "
            "learns from sequences: set data.replay: ReplayBuffer, or leave the memory out."
        )

    def take_given_rewards(self) -> "GivenRewards | None":
        """Return the rewards of transitions that were not collected, for a reward normaliser.

        The second call returns None, and so does a replay without such transitions.
        """
        return None

    def metrics(self) -> dict[str, float]:
        """Return what there is to chart, by name."""
        return {"replay/size": float(len(self))}

    @abstractmethod
    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Return what a resumed run needs, as plain numbers, texts and tensors.

        What is large may go into files of the folder, each written whole before this returns. Their
        names stand in the state under `files`; see `replay_files`, which removes those that no
        checkpoint beside the folder names any more.

        Args:
            folder: beside the checkpoint that will hold the state.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Take up a saved state, in an empty replay, before the first `extend`.

        Args:
            state: as `state_dict` returned it.
            folder: beside the checkpoint that holds it.
        """


class ReplayFactory(Protocol):
    """Makes a replay; in YAML the class and its other arguments."""

    def __call__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        device: torch.device | str,
        seed: int,
        /,
        *,
        directory: Path,
    ) -> Replay:
        """Make one; see `Replay` for the arguments."""
