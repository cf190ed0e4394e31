"""Break the package on purpose, one defect at a time, and see whether its tests notice.

    python scripts/mutations.py                          # all of them, about a quarter of an hour
    python scripts/mutations.py --only gae staleness     # those whose text has one of these words
    python scripts/mutations.py --jobs 2 --write         # also into scripts/results/mutations.md;
                                                         # with --only, the rows of those alone
    python scripts/mutations.py --jobs 2 --notice        # two tests that notice each, and which
                                                         # tests nothing needs: see noticing.py
    python scripts/mutations.py --drawn 40 --seed 0 --only functional/ rollout/
                                                         # drawn at random, below folders: drawn.py

Each defect is one that code like this has had somewhere: an episode that goes on over its end, a
generator that is not saved, a rank that trains by itself. `mutations.txt` lists them. A defect is
made in a copy of the tree, and the test files named beside it run there until one fails: first the
test that caught it when the results were last written. Who shortens, merges or removes tests runs
this before and after: what was caught must still be.

`tests/test_architecture.py` keeps the list true: every text stands exactly once in its file, every
test file is there, and every package of the source has a defect.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import noticing

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/lightning_rl"
RESULTS = ROOT / "scripts" / "results" / "mutations.md"

COPIED = ("src", "tests", "configs", "docs", "scripts", "README.md", "CHANGELOG.md")
COPIED += ("pyproject.toml", "constraints.txt")

LOADED_ONCE = ("pytest", "torch", "lightning.pytorch.cli", "tensordict", "gymnasium.vector")
LOADED_ONCE += ("torch.utils.tensorboard", "torch._dynamo", "torchmetrics")
"""Libraries that each run of the tests would take seconds to import; it is forked after them."""

PATIENCE = 120
"""Seconds that one test may take; a defect may well have one wait for ever."""


class Mutation(NamedTuple):
    """One defect.

    Attributes:
        file: below src/lightning_rl.
        defect: what is wrong then.
        before: text that stands once in the file.
        after: what takes its place.
        tests: files below tests/, those of the package that are about it.
    """

    file: str
    defect: str
    before: str
    after: str
    tests: str

    @property
    def package(self) -> str:
        """The folder, or the name of a module at the top."""
        folder = Path(self.file).parent.as_posix()
        return folder if folder != "." else Path(self.file).stem


def read_mutations() -> Iterator[Mutation]:
    """Yield the defects of mutations.txt, whose head describes the format."""
    for block in TABLE.read_text().split("\n\n")[1:]:
        place, defect, *lines = block.strip("\n").split("\n")
        file, tests = place.split(" | ")
        before, after = ("\n".join(x[1:] for x in lines if x[0] == sign) for sign in "-+")
        yield Mutation(file, defect, before, after, tests)


TABLE = ROOT / "scripts" / "mutations.txt"
MUTATIONS = tuple(read_mutations())


class Outcome(NamedTuple):
    """What became of a defect.

    Attributes:
        test: that failed, and its message; None where all passed.
        seconds: of CPU time, of the tests and what they have started.
    """

    mutation: Mutation
    test: tuple[str, str] | None
    seconds: float


def main() -> None:
    """Try the defects, print a line for each, and say how many were caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="words of the file or the defect")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--notice", action="store_true", help="two tests that notice each")
    parser.add_argument("--drawn", type=int, default=0, help="this many at random, with --notice")
    parser.add_argument("--seed", type=int, default=0, help="of --drawn (default: 0)")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if any(w in f"{m.file} {m.defect}" for w in arguments.only)]
    if arguments.drawn:
        chosen = drawn_at_random(arguments.only, arguments.drawn, arguments.seed)
    for name in LOADED_ONCE:
        importlib.import_module(name)
    if arguments.notice or arguments.drawn:
        enough = 1 if arguments.drawn else 2
        rows = notice(chosen, arguments.jobs, enough)
        if arguments.write and not arguments.drawn:
            noticing.write_rooms({m.defect: m.package for m in chosen}, rows)
        return
    outcomes = []
    for outcome in tried(chosen, arguments.jobs):
        outcomes.append(outcome)
        mutation, test, seconds = outcome
        found = f"caught by {test[0]}\n         {test[1]}" if test else "SURVIVED"
        print(f"{seconds:5.0f} s  {mutation.file}: {mutation.defect}: {found}", flush=True)
    survived = sum(outcome.test is None for outcome in outcomes)
    print(f"{len(outcomes) - survived} of {len(outcomes)} caught")
    if arguments.write:
        now = {o.mutation.defect: o.test[0] if o.test else "" for o in outcomes}
        RESULTS.write_text(table(caught_before() | now))
    sys.exit(1 if survived else 0)


def drawn_at_random(below: Sequence[str], count: int, seed: int) -> list[Mutation]:
    """Return random defects of the files below some folders of the package."""
    from drawn import drawn

    package = ROOT / PACKAGE
    files = sorted(file for name in below for file in (package / name).rglob("*.py"))
    return [
        Mutation(file.relative_to(package).as_posix(), defect, before, after, "")
        for file, defect, before, after in drawn(files, count, seed)
    ]


