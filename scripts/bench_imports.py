"""Compare starts of `rl-cli`: uncompiled, compiled with an empty cache of Inductor, compiled again.

    python scripts/bench_imports.py --start ppo_mujoco.yaml --pairs 3

Each run has one iteration, in a new interpreter. The script prints medians of CPU seconds, because
other load slows all, next to those of the imports of the two largest dependencies. Use an idle
machine for figures that you quote.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile

from scripting import parser_of

DEPENDENCIES = "import lightning.pytorch, tensordict"


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
        seconds = {DEPENDENCIES: cpu_seconds("-c", DEPENDENCIES)}
        seconds["uncompiled"] = cpu_seconds(*command, "false")
        for name in ("compiled, empty cache", "compiled, second start"):
            seconds[name] = cpu_seconds(*command, "true", TORCHINDUCTOR_CACHE_DIR=cache)
    return seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--start", metavar="CONFIG", default="ppo.yaml")
    args = parser.parse_args()
    runs = [starts(args.start) for _ in range(args.pairs)]
    for name in runs[0]:
        print(f"{statistics.median(run[name] for run in runs):6.2f} s  {name}")


if __name__ == "__main__":
    main()
