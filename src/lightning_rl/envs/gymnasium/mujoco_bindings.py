"""Have MuJoCo's Python bindings give warnings of Python, and time no steps that nobody asks for.

Of what is private to MuJoCo this file alone uses something: the library's path, and the name of a C
variable in it. Tried with mujoco 4.0.
"""

import ctypes
import sys
import warnings
from typing import Any

OF_MUJOCO = ("mujoco", "dm_control")
"""Packages whose objects an env holds where it steps MuJoCo."""


def hear_mujoco() -> None:
    """Have MuJoCo's warnings in this process be warnings of Python.

    By itself MuJoCo prints each one whenever it comes, and writes it to MUJOCO_LOG.TXT in the
    working directory: with version 4 the models that come with Gymnasium give one for every env
    that is made. What is deprecated about a model is a `DeprecationWarning`, which Python shows to
    those who ask for it; the rest, such as a simulation that is unstable, a `RuntimeWarning`.

    A callback of the user's, by `mujoco.set_mju_user_warning`, is left alone. Nothing is done where
    `mujoco` has not been imported.
    """
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None and mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_warn)


def _warn(text: str) -> None:
    # Where an env of Gymnasium's makes its model, it would be Gymnasium's, which has its own shown.
    deprecated = "deprecated" in text
    category, stacklevel = (DeprecationWarning, 1) if deprecated else (RuntimeWarning, 2)
    try:
        warnings.warn(f"MuJoCo: {text.strip()}", category, stacklevel)
    except Warning as error:  # where warnings are errors: through MuJoCo it would end the process
        print(error, file=sys.stderr)


def set_mujoco_profiler(wanted: bool) -> None:
    """Have MuJoCo time its steps in this process, or not.

    MuJoCo reads a clock some 30 times per simulation step to fill `MjData.timer`, if the callback
    `mjcb_time` is set, and its Python bindings set it. HalfCheetah-v5 takes 29 µs a step with it
    and 26 without, to the same bits. `mujoco.set_mjcb_time(None)` only puts the bindings' own clock
    back, so the C variable is cleared.

    A clock of the user's, by `mujoco.set_mjcb_time`, is left alone, and one that is set later
    works. Nothing is done where `mujoco` has not been imported, nor where the variable is not found
    (another version, or platform).
    """
    mujoco = sys.modules.get("mujoco")
    if mujoco is None or mujoco.get_mjcb_time() is not None:
        return
    try:
        clock = _clock_of(mujoco)
    except (AttributeError, OSError, ValueError):
        return
    if not wanted:
        clock.value = None
    elif clock.value is None:
        mujoco.set_mjcb_time(None)


def has_mujoco_profiler(env: Any) -> bool | None:
    """Tell whether MuJoCo times the steps of an env, in this process; None where it has none."""
    held = vars(getattr(env, "unwrapped", env)).values()
    if not any(type(one).__module__.partition(".")[0] in OF_MUJOCO for one in held):
        return None
    try:
        return _clock_of(sys.modules["mujoco"]).value is not None
    except (AttributeError, OSError, ValueError):
        return True  # it cannot be switched off here


def _clock_of(mujoco: Any) -> ctypes.c_void_p:
    """Return the C variable that holds the clock, which is null where there is none."""
    library = ctypes.CDLL(mujoco._callbacks.__file__)
    return ctypes.c_void_p.in_dll(library, "mjcb_time")
