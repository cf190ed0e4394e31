"""Turn what the argument parser says into what its user needs.

The setting, what is allowed, and the closest match.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer

from lightning_rl.algorithms import Algorithm
from lightning_rl.buffers import Replay
from lightning_rl.cli.parsing import Given
from lightning_rl.collectors import Collector
from lightning_rl.data import RLDataModule
from lightning_rl.envs import VectorEnv
from lightning_rl.errors import closest
from lightning_rl.permission import CURE
from lightning_rl.policies import Encoder, Memory, Policy
from lightning_rl.trainer import RLTrainer

FAMILIES: dict[str, type] = {
    "model": Algorithm,
    "model.policy": Policy,
    "model.policy.encoder": Encoder,
    "model.policy.memory": Memory,
    "model.optimizer": Optimizer,
    "data.env": VectorEnv,
    "data.eval_env": VectorEnv,
    "data.collector": Collector,
    "data.replay": Replay,
}
"""Which family of classes a key takes its class from."""

OF_LIGHTNING: dict[str, type] = {"trainer.callbacks": Callback, "trainer.logger": Logger}
"""The same, of classes whose settings are not ours to name."""

OURS = {"default_root_dir": "it is the directory of the run; set --output_dir or trainer.run_dir"}
"""Settings of Lightning's that this package sets itself, and what to set instead."""

SECTIONS: dict[str, type] = {"data": RLDataModule, "trainer": RLTrainer}
"""The keys below which settings of one class stand."""

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "NoneType": "null",
    "Sequence": "a list",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping, such as {name: value}",
}
"""What to call the types that a value may have."""


def explain(message: str, typed: Sequence[str] = (), cure: str = CURE) -> str:
    """Rewrite a message of the parser.

    One that it does not know stays, less the parser's inner workings.

    Args:
        message: of the parser.
        typed: options, of which the message may be about one: they tell its whole path.
        cure: what to do about code of others.
    """
    given = Given(typed)
    key = _whole(_key(message), given)
    if option := _unknown_option(message):
        return _unknown_setting(option, given)
    if name := _search(r"Importing '([^']+)' is not allowed", message):
        return (
            f"'{name}' for {key} is code of others, and the configuration comes from a checkpoint. "
            f"{cure}"
        )
    if stray := _search(r"unrecognized arguments: ([^-]\S*)", message):
        return f"'{stray}' belongs to no option: an option is --name value."
    if missing := _search(r"arguments are required: (.+)", message):
        return f"Missing setting: {re.sub(r'(fit|check)[.]', '', missing)}."
    return (
        _about_a_class(message, key, given)
        or _about_a_value(message, key)
        or re.sub(r"\s+\n", "\n", message).strip()
    )


def _search(pattern: str, message: str) -> str | None:
    found = re.search(pattern, message)
    return found[1].strip() if found else None


def _key(message: str) -> str:
    """Return the key that a message is about, which may lack those above it."""
    return _search(r'Parser key "([^"]+)"', message) or _search(r"^--(\S+)\.help: ", message) or ""


def _whole(key: str, given: Given) -> str:
    """Return the whole path of a key, as far as what is given, or a class, tells it."""
    if "." in key or key in FAMILIES or key in SECTIONS or not key:
        return key
    if key_given := given.path_of(key):
        return key_given
    families = [path for path in FAMILIES if path.endswith(f".{key}")]
    owners = families or [
        f"{path}.{key}"
        for path, family in FAMILIES.items()
        if path != "data.eval_env" and any(key in _parameters(cls) for cls in _subclasses(family))
    ]
    return owners[0] if len(owners) == 1 else key


def _unknown_option(message: str) -> str | None:
    return (
        _search(r"Option '([^']+)' is not accepted", message)
        or _search(r"accept option '([^']+)'", message)
        or _search(r"unrecognized arguments: --([\w.]+)", message)
    )


def _unknown_setting(option: str, given: Given) -> str:
    """Say whose setting it would be, what that has, and what it may be meant for."""
    path = given.path_of(option) or option
    above, _, name = path.rpartition(".")
    if path.endswith(".help"):
        wanted = path.removesuffix(".help")
        topics = (*FAMILIES, *OF_LIGHTNING, *SECTIONS)
        first = next((f"--{path}.help" for path in FAMILIES if wanted.startswith(f"{path}.")), None)
        cure = f" Where only some classes have it, name one first: {first} NAME --{wanted}.help."
        return (
            f"There is no help on '{wanted}'{closest(wanted, topics)}; there is on "
            f"{', '.join(topics)}.{cure if first else ''}"
        )
    owner = _class_at(above, given)
    if owner is None:
        matches = _matching_settings(option, _configurable())
        return f"Unknown setting '{path}'{matches or '; rl-cli fit --help lists what there is'}."
    if name in OURS:
        return f"Unknown setting '{name}' of {owner.__name__}: {OURS[name]}."
    matches = _matching_settings(name, [owner]) or _matching_settings(name, _configurable())
    allowed = ", ".join(_in_order(owner))
    return f"Unknown setting '{name}' of {owner.__name__}{matches}. It has {allowed}."


