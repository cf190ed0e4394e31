"""Messages on names that do not exist: the name here of a foreign setting, and close matches."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

MOST_NAMES = 24
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


CLASS_KEYS = (".algo", ".algorithm", "class_name", ".logger", ".model", ".name", ".policy", ".type")
"""Ends of settings of other libraries whose value names a class."""


def counterpart(path: str, kind: str = "settings", library: str | None = None) -> str:
    """Return what a name of other libraries, or of one, is here: `"; here it is ..."`, or "".

    The longest end of the path that a library has decides.
    """
    parts = path.replace("-", "_").split(".")
    return next(filter(None, (_meaning(parts[i:], kind, library) for i in range(len(parts)))), "")


def _meaning(parts: list[str], kind: str, library: str | None) -> str:
    name, meanings = ".".join(parts), dict[str, tuple[str, list[str]]]()
    for other, content in foreign_libraries().items():
        meaning = content[kind].get(name)
        if meaning and library in (None, other):
            # Libraries often mean the same setting: the first word decides.
            target = meaning.split()[0].rstrip(":,;")
            meanings.setdefault(target, (meaning, []))[1].append(other)
    if len(meanings) > 1:
        texts = (f"{text} ({' and '.join(names)})" for text, names in meanings.values())
        return f"; here it is {', or '.join(texts)}"
    for meaning, _ in meanings.values():
        # A name without a counterpart says so: `none: ...`.
        reason = meaning.removeprefix("none: ")
        return f"; {'here it is' if reason == meaning else 'there is none here:'} {reason}"
    return ""


def setting_here(path: str, value: Any, library: str | None = None) -> str:
    """Return what a setting of other libraries is here, or the class that its value names."""
    is_class = f".{path}".endswith(CLASS_KEYS) and isinstance(value, str)
    note = counterpart(value, "classes", library) if is_class else ""
    return note or counterpart(path, library=library)


def section_here(path: str, library: str | None = None) -> str:
    """Return what the longest known beginning of a setting's path is here, or ""."""
    parts = path.replace("-", "_").split(".")
    for end in range(len(parts) - 1, 0, -1):
        if note := counterpart(".".join(parts[:end]), library=library):
            return note.replace("here it is", f"here {parts[end - 1]} is")
    return ""


def foreign_config(tree: Mapping[str, Any]) -> str | None:
    """Return the message on a config of another library, or None for a config of this one."""
    if "model" in tree or "data" in tree:
        return None
    settings = list(_settings(tree, ""))
    lines = {
        library: [
            f"\n  {path}{note.replace('; here it is', ':')}"
            for path, value in settings
            if (note := setting_here(path, value, library) or section_here(path, library))
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
    field, places = f"{path}.{name}".lstrip("."), list(places)
    if path == "trainer" and name in ELSEWHERE:
        return f"{field} has no effect here: {ELSEWHERE[name]}."
    # The first setting inside a mapping tells which library has it.
    leaf, leaf_value = next(_settings(value, field))
    cure = (
        _class_here(leaf, leaf_value, places)
        or setting_here(leaf, leaf_value)
        or _same_name(leaf, places)
        # A path here may begin like one of another library: `model.optimizer`.
        or (counterpart(field) if owner else section_here(leaf))
    )
    if cure and not owner:
        return f"Unknown setting '{leaf}'{cure}."
    if cure:
        return f"Unknown setting '{name}' of {owner}{cure}{_holders(cure, path, owner, places)}."
    if not owner:
        matches = _matches(name, places, settable)
        return f"Unknown setting '{field}'{matches or '; rl-cli fit --help lists the settings'}."
    # Close matches in the same section come before those elsewhere.
    matches = _matches(name, [(path, owner, settable)]) or _matches(name, places)
    return f"Unknown setting '{name}' of {owner}{matches}. It has {', '.join(settable)}."


def unknown_class(name: str, path: str, names: list[str]) -> str:
    """Return the message on a class that does not exist; `names` are the classes of its kind."""
    head = f"'{name}' for {path}"
    # A name of the Hub begins with its owner: `lerobot/smolvla_base`.
    foreign = name.partition("/")[0]
    if note := counterpart(foreign, "classes"):
        homes = [
            other for other, content in foreign_libraries().items() if foreign in content["classes"]
        ]
        return f"{head} is a class of {' and '.join(homes)}{note}."
    if path.endswith("env") and (name in gymnasium.registry or re.search(r"-v\d+$", name)):
        module = "" if name in gymnasium.registry else "my_module:"
        return (
            f"{head} is the id of a Gymnasium env: write --{path} GymnasiumEnv --{path}.id "
            f"{module}{name}{', of the module that registers it' if module else ''}."
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


def _settings(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each setting in a mapping."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _settings(below, f"{path}.{name}".lstrip("."))
    else:
        yield path, value


Places = Sequence[tuple[str, str, Iterable[str]]]
"""Path, class and settings of each class that a config may name."""


def _class_here(leaf: str, value: Any, places: Places) -> str:
    """Return how a class of this package is named, which a setting such as `type` names."""
    if f".{leaf}".endswith(CLASS_KEYS):
        for path, cls, _ in places:
            if value == cls:
                return f"; here it is --{path} {cls}, in YAML class_path: {cls}"
    return ""


def _same_name(leaf: str, places: Places) -> str:
    """Return where a setting of this very name is."""
    name = leaf.rpartition(".")[2]
    holders: dict[str, list[str]] = {}
    for path, cls, settings in places:
        if name in settings and path != "trainer":
            holders.setdefault(f"{path}.{name}", []).append(cls)
    if leaf in holders:  # of another class, which is meant rather than another place
        return ""
    options = [f"--{_of(path, classes)}" for path, classes in holders.items()]
    # A name at many places, such as `path`, says little.
    return f"; here it is {', or '.join(options)}" if 0 < len(options) < 3 else ""


def _holders(cure: str, path: str, owner: str, places: Places) -> str:
    """Return `", of PPO and others, not of SAC"` if a class lacks the setting of a cure."""
    section, _, name = cure.removeprefix("; here it is --").split()[0].rstrip(",").rpartition(".")
    classes = [cls for place, cls, settings in places if place == path and name in settings]
    if section != path or not classes or owner in classes:
        return ""
    return f", of {_few(classes)}, not of {owner}"


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
    return f"{path} of {_few(classes)}"


def _few(classes: list[str]) -> str:
    return " and ".join(classes if len(classes) < 3 else [classes[0], "others"])
