"""Print the findings of a check: a table in a terminal, plain lines elsewhere."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_rl.extensions.checks.check_env import LEVELS, Finding

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
"""Terminal style of each level."""


def report_findings(findings: Sequence[Finding], trainer_settings: Any) -> None:
    """Print the findings of `rl-cli check`; exit with status 1 if there is an error."""
    print_findings([*findings, *processes_not_checked(trainer_settings)])
    if any(finding.level == "error" for finding in findings):
        sys.exit(1)


def processes_not_checked(trainer: Any) -> list[Finding]:
    """Return a note if training would use several processes: a check uses one."""
    counts = {name: trainer.get(name) for name in ("devices", "num_nodes")}
    several = {name: value for name, value in counts.items() if value not in (None, "auto", 1, "1")}
    if not several:
        return []
    text = ", ".join(f"trainer.{name}: {value}" for name, value in several.items())
    warning = (
        f"{text}, but this check had one process: in training each process plays data.num_envs envs"
    )
    return [Finding("update", "note", f"{warning}, so that a run has fewer iterations")]


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print findings, sorted by topic, and the number of findings per level."""
    console = console or Console(highlight=False)
    if console.is_terminal:
        console.print(_table(findings))
    else:
        # Written without rich, which would break a line at the width of a log.
        console.file.write("".join(map(_line, findings)))
    # From errors to notes: the number of ok findings tells nothing.
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS[:0:-1]}
    summary = ", ".join(
        f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items()
    )
    console.file.write(f"{summary}.\n")


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    previous_topic = ""
    for finding in findings:
        # A topic stands only next to its first finding.
        topic = "" if finding.topic == previous_topic else finding.topic
        previous_topic = finding.topic
        text = Text(finding.text)
        if finding.cure:
            text.append(f"\n→ {finding.cure}", style="dim" if finding.level == "ok" else "")
        table.add_row(topic, Text(finding.level, style=STYLES[finding.level]), text)
    return table


def _line(finding: Finding) -> str:
    cure = f" → {finding.cure}" if finding.cure else ""
    return f"{finding.level:8}{finding.topic:12}{finding.text}{cure}\n"
