"""The core works without extensions, and each extension without those that it does not need: in a copy of the package."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.test_architecture import SOURCE

ROOT = SOURCE.parents[1]


@pytest.fixture
def package(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    copy = tmp_path / "src" / "lightning_rl"
    return shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))


def python(package, *arguments, cwd=ROOT):
    """Run Python with the copy of the package."""
    environment = os.environ | {"PYTHONPATH": f"{package.parent}{os.pathsep}{ROOT}"}
    settings = {"capture_output": True, "text": True, "timeout": 600, "check": False}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, **settings)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_an_extension_the_others_can_be_imported_configured_and_trained_with(
    package, tmp_path
):
    python(package, "-m", "tests.cli.left_out", str(package), cwd=tmp_path)
