"""Take from the configuration inside a checkpoint what a policy needs: a checkpoint is data.

It names no code of others, and nothing that writes: of the trainer's settings the plain ones count.
"""

import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import gymnasium
from jsonargparse import set_parsing_settings
from torch.cuda import device_count
from torch.optim import Optimizer

from lightning_rl.algorithms import Algorithm
from lightning_rl.buffers import Replay
from lightning_rl.checkpoints.format import SECTIONS
from lightning_rl.cli.kept_config import settings_of
from lightning_rl.collectors import Collector
from lightning_rl.envs import InterventionSource, VectorEnv
from lightning_rl.envs.tasks import ActionTerm
from lightning_rl.policies import Backbone, Policy
from lightning_rl.policies.networks.encoders import Encoder
from lightning_rl.policies.networks.memory import Memory
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.jsonargparse_private import parsing_settings_kept
from lightning_rl.system.permission import CURE, withheld
from lightning_rl.system.plain_yaml import dump_yaml

OURS = "lightning_rl"


class Family(NamedTuple):
    """What may stand under a key: classes of one kind, from some packages."""

    kind: type
    packages: tuple[str, ...]


FAMILIES = {
    "model": Family(Algorithm, (OURS,)),
    "policy": Family(Policy, (OURS,)),
    "backbone": Family(Backbone, (OURS,)),
    "encoder": Family(Encoder, (OURS,)),
    "memory": Family(Memory, (OURS,)),
    "env": Family(VectorEnv, (OURS,)),
    "eval_env": Family(VectorEnv, (OURS,)),
    "action": Family(ActionTerm, (OURS,)),
    "collector": Family(Collector, (OURS,)),
    "replay": Family(Replay, (OURS,)),
    "online": Family(Replay, (OURS,)),
    "offline": Family(Replay, (OURS,)),
    "optimizer": Family(Optimizer, (OURS, "torch.optim")),
    "wrappers": Family(gymnasium.Wrapper, (OURS, "gymnasium.wrappers")),
    "source": Family(InterventionSource, (OURS,)),
}
"""The keys under which a checkpoint may name a class; under any other it may name none.

None of these classes, but those in `REFUSED`, writes to a place of its own choice: a test forges
each of their arguments.
"""

REFUSED = {
    "gymnasium.wrappers.RecordVideo": "writes files where its settings say",
    "gymnasium.wrappers.HumanRendering": "opens a window",
}
"""Classes of those packages that are refused, by any name under which they are found, and why."""

FOR_THE_TYPIST = tuple(
    f"lightning.pytorch.{part}" for part in ("callbacks", "loggers", "profilers")
)
"""Packages whose classes only the user may name, in short too: `--trainer.logger CSVLogger`."""

TRAINER_TEXTS = {
    "accelerator": "auto|cpu|gpu|cuda|mps",
    "strategy": "auto|ddp(_find_unused_parameters_(true|false))?",
    "devices": r"auto|-1|[\d, ]+",
    "precision": "(16|32|64|bf16)(-true|-mixed)?",
    "gradient_clip_algorithm": "norm|value",
    "deterministic": "warn",
    "best_metric": r"eval/[\w/]+",
    "best_mode": "max|min",
    "max_time": r"[\d:]+",
    "val_check_interval": r"[\d:]+",
}
"""Which texts a checkpoint may say to the trainer; numbers and flags it may say under any key."""

OF_THAT_RUN = (
    *("exp_name", "output_dir", "run_dir", "default_root_dir", "init_from", "restore_replay"),
)
"""Settings of the trainer that mean nothing to a run that goes on: left out without a word."""

PATH_KEYS = (
    "xml_file",
    "path",
    "model_path",
    "adapter",
    "tokenizer",
    "action_statistics",
    "weights",
    "checkpoint",
    "teacher",
)
"""Keys of plain texts, which may look like import paths, as `model.xml` does."""

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+(:\w+)?|[^\W\d][\w.]*:[^\W\d][\w./-]*")
"""`package.name`, or `module:name`."""


class Checked(NamedTuple):
    """What is taken from the configuration of a checkpoint.

    Attributes:
        config: as YAML.
        left_out: settings of the trainer that are not taken, and their values.
        reads: paths that what it names will read, by setting.
    """

    config: str
    left_out: dict[str, Any]
    reads: dict[str, str]

    def __str__(self) -> str:
        """Return a line for each of both; nothing where there is nothing to say."""
        lines = []
        if self.left_out:
            names = ", ".join(f"{key} ({_brief(value)})" for key, value in self.left_out.items())
            lines.append(
                f"Left out of the checkpoint's configuration, which is data and decides nothing "
                f"about files, machines or code: {names}. To keep them give them again, or add "
                "--trust_code true if you know where it comes from, or give the run's config.yaml "
                "as --config."
            )
        if self.reads:
            names = ", ".join(f"{path} ({key})" for key, path in self.reads.items())
            lines.append(f"The checkpoint's configuration reads, as data: {names}.")
        # Without what would steer a terminal.
        return "".join(f"{re.sub('[^ -~]', '?', line)}\n" for line in lines)


