"""Leave out some extensions in turn: import the others, parse shipped configs and train.

python -m tests.cli.left_out COPY_OF_THE_PACKAGE

Each turn is a fork of a process that has imported the core and the packages of extras, and moves folders away.
For each two extensions, the first of which does not need the second, a turn has the first without the second.
"""

import ast
import os
import re
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module, invalidate_caches
from itertools import product
from pathlib import Path
from random import Random

import pytest

from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.system.extensions import TASKS
from lightning_rl.system.lazy import modules_of_names

RULES = Path(__file__).parents[1] / "test_architecture.py"
# That file imports extensions.
NEEDS = ast.literal_eval(re.search(r"^NEEDS = (\{.*?^\})", RULES.read_text(), re.M | re.S)[1])
EXTRAS = [
    "mujoco",
    "minari",
    "transformers",
    "peft",
    "onnx",
    "pyarrow",
    "av",
    "PIL",
    "optuna",
    "h5py",
]
SMALL = "--data.num_envs 2 --data.buffer_size 8 --data.total_env_steps 32 --model.batch_size 8"
"""Options of a short run of ppo.yaml."""


def not_working_without(extension):
    """Return the extension, and those that need it."""
    needing = {name for name, needs in NEEDS.items() if extension in needs.split()}
    return {extension}.union(*map(not_working_without, needing))


def turns_of(names):
    """Return sets of extensions to leave out, which have each extension without each that it does not need."""
    lost = {name: not_working_without(name) for name in names}
    missing = {(there, away) for away in names for there in set(names) - lost[away]}
    turns, draws = [set(names)], Random(5)

    def shown(turn):
        there = set(names).difference(*(lost[name] for name in turn))
        return missing & set(product(there, turn))

    while missing:
        candidates = []
        for _ in range(30):
            turn = set()
            for name in draws.sample(names, len(names)):
                turn = max(turn, turn | {name}, key=lambda away: len(shown(away)))
            candidates.append(turn)
        turns.append(max(candidates, key=lambda turn: len(shown(turn))))
        missing -= shown(turns[-1])
    return turns


def modules_of(package):
    """Return the import paths of the modules of each extension."""
    found = {}
    for path in sorted((package / "extensions").glob("*/**/*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found.setdefault(parts[2], []).append(".".join(parts).removesuffix(".__init__"))
    return found


def extensions_named_in(config, package):
    """Return the extensions whose classes a config names."""
    homes = modules_of_names(str(package / "__init__.py")) | TASKS
    words = set(re.findall(r"[A-Z]\w+", config.read_text()))
    paths = [homes[word].split(".") for word in words if word in homes]
    return {path[2] for path in paths if path[1] == "extensions"}


def check(turn, package, modules, configs):
    """Do what works without some extensions."""
    from lightning_rl.cli.app import run  # it imports extensions, for their short names

    invalidate_caches()
    for name in turn:
        with pytest.raises(ImportError):
            import_module(f"lightning_rl.extensions.{name}")
    for name in sorted(set(modules).difference(*map(not_working_without, turn))):
        for module in modules[name]:
            import_module(module)
    for config in configs:
        with pytest.raises(SystemExit) as ended:
            run(["fit", f"--config={config}", "--print_config"])
        assert not ended.value.code, config
    run(["fit", "--config=ppo.yaml", "--model.n_epochs=1", *SMALL.split()])


def attempt(*settings):
    """Check in a fork; return whether it passed."""
    if (child := os.fork()) == 0:
        code = 1
        with open("log", "w") as log, redirect_stdout(log), redirect_stderr(log):
            try:
                check(*settings)
                code = 0
            except BaseException:
                traceback.print_exc()
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def main(package):
    for extra in ("lightning_rl.extend", "lightning_rl.training.trainer", *EXTRAS):
        with suppress(ImportError):
            import_module(extra)
    modules, failed = modules_of(package), 0
    named = {path: extensions_named_in(path, package) for path in shipped_configs().values()}
    for turn in turns_of(sorted(modules)):
        lost = set().union(*map(not_working_without, turn))
        configs = [path for path in named if not named[path] & lost]
        folders = {package / "extensions" / name: package / f"{name}.away" for name in turn}
        for folder, away in folders.items():
            folder.rename(away)
        if not attempt(turn, package, modules, configs[:3]):
            failed += 1
            print(f"Without {', '.join(sorted(turn))}:", Path("log").read_text()[-1500:])
        for folder, away in folders.items():
            away.rename(folder)
        named = {path: names for path, names in named.items() if path not in configs[:3]}
    sys.exit(failed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
