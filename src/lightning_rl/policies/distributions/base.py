"""Turn network outputs into actions, log-probs and entropies, without torch.distributions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_rl.rollout.contract import FieldSpec

Fields = dict[str, Tensor]
"""Fields of a rollout by name: `action`, and what its log-prob needs."""

NEVER = -1e30
"""Logit of forbidden choices. Finite, because 0 * -inf in an entropy is NaN."""


class ActionDistribution(nn.Module, ABC):
    """A family of distributions over one action space. B is any batch shape."""

    num_outputs: int
    """Network outputs per sample."""

    noise_size: int
    """Z, random numbers per action."""

    extra_fields: dict[str, FieldSpec] = {}  # noqa: RUF012  # overridden per instance, never mutated
    """Fields that `sample` returns with the action, and `log_prob_and_entropy` reads."""

    state_size = num_choices = 0
    """S, numbers in the state; C, categories of all choices."""
    state_dependent = False  # whether log standard deviations are among the outputs

    def masked(self, output: Tensor, mask: Tensor) -> Tensor:
        """Return logits [B, C] with probability exactly 0 for choices with `mask` [B, C] = 0."""
        return output.masked_fill(mask == 0, NEVER)

    def fill_noise(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        """Fill noise [..., Z] for `sample`. Default: standard normal."""
        return noise.normal_(generator=generator)

    @abstractmethod
    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        """Return `action` [B, *A], `sample_log_prob` [B], `extra_fields`, and `next_state` [B, S].

        Args:
            output: [B, num_outputs].
            noise: [B, Z]; None for the mode.
            state: [B, S], zero at the start of an episode.
        """

    @abstractmethod
    def log_prob_and_entropy(
        self, output: Tensor, fields: Fields, executed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the log-prob [B] of the stored action and the entropy [B], with gradients.

        Args:
            output: [B, num_outputs].
            fields: `action` and `extra_fields`; a missing field is None.
            executed: [B, K] bool, the executed actions of a chunk; None for all.
        """

    def fields_of(self, action: Tensor) -> dict[str, Tensor] | None:
        """Return `extra_fields` of given actions [B, *A]; None if they cannot be computed."""
        return None if self.extra_fields else {}


class Categorical(ActionDistribution):
    """Independent categorical distributions, for Discrete and MultiDiscrete actions.

    The network gives the concatenated logits of all of them.
    """

    columns: Tensor

    def __init__(self, sizes: Sequence[int], shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.num_outputs = self.num_choices = sum(sizes)
        self.padded = len(set(sizes)) > 1
        self.rows, self.width = len(sizes), max(sizes)
        self.noise_size = self.rows * self.width
        # Logits are laid out as [B, D, max(n)]; short rows are padded with logits of probability 0.
        columns = torch.full((self.rows, self.width), self.num_outputs)
        start = 0
        for row, size in enumerate(sizes):
            columns[row, :size] = torch.arange(start, start + size)
            start += size
        self.register_buffer("columns", columns.flatten(), persistent=False)

    def fill_noise(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        return gumbel_(noise, generator)

    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        log_probs = self._log_probs(output)
        # The largest sum with Gumbel noise is a sample (Maddison, Tarlow and Minka 2014, "A*
        # Sampling", section 2). `multinomial` would synchronize with the device.
        index = (log_probs if noise is None else log_probs + noise.view_as(log_probs)).argmax(-1)
        return {
            "action": index if self.shape else index.squeeze(-1),
            "sample_log_prob": self._gather(log_probs, index),
        }

    def log_prob_and_entropy(
        self, output: Tensor, fields: Fields, executed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        action = fields["action"]
        log_probs = self._log_probs(output)
        entropies = -(log_probs.exp() * log_probs)
        entropy = entropies.sum((-2, -1))
        if executed is not None:
            entropy = summed(entropies.sum(-1), executed)
        index = action if self.shape else action.unsqueeze(-1)
        return self._gather(log_probs, index, executed), entropy

    def _log_probs(self, output: Tensor) -> Tensor:
        if self.padded:
            # The added column has probability 0; `columns` points to it where a row is short.
            output = nn.functional.pad(output, (0, 1), value=NEVER)[..., self.columns]
        logits: Tensor = output.unflatten(-1, (self.rows, self.width))
        return logits.log_softmax(-1)

    def _gather(self, log_probs: Tensor, index: Tensor, executed: Tensor | None = None) -> Tensor:
        return summed(log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1), executed)


def summed(values: Tensor, executed: Tensor | None) -> Tensor:
    """Return the sum [*B] of numbers [*B, A] over the actions that were `executed` [*B, K]."""
    if executed is None:
        return values.sum(-1)
    # Each executed action of a chunk has A / K numbers.
    counted = executed.repeat_interleave(values.shape[-1] // executed.shape[-1], -1)
    # `where` instead of a product: an action that was not executed may have the log-prob -inf.
    return torch.where(counted, values, 0.0).sum(-1)


def widened(output: Tensor) -> Tensor:
    """Return a network's output [...] in float32, if it has less precision."""
    return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output


def gumbel_(noise: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill noise [...] with Gumbel samples, -log(E), E ~ Exp(1), and return it."""
    return noise.exponential_(generator=generator).log_().neg_()
