"""Run all GPU checks of this package, and write one report.

    PYTHONPATH=src python scripts/gpu_check.py                     # all that fits in 9 minutes
    PYTHONPATH=src python scripts/gpu_check.py --only compiled w3  # see --list
    PYTHONPATH=src python scripts/gpu_check.py --device cpu        # the same, small: a test of it

Each check runs in its own process (`scripts/gpu`) with a time-out, so that an error, a lack of
memory or a hang does not stop the others. Writes `report.md`, `report.json` (the raw numbers) and
the output of each check to `--output`.

Timed checks run first, one at a time; then `--jobs` of the rest at a time. Checks that do not fit
the time limit are reported as not run, with the command to run them.

Exit code 1 if a check failed; 2 for a mistake in the command line.
"""

import argparse
import contextlib
import difflib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripting import parser_of, processor, table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGES = ("lightning-rl", "torch", "triton", "lightning", "tensordict", "gymnasium", "numpy")
PACKAGES += ("rsl-rl-lib",)
PATIENCE = 2.5
"""A check is ended after this multiple of its expected time."""

SMALL_SECONDS = 240.0
"""Time limit of any small check; on a busy CPU it has to compile."""

TIME_LIMIT = 540.0
"""Seconds for everything on a GPU: machines are lent for ten minutes a command."""

SECONDS_TO_SAY = 1.0
"""Seconds for a hanging check to print its stacks."""

LINES = 60
"""Last lines of a failed check's output in the report."""

MEMORY = """
## Memory

Bytes allocated at the peak, beyond what was before the run. The estimate is of what training keeps:
cuBLAS's workspace (tens of MiB) is not in it, and outweighs a small run.
"""


@dataclass(frozen=True)
class Check:
    """One process.

    Attributes:
        target: `module:function` of `scripts/gpu`, which gets the check's `Findings`.
        seconds: expected seconds on a data-centre GPU, with compiling.
        alone: whether no other check may run at the same time.
    """

    name: str
    target: str
    about: str
    seconds: float
    alone: bool = False


CHECKS = (
    Check("w3", "speed:w3", "W3: env steps/s, beside RSL-RL", 150, alone=True),
    Check("steps_speed", "speed:steps", "compiled steps of the tasks, to eager", 110, alone=True),
    Check("steps", "equality:steps", "compiled steps and CUDA graphs, to eager", 100),
    Check("compiled", "equality:compiled", "compiled updates and CUDA graphs, to eager", 80),
    Check("processes", "processes:in_processes", "NCCL (gloo on a CPU) with one and two ranks", 90),
    Check("fsdp", "sharded:in_shards", "a VLA with shards (FSDP2), to whole policies", 120),
    Check("async", "equality:asynchronous", "collection in the background, to that in turns", 50),
    Check("resume", "equality:resume", "resumed runs, to uninterrupted ones", 50),
    Check("bf16", "precision:bf16", "bf16-mixed: first ratio, float32 weights, learning", 70),
    Check("memory", "memory:memory", "peak memory to its estimate, and growth", 60),
    Check("vla_ppo", "learning:learn_vla", "the VLA toy: clone, then PPO", 120),
    Check("ppo_push_cube", "learning:learn", "ppo_push_cube.yaml to its bar", 90),
    Check("ppo_cart_pole", "learning:learn", "ppo_cart_pole_task.yaml to its bar", 60),
    Check("grpo_push_cube", "learning:learn", "grpo_push_cube.yaml to its bar", 110),
    Check("ppo_point_mass", "learning:learn", "ppo_point_mass.yaml to its bar", 90),
    Check("vla_grpo", "learning:learn_vla", "the VLA toy: clone, then GRPO", 150),
    Check("grpo_cart_pole", "learning:learn", "grpo_cart_pole_task.yaml to its bar", 180),
)
"""Sorted by importance, after the checks that run alone."""

FAILED, NOT_RUN = "failed", "not run"

Outcome = dict[str, Any]
"""Of a check: name, about, status, seconds, rows, memory, error, output."""


def main(argv: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    args = arguments(argv, checks)
    if args.list:
        width = max(len(check.name) for check in checks)
        print("\n".join(f"{check.name:{width}}  {check.about}" for check in checks))
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    chosen = [check for check in checks if not args.only or check.name in args.only]
    print(f"{len(chosen)} checks on {args.device}{', small' if args.small else ''}", flush=True)
    report = {
        "command": [Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)],
        "began": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": args.device,
        "small": args.small,
        "machine": machine(args.device),
    }

    def write(outcomes: list[Outcome]) -> str:
        content = report | {"checks": outcomes}
        text = as_markdown(content)
        (args.output / "report.json").write_text(json.dumps(content, indent=1))
        (args.output / "report.md").write_text(text)
        return text

    outcomes = Runs(args, write).all(chosen)
    print(f"\n{write(outcomes)}\nReport: {args.output / 'report.md'}")
    return int(any(outcome["status"] == FAILED for outcome in outcomes))


