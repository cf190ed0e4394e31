"""Run the tests that need an environment of their own, and keep the results in tests/README.md.

    python scripts/environments.py                         # all; those of .ci/run are not repeated
    python scripts/environments.py robots python-3.13      # some
    python scripts/environments.py python-3.13 --core      # of a Python version, tests/core alone
    python scripts/environments.py --folder DIRECTORY      # keep the environments

`uv` makes the environments. Python versions that it cannot download are looked for in pyenv's
folder. A failed command ends an environment.
"""

import datetime
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from scripting import parser_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "tests" / "README.md"
DEV = ("-c", "constraints.txt", "-e", ".[dev]")
EVERYTHING = ("pytest tests/core", "pytest --ignore tests/core")
ENV = {"MUJOCO_GL": "egl", **os.environ}
"""Without a display, MuJoCo's envs draw by EGL."""

PYTEST = ("pytest", "pytest-timeout", "pytest-xdist", "optuna", "safetensors")


class Environment(NamedTuple):
    """A Python version, what is installed, and the commands that run there.

    Without packages, the commands run in the environment of this script. `{lerobot}` in a command
    is the interpreter of the environment with that name.
    """

    python: str
    packages: tuple[str, ...]
    commands: tuple[str, ...]


ENVIRONMENTS = {
    "python-3.12": Environment("3.12", DEV, EVERYTHING),
    "python-3.13": Environment("3.13", DEV, EVERYTHING),
    "envpool": Environment(
        "3.11",
        ("-e", ".[envpool]", *PYTEST),
        (
            "pytest -n 0 tests/numerics/test_envpool.py",
            "pytest -n 0 tests/cli/test_commands.py -k sac_humanoid",
        ),
    ),
    "robots": Environment(
        "3.11",
        ("-c", "constraints-robots.txt", "-e", ".[robots]", *PYTEST),
        (
            "pytest -n 0 tests/cli/test_commands.py -k hil_pick_cube.yaml",
            "pytest -n 0 tests/cli/test_commands.py -k fetch",
            "python scripts/robot_envs.py",
        ),
    ),
    "libero": Environment(
        "3.11",
        ("-c", "constraints-libero.txt", "-e", ".[libero]", *PYTEST),
        ("pytest -n 0 tests/numerics/test_libero.py", "python scripts/libero_states.py"),
    ),
    "ogbench": Environment(
        "3.11",
        ("-c", "constraints-ogbench.txt", "-e", ".[robots]", "ogbench", *PYTEST),
        ("pytest -n 0 tests/cli/test_commands.py -k fql_cubes",),
    ),
    "lerobot": Environment(
        "3.12",
        (
            *("lerobot[pusht,smolvla,diffusion]==0.6.1", "peft"),
            *("-e", ".[export]", "-e", "plugins/lerobot_policy_lightning_rl"),
        ),
        (),
    ),
    "with-lerobot": Environment(
        "",
        (),
        (
            "python scripts/lerobot_arm.py {lerobot}",
            "python scripts/lerobot_policies.py --python {lerobot}",
            "python scripts/lerobot_plugin.py --python {lerobot}",
            "python scripts/lerobot_roundtrip.py",
        ),
    ),
    "yardsticks": Environment(
        "", (), ("python scripts/bench_peers.py --workloads W1 --repeats 1",)
    ),
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--folder", type=Path, help="of the environments; temporary if not given")
    parser.add_argument("--core", action="store_true", help="of a Python version, tests/core alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.folder or Path(scratch)).absolute()
        left_out = EVERYTHING[1:] if args.core else ()
        results = {name: result_of(name, folder, left_out) for name in args.names or ENVIRONMENTS}
    return int(any(result.startswith("failed") for result in results.values()))


def result_of(name: str, folder: Path, left_out: tuple[str, ...] = ()) -> str:
    """Make an environment, run its commands there but some, and write the row of the page."""
    environment = ENVIRONMENTS[name]
    binaries = folder / name / "bin" if environment.packages else Path(sys.executable).parent
    try:
        if environment.packages and not (folder / name).exists():
            run(["uv", "venv", "--python", interpreter(environment.python), str(folder / name)])
            target = ["--python", str(binaries / "python")]
            run(["uv", "pip", "install", "--quiet", *target, *environment.packages])
        parts = []
        for command in (c for c in environment.commands if c not in left_out):
            program, *arguments = command.format(lerobot=folder / "lerobot/bin/python").split()
            tests = re.search(r"\d+ passed.* in .*", run([str(binaries / program), *arguments]))
            label = " ".join(argument for argument in arguments if "/" in argument)
            parts.append(f"{label}: {tests[0]}" if tests else f"{Path(arguments[0]).name} passed")
        result = "; ".join(parts) or "installed"
    except subprocess.CalledProcessError as error:
        last = (error.stdout.strip() or "no output").splitlines()[-1]
        result = "failed: " + re.sub(r"[|\x1b]", " ", last)[:160]
    print(f"{name}: {result}", flush=True)
    write(name, result)
    return result


def run(command: list[str]) -> str:
    """Run in the root of the project; return what is printed, errors among it."""
    print(" ".join(command), file=sys.stderr, flush=True)
    return subprocess.run(
        command,
        cwd=ROOT,
        env=ENV,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ).stdout


def interpreter(version: str) -> str:
    """Return pyenv's interpreter of a version, or the version, which uv looks for."""
    places = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(places[-1]) if places else version


def write(name: str, result: str) -> None:
    """Replace the row of an environment in tests/README.md."""
    commit = run(["git", "rev-parse", "--short", "HEAD"]).strip()
    row = f"| `{name}` | {result} | {datetime.date.today()} | {commit} |"
    text = PAGE.read_text()
    pattern = re.compile(rf"^\| `{re.escape(name)}` \|.*$", re.MULTILINE)
    assert pattern.search(text), f"{PAGE} has no row of {name}"
    PAGE.write_text(pattern.sub(lambda _: row, text))


if __name__ == "__main__":
    sys.exit(main())
