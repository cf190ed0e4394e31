"""Check the configuration in a checkpoint before anything is imported or built.

A checkpoint is data. It may name the classes in the table of `registry`; of the trainer's settings
it may set numbers, flags and some texts.
"""

import os
import re
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch.cuda import device_count

from lightning_rl.checkpoints.format import SECTIONS
from lightning_rl.checkpoints.registry import (
    CLASSES,
    ENV_PACKAGES,
    FROM_A_HUB,
    GRANTS,
    PACKAGES,
    REFUSED,
    makers_of,
)
from lightning_rl.checkpoints.saved import settings_of
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.plain_yaml import dump_yaml, read_yaml

CURE = "Add --trust_code true if you know where it comes from, or give your own --config."
CURE_IN_PYTHON = (
    "Pass trust_code=True if you know where it comes from, or what it names yourself: policy=..."
)
"""What to do where something is refused: on the command line, and from `load_policy`."""

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

    Nothing is imported to find out.

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
            key: the last of them; of the settings of a class its name.
            value: a tree of plain values.
        """
        if isinstance(value, dict):
            if "class_path" in value:
                self._class(f"{path}.class_path", key, value["class_path"])
            if value.get("render_mode") == "human":
                self.refuse(f"{path}.render_mode", "human", "opens a window")
            if key == "lightning_rl.GymnasiumEnv" and isinstance(value.get("id"), str):
                self._env_id(f"{path}.id", value["id"])
            for name, child in value.items():
                if not isinstance(name, str) or "." in name:
                    self.refuse(path, name, "is not the plain name of a setting")
                if name != "class_path":
                    self.at(f"{path}.{name}", _key_below(key, name, value), child)
                if (name in GRANTS and child) or (name in FROM_A_HUB and "/" in str(child)):
                    self._refuse_grant(f"{path}.{name}", child)
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

    def _refuse_grant(self, path: str, value: Any) -> NoReturn:
        place, _, name = path.rpartition(".")
        raise ConfigurationError(
            f"The configuration in {self.checkpoint} sets {name}: "
            f"{'true' if value is True else value} at {place}. A checkpoint is data: it cannot "
            f"allow code or downloads, and nothing was run or downloaded. {self.cure}"
        )

    def _class(self, path: str, key: str, name: Any) -> None:
        allowed = CLASSES.get(key)
        if allowed is None:
            self.refuse(path, name, "is no place for a class")
        if str(name) not in allowed.names:
            packages = [p for p in PACKAGES if any(one.startswith(p) for one in allowed.names)]
            of_the_table = f"is no {allowed.kind} of {' or '.join(packages)}"
            self.refuse(path, name, REFUSED.get(str(name).rpartition(".")[2], of_the_table))

    def _text(self, path: str, key: str, text: str) -> None:
        if key in CLASSES:
            self._class(path, key, text)
        elif re.fullmatch(r"\$\{\w+\}", text):
            self._refuse_grant(path, text)
        elif key not in (*PATH_KEYS, "exp_name") and IMPORT_PATH.fullmatch(text):
            self.refuse(path, text, "looks like the path of a Python object")
        elif key in PATH_KEYS or (os.sep in text and os.path.exists(text)):
            self.reads[path] = text
        # The parser of the command line reads texts again, as YAML: quotes or a mapping within.
        again: Any = text
        with suppress(ConfigurationError):
            again = read_yaml(text, path)
        if isinstance(again, dict | list | str) and again != text:
            self.at(path, key, again)

    def _env_id(self, path: str, name: str) -> None:
        """Refuse an id that imports a module, and envs of other packages than the table's."""
        if ":" in name:
            self.refuse(path, name, f"would import {name.partition(':')[0]}")
        makers = makers_of(name)
        if not makers:
            self.refuse(path, name, f"is no env of {', '.join(ENV_PACKAGES)} that is registered")
        for maker in sorted(makers - {*ENV_PACKAGES}):
            self.refuse(path, name, f"is made by {maker}")


def _key_below(key: str, name: str, value: dict[str, Any]) -> str:
    """Return the key by which to look at what stands under a name: settings of a class hide it."""
    if key in CLASSES and name in ("init_args", "dict_kwargs"):
        return str(value.get("class_path"))
    # `encoders` maps keys of the observation to encoders.
    return "encoder" if key == "encoders" else name
