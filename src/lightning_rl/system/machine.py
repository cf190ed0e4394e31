"""The ways that are faster on some machines, in one place, with a switch for each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MachineSettings:
    """What is done for speed alone, and how to do without it.

    Each is used where it can be and is left out where not; `run.json` says under `computing` what
    was used. They hold for the whole process, from the making of a trainer on.

    Args:
        cuda_graphs: replay small compiled graphs on a GPU as CUDA graphs. Results are the same.
        keep_freed_memory: have the C library (glibc) keep what is freed, see `keep_freed_memory` of
            `process`. Results are the same. What an earlier trainer of the process has set stays.
        numpy_acting: act with small perceptrons, for few envs on a CPU, in NumPy. The actions are
            the same but for their last digits.
        compiled_steps: where `compile` has graphs compiled, step a batched torch env by one, acting
            included. Last digits differ, as those of the update do.
        skip_signal_exchange: with several processes, leave out what Lightning asks rank 0 before
            each batch, for 2 ms by gloo: whether it has got a signal. Signals come to us.
        mujoco_profiler: leave MuJoCo's own profiler on, which its Python bindings switch on, and
            which takes a tenth of a step; for who reads `MjData.timer`. Physics is the same.
    """

    cuda_graphs: bool = True
    keep_freed_memory: bool = True
    numpy_acting: bool = True
    compiled_steps: bool = True
    skip_signal_exchange: bool = True
    mujoco_profiler: bool = False


PLAIN = MachineSettings(
    cuda_graphs=False,
    keep_freed_memory=False,
    numpy_acting=False,
    compiled_steps=False,
    skip_signal_exchange=False,
    mujoco_profiler=True,
)
"""Nothing that is done for speed alone: what benchmarks compare with."""

_in_force = MachineSettings()


def settings() -> MachineSettings:
    """Return the settings in force."""
    return _in_force


def put_in_force(wanted: MachineSettings) -> None:
    """Have these hold from here on, in this process and those that it forks."""
    global _in_force
    _in_force = wanted