def checked_config(text: str, checkpoint: Path, cure: str = CURE) -> Checked:
    """Return what may be taken of the configuration of a checkpoint, if it names no code of others.

    Nothing is imported that it names, but classes of the packages in `FAMILIES`.

    Args:
        text: YAML.
        checkpoint: for the messages.
        cure: what to do where it is refused, for the messages.

    Raises:
        ConfigurationError: naming the key, what stands there, and the cure.
    """
    config = settings_of(text, checkpoint)
    address = _without_address(config)
    inspection = Inspection(checkpoint, cure)
    for section, value in config.items():
        if section not in SECTIONS:
            inspection.refuse(section, value, "is no section of a configuration")
        if section in ("model", "data", "trainer") and not isinstance(value, dict):
            inspection.refuse(section, value, "is no mapping of settings")
        if section not in ("trainer", "output_dir"):
            inspection.at(section, section, value)
    # Where a run writes is for who resumes it to say.
    config.pop("output_dir", None)
    settings = config.pop("trainer", {})
    config["trainer"] = {
        key: value
        for key, value in settings.items()
        if _is_plain(key, value) and key not in OF_THAT_RUN
    }
    left_out = {
        f"trainer.{key}": value
        for key, value in settings.items()
        if key not in config["trainer"] and key not in OF_THAT_RUN and value != []
    }
    if address is not None:
        left_out["data.collector.address"] = address
    return Checked(dump_yaml(config), left_out, inspection.reads)


def _without_address(config: dict[str, Any]) -> Any:
    """Take out the address of the cluster that a run was part of, and return it.

    Whoever answers there could run code in this process: that is for the user to say.
    """
    place: Any = config
    for key in ("data", "collector", "init_args"):
        place = place.get(key) if isinstance(place, dict) else None
    return place.pop("address", None) if isinstance(place, dict) else None


def _is_plain(key: Any, value: Any) -> bool:
    """Tell whether a setting of the trainer is a number, a flag or a known text, and is bounded."""
    if key == "num_nodes":
        return bool(value == 1)  # or the run would wait for machines that do not come
    if key == "devices" and _number_of_devices(value) > max(os.cpu_count() or 1, device_count()):
        return False
    if isinstance(value, dict):
        return all(isinstance(one, bool | int | float | None) for one in value.values())
    if isinstance(value, list):
        return key == "devices" and all(isinstance(one, int) for one in value)
    if isinstance(value, str):
        return key in TRAINER_TEXTS and re.fullmatch(TRAINER_TEXTS[key], value) is not None
    return value is None or isinstance(value, bool | int | float)


def _number_of_devices(value: Any) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, str):
        return len(value.split(","))
    return len(value) if isinstance(value, list) else value if isinstance(value, int) else 0


def _brief(value: Any) -> str:
    """Return the classes that a value names, or the value, in a few words."""
    values = value if isinstance(value, list) else [value]
    names = [one.get("class_path", one) if isinstance(one, dict) else one for one in values]
    # An address is no path of a class.
    short = (str(name) if ":" in str(name) else str(name).rpartition(".")[2] for name in names)
    return textwrap.shorten(", ".join(short), 80)


