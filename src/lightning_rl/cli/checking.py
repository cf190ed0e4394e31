"""Check the user's settings before jsonargparse parses them: names, classes and values."""

import builtins
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from textwrap import shorten
from types import FunctionType
from typing import Any, NamedTuple, Union, cast, get_args, get_origin

import gymnasium
import yaml
from jsonargparse import Namespace
from lightning.pytorch.strategies import StrategyRegistry
from torch.optim import Optimizer

import lightning_rl
from lightning_rl.algorithms import Algorithm
from lightning_rl.algorithms.checks import PRECISIONS
from lightning_rl.buffers import Replay
from lightning_rl.checkpoints.registry import PROBES
from lightning_rl.checkpoints.trust import CURE
from lightning_rl.cli.help_pages import BUILDING_BLOCKS
from lightning_rl.cli.names import (
    ELSEWHERE,
    known_classes,
    of_another_kind,
    unknown_class,
    unknown_setting,
)
from lightning_rl.cli.options import Option, name_unused, option_parser
from lightning_rl.cli.parsing import (
    BEFORE,
    FILLED_IN,
    OF_THE_CLASS,
    NamedLater,
    TurnedOn,
    Typed,
    UsageError,
    asks_for_help,
    check_names,
    merge_options,
    override,
    read_settings,
)
from lightning_rl.collectors import Collector
from lightning_rl.envs import VectorEnv
from lightning_rl.policies import Encoder, Memory, Policy
from lightning_rl.system.declared import Family, Parts, describe_type, parts_of
from lightning_rl.system.errors import ConfigurationError, closest
from lightning_rl.system.extensions import import_present
from lightning_rl.system.jsonargparse_private import (
    ImportDenied,
    ParamData,
    accept_plain_numpy_numbers,
    converted,
    import_object,
    parameters_of,
)
from lightning_rl.system.lazy import modules_of_names
from lightning_rl.system.plain_yaml import QuotedText, load_yaml
from lightning_rl.system.texts import is_import_path, is_settings_file
from lightning_rl.training.data import RLDataModule
from lightning_rl.training.trainer import RLTrainer

for _module in sorted({*modules_of_names(lightning_rl.__file__).values()}):
    import_present(_module)  # for its short names

FAMILIES = {
    Algorithm: "model",
    Policy: "model.policy",
    Encoder: "model.policy.encoder",
    Memory: "model.policy.memory",
    Optimizer: "model.optimizer",
    VectorEnv: "data.env",
    Collector: "data.collector",
    Replay: "data.replay",
}
"""Base classes whose subclasses a config names, and the setting that names them."""


class Section(NamedTuple):
    """A section of the config, whose class is fixed."""

    cls: type


SECTIONS = {"data": Section(RLDataModule), "trainer": Section(RLTrainer)}

TOPICS = (*FAMILIES.values(), "data.eval_env", "trainer.callbacks", "trainer.logger", *SECTIONS)
"""Help topics, for messages."""

TEXTS = {
    "trainer.strategy": ("auto", *StrategyRegistry.available_strategies()),
    "trainer.profiler": ("simple", "advanced", "pytorch", "xla"),
}
"""Texts that stand for an instance of a Lightning class."""

ALLOWED = {
    "trainer.precision": " or ".join(PRECISIONS),
    "trainer.strategy": "auto, ddp or fsdp",
    "trainer.profiler": "simple, advanced, pytorch or null",
}
"""Allowed values of settings whose type accepts more."""

EXAMPLES = {"monitor": "eval/avg_reward", "id": "CartPole-v1"}
"""Example values for messages."""

EMPTY = inspect.Parameter.empty


def check_run(arguments: Sequence[str]) -> dict[str, Any]:
    """Check the arguments of a subcommand that makes a run; return settings for the parser."""
    return check_options(arguments[1:], kinds_of(arguments[0]))


