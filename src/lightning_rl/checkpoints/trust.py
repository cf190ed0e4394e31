"""Check the configuration in a checkpoint before anything is imported or built."""

import os
import re
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch.cuda import device_count

from lightning_rl.checkpoints.registry import (
    CLASSES,
    ENV_PACKAGES,
    GRANTS,
    OTHER_TEXTS,
    PACKAGES,
    REFUSED,
    SECTIONS,
    TEXTS,
    packages_of,
)
from lightning_rl.checkpoints.saved import settings_of
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.plain_yaml import dump_yaml, read_yaml
from lightning_rl.system.texts import asks_a_hub

CURE = "Add --trust_code true if you trust its source, or give your own --config."
CURE_IN_PYTHON = (
    "Pass trust_code=True if you trust its source, or pass the object yourself: policy=..."
)
"""Cures for a refusal on the command line, and in `load_policy`."""

TRAINER_TEXTS = {
    "accelerator": "auto|cpu|gpu|cuda|mps",
    "strategy": "auto|fsdp|ddp(_find_unused_parameters_(true|false))?",
    "devices": r"auto|-1|[\d, ]+",
    "precision": "(16|32|64|bf16)(-true|-mixed)?",
    "gradient_clip_algorithm": "norm|value",
    "deterministic": "warn",
    "best_metric": r"eval/[\w/]+",
    "best_mode": "max|min",
    "max_time": r"[\d:]+",
    "val_check_interval": r"[\d:]+",
}
"""Texts that a checkpoint may set for the trainer; numbers and flags may have any key."""

OF_THAT_RUN = (
    *("exp_name", "output_dir", "run_dir", "default_root_dir", "init_from", "restore_replay"),
)
"""Settings of the trainer that a resumed run does not need; they are dropped silently."""


class CheckedConfig(NamedTuple):
    """The accepted part of a checkpoint's configuration.

    Attributes:
        config: as YAML.
        left_out: refused settings of the trainer, and their values.
        reads: paths of files that the named classes will read, by setting.
    """

    config: str
    left_out: dict[str, Any]
    reads: dict[str, str]

    def __str__(self) -> str:
        lines = []
        if self.left_out:
            names = ", ".join(f"{key} ({_brief(value)})" for key, value in self.left_out.items())
            lines.append(
                "Ignored settings of the checkpoint, because they concern files, machines or "
                f"code: {names}. To use them, pass them again, add --trust_code true if you trust "
                "the checkpoint's source, or give the run's config.yaml as --config."
            )
        if self.reads:
            names = ", ".join(f"{path} ({key})" for key, path in self.reads.items())
            lines.append(f"The checkpoint's configuration reads these files as data: {names}.")
        # Remove control characters of a terminal.
        return "".join(f"{re.sub('[^ -~]', '?', line)}\n" for line in lines)


def checked_config(text: str, checkpoint: Path, cure: str = CURE) -> CheckedConfig:
    """Return the accepted part of a checkpoint's configuration, without any import."""
    config = settings_of(text, checkpoint)
    address = _without_address(config)
    inspection = Inspection(checkpoint, cure)
    for section, value in config.items():
        if section not in SECTIONS:
            inspection.refuse(section, value, "is not a section of a configuration")
        if section in ("model", "data", "trainer") and not isinstance(value, dict):
            inspection.refuse(section, value, "is not a mapping of settings")
        if section not in ("trainer", "output_dir"):
            inspection.at(section, section, value)
    # The user of a resumed run chooses its directory.
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
    return CheckedConfig(dump_yaml(config), left_out, inspection.reads)


def _without_address(config: dict[str, Any]) -> Any:
    # Only the user may set the address: a host there could run code in this process.
    place: Any = config
    for key in ("data", "collector", "init_args"):
        place = place.get(key) if isinstance(place, dict) else None
    return place.pop("address", None) if isinstance(place, dict) else None


