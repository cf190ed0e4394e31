"""Messages on names that do not exist: the name here of a foreign setting, and close matches."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium

from lightning_rl.system.errors import closest
from lightning_rl.system.plain_yaml import load_yaml

ELSEWHERE = {
    "exp_name": "write exp_name: NAME at the top of the file, or add --exp_name NAME",
    "output_dir": "write output_dir: DIR at the top of the file, or add --output_dir DIR",
    "restore_replay": "add --restore_replay false to the command",
    "default_root_dir": "set --output_dir or trainer.run_dir",
}
"""Trainer settings that the command line sets itself, and what to do instead."""

MOST_NAMES = 20
"""Most classes that a message lists; for larger families a message names close matches only."""

LEAST_FOREIGN = 3
"""Least number of foreign names by which a configuration counts as one of another library."""


@cache
def foreign_libraries() -> dict[str, dict[str, Any]]:
    """Return the page, the settings, classes and commands of each library in `foreign.yaml`."""
    libraries: dict[str, dict[str, Any]] = load_yaml(
        Path(__file__).with_name("foreign.yaml").read_text(encoding="utf-8")
    )
    return libraries


def counterpart(path: str, kind: str = "settings", library: str | None = None) -> str:
    """Return what a name of other libraries, or of one, is here: `"; here it is ..."`, or "".

    The longest end of the path that a library has decides, or else its longest beginning.
    """
    for name in _parts(path):
        meanings: dict[str, tuple[str, list[str]]] = {}
        for other, content in foreign_libraries().items():
            meaning = content[kind].get(name)
            if meaning and library in (None, other):
                # Libraries often mean the same setting: the first word decides.
                target = meaning.split()[0].rstrip(":,;")
                meanings.setdefault(target, (meaning, []))[1].append(other)
        if len(meanings) == 1:
            meaning = next(iter(meanings.values()))[0]
            # A name without a counterpart says so: `none: ...`.
            reason = meaning.removeprefix("none: ")
            return f"; {'here it is' if reason == meaning else 'there is none here:'} {reason}"
        if meanings:
            texts = (f"{text} ({' and '.join(names)})" for text, names in meanings.values())
            return f"; here it is {', or '.join(texts)}"
    return ""


def foreign_config(tree: Mapping[str, Any]) -> str | None:
    """Return the message on a config of another library, or None for a config of this one."""
    if "model" in tree or "data" in tree:
        return None
    paths = list(_paths(tree, ""))
    lines = {
        library: [
            f"\n  {path}{note}" for path in paths if (note := counterpart(path, library=library))
        ]
        for library in foreign_libraries()
    }
    library = max(lines, key=lambda name: len(lines[name]))
    if len(lines[library]) < LEAST_FOREIGN:
        return None
    return (
        f"These are settings of {library}. Begin with a config of this package, such as --config "
        f"ppo.yaml; {foreign_libraries()[library]['page']} compares all settings."
        f"{''.join(lines[library])}"
    )


def unknown_setting(
    name: str,
    value: Any,
    path: str,
    owner: str,
    settable: Iterable[str],
    places: Iterable[tuple[str, str, Iterable[str]]],
) -> str:
    """Return the message on a setting that does not exist.

    Args:
        name: the unknown name.
        value: its value; the names in a mapping tell libraries apart.
        path: of the holder; empty at the top.
        owner: class of the holder; empty at the top.
        settable: names that the holder has.
        places: path, class and settings of each class that a config may name.
    """
    field = f"{path}.{name}".lstrip(".")
    if path == "trainer" and name in ELSEWHERE:
        return f"{field} has no effect here: {ELSEWHERE[name]}."
    # The first setting inside a mapping tells which library has it.
    leaf = next(_paths(value, field))
    note = counterpart(leaf)
    if not owner:
        if note:
            return f"Unknown setting '{leaf}'{note}."
        matches = _matches(name, places, settable)
        return f"Unknown setting '{field}'{matches or '; rl-cli fit --help lists the settings'}."
    # Close matches in the same section come before those elsewhere.
    note = note or _matches(name, [(path, owner, settable)]) or _matches(name, places)
    return f"Unknown setting '{name}' of {owner}{note}. It has {', '.join(settable)}."


def unknown_class(name: str, path: str, names: list[str]) -> str:
    """Return the message on a class that does not exist; `names` are the classes of its kind."""
    head = f"'{name}' for {path}"
    if note := counterpart(name, "classes"):
        homes = [
            other for other, content in foreign_libraries().items() if name in content["classes"]
        ]
        return f"{head} is a class of {' and '.join(homes)}{note}."
    if path.endswith("env") and name in gymnasium.registry:
        return (
            f"{head} is the id of a Gymnasium env: write --{path} GymnasiumEnv --{path}.id {name}."
        )
    allowed = f"known here: {', '.join(names)}; " if len(names) <= MOST_NAMES else "give its name, "
    return (
        f"Unknown class '{name}' for {path}: {allowed}or an import path such as my_module.MyClass"
        f"{closest(name, names)}."
    )


def of_another_kind(name: str, family: str, path: str) -> str:
    """Return the beginning of the message on a class in the place of another."""
    return f"'{name}' for {path} is not a subclass of {family}, but must be"


def known_classes(names: list[str]) -> str:
    """Return `"; known here: A, B"`, unless there are too many names."""
    return f"; known here: {', '.join(names)}" if 0 < len(names) <= MOST_NAMES else ""


def _parts(path: str) -> Iterator[str]:
    """Yield the ends of a path such as `policy.actor.dims`, longest first, then its beginnings."""
    parts = path.replace("-", "_").split(".")
    yield from (".".join(parts[i:]) for i in range(len(parts)))
    yield from (".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1))


def _paths(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _paths(below, f"{path}.{name}".lstrip("."))
    else:
        yield path


def _matches(
    name: str, places: Iterable[tuple[str, str, Iterable[str]]], options: Iterable[str] = ()
) -> str:
    owners: dict[str, dict[str, list[str]]] = {option: {option: []} for option in options}
    for path, owner, settings in places:
        for setting in settings:
            if path != "trainer" or setting not in ELSEWHERE:
                holders = owners.setdefault(setting, {})
                holders.setdefault(f"{path}.{setting}", []).append(owner)
    # `coef` also finds `ent_coef`.
    related = [key for key in owners if name.endswith(f"_{key}") or key.endswith(f"_{name}")]
    close = dict.fromkeys([*get_close_matches(name, owners, n=4), *related])
    # A setting of another class may have this very name.
    names = [name] if name in owners else close
    offers = [_of(*place) for key in names for place in owners[key].items()]
    return f"; close matches: {', '.join(offers)}" if offers else ""


def _of(path: str, classes: list[str]) -> str:
    """Return the path of a setting, and which classes have it, if not all at this path."""
    if path.count(".") < 2 and not path.startswith("model."):
        return path
    return f"{path} of {' and '.join(classes if len(classes) < 3 else [classes[0], 'others'])}"
