"""Record which branches each test takes, and judge which tests neither a defect nor a branch needs.

`mutations.py --notice` uses it in two steps, each stored as it is done in build/mutations/COMMIT:

1. Each test file runs once under coverage, in a process: branches and CPU seconds of each test.
2. Each defect meets the tests in the files that its entry names (coverage sees no child processes),
   then the other tests that reach its lines, until two notice it. Tests that another defect needs
   come first, then quick ones. More than two are not looked for: the rest of the row needs no run.

A test function may go if each defect keeps two tests that notice it (or as many as there were) and
each branch of the package keeps a test that takes it. A test that was not run on a defect which
fewer than two others notice stays. Tests of `EXEMPT` stay.
"""

import ast
import json
import os
import pkgutil
import re
import sqlite3
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results" / "noticing.md"
EXEMPT = ("tests/reports/", "tests/core/reports/", "tests/security/", "tests/test_")

LONGEST = 30
"""CPU seconds of tests for one defect."""

FILES = 3
"""Test files that are imported at a time."""


@cache
def store() -> Path:
    """Return the folder of the results for the commit of the tree."""
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, text=True
    )
    folder = ROOT / "build" / "mutations" / commit.strip()
    (folder / "branches").mkdir(parents=True, exist_ok=True)
    return folder


# --- the branches of each test ---


class Recorder:
    """Pytest plugin: record branches and CPU seconds of each test of a file."""

    def __init__(self) -> None:
        import coverage

        self._data = store() / f"{os.getpid()}.coverage"
        self._coverage = coverage.Coverage(
            data_file=self._data, branch=True, source_pkgs=["lightning_rl"], messages=False
        )
        self._coverage.start()
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure one test, with the fixtures that it makes."""
        self._coverage.switch_context(item.nodeid)
        start = sum(os.times()[:4])  # of this process and its ended children
        result = yield
        self._seconds[item.nodeid] = sum(os.times()[:4]) - start
        return result

    def write(self, target: Path) -> None:
        """Write a code of 64 bits for each branch, by test."""
        self._coverage.stop()
        self._coverage.save()
        taken: dict[str, list[int]] = {test: [] for test in self._seconds}
        with sqlite3.connect(self._data) as database:
            query = "select context, path, fromno, tono from arc, context, file"
            query += " where context_id = context.id and file_id = file.id"
            for test, path, start, end in database.execute(query):
                if test in taken:
                    taken[test].append(code(os.path.relpath(path, ROOT), start, end))
        self._data.unlink()
        branches = [np.array(taken[test], dtype=np.uint64) for test in taken]
        np.savez_compressed(
            target.with_suffix(".part.npz"),
            tests=np.array(list(taken)),
            seconds=np.array(list(self._seconds.values())),
            lengths=np.array(list(map(len, branches)), dtype=np.int64),
            branches=np.concatenate(branches) if branches else np.zeros(0, np.uint64),
        )
        target.with_suffix(".part.npz").rename(target)


def code(file: str, start: int, end: int) -> int:
    """Return a number for the branch from a line to a line of a file."""
    return zlib.crc32(file.encode()) << 32 | (start & 0xFFFF) << 16 | end & 0xFFFF


def record(folders: Sequence[str]) -> None:
    """Record the test files below some folders that the store does not have, each in a fork."""
    import lightning_rl

    for module in pkgutil.walk_packages(lightning_rl.__path__, "lightning_rl."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    for file in sorted(path for name in folders for path in (ROOT / name).rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        target = store() / "branches" / f"{name.replace('/', '.')}.npz"
        if target.exists() or name.startswith("tests/test_"):
            continue
        if pid := os.fork():
            os.waitpid(pid, 0)
            print(f"{'recorded' if target.exists() else 'NOT RECORDED'}: {name}", flush=True)
            continue
        try:
            os.chdir(ROOT)
            sys.path.insert(0, str(ROOT))
            recorder = Recorder()
            options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "300", "--no-header"]
            pytest.main([*options, name], plugins=[recorder])
            recorder.write(target)
        finally:
            os._exit(0)


class Reach:
    """The tests in the store, with their seconds and the branches that they take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.branches: dict[str, NDArray[np.uint64]] = {}
        for file in (store() / "branches").glob("tests*.py.npz"):
            with np.load(file) as data:
                tests = data["tests"].tolist()
                parts = np.split(data["branches"], data["lengths"].cumsum()[:-1]) if tests else []
                self.seconds |= zip(tests, data["seconds"].tolist(), strict=True)
                self.branches |= zip(tests, parts, strict=True)

    def tests(self, file: str, text: str, named: Sequence[str], needed: set[str]) -> list[str]:
        """Return the tests of the named files, and then the others that reach a text.

        Args:
            file: below the root.
            text: stands once in it.
            named: test files, below the root.
            needed: test functions that come first.
        """
        content = (ROOT / file).read_text()
        first = content.split(text)[0].count("\n") + 1
        last = first + text.count("\n")
        # No test takes a branch in a signature: then the whole function counts, or the file.
        around = [
            node for node in ast.walk(ast.parse(content)) if isinstance(node, ast.FunctionDef)
        ]
        spans = [(node.lineno, node.end_lineno or 0) for node in around]
        spans = sorted((end - begin, begin, end) for begin, end in spans if begin <= first <= end)
        for begin, end in [(first, last), *((begin, end) for _, begin, end in spans), (1, 1 << 16)]:
            if reaching := self._reaching(file, begin, end):
                break
        about = {test for test in self.seconds if test.split("::")[0] in named}

        def order(test: str) -> tuple[bool, bool, float]:
            return test not in about, function(test) not in needed, self.seconds[test]

        return sorted(reaching | about, key=order)

    def _reaching(self, file: str, first: int, last: int) -> set[str]:
        """Return the tests that take a branch from or to a line of a file."""
        reaching, low = set(), np.uint64(0xFFFF)
        for test, branches in self.branches.items():
            here = branches[branches >> np.uint64(32) == np.uint64(zlib.crc32(file.encode()))]
            ends = np.concatenate(((here >> np.uint64(16)) & low, here & low))
            if ((ends >= first) & (ends <= last)).any():
                reaching.add(test)
        return reaching


