"""Settings of the changes of an env's state that `data.events` names."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_rl.system.construction import IMPORT_PATH

Function = str | Callable[..., Any]
"""A function `(env, **params)`, a class, or an import path."""


@dataclass
class Term:
    """A named part of a task.

    Attributes:
        term: a function `(env, **params)`, or a class that is made with the parameters and called
            with `(env)`; in YAML its import path, or the name of a term of this package. Default:
            the task's own term of this name. A class with a memory has a method `start(env)`, which
            returns a dict of tensors [M, ...]; it is called with `(env, memory)` and returns its
            value and its next memory.
        params: parameters by name. Default: the parameters of the task's own term.
    """

    term: Function | None = field(default=None, metadata={IMPORT_PATH: True})
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class Event(Term):
    """A change of the state, such as a push or other physical parameters.

    The term returns the replaced entries of the state, {name: [M, ...]}.

    Attributes:
        mode: `startup`: once per env; `reset`: at the start of every episode; `interval`: between
            two steps, at random times. Default: `reset`, or the task's.
        every_s: least and most seconds from one firing to the next, for the mode `interval`.
        at_reset: whether an interval event also fires at the start of every episode.
    """

    mode: Literal["startup", "reset", "interval"] | None = None
    every_s: tuple[float, float] | None = None
    at_reset: bool | None = None
