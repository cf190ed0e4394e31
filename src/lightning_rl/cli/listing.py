"""List the shipped classes and their settings, for the table of names; imports everything."""

from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import Any, Literal, get_args, get_origin

import gymnasium

from lightning_rl.checkpoints.registry import PACKAGES
from lightning_rl.cli import checking
from lightning_rl.cli.app import RLCLI
from lightning_rl.cli.first_check import CORE
from lightning_rl.cli.imports import FOR_THE_TYPIST
from lightning_rl.cli.names_table import page_key
from lightning_rl.system.declared import describe_type, parts_of
from lightning_rl.system.extensions import SUBCOMMANDS, import_present
from lightning_rl.system.jsonargparse_private import parameters_of
from lightning_rl.training.trainer import RLTrainer

SHIPPED = (*PACKAGES, *FOR_THE_TYPIST, gymnasium.Env.__module__)
"""Packages of the classes in the table."""

NUMBERS_AND_TEXTS = (bool, int, float, str, type(None))
"""Types in whose place no mapping is possible; so are choices of texts."""


def list_names() -> dict[str, Any]:
    """Return the content of a `Table`, without its key."""
    listing = _Listing()
    options: dict[str, Any] = {}
    for subcommand in CORE:
        kinds = checking.kinds_of(subcommand).items()
        options[subcommand] = {name: listing.slot(kind) for name, kind in kinds}
    for subcommand, (path, _, extra) in SUBCOMMANDS.items():
        if not extra and (module := import_present(path.rpartition(".")[0])):
            options[subcommand] = dict.fromkeys(module.OPTIONS)
    paths = [(path, _key(cls)) for path, cls in checking.configurable()]
    return {
        "packages": sorted({package.partition(".")[0] for package in SHIPPED}),
        "options": options,
        "classes": listing.classes,
        "families": listing.families,
        "paths": [(path, key) for path, key in paths if key in listing.classes],
        "pages": {page_key([name, "--help"]): _page_of(name) for name in CORE},
    }


def _page_of(subcommand: str) -> str:
    with redirect_stdout(StringIO()) as page, suppress(SystemExit):
        RLCLI([subcommand, "--help"])
    return page.getvalue()


class _Listing:
    def __init__(self) -> None:
        self.classes: dict[str, dict[str, Any]] = {}
        self.families: dict[str, dict[str, Any]] = {}

    def slot(self, kind: Any, path: str = "") -> dict[str, Any] | None:
        """Describe the classes or the values that a type takes; None for other types."""
        if isinstance(kind, checking.Section):
            return {"group": self._describe(kind.cls), "mapping": False}
        parts = parts_of(kind)
        choices = [kind for kind in parts.plain if get_origin(kind) is Literal]
        # Another plain type may take a mapping as such.
        if set(parts.plain) - {*NUMBERS_AND_TEXTS, *choices}:
            return None
        if not parts.has_classes and str not in parts.plain:
            texts = [text for choice in choices for text in get_args(choice)]
            values = checking.ALLOWED.get(path, describe_type(kind))
            return {"values": values, "choices": texts, "mapping": False}
        if parts.group and not parts.families:
            return {"group": self._describe(parts.group), "mapping": False}
        if not parts.families and (inner := parts.entries or parts.values):
            slot = self.slot(inner)
            return slot and {**slot, "mapping": parts.values is not None}
        # Of several kinds of classes, the table cannot tell which one is meant.
        if len(parts.families) != 1 or parts.group or parts.values:
            return None
        family = parts.families[0]
        if not self._describe_family(family.cls):
            return None
        return {
            "family": family.cls.__name__,
            "filled_in": [family.leading, family.named],
            "text": bool(choices) or str in parts.plain,
            "mapping": False,
        }

    def _describe_family(self, family: type) -> bool:
        if family.__module__.startswith(SHIPPED) and family.__name__ not in self.families:
            kinds = {cls.__name__: cls for cls in checking.subclasses(family)}
            # None for a class that is not shipped.
            keys: dict[str, str | None] = dict.fromkeys(kinds)
            offered = checking.offered_names(family)
            self.families[family.__name__] = {"classes": keys, "offered": offered}
            for name, cls in kinds.items():
                if cls.__module__.startswith(SHIPPED):
                    keys[name] = self._describe(cls)
        return family.__name__ in self.families

    def _describe(self, cls: type) -> str:
        if (key := _key(cls)) not in self.classes:
            settings: dict[str, Any] = {}
            self.classes[key] = settings  # now, because a class may take others of its kind
            for name, parameter in parameters_of(cls).items():
                path = f"trainer.{name}" if cls is RLTrainer else ""
                settings[name] = self.slot(parameter.annotation, path)
        return key


def _key(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
