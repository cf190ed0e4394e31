"""Augmentation of pictures."""

import torch
from torch import Tensor


def shift_pictures(pictures: Tensor, shift: Tensor, sides: tuple[int, int] = (1, 2)) -> Tensor:
    """Return pictures shifted by whole pixels; edge pixels are repeated.

    With shifts drawn uniformly from -4 to 4 it is the random shift of Kostrikov, Yarats and Fergus
    2020, "Image Augmentation Is All You Need" (DrQ).

    Args:
        pictures: [B, ...], of any dtype.
        shift: [B, 2] int64, pixels up (height) and left (width).
        sides: the dimensions of `pictures` that are height and width.
    """
    moved = pictures.movedim(sides, (1, 2))
    height, width = moved.shape[1:3]
    # Indices of rows and columns of each picture, clamped to its edges.
    rows = _clamped(height, shift[:, 0])[:, :, None]
    columns = _clamped(width, shift[:, 1])[:, None, :]
    index = torch.arange(len(moved), device=pictures.device)[:, None, None]
    return moved[index, rows, columns].movedim((1, 2), sides)


def _clamped(size: int, shift: Tensor) -> Tensor:
    places = torch.arange(size, device=shift.device)
    return (places + shift[:, None]).clamp(0, size - 1)
