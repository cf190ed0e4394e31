"""The wheel and the sdist hold what they should, and `rl-cli fit` runs from an installed wheel."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.messages import assert_names

ROOT = Path(__file__).parents[2]
pytest.importorskip("hatchling", reason="builds the package; part of the extra dev")


def build(directory, out, *targets):
    """Build a source tree without network and isolation, as `python -m build` does with both."""
    kinds = [option for target in targets for option in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out), *kinds]
    subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=300)
    return {path.suffix: path for path in out.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist of this tree, and the wheel that is built from the sdist: both must be complete."""
    out = tmp_path_factory.mktemp("dist")
    sdist = build(ROOT, out, "sdist")[".gz"]
    with tarfile.open(sdist) as archive:
        archive.extractall(out / "source", filter="data")
    (source,) = (out / "source").iterdir()
    return source, build(source, tmp_path_factory.mktemp("wheel"), "wheel")[".whl"]


def files_below(folder):
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_sdist_and_wheel_hold_every_file(built):
    source, wheel = built
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {f"lightning_rl/{name}" for name in files_below(ROOT / "src" / "lightning_rl")}
    configs = {f"lightning_rl/configs/{name}" for name in files_below(ROOT / "configs")}
    assert {"lightning_rl/py.typed", "lightning_rl/__init__.pyi"} <= package
    assert package | configs == {name for name in names if ".dist-info/" not in name}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "tests", "docs", "src"):
        assert (source / name).exists(), name


@pytest.mark.slow
def test_an_installed_wheel_trains(built, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*install, "--no-index", str(built[1])], check=True, capture_output=True)
    # The dependencies come from this environment. Its own .pth files, such as an editable install
    # of this package, are not read there.
    (site,) = (tmp_path / "env" / "lib").glob("*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command):
        settings = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
        result = subprocess.run([*map(str, command)], timeout=280, **settings)
        assert result.returncode == 0, result.stderr
        return result.stdout

    found = run(python, "-c", "import lightning_rl; print(lightning_rl.__file__)")
    assert Path(found.strip()).is_relative_to(site)
    short = ["--data.total_env_steps", "4096", "--data.num_eval_episodes", "2"]
    run(python.with_name("rl-cli"), "fit", "--config", "ppo.yaml", *short)
    (checkpoint,) = (tmp_path / "outputs").glob("*/checkpoints/last.ckpt")
    validated = run(python.with_name("rl-cli"), "validate", "--ckpt_path", checkpoint)
    assert_names(validated.lower(), "return")