class Inspection:
    """A walk through the configuration in a checkpoint."""

    def __init__(self, checkpoint: Path, cure: str) -> None:
        self.checkpoint = checkpoint
        self.cure = cure
        self.reads: dict[str, str] = {}

    def at(self, path: str, key: str, value: Any) -> None:
        """Look at a value, at all that it holds, and at the texts that name code.

        Args:
            path: of all keys down to the value, for the message.
            key: the last of them that is a name.
            value: a tree of plain values.
        """
        if isinstance(value, dict):
            if "class_path" in value:
                self._class(f"{path}.class_path", key, value["class_path"])
            if value.get("render_mode") == "human":
                self.refuse(f"{path}.render_mode", "human", "opens a window")
            for name, child in value.items():
                if not isinstance(name, str) or "." in name:
                    self.refuse(path, name, "is not the plain name of a setting")
                if name == "id" and _in_env(path) and isinstance(child, str):
                    self._env_id(f"{path}.{name}", child)
                elif name != "class_path":
                    self.at(f"{path}.{name}", _inherited(key, name), child)
        elif isinstance(value, list | tuple):
            for i, child in enumerate(value):
                self.at(f"{path}.{i}", key, child)
        elif isinstance(value, str):
            self._text(path, key, value)

    def refuse(self, path: str, value: Any, why: str) -> NoReturn:
        """Say what was found, where, and what to do."""
        raise ConfigurationError(
            f"The configuration in {self.checkpoint} names '{value}' as {path}, which {why}. "
            "Nothing was imported. A checkpoint is data, and code that it names is not run. "
            f"{self.cure}"
        )

    def _class(self, path: str, key: str, name: Any) -> None:
        family = FAMILIES.get(key)
        if family is None:
            self.refuse(path, name, "is no place for a class")
        kind, packages = family
        if not isinstance(name, str) or not _within(name, packages):
            self.refuse(path, name, f"is no {kind.__name__} of {' or '.join(packages)}")
        found = _find(name)
        if not (
            isinstance(found, type)
            and issubclass(found, kind)
            and _within(f"{found.__module__}.", packages)
        ):
            self.refuse(path, name, f"is no {kind.__name__} of {' or '.join(packages)}")
        for one, why in REFUSED.items():
            if found is _find(one):
                self.refuse(path, name, why)

    def _text(self, path: str, key: str, text: str) -> None:
        if key in FAMILIES:
            self._class(path, key, text)
        elif "class_path" in text or (
            key not in (*PATH_KEYS, "exp_name") and IMPORT_PATH.fullmatch(text)
        ):
            self.refuse(path, text, "looks like the path of a Python object")
        elif key in PATH_KEYS or (os.sep in text and os.path.exists(text)):
            self.reads[path] = text

    def _env_id(self, path: str, name: str) -> None:
        """Refuse an env that another package brings, and an id that imports one."""
        if ":" in name:
            self.refuse(path, name, f"would import {name.partition(':')[0]}")
        for spec in gymnasium.registry.values():
            # A name without a version means its latest.
            if name in (spec.id, spec.id.rpartition("-v")[0]):
                makers = [spec.entry_point, spec.vector_entry_point]
                makers += [wrapper.entry_point for wrapper in spec.additional_wrappers]
                for maker in makers:
                    home = maker if isinstance(maker, str) else getattr(maker, "__module__", "")
                    if maker is not None and not _within(f"{home}.", (OURS, "gymnasium")):
                        self.refuse(path, name, f"is made by {home}")


def _in_env(path: str) -> bool:
    return path.startswith(("data.env", "data.eval_env"))


def _inherited(key: str, name: str) -> str:
    """Name a value for its look-up: settings of a class hide its key, and nothing else does."""
    if key == "encoders":  # by keys of an observation, whatever these are called
        return "encoder"
    return "" if key in FAMILIES and name in ("init_args", "dict_kwargs") else name


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return name.startswith(tuple(f"{package}." for package in packages))


def _find(name: str) -> Any:
    """Return the object of an import path, or None; its package is one of the allowed ones."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute, None)
    except (ImportError, ValueError):
        return None


def find_code_here() -> None:
    """Add the working directory to the places of modules: `class_path: my_module.MyAlgorithm`.

    Every subcommand does so if it reads no checkpoint, or a trusted one, or if the user has typed
    the name of a module.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


@contextmanager
def only_allowed_imports(typed: Sequence[str], cure: str = CURE) -> Iterator[None]:
    """Let the parser import the packages in `FAMILIES`, and what the user has typed; grant nothing.

    A second lock behind `checked_config`, at the door where the parser imports. The working
    directory counts as a place of modules only if the user has typed the name of one.
    """
    packages = {package for family in FAMILIES.values() for package in family.packages}
    packages |= set(FOR_THE_TYPIST)
    libraries = {package.split(".")[0] for package in packages}
    foreign = set()
    for name in _import_paths(typed):
        root = name.split(".")[0]
        if root in libraries:
            packages.add(name.rpartition(".")[0])
        elif root not in {*sys.stdlib_module_names, "jsonargparse"}:
            foreign.add(root)
    if foreign:
        find_code_here()
    with parsing_settings_kept(), withheld(cure):
        set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=sorted(packages | foreign),
            instantiate_subclass_spec_in_any=False,
        )
        yield


def _import_paths(typed: Sequence[str]) -> Iterator[str]:
    """Yield the import paths in what the user typed: `--model=a.B`, `c:Env-v0`, `[d.E, e.F]`."""
    for option in typed:
        value = option.partition("=")[2] if option.startswith("--") else option
        for word in re.split(r"[\s,\[\]{}'\"]+", value):
            if IMPORT_PATH.fullmatch(word) and not word.endswith((".ckpt", ".yaml")):
                yield word.split(":")[0]
