"""Answer `--help` sooner: leave out imports that no help needs.

Lightning, TensorDict and this package import torch's compiler (`torch._dynamo`, `torch._inductor`)
where their classes are defined, and torchmetrics, which Lightning imports, transformers where that
is installed: three of the five seconds that `rl-cli` takes to start. Help builds and runs nothing.
So a process that prints help and ends has empty modules in their place. No other process has, and
`LIGHTNING_RL_WHOLE_IMPORTS=1` in the environment switches it off.

Tried with torch 2.13, lightning 2.6.6, torchmetrics 1.9, tensordict 0.15 and transformers 5.23.
Where another version needs more than is here, help begins anew with all imports, and is only late.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

LEFT_OUT = ("torch._dynamo", "torch._inductor")
"""Modules that are empty in a process that prints help."""

NOT_INSTALLED = ("transformers",)
"""Packages that torchmetrics imports if they are installed: there, they are not."""

SWITCH = "LIGHTNING_RL_WHOLE_IMPORTS"
"""The variable that has help import everything."""

OWN = ("lightning_rl.", "lightning.", "torch.", "gymnasium.")
"""Packages of which help can be given so; modules of others may need what is left out."""


def asks_for_help(options: Sequence[str]) -> bool:
    """Tell whether options of a subcommand ask for help: `--help`, `--model.help [NAME]`."""
    flags = [option.partition("=")[0] for option in options]
    return any(
        flag in ("-h", "--help") or (flag.startswith("--") and flag.endswith(".help"))
        for flag in flags
    )


def can_be_quick(options: Sequence[str]) -> bool:
    """Tell whether help concerns only what is known: no config, and no class of someone else's."""
    pairs = [option.partition("=") for option in options]
    flags = [name for name, _, _ in pairs if name.startswith("-")]
    values = [
        value if name.startswith("-") else option
        for option, (name, _, value) in zip(options, pairs, strict=True)
    ]
    return (
        not os.environ.get(SWITCH)
        and all(asks_for_help([flag]) for flag in flags)
        and all("." not in value or value.startswith(OWN) for value in values)
    )


def leave_out_the_rest() -> None:
    """Put empty modules in the place of `LEFT_OUT`, in this process, for good."""
    sys.meta_path.insert(0, _Finder())


def leave_at_once(stop: SystemExit) -> NoReturn:
    """End the process without taking apart what was imported, which takes most of a second."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # whoever read it has seen enough
            stream.flush()
    os._exit(stop.code if isinstance(stop.code, int) else int(stop.code is not None))


def begin_anew(arguments: Sequence[str]) -> NoReturn:
    """Give the same help with all imports."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "lightning_rl", *arguments]
    os.execve(sys.executable, command, {**os.environ, SWITCH: "1"})


class _Empty(ModuleType):
    """A module of decorators that change nothing, and of classes that nothing is one of."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _unchanged


def _unchanged(function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    return function if callable(function) else _unchanged


class _Finder(DistributionFinder, Loader):
    """Finds empty modules, and old distributions, before others find the real ones."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec for what is left out."""
        left_out = any(f"{fullname}.".startswith(f"{name}.") for name in LEFT_OUT)
        return ModuleSpec(fullname, self, is_package=True) if left_out else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty one."""
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it stays empty."""

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterator[Distribution]:
        """Say of a package that its version is 0, which is too old for everyone."""
        if context.name in NOT_INSTALLED:
            yield _Old(context.name)


class _Old(Distribution):
    def __init__(self, name: str) -> None:
        self.named = name

    def read_text(self, filename: str) -> str | None:
        text = f"Metadata-Version: 2.1\nName: {self.named}\nVersion: 0\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(path)
