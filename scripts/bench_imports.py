"""Compare the import time of the package with the import time of its two largest dependencies.

    python scripts/bench_imports.py
    python scripts/bench_imports.py --start ppo_mujoco.yaml --pairs 3

Two interpreters start one after the other, several times, and the script compares their CPU
seconds, because other load slows both. Use an idle machine for figures that you quote.

With `--start` it compares whole runs of one iteration with the imports: uncompiled, compiled with
an empty cache of Inductor, and compiled again.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile

DEPENDENCIES = "import lightning.pytorch, tensordict"
PACKAGE = "from lightning_rl import PPO, RLTrainer, RLDataModule"


def cpu_seconds(*arguments: str, **environment: str) -> float:
    """Return the CPU seconds of a new interpreter, and of what it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [sys.executable, *arguments],
            check=True,
            cwd=directory,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def starts(config: str) -> dict[str, float]:
    """Return the CPU seconds of the imports, and of runs of one iteration."""
    command = ("-m", "lightning_rl", "fit", "--config", config, "--data.num_eval_episodes", "1")
    command += ("--trainer.max_steps", "1", "--model.compile")
    with tempfile.TemporaryDirectory() as cache:
        found = {DEPENDENCIES: cpu_seconds("-c", DEPENDENCIES)}
        found["uncompiled"] = cpu_seconds(*command, "false")
        for name in ("compiled, empty cache", "compiled, second start"):
            found[name] = cpu_seconds(*command, "true", TORCHINDUCTOR_CACHE_DIR=cache)
    return found


def main() -> None:
    """Print medians of CPU seconds, and the median of the pairs' ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--start", metavar="CONFIG", help="compare whole runs of one iteration")
    args = parser.parse_args()
    if args.start:
        runs = [starts(args.start) for _ in range(args.pairs)]
        for name in runs[0]:
            print(f"{statistics.median(run[name] for run in runs):6.2f} s  {name}")
        return
    codes = (DEPENDENCIES, PACKAGE)
    for code in codes:
        cpu_seconds("-c", code)  # compiles all files, and loads them into the file cache
    rows = [[cpu_seconds("-c", code) for code in codes] for _ in range(args.pairs)]
    for code, column in zip(codes, zip(*rows, strict=True), strict=True):
        print(f"{statistics.median(column):6.2f} s  {code}")
    ratios = sorted(package / dependencies for dependencies, package in rows)
    print(f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
