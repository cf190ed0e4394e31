"""Draw categories by the Gumbel-max trick."""

import torch
from torch import Tensor


def draw_category(
    log_probs: Tensor, deterministic: bool, generator: torch.Generator | None
) -> Tensor:
    """Return the index [B] of one of n categories, or of the likeliest where `deterministic`.

    By the Gumbel-max trick, argmax(log p + g): one pass, where `multinomial` needs the sums of the
    probabilities, and looks at them, which an accelerator waits for.

    Source: Maddison, Tarlow and Minka 2014, "A* Sampling", section 2.

    Args:
        log_probs: [B, n], up to a constant for each of B.
        deterministic: take the likeliest.
        generator: of the draw.
    """
    if deterministic:
        return log_probs.argmax(-1)
    return (log_probs + gumbel_(torch.empty_like(log_probs), generator)).argmax(-1)


def gumbel_(noise: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill `noise` [...] with draws of Gumbel's distribution, -log(E), E ~ Exp(1); return it."""
    return noise.exponential_(generator=generator).log_().neg_()
