"""What scripts share, with nothing but Python: command lines, environments, trainers, tables."""

import argparse
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "limit_val_batches": 0,
}
"""Settings of a trainer that writes nothing and does not evaluate."""


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of a script, as it is written."""
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def interpreter_in(folder: Path, *installs: Sequence[str]) -> Path:
    """Return the interpreter of a virtual environment, which is made if it is missing.

    Args:
        folder: of the environment.
        installs: arguments of each `pip install`.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for arguments in installs:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)
    return python


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table, each row in one line."""
    lines = [columns, ["---"] * len(columns), *rows]
    texts = ([" ".join(str(c).replace("|", "\\|").split()) for c in cells] for cells in lines)
    return [f"| {' | '.join(cells)} |" for cells in texts]


def processor() -> str:
    """Return the model of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
