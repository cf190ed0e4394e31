"""The core works without extensions, and each extension without those that it does not need: in a copy of the package."""

import os
import shutil
import subprocess
import sys

from tests.test_architecture import SOURCE

ROOT = SOURCE.parents[1]


def test_without_an_extension_the_others_can_be_imported_configured_and_trained_with(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    package = tmp_path / "src" / "lightning_rl"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": f"{package.parent}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.cli.left_out", str(package)]
    settings = {"capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