def parse_classes(
    subcommand: str, description: str, options: Mapping[str, Option], typed: Sequence[str]
) -> Namespace:
    """Parse the options of a subcommand as `parse_options` does, and make objects of its classes.

    `--help` prints the help and exits.
    """
    accept_plain_numpy_numbers()
    check_names(subcommand, typed, options)
    parser = option_parser(subcommand, description, options)
    if asks_for_help(typed):
        parser.parse_args(list(typed))
    checked = check_options(typed, {name: option.kind for name, option in options.items()})
    settings = cast(Namespace, parser.instantiate(parser.parse_object(checked)))
    name_unused(options, settings, typed)
    return settings


def kinds_of(subcommand: str) -> dict[str, Any]:
    """Return the types of the options of a subcommand that makes a run, by name."""
    method = inspect.signature(getattr(RLTrainer, subcommand)).parameters
    kinds = {
        name: param.annotation
        for name, param in method.items()
        if name != "self" and "data" not in name
    }
    kinds |= {"config": str, "exp_name": str, "output_dir": str, "print_config": bool}
    kinds |= {"trust_code": bool, "restore_replay": bool}
    return {**kinds, "seed_everything": bool | int | None, "model": Algorithm, **SECTIONS}


def check_options(options: Sequence[str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Check options against `kinds`, types by name (`data.env`); return the settings."""
    # Settings of all files and options are merged first: a later class replaces an earlier one.
    walk, tree = _Walk(asks_for_help(options)), merge_options(options)
    checked: dict[str, Any] = {}
    for name, kind in kinds.items():
        section, _, last = name.rpartition(".")
        holder = tree.get(section, {}) if section else tree
        place = checked.setdefault(section, {}) if section else checked
        if last in holder:
            place[last] = walk.at(kind, holder[last], name)
        elif name == "model":
            walk.missing.append(UsageError("Missing setting: model."))
    for name in tree.keys() - {kind.partition(".")[0] for kind in kinds}:
        raise walk.unknown(name, tree[name], "", None, kinds)
    # After unknown names: a misspelt setting is also a missing one.
    if walk.missing and not walk.helps:
        raise walk.missing[0]
    return checked


class _Walk:
    """Checks a tree of settings against the signatures of constructors."""

    def __init__(self, helps: bool = False) -> None:
        self.helps = helps  # help accepts abstract classes and missing settings
        self.missing: list[UsageError] = []  # raised after all other errors

    def at(self, kind: Any, value: Any, path: str, default: Any = EMPTY) -> Any:
        # Only a switch keeps its earlier settings under `true`; other types refuse the text.
        if isinstance(value, TurnedOn) and bool not in parts_of(kind).plain:
            value = Typed("true")
        if isinstance(value, NamedLater) and not parts_of(kind).families:
            value = value["class_path"]
        if isinstance(kind, Section):
            return self._group(kind.cls, value, path)
        if kind in (EMPTY, Any):
            name = value.get("class_path", ".") if isinstance(value, dict) else "."
            if "." not in name:
                raise UsageError(
                    f"{path}: a constructor of your own takes the short name {name} only for an "
                    "argument with a type, as in policy: Policy."
                )
            return _as_text(value, path)
        parts = parts_of(kind)
        if value is None and default is None:
            return None
        # Where a class is allowed, a text names a class.
        if kinds := [kind for kind in parts.plain if kind is not str or not parts.families]:
            plain_value = _converted(Union[tuple(kinds)], value, path)  # noqa: UP007
            # NumPy and torch hold whole numbers in 64 bits: they would overflow far from here.
            if type(plain_value) is int and abs(plain_value) >= 2**63:
                raise UsageError(f"{path} must lie below 2**63, got {plain_value}.")
            if plain_value is not EMPTY:
                return plain_value
        if isinstance(value, list) and parts.entries is not None:
            return [self.at(parts.entries, entry, path) for entry in value]
        if isinstance(value, dict) and parts.values and "class_path" not in value:
            return {
                key: self.at(parts.values, entry, f"{path}.{key}") for key, entry in value.items()
            }
        if parts.families and isinstance(value, str | dict) and value != "":
            return self._class(kind, parts, value, path)
        if parts.group is not None and isinstance(value, str | dict):
            return self._group(parts.group, value, path)
        if _takes_function(parts) and isinstance(value, str) and "." in value:
            _refuse_import(value, path)
        raise UsageError(_wrong(kind, value, path, default))

    def unknown(
        self, name: str, value: Any, path: str, owner: type | None, settable: Iterable[str]
    ) -> UsageError:
        if self.helps:
            topic, topic_list = f"{path}.{name}".lstrip("."), ", ".join(TOPICS)
            return UsageError(
                f"There is no help on '{topic}'{closest(topic, TOPICS)}; there is help on "
                f"{topic_list}."
            )
        configurable_classes = (
            (path, cls.__name__, parameters_of(cls)) for path, cls in configurable()
        )
        owner_name = "" if owner is None else owner.__name__
        return UsageError(
            unknown_setting(name, value, path, owner_name, settable, configurable_classes)
        )

    def _class(self, kind: Any, parts: Parts, value: Any, path: str) -> Any:
        spec = _content(value, path)
        spec = spec if isinstance(spec, dict) else {"class_path": str(value)}
        family, name, is_text = parts.families[0], spec.get("class_path"), isinstance(value, str)
        if name is None and not self.helps:
            raise UsageError(_wrong(kind, value, path, EMPTY))
        is_alone = is_text or spec.keys() == {"class_path", BEFORE}  # the text replaces a class
        if str in parts.plain and is_alone and not _names_class(str(name), parts):
            if name in TEXTS.get(path, (name,)):
                return str(name)
            raise UsageError(_wrong(kind, name, path, EMPTY))
        # A text may also name a function that makes the object: `--data.env my_module.make_env`.
        cls = family.cls if name is None else self._resolved(name, parts, path, is_text)
        if is_text and not isinstance(cls, type):
            return name
        settable = _settable(cls, family)
        settings = {name: value for name, value in spec.items() if name not in OF_THE_CLASS}
        replaced_settings = self._chosen(spec, parts, path)
        # The new class takes the settings of the class it replaces, where name and type fit.
        shared = {
            name: value
            for name, value in replaced_settings.items()
            if name in settable and self._suits(settable[name].annotation, value, f"{path}.{name}")
        }
        settings = shared | {k: override(shared.get(k), v) for k, v in settings.items()}
        settings = self._settings(cls, settable, settings, path, replaced_settings)
        extra = {"init_args": settings, "dict_kwargs": _as_text(spec.get("dict_kwargs"), path)}
        return {"class_path": name} | {key: content for key, content in extra.items() if content}

    def _chosen(self, spec: Mapping[str, Any], parts: Parts, path: str) -> dict[str, Any]:
        """Return the settings of replaced classes, without the defaults that a run's file lists."""
        if BEFORE not in spec:
            return {}
        replaced = spec[BEFORE]
        settings = {name: value for name, value in replaced.items() if name not in OF_THE_CLASS}
        with suppress(Exception):  # all settings count of a class that cannot be imported
            cls = self._resolved(replaced["class_path"], parts, path, False)
            params = _settable(cls, parts.families[0])
            defaults = {k: v.default for k, v in params.items() if v.default is not EMPTY}
            # Only a file of a run has all settings of a class: other files have chosen ones.
            if defaults.keys() <= settings.keys():
                settings = {
                    name: value
                    for name, value in settings.items()
                    if isinstance(value, Typed) or not _is_default(value, defaults.get(name, EMPTY))
                }
        earlier = self._chosen(replaced, parts, path)
        return earlier | {name: override(earlier.get(name), v) for name, v in settings.items()}

    def _suits(self, kind: Any, value: Any, path: str) -> bool:
        try:
            _Walk(self.helps).at(kind, value, path)
        except UsageError:
            return False
        return True

    def _group(self, cls: type, value: Any, path: str) -> dict[str, Any]:
        content = _content(value, path)
        if not isinstance(content, dict):
            raise UsageError(
                f"{path} must be a mapping of settings, or the path of a YAML file, got "
                f"{_shown(value)}."
            )
        settable = parameters_of(cls)
        if cls is RLTrainer:
            settable = {name: param for name, param in settable.items() if name not in ELSEWHERE}
        return self._settings(cls, settable, content, path, {})

    def _settings(
        self,
        cls: Any,
        settable: Mapping[str, ParamData],
        settings: Mapping[str, Any],
        path: str,
        replaced_settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        checked = {}
        for name, value in settings.items():
            if name not in settable:
                raise self.unknown(name, value, path, cls, settable)
            param = settable[name]
            checked[name] = self.at(param.annotation, value, f"{path}.{name}", param.default)
        for name, param in settable.items():
            if param.default is EMPTY and param.annotation is not EMPTY and name not in settings:
                self.missing.append(
                    _missing(name, param.annotation, cls, path, replaced_settings.get(name))
                )
        return checked

    def _resolved(self, name: str, parts: Parts, path: str, is_factory: bool) -> Any:
        family, bases = parts.families[0], tuple(choice.cls for choice in parts.families)
        if "." in name:
            cls = _imported(name, family.cls, path)
        elif _names_class(name, parts):
            cls = next(sub for base in bases for sub in subclasses(base) if sub.__name__ == name)
        else:
            raise _unknown_class(name, family.cls, path)
        if callable(cls) and not isinstance(cls, type):
            if not (is_factory and family.is_factory):
                check_class(name, path)
            return cls
        if not isinstance(cls, type) or not issubclass(cls, bases):
            cure = _of_gymnasium(name, cls, path) if family.cls is VectorEnv else None
            raise UsageError(cure or _of_another_kind(name, family.cls, path))
        if inspect.isabstract(cls) and not self.helps:
            methods = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
            raise UsageError(
                f"'{name}' for {path} is abstract: define {methods}, or name a class that "
                f"defines them{_known(family.cls)}."
            )
        return cls


def _settable(cls: Any, family: Family) -> dict[str, ParamData]:
    parameters = parameters_of(cls)
    # The env, or the caller of a factory, passes these arguments.
    filled_in = (*FILLED_IN, *list(parameters)[: family.leading], *family.named)
    return {name: param for name, param in parameters.items() if name not in filled_in}


def _is_default(value: Any, default: Any) -> bool:
    return bool(value == (list(default) if isinstance(default, tuple) else default))


def _names_class(text: str, parts: Parts) -> bool:
    names = (cls.__name__ for family in parts.families for cls in subclasses(family.cls))
    return "." in text or text in names


def _content(value: Any, path: str) -> Any:
    is_file = isinstance(value, str) and is_settings_file(value) and os.path.isfile(value)
    return read_settings(str(value), path) if is_file else value


def _read(value: Any) -> Any:
    if isinstance(value, NamedLater):  # no class is meant where plain values are read
        value = value["class_path"]
    if isinstance(value, Typed) and value.strip():
        with suppress(yaml.YAMLError, ValueError, LookupError, AttributeError):
            return load_yaml(str(value))
    return value


def _converted(kind: Any, value: Any, path: str) -> Any:
    """Convert a plain value to a type; return `EMPTY` if that fails."""
    yaml_value = _as_text(value, path)
    is_whole = isinstance(yaml_value, float) and yaml_value.is_integer()
    # YAML reads `1e6` as a float, also for a setting that is a whole number.
    for candidate in (yaml_value, int(yaml_value) if is_whole else yaml_value, value):
        with suppress(ValueError, TypeError):
            setting = converted(kind, candidate, value if isinstance(value, Typed) else None)
            return _quoted(setting) if isinstance(setting, str) else setting
    return EMPTY


def _as_text(value: Any, path: str) -> Any:
    """Read typed values in a tree, and quote its texts: jsonargparse would parse them as YAML."""
    value = _read(value)
    if isinstance(value, list):
        return [_as_text(entry, path) for entry in value]
    if isinstance(value, dict):
        content = {name: _as_text(entry, f"{path}.{name}") for name, entry in value.items()}
        if "class_path" not in value:
            return content
        name = content.pop("class_path")
        check_class(name, path)
        return {"class_path": name, "init_args": content.get("init_args", content)}
    return _quoted(value) if isinstance(value, str) else value


def check_class(name: str, path: str) -> None:
    """Refuse a function in the place of a class, unless its annotation names a class."""
    try:
        target = import_object(name)
    except (ImportError, AttributeError, ValueError):
        return  # the later import reports it
    returns = getattr(target, "__annotations__", {}).get("return")
    returned = returns if isinstance(returns, str) else getattr(returns, "__name__", "None")
    # Without an annotation, `returned` is "None", which `builtins` also has.
    if callable(target) and not isinstance(target, type) and hasattr(builtins, returned):
        raise ConfigurationError(
            f"{path}.class_path is {name}, which is neither a class nor a function whose "
            "annotation names a class. It was not called. Name a class, or annotate the function: "
            "def make(...) -> MyEnv."
        )


def _quoted(text: str) -> str:
    return str(text) if _read(Typed(text)) == text else QuotedText(text)


def _wrong(kind: Any, value: Any, path: str, default: Any) -> str:
    allowed, cure, parts = ALLOWED.get(path, describe_type(kind)), "", parts_of(kind)
    value = _read(value)
    if parts.families and not parts.plain and not isinstance(value, list):
        allowed = "the name of a class, or {class_path: NAME, init_args: {...}}"
        cure = _known(parts.families[0].cls)
    if value is None and default is not EMPTY:
        cure = f"; leave it out for {default}"
    elif isinstance(value, bool | None) and ("one of" in allowed or "a text" in allowed):
        cure = " (YAML converts off, no, on, yes and null: put the text in quotes)"
    elif "a list" in allowed and not isinstance(value, list | dict):
        cure = f": write [{value}]"
    elif "a list" in allowed and isinstance(value, list):
        entries = " or ".join(
            describe_type(get_args(kind)[0]) for kind in parts.plain if get_args(kind)
        )
        cure = f": each entry must be {entries}" if entries else ""
    elif "a text" in allowed and isinstance(value, int | float):
        cure = " (YAML converts 1:30:00, 2025_01 and 1e3 to numbers: put the text in quotes)"
    is_choice = allowed.startswith("one of") and value is not None
    return f"{path} must be {allowed}, got {value if is_choice else _shown(value)}{cure}."


def _shown(value: Any) -> str:
    return "null" if value is None else f"'{shorten(str(value), 200)}'"


def _missing(name: str, kind: Any, cls: type, path: str, replaced: Any) -> UsageError:
    field, families = f"{path}.{name}", parts_of(kind).families
    if replaced is not None and families:
        other = replaced.get("class_path") if isinstance(replaced, dict) else replaced
        return UsageError(
            f"Missing setting: {field}. {other} was given, but {cls.__name__} does not take it; it "
            f"takes {', '.join(offered_names(families[0].cls))}."
        )
    example = f"{name}: {EXAMPLES.get(name, '...')}"
    if "." in path:
        example = f"{{class_path: {cls.__name__}, init_args: {{{example}}}}}"
    return UsageError(
        f"Missing setting: {field} of {cls.__name__}, {describe_type(kind)}: write {example}"
        f"{_known(families[0].cls) if families else ''}."
    )


def _takes_function(parts: Parts) -> bool:
    return any(kind is Callable or get_origin(kind) is Callable for kind in parts.plain)


def _refuse_import(name: str, path: str) -> None:
    """Raise the reason for which a text is no function, which the parser hides."""
    target = _imported(name, None, path)
    if isinstance(target, type):
        raise UsageError(
            f"'{name}' for {path} is a class, but must be a function. Name a function that makes "
            f"it: def make(*arguments): return {target.__name__}(*arguments)."
        )
    if not callable(target):
        raise UsageError(f"'{name}' for {path} must be a function, but is {_shown(target)}.")


def _imported(name: str, family: type | None, path: str) -> Any:
    """Import a class of a family, or without one a function."""
    module, _, attribute = name.rpartition(".")
    head, allowed = f"'{name}' for {path}", _known(family) if family else ""
    try:
        return import_object(name)
    except ImportDenied:
        raise UsageError(
            f"{head} is third-party code, and the configuration comes from a checkpoint. {CURE}"
        ) from None
    except ModuleNotFoundError as error:
        # The module itself is missing, or a package that it imports: the cures differ.
        if not f"{module}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{head} cannot be imported: {module} needs '{error.name}', which is not installed."
            ) from error
        raise UsageError(
            f"{head} cannot be found: there is no module '{error.name}' in the working directory "
            f"or among the installed packages{allowed}."
        ) from error
    except AttributeError as error:
        kind = family or FunctionType
        # Where the module is missing, no member of the substitute `inspect` passes the filter.
        members = vars(sys.modules.get(module, inspect)).values()
        local = [obj for obj in members if getattr(obj, "__module__", "") == module]
        names = sorted(
            obj.__name__
            for obj in local
            if (isinstance(obj, type) and issubclass(obj, kind)) or (not family and callable(obj))
        )
        offered = f"; it has {', '.join(names)}" if names else f", and it has no {kind.__name__}"
        raise UsageError(
            f"{head} cannot be found: module '{module}' has no '{attribute}'{offered}"
            f"{closest(attribute, names)}{allowed}."
        ) from error
    except ValueError:
        if is_import_path(name):
            raise  # by the module, such as a refusal of the class
        # Not an import path: `a..b`.
        if family is None:
            raise UsageError(f"{head} is no import path, such as my_module.my_function.") from None
        raise _unknown_class(name, family, path) from None


def _unknown_class(name: str, family: type, path: str) -> UsageError:
    if any(cls.__name__ == name for base in FAMILIES for cls in subclasses(base)):
        return UsageError(_of_another_kind(name, family, path))
    return UsageError(unknown_class(name, path, offered_names(family)))


def _of_another_kind(name: str, family: type, path: str) -> str:
    return f"{of_another_kind(name, family.__name__, path)}{_known(family)}."


def _of_gymnasium(name: str, cls: Any, path: str) -> str | None:
    if not isinstance(cls, type) or not issubclass(cls, gymnasium.Env):
        return None
    module = name.rpartition(".")[0]
    # Gymnasium stores an entry point as a class, or as text.
    places = (cls, f"{cls.__module__}:{cls.__qualname__}")
    ids = [spec.id for spec in gymnasium.registry.values() if spec.entry_point in places]
    id = ids[-1] if ids else f"{cls.__name__}-v0"
    register = "" if ids else f"call gymnasium.register('{id}', {cls.__name__}) in {module}, and "
    # The module prefix lets `gymnasium.make` import the module that registers the env.
    id = id if ids and module.startswith("gymnasium.") else f"{module}:{id}"
    return (
        f"'{name}' for {path} is a Gymnasium env: {register}write --{path} GymnasiumEnv "
        f"--{path}.id {id}."
    )


def configurable() -> Iterator[tuple[str, type]]:
    """Yield the sections and all classes that a config may name, with their setting."""
    yield from ((path, section.cls) for path, section in SECTIONS.items())
    for family, path in FAMILIES.items():
        classes = (cls for cls in subclasses(family) if cls.__name__ not in PROBES)
        yield from ((path, cls) for cls in classes if not inspect.isabstract(cls))


def _known(family: type) -> str:
    return known_classes(offered_names(family))


def offered_names(family: type) -> list[str]:
    """Return the names of the classes of a family that messages offer."""
    of_lightning = family.__module__.startswith("lightning.pytorch.")
    return sorted(
        {
            cls.__name__
            for cls in subclasses(family)
            if not cls.__name__.startswith("_")
            and not inspect.isabstract(cls)
            and cls.__name__ not in (*PROBES, *BUILDING_BLOCKS)
            and (not of_lightning or cls.__module__.startswith("lightning.pytorch."))
        }
    )


def subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and all classes below it."""
    yield cls
    children: list[type[Any]] = cls.__subclasses__()
    for child in children:
        if "<locals>" not in child.__qualname__:  # a class inside a function has no import path
            yield from subclasses(child)
