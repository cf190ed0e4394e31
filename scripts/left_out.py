"""Leave out each extension in turn, and run the tests of the others in a copy of the project.

    python scripts/left_out.py [EXTENSION ...]      # default: all; prints a row for each

A test file is left out with an extension that its text, or the text of a file of tests/ that it
imports, names: by an import, a class, a shipped config or a subcommand. `NEEDS` of
tests/test_architecture.py names the extensions that do not work without another.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from lightning_rl.system.extensions import SUBCOMMANDS, TASKS  # noqa: E402, I001
from lightning_rl.system.lazy import modules_of_names  # noqa: E402
from tests.cli.left_out import not_working_without  # noqa: E402

HOMES = modules_of_names(str(ROOT / "src/lightning_rl/__init__.py")) | TASKS
HOMES |= {f'"{name}"': path for name, (path, *_) in SUBCOMMANDS.items()}
NAMES = sorted(p.parent.name for p in ROOT.glob("src/lightning_rl/extensions/*/__init__.py"))
NAMED_OTHERWISE: dict[str, list[str]] = {}
"""By extension, test files that need it without naming it."""


@cache
def extensions_of(path: Path) -> frozenset[str]:
    """Return the extensions that a test file or a config names."""
    names: set[str] = set()
    waiting, seen = [path], set()
    while waiting:
        text = (file := waiting.pop()).read_text()
        seen.add(file)
        words = {*re.findall(r'[A-Z]\w+|"\w+"', text)}
        places = " ".join(HOMES.get(word, "") for word in words)
        names |= {*re.findall(r"lightning_rl\.extensions\.(\w+)", text + places)}
        others = [ROOT / "configs" / name for name in re.findall(r"\w+\.yaml", text)]
        modules = re.findall(r"from (tests\.[\w.]+) import", text)
        others += [ROOT.joinpath(*m.split(".")).with_suffix(".py") for m in modules]
        waiting += [other for other in others if other.is_file() and other not in seen]
    return frozenset(names)


def run_without(extension: str, copy: Path) -> str:
    """Delete an extension from a copy, run the tests of the others, and return a row."""
    lost = not_working_without(extension)
    shutil.rmtree(copy / "src/lightning_rl/extensions" / extension)
    tests = [path for path in ROOT.glob("tests/*/test_*.py") if extensions_of(path)]
    kept = [str(path.relative_to(ROOT)) for path in sorted(tests) if not extensions_of(path) & lost]
    unnamed = {f"tests/{name}" for name in NAMED_OTHERWISE.get(extension, ())}
    kept = [path for path in kept if path not in unnamed]
    environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-rfE", *kept]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) \S+", done.stdout, re.M)
    result = failed[0] if failed else "passed" if done.returncode == 0 else done.stderr[-200:]
    return f"| {extension} | {len(kept)} of {len(tests)} test files | {result} |"


for name in sys.argv[1:] or NAMES:
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", "outputs", "__pycache__", "*_cache", "shared")
        print(run_without(name, shutil.copytree(ROOT, Path(folder, "project"), ignore=ignored)))