def arguments(argv: Sequence[str] | None, checks: Sequence[Check]) -> argparse.Namespace:
    """Parse the command line, and set the defaults of the device."""
    parser = parser_of(__doc__)
    about = "on a CPU a few iterations each, and no bar that needs more"
    parser.add_argument("--device", choices=("cuda", "cpu", "auto"), default="auto", help=about)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks by name, see --list")
    parser.add_argument("--list", action="store_true", help="print the checks and stop")
    parser.add_argument("--output", type=Path, default=Path("gpu_check"), metavar="DIR")
    limit = f"over everything; {TIME_LIMIT:.0f} on a GPU, none on a CPU, if not given"
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help=limit)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="of each check")
    parser.add_argument("--jobs", type=int, help="at a time; a quarter of the cores on a GPU, or 1")
    args = parser.parse_args(argv)
    names = [check.name for check in checks]
    for name in args.only or []:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            parser.error(f"--only: there is no check '{name}'; there are {', '.join(names)}.{hint}")
    for option in ("time_limit", "timeout", "jobs"):
        value = getattr(args, option)
        if value is not None and value <= 0:
            named = f"--{option.replace('_', '-')}"
            parser.error(f"{named} must be above 0, got {value:g}; leave it out for the default.")
    if not args.list:
        args.device = chosen_device(args.device, parser)
    args.small = args.device != "cuda"
    args.time_limit = args.time_limit or (float("inf") if args.small else TIME_LIMIT)
    args.jobs = args.jobs or (1 if args.small else max(1, min(4, (os.cpu_count() or 1) // 4)))
    args.output = args.output.absolute()
    return args


def chosen_device(device: str, parser: argparse.ArgumentParser) -> str:
    if device == "cpu":
        return device
    import torch  # here, so that --help and runs on a CPU do not wait for it

    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        parser.error(
            f"--device cuda: torch {torch.__version__} sees no GPU. Use --device cpu for a small "
            "run of every check, or install a torch built for CUDA and look at nvidia-smi."
        )
    return "cpu"


class Runs:
    """Run checks in their own processes, within the time limit.

    Args:
        args: of the command line.
        write: writes the report so far, after each check, in case the machine is taken away.
    """

    def __init__(self, args: argparse.Namespace, write: Callable[[list[Outcome]], Any]) -> None:
        self._args = args
        self._write = write
        self._deadline = time.monotonic() + args.time_limit
        self._outcomes: list[Outcome] = []
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def all(self, checks: Sequence[Check]) -> list[Outcome]:
        """Return the results of the checks: first those that run alone, then the others."""
        pool = ThreadPoolExecutor(self._args.jobs)
        try:
            for check in checks:
                if check.alone:
                    self._run(check)
            list(pool.map(self._run, [check for check in checks if not check.alone]))
        finally:  # also after Ctrl-C: processes in own sessions would keep running
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self._running):
                end_group(process)
        return self._outcomes

    def _run(self, check: Check) -> None:
        """Run a check if there is time left for it, and report."""
        left = self._deadline - time.monotonic()
        outcome: Outcome = {"name": check.name, "about": check.about, "seconds": 0.0}
        outcome |= {"rows": [], "memory": [], "error": None, "output": ""}
        expected = 1.0 if self._args.small else check.seconds
        if left < expected:
            error = f"{max(0.0, left):.0f} s were left of --time-limit, {expected:.0f} are needed"
            outcome |= {"status": NOT_RUN, "error": error}
        else:
            timeout = SMALL_SECONDS if self._args.small else PATIENCE * check.seconds
            outcome |= self._outcome_of(check, min(left, self._args.timeout or timeout))
        with self._lock:
            self._outcomes.append(outcome)
            error = f"  {outcome['error']}" if outcome["error"] else ""
            head = f"{outcome['status']:8} {outcome['name']:15} {outcome['seconds']:5.0f} s{error}"
            lines = [f"    {verdict(row['passed']):3} {said(row)}" for row in outcome["rows"]]
            print("\n".join([head, *lines]), flush=True)
            self._write(self._outcomes)

    def _outcome_of(self, check: Check, timeout: float) -> Outcome:
        """Run a check, and read what it has written."""
        directory = self._args.output / check.name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        command = [sys.executable, str(HERE / "gpu" / "run_check.py"), check.target]
        command += [self._args.device, str(directory), *(["--small"] if self._args.small else [])]
        began = time.monotonic()
        with (directory / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=directory,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its child processes can be ended, too
            )
            self._running.add(process)
            error = None
            try:
                status = process.wait(timeout)
                if status < 0:
                    error = f"ended by {signal.Signals(-status).name}"
                elif status > 0:
                    error = f"exit code {status}"
            except subprocess.TimeoutExpired:
                error = f"no end within {timeout:.0f} s"
                process.send_signal(signal.SIGQUIT)  # prints the stacks of its threads
                time.sleep(SECONDS_TO_SAY)
            finally:
                end_group(process)
                self._running.discard(process)
        printed = (directory / "output.txt").read_text(errors="replace")
        if error is not None and (last := last_error(printed)):
            error += f": {last}"
        written = directory / "findings.json"
        findings: dict[str, Any] = {"rows": [], "memory": []}
        if written.exists():  # else the check died before its first row
            findings = json.loads(written.read_text())
        passed = error is None and all(row["passed"] is not False for row in findings["rows"])
        return {
            "status": "passed" if passed else FAILED,
            "error": error,
            "seconds": time.monotonic() - began,
            "output": "" if passed else "\n".join(printed.splitlines()[-LINES:]),
            **findings,
        }


def environment() -> dict[str, str]:
    """Return the environment of a check, with the package of this checkout."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = (str(Path(path).absolute()) for path in (ROOT / "src", ROOT, HERE, *given))
    changed = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    # One thread each, unless a check sets more, because several run in parallel.
    return {"OMP_NUM_THREADS": "1", **os.environ, **changed}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a check and its child processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_error(printed: str) -> str:
    """Return the last line of the last traceback."""
    if "Traceback (most recent call last)" not in printed:
        return ""
    lines = printed.rpartition("Traceback (most recent call last)")[2].splitlines()
    return next((line for line in lines[1:] if line and not line.startswith(" ")), "")


def said(row: dict[str, Any]) -> str:
    bar = f" ({row['bar']})" if row["bar"] else ""
    return f"{row['name']}: {row['figure']}{bar}"


def verdict(passed: bool | None) -> str:
    return "-" if passed is None else "yes" if passed else "NO"


def machine(device: str) -> list[str]:
    """Return the conditions of the figures: device, driver, cores and versions."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    lines = []
    if device == "cuda":
        import torch

        query = "--query-gpu=name,driver_version,memory.total"
        gpus = printed_by("nvidia-smi", query, "--format=csv,noheader")
        lines = [f"GPU (name, driver, memory): {gpu}" for gpu in gpus.splitlines()]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions |= {"cuda": str(torch.version.cuda), "nccl": nccl}
    lines.append(f"{processor()}, {os.cpu_count()} cores, {platform.platform()}")
    commit = printed_by("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "unknown"
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [*lines, f"commit {commit}; {packages}"]


def printed_by(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def as_markdown(report: dict[str, Any]) -> str:
    outcomes = report["checks"]
    counts = {s: sum(o["status"] == s for o in outcomes) for s in ("passed", FAILED, NOT_RUN)}
    size = " (small: a few iterations each, bars of learning not applied)"
    lines = [
        f"# Checks on {report['device']}{size if report['small'] else ''}",
        "",
        f"{report['began']}: {', '.join(f'{n} {s}' for s, n in counts.items())}.",
        "",
        *results_table(outcomes),
        MEMORY,
        *memory_table(outcomes),
    ]
    for outcome in outcomes:
        if outcome["status"] == FAILED:
            lines += ["", f"## {outcome['name']} failed", "", outcome["about"] + ".", ""]
            lines += [f"- {said(row)}" for row in outcome["rows"] if row["passed"] is False]
            lines += [f"- {outcome['error']}"] if outcome["error"] else []
            lines += ["", "The end of what it printed:", "", "```", outcome["output"], "```"]
    lines += ["", "## Machine", "", *(f"- {line}" for line in report["machine"])]
    return "\n".join(lines) + "\n"


def results_table(outcomes: list[Outcome]) -> list[str]:
    rows = []
    for outcome in outcomes:
        for row in outcome["rows"]:
            cells = f"{outcome['name']}: {row['name']}", verdict(row["passed"]), row["figure"]
            rows.append([*cells, row["bar"], f"{row['seconds']:.1f}"])
        if outcome["error"] or not outcome["rows"]:
            passed = NOT_RUN if outcome["status"] == NOT_RUN else "NO"
            error = outcome["error"] or "it found nothing"
            rows.append([outcome["name"], passed, error, "", f"{outcome['seconds']:.1f}"])
    lines = table(("check", "passed", "figure", "bar", "seconds"), rows)
    missing = [outcome["name"] for outcome in outcomes if outcome["status"] == NOT_RUN]
    if missing:
        lines += ["", f"Not run; run them by `scripts/gpu_check.py --only {' '.join(missing)}`."]
    return lines


def memory_table(outcomes: list[Outcome]) -> list[str]:
    """Compare each run's device memory with the package's own estimate."""
    columns = ("run", "iterations", "estimated", "peak", "peak / estimated")
    rows = []
    for outcome in outcomes:
        for row in outcome["memory"]:
            peak, estimate = row["peak"], row["estimate"]
            ratio = f"{peak / estimate:.2f}" if peak and estimate else ""
            sizes = mebi(estimate), mebi(peak), ratio, mebi(row["growth"])
            rows.append([f"{outcome['name']}: {row['run']}", row["iterations"], *sizes])
    return table((*columns, "growth, second half"), rows)


def mebi(size: float | None) -> str:
    return "" if size is None else f"{size / 2**20:,.1f} MiB"


def leave(number: int, frame: object) -> None:
    """End as after Ctrl-C, which ends the running checks."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    former = signal.signal(signal.SIGTERM, leave)
    try:
        sys.exit(main())
    finally:  # tests run this file in their own process
        signal.signal(signal.SIGTERM, former)
