"""Draw categories by the Gumbel-max trick."""

from collections.abc import Sequence

import torch
from torch import Tensor


def choose(log_probs: Tensor, noise: Tensor | None) -> Tensor:
    """Return the index [B] of one of n categories; the likeliest one without noise.

    By the Gumbel-max trick, argmax(log p + g): one pass, where `multinomial` needs the sums of the
    probabilities, and looks at them, which an accelerator waits for.

    Source: Maddison, Tarlow and Minka 2014, "A* Sampling", section 2.

    Args:
        log_probs: [B, n], up to a constant for each of B.
        noise: as many numbers of `gumbel_noise`, in any shape.
    """
    keys = log_probs if noise is None else log_probs + noise.view_as(log_probs)
    return keys.argmax(-1)


def gumbel_noise(
    shape: Sequence[int], device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Return draws [*shape] of Gumbel's distribution, -log(E), E ~ Exp(1)."""
    return torch.empty(*shape, device=device).exponential_(generator=generator).log_().neg_()
