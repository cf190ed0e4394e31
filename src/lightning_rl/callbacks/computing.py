"""Say by which ways a run computes: what `run.json` has under `computing`."""

from typing import Any

from lightning.pytorch import Trainer

from lightning_rl.algorithms import Algorithm
from lightning_rl.callbacks.typed import data_of
from lightning_rl.distributed import ranks


def computing_of(trainer: Trainer, algorithm: Algorithm) -> dict[str, Any]:
    """Return which of several ways to the same numbers, up to their last digits, a run takes.

    Returns:
        `compiled` and `why`; `products`, `mkl` or `onednn`, where a graph on the CPU has been
        compiled; `cuda_graphs`, whether graphs are replayed as such; `flush_denormal`, whether
        denormal numbers are taken for zero; `keeps_freed_memory`, whether the C library does;
        `sums_over_ranks`, `shared memory` or the backend of `torch.distributed`, null for one
        process; `acting` and `stepping`, the classes that do it, null where nothing is collected.
    """
    choice = algorithm.compilation
    collector = data_of(trainer).collector
    ways = {"acting": None, "stepping": None}
    return {
        "compiled": choice.compiled,
        "why": choice.why,
        "products": choice.products,
        "cuda_graphs": algorithm.replays_cuda_graphs,
        "flush_denormal": getattr(trainer, "flush_denormal", None),
        "keeps_freed_memory": getattr(trainer, "keeps_freed_memory", None),
        "sums_over_ranks": ranks.way_of_sums(),
        **(ways if collector is None else ways | collector.ways),
    }
