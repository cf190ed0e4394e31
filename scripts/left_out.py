"""Run the tests of extensions in copies of the project without those that they do not need.

    python scripts/left_out.py [FOLDER]      # about twenty CPU minutes; prints a table

A test file needs the extensions that its text, or the text of a file of tests/ that it imports,
names (by an import, a class, a shipped config or a subcommand), and those that these need:
`NEEDS` of tests/test_architecture.py. Files that need the same ones run together, in a copy from
which all others are deleted at once. What passes so is taken to pass without any one of them. The
results in FOLDER are kept: a second run goes on.
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
from tests.cli.left_out import NEEDS  # noqa: E402

HOMES = modules_of_names(str(ROOT / "src/lightning_rl/__init__.py")) | TASKS
HOMES |= {f'"{name}"': path for name, (path, *_) in SUBCOMMANDS.items()}
NAMES = {path.parent.name for path in ROOT.glob("src/lightning_rl/extensions/*/__init__.py")}
NOT_NAMED = {
    "cli/test_logs.py": "videos",
    "numerics/test_iql.py": "checks",
    "numerics/test_libero.py": "datasets",
    "reports/test_films.py": "videos",
    "reports/test_nan_weights.py": "videos",
}
"""By test file, extensions that it needs without naming them."""

OF_ALL = {
    *("test_commands", "test_configs", "test_first_check", "test_first_hour", "test_left_out"),
    *("test_locks", "test_messages", "test_pages", "test_renamed", "test_texts"),
}
"""Test files about all configs, classes, commands or pages, for which nothing can be left out."""


@cache
def extensions_of(path: Path) -> frozenset[str]:
    """Return the extensions that a test file needs."""
    names = set(NOT_NAMED.get(f"{path.parent.name}/{path.name}", "").split())
    unread, files = [path], set()
    while unread:
        text = (file := unread.pop()).read_text()
        files.add(file)
        imports = " ".join(re.findall(r"from lightning_rl import ([^()]+?$|\([^)]+\))", text, re.M))
        words = {*re.findall(r'[A-Z]\w+|"\w+"', text), *re.findall(r"\w+", imports)}
        places = " ".join(HOMES.get(word, "") for word in words)
        names |= {*re.findall(r"lightning_rl\.extensions\.(\w+)", text + places)}
        named_files = [ROOT / "configs" / name for name in re.findall(r"\w+\.yaml", text)]
        modules = re.findall(r"from (tests\.[\w.]+) import", text)
        named_files += [ROOT.joinpath(*m.split(".")).with_suffix(".py") for m in modules]
        unread += [named for named in named_files if named.is_file() and named not in files]
    while needed := set(" ".join(NEEDS.get(name, "") for name in names).split()) - names:
        names |= needed
    return frozenset(names & NAMES)


def result_with(extensions: frozenset[str], tests: list[str]) -> str:
    """Run tests in a copy that has some extensions alone; return the tests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", "outputs", "__pycache__", "*_cache", "shared")
        copy = shutil.copytree(ROOT, Path(folder, "project"), ignore=ignored)
        for name in NAMES - extensions:
            shutil.rmtree(copy / "src/lightning_rl/extensions" / name)
        environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}"}
        options = ["--continue-on-collection-errors", "--tb=short"]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rfE", *options, *tests]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M)
    return "\n".join(failed) or ("" if done.returncode in (0, 5) else done.stdout[-500:])


groups: dict[frozenset[str], list[str]] = {}
for test in sorted(ROOT.glob("tests/*/test_*.py")):
    if test.stem not in OF_ALL and (needed_by_test := extensions_of(test)):
        groups.setdefault(needed_by_test, []).append(str(test.relative_to(ROOT)))
results = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
results.mkdir(parents=True, exist_ok=True)
for extensions, tests in groups.items():
    result = results / "-".join(sorted(extensions))
    if not result.exists():
        result.write_text(result_with(extensions, tests))
    print(f"With {', '.join(sorted(extensions))} alone: {len(tests)} files;", flush=True)
    print(result.read_text() or "all passed.", flush=True)
for name in sorted(NAMES):
    without = [len(tests) for extensions, tests in groups.items() if name not in extensions]
    print(f"| {name} | {sum(without)} of {sum(map(len, groups.values()))} files ran without it |")
sys.exit(any(file.read_text() for file in results.iterdir()))
