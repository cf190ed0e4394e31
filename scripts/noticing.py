"""Find which tests notice each defect of `mutations.py`, and which slow tests no defect needs.

A first run of the suite under coverage records the lines and the CPU seconds of each test. Each
defect then meets the tests that reach its lines, and the tests in the files that its entry names
(coverage does not see subprocesses of tests), quick ones first:

- a test of at most `SLOW` seconds notices it: no slow test is needed, and the next defect follows;
- otherwise slow tests run until two of them notice it.

A slow test that is never the only one to notice a defect is a candidate for removal. The results
are in build/mutations/, where a stopped run continues. Remove that folder after a change.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "mutations"
SECONDS = FOLDER / "seconds"
"""A JSON-lines file for each process that ran tests: a test and its CPU seconds per line."""

SLOW = 1.0
"""CPU seconds above which a test must be needed."""

LONGEST = 130
"""Seconds of tests for one defect: with two jobs, 266 defects take at most 5 hours."""


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its ended children."""
    return sum(os.times()[:4])


# --- record the lines of each test: this file as a pytest plugin ---


class Recorder:
    """Record lines and seconds by test, in the process that runs them."""

    def __init__(self) -> None:
        import coverage

        SECONDS.mkdir(parents=True, exist_ok=True)
        self._coverage = coverage.Coverage(
            data_file=FOLDER / "lines", data_suffix=True, source_pkgs=["lightning_rl"]
        )
        self._coverage.start()
        self._seconds = (SECONDS / f"{os.getpid()}.jsonl").open("w")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure one test, with the fixtures that it makes."""
        self._coverage.switch_context(item.nodeid)
        before = cpu_seconds()
        result = yield
        self._seconds.write(json.dumps([item.nodeid, cpu_seconds() - before]) + "\n")
        return result

    def pytest_sessionfinish(self) -> None:
        """Write the lines."""
        self._coverage.stop()
        self._coverage.save()
        self._seconds.close()


def pytest_configure(config: pytest.Config) -> None:
    """Record in each process that runs tests: a worker, or the only one."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses"):
        config.pluginmanager.register(Recorder())


def record() -> None:
    """Run the suite once, and record it."""
    import coverage

    for old in (*FOLDER.glob("lines*"), *SECONDS.glob("*")):
        old.unlink()
    path = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "noticing", "--timeout", "900"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=True)
    coverage.Coverage(data_file=FOLDER / "lines").combine()


class Reach:
    """The tests that reach a text, and their durations."""

    def __init__(self) -> None:
        import coverage

        if not (FOLDER / "lines").is_file():
            record()
        self._data = coverage.CoverageData(FOLDER / "lines")
        self._data.read()
        rows = [json.loads(line) for file in SECONDS.iterdir() for line in file.open()]
        self.seconds = dict(rows)

    def tests(self, file: str, text: str, named: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the tests of the named files, and the others that reach a text, quickest first.

        Args:
            file: below the root.
            text: stands once in it.
            named: test files, below the root.
        """
        first = (ROOT / file).read_text().split(text)[0].count("\n") + 1
        by_line = self._data.contexts_by_lineno(str(ROOT / file))
        reaching = {
            test
            for line in range(first, first + text.count("\n") + 1)
            for test in by_line.get(line, ())
        }
        order = sorted(self.seconds, key=self.seconds.__getitem__)
        about = [test for test in order if test.split("::")[0] in named]
        return about, [test for test in order if test in reaching and test not in about]


# --- find the tests that notice a defect ---


class Watch:
    """Pytest plugin that runs some tests, until the kind that a defect needs is known.

    Attributes:
        noticed_by: the tests that failed.
        is_settled: a quick test failed, or two slow ones, or the time is over.
        is_complete: False if the time was over before.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self.noticed_by: list[str] = []
        self.is_settled, self.is_complete = False, True
        self._seconds = seconds
        self._tests: list[str] = []
        self._end = time.monotonic() + LONGEST

    def run(self, options: Sequence[str], tests: list[str]) -> None:
        """Run tests in their order."""
        self._tests = tests
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        if files and not self.is_settled:
            pytest.main([*options, *files], plugins=[self])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that are to run."""
        collected = {item.nodeid: item for item in items}
        items[:] = [collected[test] for test in self._tests if test in collected]

    def pytest_collectreport(self, report: Any) -> None:
        """Count a file that cannot be imported as a failed test."""
        if report.failed:
            self.noticed_by.append(report.nodeid)
            self.is_settled = True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a failure."""
        if report.failed and report.nodeid not in self.noticed_by:
            self.noticed_by.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Stop after the test that settles it."""
        result = yield
        quick = any(self._seconds.get(test, 0.0) <= SLOW for test in self.noticed_by)
        self.is_complete = time.monotonic() < self._end
        self.is_settled = quick or len(self.noticed_by) >= 2 or not self.is_complete
        if self.is_settled:
            item.session.shouldstop = "it is settled"
        return result


def candidates(seconds: dict[str, float], found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the slow tests that are never the only one to notice a defect, slowest first."""
    needed = {row["noticed by"][0] for row in found.values() if len(row["noticed by"]) == 1}
    slow = [test for test in seconds if seconds[test] > SLOW and test not in needed]
    return sorted(slow, key=seconds.__getitem__, reverse=True)
