"""Leave out each extension in turn: import the others, parse shipped configs and train.

python -m tests.cli.left_out COPY_OF_THE_PACKAGE

Each turn is a fork of a process that has imported the core and the packages of extras, and moves one folder away.
"""

import os
import re
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest

from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.system.extensions import TASKS
from lightning_rl.system.lazy import modules_of_names
from tests.test_architecture import NEEDS

EXTRAS = (
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
)
SMALL = "--data.num_envs 2 --data.buffer_size 8 --data.total_env_steps 32 --model.batch_size 8"
"""Options of a short run of ppo.yaml."""


def not_working_without(extension):
    """Return the extension, and those that need it."""
    needing = {name for name, needs in NEEDS.items() if extension in needs.split()}
    return {extension}.union(*map(not_working_without, needing))


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


def check(extension, package, modules, configs):
    """Do what works without an extension."""
    from lightning_rl.cli.app import run  # it imports extensions, for their short names

    invalidate_caches()
    lost = not_working_without(extension)
    for name in sorted(set(modules) - lost):
        for module in modules[name]:
            import_module(module)
    for config in configs:
        if not extensions_named_in(config, package) & lost:
            with pytest.raises(SystemExit) as ended:
                run(["fit", f"--config={config}", "--print_config"])
            assert not ended.value.code, config
    run(
        [
            "fit",
            "--config=ppo.yaml",
            "--model.n_epochs=1",
            "--trainer.enable_progress_bar=false",
            *SMALL.split(),
        ]
    )


def attempt(extension, *settings):
    """Check in a fork; return whether it passed."""
    if (child := os.fork()) == 0:
        code = 1
        with open(f"{extension}.log", "w") as log, redirect_stdout(log), redirect_stderr(log):
            try:
                check(extension, *settings)
                code = 0
            except BaseException:
                traceback.print_exc()
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def main(package):
    for extra in EXTRAS:
        with suppress(ImportError):
            import_module(extra)
    modules, configs = modules_of(package), sorted(shipped_configs().values())
    failed = []
    for number, extension in enumerate(modules):
        folder, away = package / "extensions" / extension, package / f"{extension}.away"
        folder.rename(away)
        if not attempt(extension, package, modules, configs[number :: len(modules)]):
            failed.append(extension)
        away.rename(folder)
    for extension in failed:
        print(f"Without {extension}:", Path(f"{extension}.log").read_text()[-1500:])
    sys.exit(len(failed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
