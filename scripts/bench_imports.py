"""Compare the import time of the package with the import time of its two largest dependencies.

    python scripts/bench_imports.py

Two interpreters start one after the other, several times, and the script compares their CPU
seconds, because other load slows both. Use an idle machine for figures that you quote.
"""

import argparse
import resource
import statistics
import subprocess
import sys

DEPENDENCIES = "import lightning.pytorch, tensordict"
PACKAGE = "from lightning_rl import PPO, RLTrainer, RLDataModule"


def cpu_seconds(code: str) -> float:
    """Return the CPU seconds of a new interpreter that runs a line of code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the CPU seconds of both, and the median of the pairs' ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=11)
    pairs = parser.parse_args().pairs
    for code in (DEPENDENCIES, PACKAGE):
        cpu_seconds(code)  # compiles all files, and loads them into the file cache
    rows = [(cpu_seconds(DEPENDENCIES), cpu_seconds(PACKAGE)) for _ in range(pairs)]
    for code, column in zip((DEPENDENCIES, PACKAGE), zip(*rows, strict=True), strict=True):
        print(f"{statistics.median(column):6.2f} s  {code}")
    ratios = sorted(package / dependencies for dependencies, package in rows)
    print(f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