def _class_at(path: str, given: Given) -> type | None:
    """Return the class whose settings stand below a path, if it can be told."""
    if path in SECTIONS:
        return SECTIONS[path]
    if path not in FAMILIES:
        return None
    name = (given.class_at(path) or "").rpartition(".")[2]
    found = [cls for cls in _subclasses(FAMILIES[path]) if cls.__name__ == name]
    return found[0] if found else None


def _about_a_class(message: str, key: str, given: Given) -> str | None:
    """Explain why a class cannot be taken, or return None if a message is not about that."""
    name = _name_of_the_class(message)
    if name is None:
        return None
    if "." not in name and "." in (given.class_at(key) or ""):
        name = str(given.class_at(key))
    module = name.rpartition(".")[0]
    what = f"'{name}' for {key}"
    known = _class_names(key)
    if missing := _search(r"No module named '([^']+)'", message):
        if f"{module}.".startswith(f"{missing}."):
            return (
                f"{what} cannot be found: there is no module '{missing}' in the working directory "
                f"or among the installed packages{_known(known)}."
            )
        return f"{what} cannot be imported: {module} needs '{missing}', which is not installed."
    if f"module '{module}' has no attribute" in message:
        wanted = name.rpartition(".")[2]
        here = _names_in(module, _family(key))
        others = f"; it has {', '.join(here)}" if here else f", and no other {_kind(key)}"
        return (
            f"{what} cannot be found: module '{module}' has no '{wanted}'{others}"
            f"{closest(wanted, here)}{_known(known)}."
        )
    if "Expected a dot import path string" in message:
        allowed = f"known here: {', '.join(known)}; " if known else "give its name, "
        path = f"or an import path such as my_module.MyClass{closest(name, known)}"
        return f"Unknown class '{name}' for {key}: {allowed}{path}."
    if re.search(r"subclass of|Unexpected import object|function that returns", message):
        return f"{what} is not a subclass of {_kind(key)}, as it must be{_known(known)}."
    return None


def _name_of_the_class(message: str) -> str | None:
    """Return the class that a message is about: the parser says it in many ways."""
    ways = (
        r"Expected a dot import path string: ([^\W\d]\S*)",
        r"class_path='([^']+)'",
        r"class_path '([^']+)'",
        r"Import path (\S+) does not correspond",
        r"Expected '([^']+)' to be a",
        r'"([^"]+)" is not a subclass of',
        r"Got value: ([^\W\d][\w.]*)\Z",
        r"Given value: ([^\W\d][\w.]*)\Z",
        r"module '(\S+)' has no attribute '\w+'",
        r"No module named '([\w.]+)'",
    )
    found = next((name for way in ways if (name := _search(way, message))), None)
    attribute = _search(r"has no attribute '(\w+)'", message)
    return f"{found}.{attribute}" if found and attribute and "." not in found else found


def _known(names: Sequence[str]) -> str:
    return f"; known here: {', '.join(names)}" if names else ""


def _family(key: str) -> type:
    return (FAMILIES | OF_LIGHTNING).get(key, object)


def _kind(key: str) -> str:
    """Name the family of a key; what is no family of ours is named by its key."""
    family = _family(key)
    return key.rpartition(".")[2] if family is object else family.__name__


def _names_in(module: str, family: type) -> list[str]:
    """Return the classes of a family that a module defines, which was imported."""
    members = vars(sys.modules[module]).items() if module in sys.modules else ()
    return sorted(
        name
        for name, member in members
        if isinstance(member, type) and issubclass(member, family) and member.__module__ == module
    )


