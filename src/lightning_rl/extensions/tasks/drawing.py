"""Draw batches of small pictures with smooth shapes, on any device.

A shape is the region of negative signed distance (formulas: Inigo Quilez, "2D distance functions").
"""

import torch
from torch import Tensor

Colour = tuple[float, float, float]
"""Red, green, blue, each 0 to 1."""

PAPER: Colour = (0.96, 0.96, 0.94)
"""Nearly white: backgrounds."""

INK: Colour = (0.20, 0.22, 0.25)
"""Nearly black."""

GREY: Colour = (0.72, 0.73, 0.75)
"""Light grey."""

BLUE: Colour = (0.16, 0.43, 0.75)
"""Agents."""

ORANGE: Colour = (0.91, 0.49, 0.13)
"""Moved objects."""

GREEN: Colour = (0.24, 0.65, 0.36)
"""Goals."""

RED: Colour = (0.80, 0.25, 0.24)
"""Obstacles, and one of two blocks."""


class Canvas:
    """M pictures of the same part of the plane, x to the right and y up.

    Shapes take points [M, 2], or [1, 2] for all pictures; lengths in m; an `opacity` from 0 to 1;
    and a `ring` in m: the width of an outline, 0 for a filled shape.

    Args:
        count: M.
        height: pixels.
        width: pixels.
        centre: point in the middle of the picture, in m.
        extent: minimum visible width and height, in m.
        background: colour of the empty picture.
        device: device of the pictures.
    """

    def __init__(
        self,
        count: int,
        height: int,
        width: int,
        centre: tuple[float, float] = (0.0, 0.0),
        extent: tuple[float, float] = (2.0, 2.0),
        background: Colour = PAPER,
        device: torch.device | str = "cpu",
    ) -> None:
        # Pixels are square: the larger scale shows at least the extent along both axes.
        self.pixel = max(extent[0] / width, extent[1] / height)
        across = torch.arange(width, device=device) + 0.5 - width / 2
        # Middles of the pixels; rows count downwards, and y points upwards.
        down = torch.arange(height, device=device) + 0.5 - height / 2
        self._x = centre[0] + across * self.pixel
        self._y = (centre[1] - down * self.pixel)[:, None]
        colour = torch.tensor(background, device=device)
        self._image = colour[None, :, None, None].repeat(count, 1, height, width)

    def disc(
        self,
        centre: Tensor,
        radius: float | Tensor,
        colour: Colour,
        opacity: float = 1.0,
        ring: float = 0.0,
    ) -> None:
        """Draw a disc around `centre` [M, 2]; `radius` is a number or [M]."""
        x, y = self._from(centre)
        size = _per_picture(radius) if isinstance(radius, Tensor) else radius
        self._paint((x * x + y * y).sqrt_() - size, colour, opacity, ring)

    def box(
        self,
        centre: Tensor,
        half: tuple[float, float],
        colour: Colour,
        angle: Tensor | None = None,
        opacity: float = 1.0,
        ring: float = 0.0,
    ) -> None:
        """Draw a box of half edges `half` around `centre` [M, 2], at an `angle` [M] (rad, left)."""
        x, y = self._from(centre)
        if angle is not None:
            # Turn the points into the frame of the box.
            cos, sin = _per_picture(angle.cos()), _per_picture(angle.sin())
            x, y = x * cos + y * sin, y * cos - x * sin
        x, y = x.abs() - half[0], y.abs() - half[1]
        # Outside, the way to the nearest edge or corner; inside, minus the way to an edge.
        outside = (x.clamp_min(0.0).square() + y.clamp_min(0.0).square()).sqrt_()
        self._paint(outside + torch.maximum(x, y).clamp_max_(0.0), colour, opacity, ring)

    def segment(
        self, begin: Tensor, end: Tensor, radius: float, colour: Colour, opacity: float = 1.0
    ) -> None:
        """Draw a line with round ends from `begin` [M, 2] to `end` [M, 2], 2 * `radius` wide."""
        x, y = self._from(begin)
        along = end - begin
        dx, dy = _per_picture(along[:, 0]), _per_picture(along[:, 1])
        # The nearest point of the line, as a share of the way from begin to end.
        share = (x * dx + y * dy).div_((dx * dx + dy * dy).clamp_min(1e-12)).clamp_(0.0, 1.0)
        x, y = x - share * dx, y - share * dy
        self._paint((x * x + y * y).sqrt_() - radius, colour, opacity, 0.0)

    def pixels(self) -> Tensor:
        """Return the pictures, uint8 [M, H, W, 3]."""
        return (self._image * 255.0).round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    def _from(self, point: Tensor) -> tuple[Tensor, Tensor]:
        return self._x - _per_picture(point[:, 0]), self._y - _per_picture(point[:, 1])

    def _paint(self, distance: Tensor, colour: Colour, opacity: float, ring: float) -> None:
        if ring:
            distance = distance.abs() - ring / 2
        # Edges are smooth over one pixel: half covered at distance 0.
        cover = (0.5 - distance / self.pixel).clamp_(0.0, 1.0)
        if opacity != 1.0:
            cover.mul_(opacity)
        colours = torch.tensor(colour, device=self._image.device)[None, :, None, None]
        self._image.lerp_(colours.expand_as(self._image), cover[:, None].expand_as(self._image))


def tip(base: Tensor, angle: Tensor, length: float) -> Tensor:
    """Return the end [M, 2] of a rod from `base` [M, 2], at `angle` [M] (rad) from upright."""
    return base + length * torch.stack((angle.sin(), angle.cos()), 1)


def _per_picture(value: Tensor) -> Tensor:
    return value[:, None, None]