def _is_plain(key: Any, value: Any) -> bool:
    if key == "num_nodes":
        return bool(value == 1)  # with more nodes, the run would wait for missing machines
    if key == "devices" and _number_of_devices(value) > max(os.cpu_count() or 1, device_count()):
        return False
    if isinstance(value, dict):
        return all(isinstance(entry, bool | int | float | None) for entry in value.values())
    if isinstance(value, list):
        return key == "devices" and all(isinstance(entry, int) for entry in value)
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
    values = value if isinstance(value, list) else [value]
    names = [spec.get("class_path", spec) if isinstance(spec, dict) else spec for spec in values]
    # An address is not the path of a class.
    short = (str(name) if ":" in str(name) else str(name).rpartition(".")[2] for name in names)
    return textwrap.shorten(", ".join(short), 80)


class Inspection:
    """A walk through the configuration in a checkpoint."""

    def __init__(self, checkpoint: Path, cure: str) -> None:
        self.checkpoint = checkpoint
        self.cure = cure
        self.reads: dict[str, str] = {}

    def at(self, path: str, key: str, value: Any) -> None:
        """Check a value at `path`, all values below it, and the texts that name code."""
        if isinstance(value, dict):
            if "class_path" in value:
                self._class(f"{path}.class_path", key, value["class_path"])
            if value.get("render_mode") == "human":
                self.refuse(f"{path}.render_mode", "human", "opens a window")
            if key == "lightning_rl.GymnasiumEnv" and isinstance(value.get("id"), str):
                self._env_id(f"{path}.id", value["id"])
            for name, child in value.items():
                if not isinstance(name, str) or "." in name:
                    self.refuse(path, name, "is not the name of a setting")
                # A grant that is false allows nothing.
                if (name in GRANTS and child) or asks_a_hub(name, child):
                    self._refuse_grant(f"{path}.{name}", child)
                if name != "class_path":
                    self.at(f"{path}.{name}", _key_below(key, name, value), child)
        elif isinstance(value, list | tuple):
            for i, child in enumerate(value):
                self.at(f"{path}.{i}", key, child)
        elif isinstance(value, str):
            self._text(path, key, value)
        elif not isinstance(value, bool | int | float | None):
            self.refuse(path, value, "is not a plain value")

    def refuse(self, path: str, value: Any, reason: str) -> NoReturn:
        raise ConfigurationError(
            f"The configuration in {self.checkpoint} names '{value}' as {path}, which {reason}. "
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
            self.refuse(path, name, "does not take a class")
        if str(name) not in allowed.names:
            packages = [p for p in PACKAGES if any(n.startswith(p) for n in allowed.names)]
            article = "an" if allowed.kind[0].lower() in "aeiou" else "a"
            of_the_table = f"is not {article} {allowed.kind} of {' or '.join(packages)}"
            self.refuse(path, name, REFUSED.get(str(name).rpartition(".")[2], of_the_table))

    def _text(self, path: str, key: str, text: str) -> None:
        allowed = TEXTS.get(key, OTHER_TEXTS)
        if re.fullmatch(r"\$\{\w+\}", text):
            self._refuse_grant(path, text)
        elif key in CLASSES and key not in TEXTS:
            self._class(path, key, text)
        elif not allowed.fits(text):
            self.refuse(path, text, f"is not {allowed.form}")
        elif allowed.is_file:
            self.reads[path] = text
        # The command line parses texts again as YAML, so check quoted texts and mappings in them.
        yaml_value: Any = text
        with suppress(ConfigurationError):
            yaml_value = read_yaml(text, path)
        if isinstance(yaml_value, dict | list | str) and yaml_value != text:
            self.at(path, key, yaml_value)

    def _env_id(self, path: str, name: str) -> None:
        if ":" in name:
            self.refuse(path, name, f"would import {name.partition(':')[0]}")
        makers = packages_of(name)
        if not makers:
            self.refuse(path, name, f"is not a registered env of {', '.join(ENV_PACKAGES)}")
        # Each package that makes this env must be allowed.
        for maker in sorted(makers - {*ENV_PACKAGES}):
            self.refuse(path, name, f"is made by {maker}")


def _key_below(key: str, name: str, value: dict[str, Any]) -> str:
    if key in CLASSES and name in ("init_args", "dict_kwargs"):
        return str(value.get("class_path"))
    if name == "model":  # the algorithm stands at the top
        return "env_model"
    # `encoders` maps keys of the observation to encoders, `actions` names to action terms.
    # `keys` maps names to names.
    inner = {"encoders": "encoder", "actions": "action", "keys": "keys"}
    return inner.get(key, name)
