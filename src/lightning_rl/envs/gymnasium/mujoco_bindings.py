"""Turn MuJoCo's warnings into Python warnings, and switch its profiler (mujoco 3.8 and 4.0)."""

import ctypes
import os
import sys
import warnings
from typing import Any

from lightning_rl.system.errors import import_extra
from lightning_rl.system.machine import offscreen_renderer
from lightning_rl.system.output import tell

OF_MUJOCO = ("mujoco", "dm_control")
"""Packages whose objects are attributes of MuJoCo envs."""


def import_mujoco() -> Any:
    """Import MuJoCo, to draw without a screen where there is none, and convert its warnings.

    Raises:
        ConfigurationError: it is not installed.
    """
    draw_offscreen()
    mujoco = import_extra("mujoco", "MujocoEnv needs MuJoCo: pip install -e '.[mujoco]'.")
    convert_mujoco_warnings()
    return mujoco


def draw_offscreen() -> None:
    """Keep pygame and MuJoCo, which is not imported yet, from looking for a screen without one."""
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("MUJOCO_GL", offscreen_renderer())


def convert_mujoco_warnings() -> None:
    """Turn MuJoCo's warnings in this process into Python warnings.

    By default MuJoCo prints every warning and writes it to MUJOCO_LOG.TXT in the working directory.
    Deprecations become a `DeprecationWarning`, other warnings, such as an unstable simulation, a
    `RuntimeWarning`. Does nothing if the user has set a callback or `mujoco` is not imported.
    """
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None and mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_warn)


def _warn(text: str) -> None:
    # With stacklevel 2, Python would show deprecations, as warnings of Gymnasium.
    deprecated = "deprecated" in text
    category, stacklevel = (DeprecationWarning, 1) if deprecated else (RuntimeWarning, 2)
    try:
        warnings.warn(f"MuJoCo: {text.strip()}", category, stacklevel)
    except Warning as error:  # warnings may be errors, and raising through MuJoCo ends the process
        tell(error, sys.stderr)


def set_mujoco_profiler(enabled: bool) -> None:
    """Turn MuJoCo's profiler on or off in this process.

    With the callback `mjcb_time`, which the Python bindings set, MuJoCo reads a clock about 30
    times per simulation step: HalfCheetah-v5 takes 29 µs per step with it and 26 µs without.
    `mujoco.set_mjcb_time(None)` only restores this clock, so this function clears the C variable.
    Does nothing if the user has set a clock, or if the variable is missing.
    """
    mujoco = sys.modules.get("mujoco")
    if mujoco is None or mujoco.get_mjcb_time() is not None:
        return
    try:
        clock = _clock_of(mujoco)
    except (AttributeError, OSError, ValueError):
        return
    if not enabled:
        clock.value = None
    elif clock.value is None:
        mujoco.set_mjcb_time(None)


def has_mujoco_profiler(env: Any) -> bool | None:
    """Return whether MuJoCo times the steps of an env in this process; None without MuJoCo."""
    values = vars(getattr(env, "unwrapped", env)).values()
    if not any(type(value).__module__.partition(".")[0] in OF_MUJOCO for value in values):
        return None
    try:
        return _clock_of(sys.modules["mujoco"]).value is not None
    except (AttributeError, OSError, ValueError):
        return True  # this platform cannot switch it off


def _clock_of(mujoco: Any) -> ctypes.c_void_p:
    library = ctypes.CDLL(mujoco._callbacks.__file__)
    return ctypes.c_void_p.in_dll(library, "mjcb_time")