def notice(mutations: Sequence[Mutation], jobs: int, enough: int) -> dict[str, dict[str, Any]]:
    """Find tests that notice each defect, and print the test functions that nothing needs.

    Returns the stored rows, by defect.

    Args:
        enough: how many tests are looked for.
    """
    reach = noticing.Reach()
    rows = noticing.stored_rows()
    left = [m for m in mutations if m.defect not in rows]

    def tests(mutation: Mutation) -> list[str]:
        needed = {noticing.function(test) for row in rows.values() for test in row["noticed_by"]}
        files = [f"tests/{name}" for name in mutation.tests.split()]
        return reach.tests(f"{PACKAGE}/{mutation.file}", mutation.before, files, needed)

    for mutation, test, seconds in tried(left, jobs, tests, enough):
        row = {"defect": mutation.defect, "file": mutation.file, "after": mutation.after}
        row |= json.loads(test[0]) if test else {}
        rows[mutation.defect] = row
        noticing.keep(row)
        print(
            f"{seconds:5.0f} s  {mutation.file}: {mutation.defect}: {row['noticed_by']}", flush=True
        )
    counts = [min(len(set(rows[m.defect]["noticed_by"])), 2) for m in mutations]
    print(
        f"{len(counts)} defects: {[counts.count(n) for n in (2, 1, 0)]} noticed twice, once, never"
    )
    for name, lines in noticing.superfluous(reach, rows):
        print(f"{lines:5} lines  {name}")
    return rows


def tried(
    mutations: Sequence[Mutation],
    jobs: int,
    tests: Callable[[Mutation], list[str]] | None = None,
    enough: int = 1,
) -> Iterator[Outcome]:
    """Yield the outcomes as they come, some defects at a time, each in a process of its own.

    Args:
        tests: returns the tests that a defect meets, until `enough` notice it.
    """
    waiting = list(mutations)
    running: dict[int, tuple[Mutation, tempfile.TemporaryDirectory[str]]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutation = waiting.pop(0)
            folder = tempfile.TemporaryDirectory(prefix="mutation-")
            watch = noticing.Watch(tests(mutation), enough) if tests else None
            running[_started(mutation, Path(folder.name), watch)] = mutation, folder
        pid, _, usage = os.wait4(-1, 0)
        mutation, folder = running.pop(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the tests have left behind
        test, _, message = (Path(folder.name) / "failed").read_text().partition("\n")
        folder.cleanup()
        yield Outcome(mutation, (test, message) if test else None, usage.ru_utime + usage.ru_stime)


def _started(mutation: Mutation, folder: Path, watch: noticing.Watch | None) -> int:
    """Fork a process that runs the tests on a copy of the tree; return its number."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        _test(mutation, folder, watch)
    finally:
        os._exit(0)


def _test(mutation: Mutation, folder: Path, watch: noticing.Watch | None) -> None:
    """Write the first test that fails to `failed`, or nothing; with `watch`, a row of JSON."""
    import pytest

    tree, failed = folder / "tree", folder / "failed"
    os.setpgid(0, 0)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    ignored = shutil.ignore_patterns("__pycache__", "outputs")
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, tree / name, **({"ignore": ignored} if copy is shutil.copytree else {}))
    target = tree / PACKAGE / mutation.file
    target.write_text(applied(mutation, target.read_text()))
    os.chdir(tree)
    sys.path[:0] = [str(tree / "src"), str(tree)]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    failed.write_text("(it ended the process that ran the tests)")
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", str(PATIENCE)]
    files = [f"tests/{name}" for name in mutation.tests.split()]
    if watch is not None:
        failed.write_text('{"noticed_by": ["(it ended the process)"], "not_run": []}')
        watch.run(options)
        failed.write_text(json.dumps(watch.row()))
        return
    options.append("-x")
    first = FirstFailure()
    known = caught_before().get(mutation.defect)
    status = pytest.main([*options, known], plugins=[first]) if known else 0
    if not first.test:
        status = pytest.main([*options, *files], plugins=[first])
    otherwise = "" if status == 0 else f"(pytest ended with {status!s})"
    failed.write_text(f"{first.test}\n{first.message}" if first.test else otherwise)


def caught_before() -> dict[str, str]:
    """Return the tests in the results that are there, by defect; empty where nothing caught it."""
    text = RESULTS.read_text() if RESULTS.is_file() else ""
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| (?:`([^`]+)`|\*\*nothing\*\*) \|$", text, re.M)
    return {defect: f"tests/{test}" if test else "" for defect, test in rows}


class FirstFailure:
    """A plugin of pytest: remembers which test failed, and why."""

    test = message = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Look at a test, or at what sets it up."""
        if report.failed and not self.test:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(report.longrepr if crash is None else crash.message)
            self.test, self.message = report.nodeid, reason.strip().splitlines()[0]

    pytest_collectreport = pytest_runtest_logreport


def applied(mutation: Mutation, content: str) -> str:
    """Return a file with the defect in it.

    Raises:
        ValueError: where the text does not stand exactly once in the file.
    """
    count = content.count(mutation.before)
    if count != 1:
        raise ValueError(f"{mutation.file} has {count} times, not once: {mutation.before}")
    return content.replace(mutation.before, mutation.after)


def table(caught_by: Mapping[str, str]) -> str:
    """Return as Markdown which test caught each defect, in the order of the defects.

    Args:
        caught_by: the name of the test by the defect, empty where none did.
    """
    tried = [m for m in MUTATIONS if m.defect in caught_by]
    lines = [
        "# Which defects the tests notice",
        "",
        f"{sum(bool(caught_by[m.defect]) for m in tried)} of {len(tried)}, by",
        "`python scripts/mutations.py --write`. Each test file beside a defect ran until its first",
        "failure; with `--only`, the other rows are those of before.",
        "",
        "| package | defect | caught by |",
        "|---|---|---|",
    ]
    for m in tried:
        test = caught_by[m.defect].removeprefix("tests/")
        lines.append(f"| {m.package} | {m.defect} | {f'`{test}`' if test else '**nothing**'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
