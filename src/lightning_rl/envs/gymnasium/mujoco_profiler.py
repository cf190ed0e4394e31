"""Switch off the profiler that MuJoCo's Python bindings switch on."""

import ctypes
import sys


def stop_mujoco_profiler() -> bool:
    """Have MuJoCo time nothing; return whether that was possible.

    MuJoCo reads a clock some 30 times per simulation step to fill `MjData.timer`, if the callback
    `mjcb_time` is set, and its Python bindings set it. HalfCheetah-v5 takes 29 µs a step with it
    and 26 without, to the same bits. `mujoco.set_mjcb_time(None)` only puts the bindings' own clock
    back, so the C variable is cleared.

    A clock of the user's, by `mujoco.set_mjcb_time`, is left alone, and one that is set later
    works. Nothing is done where `mujoco` has not been imported.
    """
    mujoco = sys.modules.get("mujoco")
    if mujoco is None or mujoco.get_mjcb_time() is not None:
        return False
    try:
        library = ctypes.CDLL(mujoco._callbacks.__file__)
        clock = ctypes.c_void_p.in_dll(library, "mjcb_time")
    except (AttributeError, OSError, ValueError):  # another version, or platform
        return False
    clock.value = None
    return True
