"""Check and convert what an env's `render` returns."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from lightning_rl.envs.refusals import KINDS, kind_of, shortened
from lightning_rl.system.errors import EnvFaultError

CHANNELS = (1, 3, 4)
"""Possible channels of a picture: grey, colours, and colours with transparency."""


def one_picture(name: str, frame: Any) -> np.ndarray:
    """Return a rendering of an env as one picture uint8 [H, W, 3]; several cameras form a row.

    Grey and transparent pictures, channels first, lists, bool, and floats in [0, 1] are converted.

    Raises:
        EnvFaultError: names the env and what its `render` returned.
    """
    array = frame.detach().cpu().numpy() if isinstance(frame, Tensor) else frame
    if isinstance(array, list | tuple) and isinstance(next(iter(array), None), Tensor | np.ndarray):
        cameras = [one_picture(name, camera) for camera in array]
        height = max(len(picture) for picture in cameras)
        padded = [np.pad(p, ((0, height - len(p)), (0, 0), (0, 0))) for p in cameras]
        return np.concatenate(padded, axis=1)
    with suppress(ValueError):  # a ragged list
        array = np.asarray(array)
        array = array[..., None] if array.ndim == 2 else array
        if array.ndim == 3 and array.shape[-1] not in CHANNELS and array.shape[0] in CHANNELS:
            array = np.moveaxis(array, 0, -1)
    kind = kind_of(getattr(array, "dtype", None))
    limit = 1 if kind in "bf" else 255
    is_picture = kind in KINDS and array.ndim == 3 and array.shape[-1] in CHANNELS and array.size
    if not is_picture or not ((array >= 0) & (array <= limit)).all():
        numbers = f", from {array.min():.4g} to {array.max():.4g}" if is_picture else ""
        raise EnvFaultError(
            f"{name} returned {shortened(frame)}{numbers} from render instead of a picture: uint8 "
            "[H, W, 3], or grey, transparent, channels first, or floats from 0 to 1."
        )
    scaled = (array * 255).round() if kind in "bf" else array
    colours = scaled.astype(np.uint8)[..., :3]
    return colours if colours.shape[-1] == 3 else colours.repeat(3, axis=-1)


def picture_or_error(render: Callable[[], Any]) -> Any:
    """Return a picture, or the text of the error: a broken film must not end an episode."""
    try:
        return render()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
