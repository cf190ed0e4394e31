"""The interface of a replay, and the exceptions of a buffer between two threads."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.rollout.goals import GoalFunction
from lightning_rl.system.construction import NamedSettings
from lightning_rl.system.errors import ConfigurationError


class BufferClosed(RuntimeError):  # noqa: N818  # a requested stop, no error
    """The buffer was closed: its readers and writers have to stop."""


class ReadInterrupted(RuntimeError):  # noqa: N818  # a requested stop, no error
    """`interrupt` ended the read; rollouts that arrive later stay in the buffer."""


class WriterError(RuntimeError):
    """The writer failed; its exception is the cause of this one."""


class Replay(ABC, NamedSettings):
    """Replay buffer of an off-policy algorithm: stores rollouts, and samples minibatches.

    The data module makes it from `data.replay`; the algorithm reads it as `Algorithm.replay`. The
    constructor of a subclass takes these five arguments first, and by name `directory`, and `goals`
    if the env has goals; the config sets its other arguments.

    Arguments of a subclass:
        observation_space: observation space of one env.
        action_space: action space of one env.
        num_envs: N, envs of this process.
        device: the learner's device, where minibatches go.
        seed: seed of the sampling.
        directory: run directory, for temporary files.
        goals: judges other goals of a goal env.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of transitions that can be sampled."""

    @abstractmethod
    def extend(self, rollout: TensorDict) -> None:
        """Copy a new rollout [N, T+1] into the replay."""

    @abstractmethod
    def batches(
        self, count: int, batch_size: int, *, n_steps: int = 1, gamma: float = 0.99
    ) -> Iterator[TensorDict]:
        """Yield minibatches [B], sampled with a saved generator.

        Fields: `observation`; `action`, as executed by the env; `reward` [B], the discounted sum of
        n rewards; `next_observation`, after the last of these n steps; `discount` [B], of the value
        of `next_observation`, 0 if the episode terminated. If rollouts have them, also `intervened`
        [B], `info/<name>` [B, ...] of the first step, and `penalty` [B], summed like the rewards. A
        sum has fewer than n rewards at the end of an episode or of the stored steps.

        Args:
            count: number of minibatches.
            batch_size: B.
            n_steps: n, number of rewards in a sum.
            gamma: discount per env step.
        """

    def chunks(
        self, count: int, batch_size: int, *, n_steps: int = 1, gamma: float = 0.99
    ) -> Iterator[TensorDict]:
        """Yield minibatches [B] as in `batches`, with the actions of all n steps.

        `action` [B, n, *A] are those whose rewards are in the sum, and copies of the last of them;
        `executed` [B, n] bool tells the former.

        Raises:
            ConfigurationError: if the replay has no chunks.
        """
        raise ConfigurationError(
            f"{type(self).__name__} samples single actions, but the algorithm trains on chunks of "
            "them. Set data.replay: ReplayBuffer."
        )

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
        """Yield minibatches [S*L] as in `batches`, of sequences of L consecutive steps.

        Each minibatch also holds the steps before and after its samples, see
        `lightning_rl.rollout.sequences`. A sequence begins with the stored state of its first step;
        it may cross the end of an episode, which resets the state, but not a gap in the stream.

        Args:
            count: number of minibatches.
            num_sequences: S.
            length: L.
            burn_in: C, steps before each sequence; fewer at the beginning of the stored steps.
            n_steps: see `batches`.
            gamma: see `batches`.

        Raises:
            ConfigurationError: if the replay has no sequences or its rollouts no state.
            RuntimeError: if there is no sequence, or if a rollout was added during the iteration.
        """
        # Not abstract: a replay for policies without memory needs no sequences.
        raise ConfigurationError(
            f"{type(self).__name__} samples single transitions, but a policy with a memory trains "
            "on sequences. Set data.replay: ReplayBuffer, or remove the memory."
        )

    def largest_new_return(self, gamma: float) -> Tensor | None:
        """Return a bound [1] on returns of rewards that the replay itself computes, or None."""
        return None

    def take_offline_rewards(self) -> tuple[float, Tensor, Tensor, Tensor] | None:
        """Return rewards of transitions without a collector, once; None if there are none.

        These are: the fraction of such transitions in each minibatch, from 0 to 1; the rewards [M]
        float32, in the order of the steps; and as [M] bool the ends of fragments, and terminations.
        """
        return None  # most replays hold only what collectors made

    def check_rate(self, fps: float | None) -> None:
        """Refuse an env of `fps` steps per second (None: unknown) if stored steps have another."""

    def metrics(self) -> dict[str, float]:
        """Return metrics by name."""
        return {"replay/size": float(len(self))}

    @abstractmethod
    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Return the state for a resumed run, as plain numbers, strings and tensors.

        Large parts may go into files in `folder`, next to the checkpoint; the state lists their
        names under `files`.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Restore the result of `state_dict` into an empty replay, before the first `extend`."""


class ReplayFactory(Protocol):
    """Make a replay; in YAML, the class and its other arguments."""

    def __call__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        device: torch.device | str,
        seed: int,
        /,  # `Replay` subclasses may use other names
        *,
        directory: Path,
        goals: GoalFunction | None = None,
    ) -> Replay:
        """Make the replay; see `Replay` for the arguments."""