# --- the tests that notice a defect ---


class Watch:
    """Pytest plugin that runs some tests of a defect, until enough have noticed it.

    Attributes:
        noticed_by: the tests that failed.
        ran: the tests that ran.
    """

    def __init__(self, tests: Sequence[str], enough: int) -> None:
        self.noticed_by: list[str] = []
        self.ran: list[str] = []
        self._tests, self._enough = tests, enough
        self._end = time.process_time() + LONGEST

    def run(self, options: Sequence[str]) -> None:
        """Run the tests in their order."""
        files = list(dict.fromkeys(test.split("::")[0] for test in self._tests))
        for first in range(0, len(files), FILES):  # to import them all takes longer than the tests
            if not self._enough_seen():
                pytest.main([*options, *files[first : first + FILES]], plugins=[self])

    def row(self) -> dict[str, Any]:
        """Return the tests that noticed; if they are fewer than asked for, the others, too."""
        rest = [test for test in self._tests if test not in self.ran]
        short = len(set(map(function, self.noticed_by))) < self._enough
        return {"noticed_by": self.noticed_by, "not_run": rest if short else []}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that are to run."""
        collected = {item.nodeid: item for item in items}
        items[:] = [collected[test] for test in self._tests if test in collected]

    def pytest_collectreport(self, report: Any) -> None:
        """Count a file that cannot be imported as a failed test."""
        if report.failed:
            self.noticed_by.append(report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a failure."""
        if report.failed and report.nodeid not in self.noticed_by:
            self.noticed_by.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Stop after the test that is enough."""
        result = yield
        self.ran.append(item.nodeid)
        if self._enough_seen():
            item.session.shouldstop = "enough"
        return result

    def _enough_seen(self) -> bool:
        functions = {function(test) for test in self.noticed_by}
        return len(functions) >= self._enough or time.process_time() > self._end


def function(test: str) -> str:
    """Return the name of a test without its parameters."""
    return test.split("[")[0]


def stored_rows() -> dict[str, dict[str, Any]]:
    """Return what the store has of each defect."""
    file = store() / "noticed.jsonl"
    rows = map(json.loads, file.read_text().splitlines() if file.is_file() else [])
    return {row["defect"]: row for row in rows}


def keep(row: Mapping[str, Any]) -> None:
    """Append a row to the store."""
    with (store() / "noticed.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_rooms(rooms: Mapping[str, str], rows: Mapping[str, dict[str, Any]]) -> None:
    """Update the rows of some rooms in `RESULTS`.

    Args:
        rooms: the package of each defect.
        rows: by defect, see `Watch.row`.
    """
    text = RESULTS.read_text() if RESULTS.is_file() else ""
    lines = dict(re.findall(r"^\| `([^`]+)` \|(.*)\|$", text, re.M))
    for room in set(rooms.values()):
        counts = [
            min(len(set(map(function, rows[defect]["noticed_by"]))), 2)
            for defect in rooms
            if rooms[defect] == room
        ]
        numbers = [len(counts), *(counts.count(n) for n in (2, 1, 0))]
        lines[room] = f" {' | '.join(map(str, numbers))} | {store().name} "
    head = "# How many test functions notice each defect\n\n"
    head += "By `python scripts/mutations.py --notice --write`; a row holds for its commit.\n\n"
    head += "| room | defects | two or more | one | none | commit |\n|---|---|---|---|---|---|\n"
    table = "".join(f"| `{room}` |{lines[room]}|\n" for room in sorted(lines))
    RESULTS.write_text(head + table)


def superfluous(reach: Reach, rows: Mapping[str, dict[str, Any]]) -> list[tuple[str, int]]:
    """Return the functions that may all go together, and their lines, longest first.

    Args:
        reach: tests of the store.
        rows: by defect, see `Watch.row`.
    """
    cases = defaultdict(list)
    for test in reach.branches:
        cases[function(test)].append(test)
    needed = set()
    for row in rows.values():
        noticing = {function(test) for test in row["noticed_by"]}
        needed |= noticing
        if len(noticing) < 2:
            needed |= {function(test) for test in row["not_run"]}
    taken = {
        name: np.unique(np.concatenate([reach.branches[t] for t in tests]))
        for name, tests in cases.items()
    }
    codes, counts = np.unique(np.concatenate(list(taken.values())), return_counts=True)
    lengths = {name: length(name) for name in cases if not name.startswith(EXEMPT)}
    gone = []
    for name in sorted(lengths, key=lengths.__getitem__, reverse=True):
        where = np.searchsorted(codes, taken[name])
        if name not in needed and (counts[where] > 1).all():
            counts[where] -= 1
            gone.append((name, lengths[name]))
    return gone


def length(name: str) -> int:
    """Return the lines of a test function."""
    file, _, title = name.rpartition("::")
    text = (ROOT / file.split("::")[0]).read_text()
    body = re.search(rf"^ *def {re.escape(title)}\(.*?(?=^\S(?<!\))|\Z)", text, re.M | re.S)
    return body[0].rstrip().count("\n") + 1 if body else 0


if __name__ == "__main__":
    record(sys.argv[1:] or ["tests"])
