"""Restore streams of random numbers."""

import torch
from lightning.pytorch.utilities import rank_zero_warn


def restore_generator(generator: torch.Generator, state: torch.Tensor, purpose: str) -> None:
    """Continue a saved stream; warn and leave the generator if it drew on another kind of device.

    Args:
        generator: of the resumed run.
        state: `generator.get_state()` of the saved one.
        purpose: what it draws, for the message.
    """
    try:
        generator.set_state(state.cpu())
    except RuntimeError:
        rank_zero_warn(
            f"The checkpoint's {purpose} was drawn on another kind of device than here "
            f"({generator.device}): its random stream starts fresh, and the resumed run will "
            "differ from an uninterrupted one."
        )
