"""Optimisations for some machines, with a switch for each, and the choice of MuJoCo's renderer."""

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True)
class MachineSettings:
    """Switches of optimisations for speed.

    An optimisation is used if the machine supports it; `run.json` lists the used ones under
    `computing`. The switches hold for the whole process, from the construction of a trainer.

    Args:
        cuda_graphs: replay small compiled graphs on a GPU as CUDA graphs. Equal results.
        keep_freed_memory: make glibc keep freed memory, for faster allocations. Equal results.
        numpy_acting: act with small perceptrons, for few envs on a CPU, in NumPy. Last digits of
            actions differ.
        compiled_steps: if `compile` compiles graphs, act and step a batched torch env by a compiled
            graph. Last digits differ, as in the update.
        skip_signal_exchange: with several processes, skip Lightning's question to rank 0 about
            signals before each batch (2 ms with gloo). The trainer handles signals itself.
        mujoco_profiler: keep MuJoCo's profiler on, for `MjData.timer`; it takes a tenth of a step.
    """

    cuda_graphs: bool = True
    keep_freed_memory: bool = True
    numpy_acting: bool = True
    compiled_steps: bool = True
    skip_signal_exchange: bool = True
    mujoco_profiler: bool = False

    def apply(self) -> None:
        """Apply the settings to this process, and to processes that it forks from now on."""
        # One for the whole process, like what the switches change.
        global _in_force
        _in_force = self


PLAIN = MachineSettings(
    cuda_graphs=False,
    keep_freed_memory=False,
    numpy_acting=False,
    compiled_steps=False,
    skip_signal_exchange=False,
    mujoco_profiler=True,
)
"""No optimisation: the baseline of benchmarks."""

_in_force = MachineSettings()


def settings() -> MachineSettings:
    """Return the settings in force."""
    return _in_force


def offscreen_renderer() -> str:
    """Return a value of `MUJOCO_GL` that works without a screen: `egl`, `osmesa` or `disable`."""
    for name, library in (("egl", "libEGL.so.1"), ("osmesa", "libOSMesa.so.8")):
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return name
    return "disable"
