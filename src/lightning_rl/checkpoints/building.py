"""Build the objects that the configuration in a checkpoint describes.

`{class_path: NAME, init_args: {...}}` describes an object, or a factory if the argument is declared
as a function. Without `trust_code` only classes in the table of `registry` are imported.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from inspect import isabstract
from pathlib import Path
from typing import Any, cast, get_origin

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_rl.checkpoints.format import (
    CONFIG_KEY,
    SPACES_KEY,
    STATE_KEY,
    read_checkpoint,
    restoring,
    weights_of,
)
from lightning_rl.checkpoints.own import is_own
from lightning_rl.checkpoints.registry import NAMES
from lightning_rl.checkpoints.saved import describe_missing, missing_settings, settings_of, written
from lightning_rl.checkpoints.trust import CURE_IN_PYTHON, checked_config
from lightning_rl.rollout.spaces import space_from
from lightning_rl.system.construction import GIVEN_BY_THE_ENV, weights_follow
from lightning_rl.system.declared import Family, is_read_from_text, parts_of
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.jsonargparse_private import converted, kind_of
from lightning_rl.system.plain_yaml import dump_yaml
from lightning_rl.system.process import package_defaults
from lightning_rl.system.texts import imported


def run_settings(path: Path, trust_code: bool) -> dict[str, Any]:
    """Return the configuration of a checkpoint's run.

    Raises:
        ConfigurationError: if the checkpoint has none, or one that is not trusted.
    """
    content = read_checkpoint(path, verify=False)
    require(
        CONFIG_KEY in content,
        f"The checkpoint {path} does not say which env it was trained in: give --config or "
        "--data.env.",
    )
    text = str(content[CONFIG_KEY])
    return settings_of(text if trust_code else checked_config(text, path).config, path)


class SavedRun:
    """Builds the policy, the algorithm or the env factory of a checkpoint.

    Args:
        path: path of the checkpoint.
        content: content of the checkpoint.
        trust_code: import any class that the checkpoint names; False: only those in `registry`, and
            the code of this user's own runs.
        cure: last sentence of a refusal.

    Attributes:
        settings: the configuration; empty if the checkpoint has none.
        trusted: whether its code is imported: with `trust_code`, or of an own run once checked.

    Raises:
        ConfigurationError: if the configuration cannot be read.
    """

    def __init__(
        self, path: Path, content: dict[str, Any], trust_code: bool, cure: str = CURE_IN_PYTHON
    ) -> None:
        self.path = path
        self.content = content
        text = content.get(CONFIG_KEY)
        self.settings = {} if text is None else settings_of(str(text), path)
        self.trusted = trust_code
        self._cure = cure

    @property
    def kept_state(self) -> dict[str, Any]:
        """The part of the state that a checkpoint of weights alone keeps."""
        return cast(dict[str, Any], weights_of(self.content)[STATE_KEY])

    def policy(self, kind: type) -> Any:
        """Build the policy; its base class must be `kind`.

        Raises:
            ConfigurationError: if the checkpoint has no policy, or names a class that is not
                allowed.
        """
        arguments = self._model().get("init_args", {})
        model = {"init_args": {"policy": arguments["policy"]} if "policy" in arguments else {}}
        self._check("load_policy", model, {})
        # The saved spaces: no env is needed to build a policy.
        config = self._with_spaces(model["init_args"]["policy"], "load_policy")
        with self.building():
            return self._build(config, kind, "model.policy")

    def algorithm(self, cls: type, overrides: Mapping[str, Any]) -> Any:
        """Build the algorithm; its base class must be `cls`. `overrides` replaces saved arguments.

        Raises:
            ConfigurationError: as for `policy`, and if the checkpoint holds another class.
        """
        model = self._model()
        # The caller's objects replace saved settings, which are not built then.
        arguments = {k: v for k, v in model.get("init_args", {}).items() if k not in overrides}
        model = {**model, "init_args": arguments}
        name = str(model.get("class_path", "")).rpartition(".")[2]
        call = f"{name if name.isidentifier() else cls.__name__}.load_from_checkpoint"
        self._check(call, model, overrides)
        kind = self._class_of(model, cls)
        if "policy" in arguments:
            arguments["policy"] = self._with_spaces(arguments["policy"], "load_from_checkpoint")
        with self.building():
            return kind(**self._arguments_of(kind, arguments, "model"), **overrides)

    def env_factory(self, kind: Any) -> Callable[[int], Any]:
        """Return the env factory of the run; `kind` is its declared type.

        Raises:
            ConfigurationError: if the checkpoint has no env, or names a class that is not allowed.
        """
        data = self.settings.get("data")
        env = data.get("env") if isinstance(data, dict) else None
        require(env is not None, f"The checkpoint {self.path} names no env.")
        self._refuse_code({"data": {"env": env}})
        with self.building():
            return cast(Callable[[int], Any], self._build(env, kind, "data.env"))

    def _model(self) -> dict[str, Any]:
        model = self.settings.get("model", {})
        is_section = isinstance(model, dict) and isinstance(model.get("init_args", {}), dict)
        require(is_section, f"The configuration in {self.path} has no section `model`.")
        return cast(dict[str, Any], model)

    def _check(self, call: str, model: dict[str, Any], overrides: Mapping[str, Any]) -> None:
        self._refuse_code({"model": written(model)})
        lacks = missing_settings(model["init_args"])
        if "policy" not in {**model["init_args"], **overrides}:
            lacks["policy"] = "it holds no configuration of it"
        arguments = sorted({f"{name.partition('.')[0]}=..." for name in lacks})
        require(
            not lacks,
            f"The checkpoint {self.path} cannot hold {describe_missing(lacks)}. Pass it: "
            f"{call}(path, {', '.join(arguments)}).",
        )

    def _refuse_code(self, config: dict[str, Any]) -> None:
        if self.trusted:
            return
        try:
            checked = checked_config(dump_yaml(config), self.path, self._cure)
        except ConfigurationError:
            # The signature only counts where the check has refused: most configs need none.
            if not is_own(self.content):
                raise
            self.trusted = True
            return
        if checked.reads:
            reads = re.sub("[^ -~]", "?", ", ".join(checked.reads.values()))
            rank_zero_info(f"The checkpoint {self.path} reads these files as data: {reads}.")

    def _class_of(self, model: dict[str, Any], cls: type) -> type:
        saved_class = cls  # a class inside a class or function has no saved path
        if "class_path" in model and not missing_settings(model["class_path"]):
            with self.building():
                saved_class = self._named(model["class_path"], "model")
        name = getattr(saved_class, "__name__", saved_class)
        require(
            isinstance(saved_class, type) and issubclass(saved_class, cls),
            f"The checkpoint {self.path} holds a {name}, which is no {cls.__name__}. Load it by "
            f"{name}.load_from_checkpoint, or by Algorithm.load_from_checkpoint, which loads any "
            "algorithm.",
        )
        require(
            not isabstract(saved_class),
            f"The checkpoint {self.path} does not name its algorithm. Load it by "
            "load_from_checkpoint of that algorithm's class, such as PPO.load_from_checkpoint.",
        )
        return saved_class

    def _with_spaces(self, policy: Any, call: str) -> Any:
        spaces = self.content[STATE_KEY].get(SPACES_KEY)
        require(
            isinstance(policy, dict) and isinstance(spaces, dict) and None not in spaces.values(),
            f"The checkpoint {self.path} does not hold the class and the spaces of its policy. "
            f"Pass a policy: {call}(path, policy=...).",
        )
        with restoring("spaces"):
            arguments = {name: space_from(spaces[name]) for name in GIVEN_BY_THE_ENV}
            return {**policy, "init_args": {**policy.get("init_args", {}), **arguments}}

    @contextmanager
    def building(self) -> Iterator[None]:
        """Turn any exception of a constructor into one message.

        Torch's random stream does not change, and its defaults are this package's.

        Raises:
            ConfigurationError: for any exception.
        """
        try:
            # Initial weights need no reproducible draws: the checkpoint replaces them.
            with torch.random.fork_rng(devices=[]), package_defaults(), weights_follow():
                yield
        except Exception as error:
            cause: BaseException | None = error
            # The user's error has the cure; errors of libraries wrap it.
            while cause is not None and not isinstance(cause, ConfigurationError):
                cause = cause.__cause__ or cause.__context__
            raise ConfigurationError(
                f"The checkpoint {self.path} describes an object that cannot be made: "
                f"{cause or error}"
            ) from error

    def _build(self, value: Any, kind: Any, path: str) -> Any:
        parts = parts_of(kind)
        kinds = [get_origin(kind) or kind for kind in parts.plain]
        if isinstance(value, dict) and "class_path" in value and parts.families:
            return self._object(value, parts.families, path)
        if isinstance(value, dict) and parts.group is not None:
            return parts.group(**self._arguments_of(parts.group, value, path))
        if isinstance(value, dict) and parts.values is not None:
            return {k: self._build(v, parts.values, f"{path}.{k}") for k, v in value.items()}
        if isinstance(value, list) and parts.entries is not None:
            return [self._build(v, parts.entries, f"{path}.{i}") for i, v in enumerate(value)]
        if isinstance(value, list) and np.ndarray in kinds:
            array = np.asarray(value)
            # Spaces have float32 bounds, and warn of others.
            return array.astype(np.float32) if array.dtype.kind == "f" else array
        if isinstance(value, list) and tuple in kinds and not is_read_from_text(kind):
            return tuple(value)
        makes = Callable in kinds or any(family.is_factory for family in parts.families)
        # Where a plain text is no valid value, the text names a function.
        if isinstance(value, str) and makes and str not in kinds:
            return self._named(value, path)
        if is_read_from_text(kind):
            # The run may have had another value than the declared ones.
            with suppress(ValueError, TypeError):
                return converted(kind, copy.deepcopy(value))
        return value

    def _object(self, value: dict[str, Any], families: list[Family], path: str) -> Any:
        name = value["class_path"]
        target = self._named(name, path)
        # The annotation, because to call the function would run code of the checkpoint.
        returns = getattr(target, "__annotations__", {}).get("return")
        cls = target if isinstance(target, type) else returns
        fitting = [f for f in families if isinstance(cls, type) and issubclass(cls, f.cls)]
        require(
            bool(fitting),
            f"'{name}' for {path} is neither a {families[0].cls.__name__} nor a function whose "
            "annotation returns one. It was not called.",
        )
        settings = {**value.get("init_args", {}), **value.get("dict_kwargs", {})}
        arguments = self._arguments_of(target, settings, path)
        # A setting declared as a factory gets the env's arguments from its caller.
        return partial(target, **arguments) if fitting[0].is_factory else target(**arguments)

    def _arguments_of(self, target: Any, settings: dict[str, Any], path: str) -> dict[str, Any]:
        return {
            name: self._build(value, kind_of(target, name), f"{path}.{name}")
            for name, value in settings.items()
        }

    def _named(self, name: Any, path: str) -> Any:
        require(
            self.trusted or str(name) in NAMES,
            f"'{name}' for {path} is third-party code, and the configuration comes from a "
            f"checkpoint. {self._cure}",
        )
        try:
            return imported(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigurationError(f"'{name}' for {path} cannot be imported: {error}.") from error
