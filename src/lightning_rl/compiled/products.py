"""Choose what multiplies the matrices of compiled graphs on a CPU: MKL, or oneDNN if it is faster.

Which is faster depends on the CPU, and the last digits of a run on the choice. So a short test
decides once, and its answer is kept for each CPU and version of torch: runs on one machine agree.
"""

import json
import math
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rl.compiled.choice import DIFFERS, Choice, cpu
from lightning_rl.compiled.onednn import load_operator
from lightning_rl.system import ranks
from lightning_rl.system.errors import WriteError
from lightning_rl.system.files import write_atomically
from lightning_rl.system.machine import settings

FASTER = 1.25
"""How many times as fast oneDNN must be. Below that a busy machine could decide one way or the
other, and there is little to gain."""

SHAPES = ((64, 64, 64), (64, 256, 64), (512, 64, 64), (2048, 128, 128))
"""Rows, what is summed over, and columns: forward passes and gradients of weights of networks with
64 and 128 units, for minibatches of 64 to 2,048 samples."""

ROUNDS = 12
"""Of which each way's best counts: what else the machine does only ever makes it slower."""

ROUND_SECONDS = 3e-4
"""About how long one shape takes in a round, one way; the clock is exact to a ten-thousandth."""

CACHE = "LIGHTNING_RL_CACHE"
"""The environment variable that names the directory in which answers are kept."""


class Products(NamedTuple):
    """What multiplies matrices, `mkl` or `onednn`, and why, in words."""

    name: str
    why: str


def choose_products(choice: Choice, measure: Callable[[], float] | None = None) -> None:
    """Choose for a run, and leave the choice there; its operator is ready then.

    All ranks do so together, and get one answer: rank 0's.

    Args:
        choice: of the run. One that is resumed keeps to what it began with.
        measure: in place of `speed_ratio`.
    """
    before, products = choice.products_before, _wanted(choice, measure or speed_ratio)
    if products.name == "onednn" and ranks.agree(not load_operator()):
        products = Products("mkl", "oneDNN's operator cannot be compiled here")
    if before is not None and before != products.name:
        names = {"mkl": "MKL", "onednn": "oneDNN"}
        rank_zero_warn(
            f"The matrix products of the run were {names[before]}'s up to the checkpoint, and now "
            f"are {names[products.name]}'s: {products.why}. So {DIFFERS}."
        )
    choice.products, choice.products_why = products


def _wanted(choice: Choice, measure: Callable[[], float]) -> Products:
    asked = settings().products
    if asked != "auto":
        return Products(asked, f"trainer.machine.products: {asked}")
    if choice.products_before is not None:
        return Products(choice.products_before, "as in the checkpoint")
    found = find_products(measure) if ranks.rank() == 0 else None
    answer = ranks.gather_over_ranks(found)[0]
    assert answer is not None
    return answer


def find_products(measure: Callable[[], float]) -> Products:
    """Return what is faster on this machine: as an earlier run has found it, or by measuring."""
    if not torch.backends.mkldnn.is_available():
        return Products("mkl", "this torch has no oneDNN")
    if not torch.cpu.get_capabilities().get("avx512_f"):
        # oneDNN gains by AVX-512 where MKL keeps to AVX2. Without it the operator, which takes
        # seconds to compile, would be for nothing.
        return Products("mkl", "the CPU has no AVX-512, without which oneDNN is not faster")
    path = _answer_path()
    ratio, source = _kept(path), f"as an earlier run has measured, see {path}"
    if ratio is None:
        if not load_operator():
            return Products("mkl", "oneDNN's operator cannot be compiled here")
        ratio, source = measure(), "as measured when this run began"
        _keep(path, ratio)
    about = f"oneDNN multiplies {ratio:.2f} times as fast as MKL, {source}"
    return Products("onednn" if ratio >= FASTER else "mkl", f"{about}; it takes {FASTER}")


def speed_ratio() -> float:
    """Return how many times as fast as MKL oneDNN multiplies, on one thread.

    The operator must be ready. It takes some 50 ms.
    """
    product = torch.ops.lightning_rl.product.default
    generator = torch.Generator().manual_seed(0)  # its own: a run must draw what it would
    threads = torch.get_num_threads()
    ratios = []
    torch.set_num_threads(1)  # so that the answer does not depend on how many the run has
    try:
        for rows, inner, columns in SHAPES:
            a = torch.randn(rows, inner, generator=generator)
            b = torch.randn(inner, columns, generator=generator)
            mkl, onednn = best_times([lambda: torch.mm(a, b), lambda: product(a, b)])  # noqa: B023  # called at once
            ratios.append(mkl / onednn)
    finally:
        torch.set_num_threads(threads)
    return math.prod(ratios) ** (1 / len(ratios))


def best_times(
    ways: list[Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return how long each way takes at its best, in seconds a call.

    They take turns, so that a machine that changes its speed is fair to all.
    """

    def timed(way: Callable[[], object], calls: int) -> float:
        began = clock()
        for _ in range(calls):
            way()
        return (clock() - began) / calls

    first = [min(timed(way, 1) for _ in range(3)) for way in ways]  # the first ones warm up
    calls = max(1, math.ceil(ROUND_SECONDS / max(*first, 1e-9)))
    rounds = [[timed(way, calls) for way in ways] for _ in range(ROUNDS)]
    return [min(times) for times in zip(*rounds, strict=True)]


def cache_directory() -> Path:
    """Return where this user's answers are kept, as the environment has it."""
    if own := os.environ.get(CACHE):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "lightning_rl"


def _about() -> dict[str, str]:
    """Return what an answer is for."""
    return {"cpu": cpu(), "torch": torch.__version__}


def _answer_path() -> Path:
    name = re.sub(r"[^\w.+-]+", "_", " ".join(_about().values()))
    return cache_directory() / f"products_{name}.json"


def _kept(path: Path) -> float | None:
    """Return the ratio that is kept; None where there is none, or nothing to be made of it."""
    try:
        content = json.loads(path.read_text())
        ratio = float(content["onednn_times_as_fast"])
        mine = {key: content[key] for key in _about()} == _about()
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return ratio if mine and math.isfinite(ratio) and ratio > 0 else None


def _keep(path: Path, ratio: float) -> None:
    """Keep a ratio for runs to come; where that cannot be written, they measure again."""
    content = json.dumps(_about() | {"onednn_times_as_fast": ratio}, indent=1).encode()
    with suppress(WriteError, OSError):
        write_atomically(path, lambda file: file.write(content))
