"""Turn what the argument parser says into what its user needs.

The setting, what is allowed, and the closest match.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from lightning_rl.algorithms import Algorithm
from lightning_rl.collectors import Collector
from lightning_rl.data import RLDataModule
from lightning_rl.envs import VectorEnv
from lightning_rl.errors import closest
from lightning_rl.permission import CURE
from lightning_rl.policies import Policy
from lightning_rl.trainer import RLTrainer

FAMILIES: dict[str, type] = {
    "model": Algorithm,
    "policy": Policy,
    "data.env": VectorEnv,
    "data.eval_env": VectorEnv,
    "data.collector": Collector,
    "optimizer": Optimizer,
}
"""Which family of classes a key takes its class from."""


def explain(message: str, cure: str = CURE) -> str:
    """Rewrite a message of the parser.

    One that it does not know stays, less the parser's inner workings. `cure` is what to do about
    code of others.
    """
    key = _search(r'Parser key "([^"]+)"', message) or ""
    if option := _search(r"Option '([^']+)' is not accepted", message) or _search(
        r"accept option '([^']+)'", message
    ):
        return f"Unknown setting '{option}'{_owner(option)}{_matching_settings(option)}."
    if name := _search(r"Importing '([^']+)' is not allowed", message):
        return (
            f"'{name}' for {key} is code of others, and the configuration comes from a checkpoint. "
            f"{cure}"
        )
    if name := _search(r"Expected a dot import path string: (\S+)", message):
        known = _class_names(key)
        allowed = f"known here: {', '.join(known)}; " if known else ""
        path = f"or an import path such as my_module.MyClass{closest(name, known)}"
        return f"Unknown class '{name}' for {key}: {allowed}{path}."
    if missing := _search(r"arguments are required: (.+)", message):
        return f"Missing setting: {missing.replace('fit.', '')}."
    if literal := re.search(r"typing\.Literal\[(.+?)\]\. Got value: (.+)", message):
        return f"{key} must be one of {literal[1].replace(chr(39), '')}, got {literal[2]}."
    if plain := re.search(r"Expected a <class '(\w+)'>\. Got value: (.+)", message):
        return f"{key} must be {_article(plain[1])}, got '{plain[2]}'."
    return re.sub(r"\s+\n", "\n", message).strip()


def _search(pattern: str, message: str) -> str | None:
    found = re.search(pattern, message)
    return found[1].strip() if found else None


def _article(kind: str) -> str:
    return {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "a text",
    }.get(kind, f"a {kind}")


def _owner(option: str) -> str:
    """Name the class that a dotted option belongs to."""
    return {"data": " of RLDataModule", "trainer": " of RLTrainer"}.get(
        option.split(".", maxsplit=1)[0], ""
    )


def _matching_settings(option: str) -> str:
    """Return close matches among all settings, each with the class that has it."""
    name = option.split(".")[-1]
    owners: dict[str, list[str]] = {}
    for cls in _configurable():
        for parameter in _parameters(cls):
            owners.setdefault(parameter, []).append(cls.__name__)
    return re.sub(
        r"(\w+)(?=,|$)",
        lambda found: f"{found[1]} of {_some(owners[found[1]])}",
        closest(name, owners),
    )


def _some(names: list[str]) -> str:
    """Name the first two, for a setting that many classes have."""
    return (
        names[0]
        if len(names) == 1
        else f"{names[0]} and {names[1] if len(names) == 2 else 'others'}"
    )


def _configurable() -> Iterator[type]:
    yield from (RLTrainer, RLDataModule)
    for family in FAMILIES.values():
        yield from _subclasses(family)


def _parameters(cls: type) -> set[str]:
    """Return the names of a constructor's parameters, and of those behind its `**kwargs`."""
    classes = [base for base in cls.__mro__ if "__init__" in vars(base) and base is not object]
    names = {
        name for base in classes for name in inspect.signature(vars(base)["__init__"]).parameters
    }
    return names - {"self", "args", "kwargs", "params"}


def _class_names(key: str) -> list[str]:
    for suffix, family in FAMILIES.items():
        if key.endswith(suffix):
            return sorted(
                {cls.__name__ for cls in _subclasses(family) if not cls.__name__.startswith("_")}
            )
    return []


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    children: list[type[Any]] = cls.__subclasses__()
    for child in children:
        if not inspect.isabstract(child):
            yield child
        yield from _subclasses(child)
