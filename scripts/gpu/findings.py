"""What a check finds: rows for the report, written to a file as they come.

Needs nothing but Python, so that a check whose imports fail is reported like any other.
"""

import json
import time
from pathlib import Path
from typing import Any


class Findings:
    """The rows of one check, and what its training runs took of the device's memory.

    Args:
        device: `cpu` or `cuda`.
        small: run a few iterations, and apply no bar that needs more.
        directory: named after the check, for whatever it writes; `findings.json` is written there
            after each row, so that a check that dies or hangs leaves what it had found.
    """

    def __init__(self, device: str, small: bool, directory: Path) -> None:
        self.device = device
        self.small = small
        self.directory = directory
        self.rows: list[dict[str, Any]] = []
        self.memory: list[dict[str, Any]] = []
        self._since = time.perf_counter()

    def add(
        self, name: str, passed: bool | None, figure: str, bar: str = "", **numbers: Any
    ) -> None:
        """Add a row; its seconds are those since the row before.

        Args:
            name: of what was checked.
            passed: None where nothing was judged; the figure says why.
            figure: what was found.
            bar: what was asked for.
            numbers: for the JSON file.
        """
        now = time.perf_counter()
        row = {"name": name, "passed": passed, "figure": figure, "bar": bar}
        self.rows.append(row | {"seconds": now - self._since, "numbers": numbers})
        self._since = now
        self.save()

    def compare(self, name: str, gap: float, most: float = 0.0) -> None:
        """Add a row for the largest difference between two results, which may be `most`."""
        figure = f"differs by {gap:.2g}" if gap else "equal bit for bit"
        bar = f"differs by at most {most:g}" if most else "equal bit for bit"
        self.add(name, gap <= most, figure, bar, difference=gap)

    def save(self) -> None:
        content = json.dumps({"rows": self.rows, "memory": self.memory}, indent=1)
        unfinished = self.directory / "findings.json.new"
        unfinished.write_text(content)
        unfinished.replace(self.directory / "findings.json")  # never half a file
