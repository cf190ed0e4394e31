"""Compare the device's memory at its peak to the package's own estimate, and look for growth."""

from typing import Any

from findings import Findings
from training import train

RATIO = {"eager": (0.5, 2.0), "compiled": (0.0, 2.0)}
"""Peak over estimate, from and to: the estimate leaves out what operations need for a moment, and
is one of eager updates; compiled ones may keep less."""

MAX_GROWTH = 2**20
"""Bytes that the second half of a run may take beyond the first."""

LARGE: dict[str, Any] = {"num_envs": 4096, "buffer_size": 16}
WIDE: dict[str, Any] = {"hidden_sizes": (1024, 1024), "normalize_observation": True}
"""Large enough that weights, rollouts and activations are most of what is taken, not cuBLAS."""


def memory(findings: Findings) -> None:
    for compile in (False, True) if findings.device == "cuda" else (False,):
        kind = "compiled" if compile else "eager"
        iterations = 6 if findings.small else 12
        sizes: dict[str, Any] = {} if findings.small else {"data": LARGE, "policy": WIDE}
        model = {"compile": compile} | ({} if findings.small else {"batch_size": 4096 * 8})
        run = train(findings, f"memory {kind}", model=model, iterations=iterations, **sizes)
        estimate = sum(run.estimate.values())
        peak, growth = run.peak(), run.growth()
        low, high = RATIO[kind]
        bar = f"from {low:g} to {high:g}"
        if peak is None:
            figure = f"no device memory on a CPU; estimate {mebi(estimate)}"
            findings.add(f"peak over estimate, {kind}", None, figure, bar, **run.estimate)
            findings.add(f"growth, {kind}", None, "resident memory alone on a CPU, no bar applied")
            continue
        figure = f"{peak / estimate:.2f}: {mebi(peak)} where {mebi(estimate)} were estimated"
        passed = None if findings.small else low <= peak / estimate <= high
        findings.add(f"peak over estimate, {kind}", passed, figure, bar, **run.estimate)
        figure, bar = f"{mebi(growth)} in {iterations} iterations", f"at most {mebi(MAX_GROWTH)}"
        findings.add(f"growth, {kind}", growth <= MAX_GROWTH, figure, bar, growth=growth)


def mebi(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