def _about_a_value(message: str, key: str) -> str | None:
    """Explain why a value cannot be taken, or return None if a message is not about that."""
    if literal := re.search(r"typing\.Literal\[(.+?)\]\. Got value: (.+)", message):
        quotes = " (YAML reads off, no, on and yes so: put the text in quotes)"
        note = quotes if literal[2] in ("True", "False") else ""
        return f"{key} must be one of {literal[1].replace(chr(39), '')}, got {literal[2]}{note}."
    if plain := re.search(r"Expected a <class '([\w.]+)'>\. Got value: (.+)", message):
        cure = _bracketed([plain[1]], plain[2])
        if plain[1] == "str" and plain[2] in ("True", "False", "None"):
            cure = " (YAML reads off, no, on, yes and null so: put the text in quotes)"
        return f"{key} must be {_article(plain[1])}, got '{plain[2]}'{cure}."
    if length := re.search(r"Expected a tuple with (\d+) elements\. Got value: (.+)", message):
        return f"{key} must be a list of {length[1]}, got {length[2]}."
    value = _search(r"Given value: (.+)", message)
    value = _search(r"NestedArg\(.*val='?(.*?)'?\)$", value or "") or value
    errors = re.findall(r"^\s+- (.+)$", message.partition("Errors:")[2], re.M)
    if value is None or not errors:
        return None
    reasons = [error for error in errors if not error.startswith("Expected a ")]
    if not reasons:
        kinds = [_search(r"<class '([\w.]+)'>", error) for error in errors]
        allowed = [_article(kind) if kind else "the name of a class" for kind in kinds]
        return f"{key} must be {' or '.join(allowed)}, got '{value}'{_bracketed(kinds, value)}."
    return f"{key} cannot be '{value}': {'; '.join(reasons)}."


def _bracketed(kinds: Sequence[str | None], value: str) -> str:
    """Show a value as the list that was meant."""
    is_list = any(_article(kind or "") == "a list" for kind in kinds)
    return f": write [{value}]" if is_list else ""


def _article(kind: str) -> str:
    name = kind.rpartition(".")[2]
    return KINDS.get(name, f"a {name}")


def _matching_settings(option: str, classes: Iterable[type]) -> str:
    """Return close matches among the settings of classes, each with the class that has it."""
    name = option.split(".")[-1]
    owners: dict[str, list[str]] = {}
    for cls in classes:
        for parameter in _parameters(cls):
            owners.setdefault(parameter, []).append(cls.__name__)
    within = [one for one in owners if name.endswith(f"_{one}") or one.endswith(f"_{name}")]
    matches = closest(name, owners)
    if within and not matches:
        matches = f"; close matches: {', '.join(within)}"
    elif within:
        first = [one for one in within if not re.search(rf"[ ,]{one}(,|$)", matches)]
        matches = matches.replace("matches: ", "matches: " + "".join(f"{one}, " for one in first))
    return re.sub(
        r"(\w+)(?=,|$)",
        lambda found: f"{found[1]} of {_some(owners[found[1]])}",
        matches,
    )


def _some(names: list[str]) -> str:
    """Name the first two, for a setting that many classes have."""
    return (
        names[0]
        if len(names) == 1
        else f"{names[0]} and {names[1] if len(names) == 2 else 'others'}"
    )


def _configurable() -> Iterator[type]:
    yield from SECTIONS.values()
    for family in dict.fromkeys(FAMILIES.values()):
        yield from _subclasses(family)


def _parameters(cls: type) -> set[str]:
    """Return the names of a constructor's parameters, and of those behind its `**kwargs`."""
    return set(_in_order(cls))


def _in_order(cls: type) -> list[str]:
    """Return those that a user can set, in the order of the constructors."""
    classes = [base for base in cls.__mro__ if "__init__" in vars(base) and base is not object]
    names: dict[str, None] = {}
    for base in classes:
        signature = inspect.signature(vars(base)["__init__"])
        names |= dict.fromkeys(signature.parameters)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    hidden = {"self", "args", "kwargs", "params", "observation_space", "action_space"}
    first = next((path for path, family in FAMILIES.items() if issubclass(cls, family)), "")
    hidden |= {"num_envs"} if first == "data.env" else set()
    hidden |= {"env", "policy", "buffer_size", "seed"} if first == "data.collector" else set()
    hidden |= {"num_envs", "device", "seed", "directory"} if first == "data.replay" else set()
    return [name for name in names if name not in hidden]


def _class_names(key: str) -> list[str]:
    family = _family(key)
    if family is object:
        return []
    ours = key in FAMILIES
    return sorted(
        {
            cls.__name__
            for cls in _subclasses(family)
            if not cls.__name__.startswith("_")
            and (ours or cls.__module__.startswith("lightning.pytorch."))
        }
    )


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    children: list[type[Any]] = cls.__subclasses__()
    for child in children:
        if not inspect.isabstract(child):
            yield child
        yield from _subclasses(child)
