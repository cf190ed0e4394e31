"""The core works without extensions: in a copy of the package from which they are deleted."""

import os
import shutil
import subprocess
import sys

from tests.test_architecture import SOURCE

ROOT = SOURCE.parents[1]


def test_without_extensions_the_core_trains_evaluates_resumes_and_loads(tmp_path):
    """`.ci/run` runs all of `tests/core` so."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    package = tmp_path / "src" / "lightning_rl"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(package / "extensions")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(
        [*command, "tests/core/cli/test_alone.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
