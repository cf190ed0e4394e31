"""Write the settings of a run to its loggers and checkpoints."""

import copy
import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, cast

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rl.checkpoints.format import CONFIG_KEY
from lightning_rl.checkpoints.registry import ENV_PACKAGES, modules_of
from lightning_rl.system.construction import (
    GIVEN_BY_THE_ENV,
    Configurable,
    config_of,
    is_unwritten,
    to_config,
)
from lightning_rl.system.plain_yaml import dump_yaml, read_yaml
from lightning_rl.training.callbacks.typed import algorithm_of, data_of
from lightning_rl.training.data import RLDataModule

FIRST_VALUES = ("init_alpha", "log_std_init", "action_statistics", "dataset_stats")
"""Settings of algorithms and policies that only give a first value to what a checkpoint holds."""

OF_THE_RUN = ("run_dir", "output_dir", "exp_name", "init_from", "restore_replay")
"""Trainer settings about a single run: its output and its starting point."""


class SettingsWriter(Callback):
    """Write the settings of a run to its loggers at the beginning, and into its checkpoints.

    The command line has a subclass that writes the configuration; this class, for runs in Python,
    reads the constructor arguments of algorithm, policy, data module and trainer. A setting that
    cannot be written (a lambda, an object of a foreign class) is described in words.
    """

    def settings(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the settings with defaults, nested as in a configuration."""
        config = configuration_of(trainer, pl_module)
        for section, cls in {"data": RLDataModule, "trainer": type(trainer)}.items():
            if isinstance(config[section], dict):
                config[section] = _defaults(cls) | config[section]
        return cast(dict[str, Any], _changed(config, _add_defaults))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and trainer.loggers:
            settings = self.settings(trainer, pl_module)
            for logger in trainer.loggers:
                logger.log_hyperparams(settings)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[CONFIG_KEY] = dump_yaml(configuration_of(trainer, pl_module))

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        warn_of_first_values(config_of(algorithm_of(pl_module)), checkpoint)


def evaluation_protocol(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """Return the settings of the latest evaluation, by name and as plain data, without defaults."""
    writer = next(c for c in cast(Any, trainer).callbacks if isinstance(c, SettingsWriter))
    config, data = writer.settings(trainer, pl_module)["data"], data_of(trainer)
    config = config if isinstance(config, dict) else {}  # a data module of the user's
    env = config.get("eval_env") or config.get("env")
    if isinstance(env, dict) and "init_args" not in env:  # of a run in Python: a class
        _add_defaults(env := env | {"init_args": {}})
    evaluation = algorithm_of(pl_module).evaluation
    protocol = {
        "eval_env": _changed(env, _drop_absent),
        "eval_events": _changed(config.get("eval_events"), _drop_absent),
        "eval_deterministic": data.eval_deterministic,
        "max_eval_episode_steps": data.max_eval_episode_steps,
        "eval_seed": evaluation["seeds"][0],
        "num_eval_episodes": evaluation["episodes"],
    }
    return cast(dict[str, Any], json.loads(json.dumps(protocol, default=str)))


def differences(protocol: Any, other: Mapping[str, Any]) -> list[str]:
    """Return the settings in which a saved protocol, if there is one, differs from another."""
    names = other if isinstance(protocol, dict) else ()
    return [f"data.{name}" for name in names if protocol.get(name) != other[name]]


def _drop_absent(settings: dict[str, Any]) -> None:
    for name in [name for name, value in settings.items() if value is None]:
        del settings[name]


def warn_of_first_values(model: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> None:
    """Warn of settings (`FIRST_VALUES`) of a model `{class_path, init_args}` without effect.

    The checkpoint, which replaces their values, has others in its configuration.
    """
    config = read_yaml(str(checkpoint.get(CONFIG_KEY, "")), "The configuration in the checkpoint")
    _compare(model, config.get("model") if isinstance(config, dict) else None, "model")


def _compare(model: Mapping[str, Any], saved: Any, path: str) -> None:
    settings = saved.get("init_args") if isinstance(saved, dict) else None
    if not isinstance(settings, dict):
        return
    # The checkpoint holds the rate that an adaptive schedule has reached.
    adapts = model["init_args"].get("lr_schedule") == "adaptive"
    for name, value in model["init_args"].items():
        if isinstance(value, dict) and "init_args" in value:
            _compare(value, settings.get(name), f"{path}.{name}")
        elif value != settings.get(name) and (
            name in FIRST_VALUES or (adapts and name == "learning_rate")
        ):
            rank_zero_warn(
                f"{path}.{name}: {value} has no effect, because it is only the first value of what "
                f"the checkpoint holds (saved setting: {settings.get(name, 'default')}). Remove "
                "it, or train from the beginning with it."
            )


def configuration_of(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """Return the configuration of a run in Python."""
    data = cast(Any, trainer).datamodule
    is_ours = type(data) is RLDataModule
    settings = _changed(to_config(data.settings() if is_ours else data), _add_module)
    arguments = config_of(cast(Configurable, trainer))["init_args"]
    return {
        "seed_everything": settings.get("seed", True) if is_ours else True,
        "exp_name": arguments.get("exp_name", "run"),
        "model": config_of(algorithm_of(pl_module)),
        "data": settings,
        "trainer": {key: value for key, value in arguments.items() if key not in OF_THE_RUN},
    }


def _changed(tree: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """Return a copy of a tree of settings, each of whose mappings `change` has changed."""
    if isinstance(tree, list):
        return [_changed(child, change) for child in tree]
    if isinstance(tree, dict):
        tree = {key: _changed(child, change) for key, child in tree.items()}
        change(tree)
    return tree


def _add_module(settings: dict[str, Any]) -> None:
    """Add to the id of an env the package that registered it: another process imports none."""
    id = settings.get("id")
    if isinstance(id, str) and ":" not in id:
        # The module of the env: its import also imports its package, which may register the env.
        packages = {*ENV_PACKAGES, "__main__"}
        homes = [module for module in modules_of(id) if module.partition(".")[0] not in packages]
        settings["id"] = f"{homes[0]}:{id}" if len(homes) == 1 else id


def _add_defaults(settings: dict[str, Any]) -> None:
    module, _, name = str(settings.get("class_path")).rpartition(".")  # a class that has just run
    # A class without an import path is described in words.
    if "init_args" in settings and module.replace(".", "_").isidentifier():
        defaults = _defaults(getattr(import_module(module), name))
        settings["init_args"] = defaults | settings["init_args"]


def _defaults(cls: Any) -> dict[str, Any]:
    return copy.deepcopy(_defaults_of(cls)) if isinstance(cls, type) else {}


@cache  # cache, because the parser takes 10 to 20 ms per class
def _defaults_of(cls: type) -> dict[str, Any]:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, fail_untyped=False)
    defaults = parser.get_defaults().as_dict()
    return {
        name: setting
        for name, value in defaults.items()
        if name not in GIVEN_BY_THE_ENV and not is_unwritten(setting := to_config(value))
    }
