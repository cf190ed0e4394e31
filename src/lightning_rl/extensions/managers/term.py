"""Build a term from its import path and parameters."""

import inspect
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, TypeVar

from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.checkpoints import present_settings
from lightning_rl.extend.envs import Event, Term
from lightning_rl.extend.errors import check_range, closest, imported, is_import_path, require
from lightning_rl.extensions.managers import functions
from lightning_rl.extensions.managers.view import EnvView


@dataclass
class Reward(Term):
    """A reward term, which returns [M] float.

    Attributes:
        weight: factor; a term with weight 0 is neither computed nor reported. Default: 1, or the
            task's.
        level: name of a curriculum term, whose level is another factor.
    """

    weight: float | None = None
    level: str | None = None


Ends = Literal["terminated", "success", "fail", "truncated", "nothing"]
"""How a step ends an episode: terminated, with success, as a failure, truncated, or not at all: a
success that is only reported."""


@dataclass
class Termination(Term):
    """A termination term, which returns [M] bool.

    Attributes:
        ends: how the term ends the episode. Default: `terminated`, or as in the task's term.
    """

    ends: Ends | None = None


@dataclass
class Metric(Term):
    """A number [M] that is reported at every step."""


@dataclass
class Noise:
    """Noise of an observation.

    Attributes:
        std: standard deviation of normal noise.
        uniform: half width of uniform noise.
        per_episode: draw the noise once per episode, as a bias; otherwise at every step.

    Raises:
        ConfigurationError: a number is negative, or both are set.
    """

    std: float = 0.0
    uniform: float = 0.0
    per_episode: bool = False

    def __post_init__(self) -> None:
        check_range("noise.std", self.std, minimum=0)
        check_range("noise.uniform", self.uniform, minimum=0)
        require(not (self.std and self.uniform), "noise: set std or uniform, not both.")


@dataclass
class Observation(Term):
    """A part of an observation group, which returns [M, ...].

    Its numbers are delayed, get noise, are clipped, scaled and stacked, in this order.

    Attributes:
        noise: noise on the numbers.
        clip: bounds of the numbers.
        scale: factor of the numbers, after the bounds.
        delay: least and most steps of the delay; drawn once per episode.
        history: number of the last values in the observation, oldest first. An episode begins with
            copies of its first value.
    """

    noise: Noise | None = None
    clip: tuple[float, float] | None = None
    scale: float | None = None
    delay: tuple[int, int] | None = None
    history: int | None = None


@dataclass
class Curriculum(Term):
    """The difficulty of each env: a number that stays when its episodes end.

    At the end of an episode, the term `(env, level, **params)` returns the next level [M] float32,
    which is also a metric. Other terms read it by `env.level(name)`.

    Attributes:
        start: first level. Default: 0, or the task's.
    """

    start: float | None = None


_Kind = TypeVar("_Kind", bound=Term)


def merged(
    kind: type[_Kind],
    defaults: Mapping[str, _Kind],
    user_terms: Mapping[str, Any] | None,
    owner: str,
    shorthand: str | None = None,
) -> dict[str, _Kind]:
    """Return the terms of a task, with the user's settings over the defaults.

    Args:
        kind: class of the terms.
        defaults: the task's own terms.
        user_terms: terms or null, by name; a null removes a term. Only fields that are set count.
        owner: name of the task, for messages.
        shorthand: field that a plain number sets.

    Raises:
        ConfigurationError: for a term without a function whose name the task does not have.
    """
    label = kind.__name__.lower()
    terms = dict(defaults)
    for name, user_term in (user_terms or {}).items():
        # null removes a term.
        if user_term is None and name in terms:
            del terms[name]
            continue
        # A plain number sets the weight alone.
        if shorthand is not None and isinstance(user_term, int | float):
            number, user_term = float(user_term), kind()
            setattr(user_term, shorthand, number)
        default = terms.get(name)
        require(
            isinstance(user_term, kind) and (user_term.term is not None or default is not None),
            f"{owner} has no {label} term '{name}'; allowed: {', '.join(defaults) or 'none'}, or a "
            f"new one with `term`, its import path{closest(name, defaults)}.",
        )
        if default is not None and user_term.term is None:
            # What the user left out keeps the task's setting; parameters are merged by name.
            params = {**default.params, **user_term.params}
            changes = {
                setting.name: getattr(user_term, setting.name)
                for setting in fields(user_term)
                if setting.name != "params" and getattr(user_term, setting.name) is not None
            }
            user_term = replace(default, **changes, params=params)
        terms[name] = user_term
    return terms


class BoundTerm:
    """A term that is built and can be called.

    Args:
        settings: function and parameters.
        kind: name of the manager, such as `rewards`.
        name: name of the term.
        owner: name of the env, for messages.
        inputs: number of arguments before the parameters.

    Attributes:
        stream: index of its random numbers in the view.
        call: the function `(env, *inputs)`, for managers that set the stream themselves.

    Raises:
        ConfigurationError: for an import path without a function, or an unknown parameter.
    """

    def __init__(self, settings: Term, kind: str, name: str, owner: str, inputs: int = 1) -> None:
        self.settings, self.kind, self.name = settings, kind, name
        self.label = f"{owner}: the term '{name}' of {kind}"
        self.prefix = f"{kind}/{name}/"
        # From the name, not the place: another term does not change the random numbers of this one.
        self.stream = zlib.crc32(self.prefix.encode())
        function = function_of(settings.term, self.label)
        self._check_parameters(function, settings.params, inputs)
        self._memory: Callable[[EnvView], dict[str, Tensor]] | None = None
        if isinstance(function, type):
            # A class is made once; with a method `start` it returns a memory with each value.
            self._object = function(**settings.params)
            self._memory = getattr(self._object, "start", None)
            function = self._object if self._memory is None else self._call_with_memory
        elif settings.params:
            function = partial(function, **settings.params)
        self.call: Callable[..., Any] = function

    def __call__(self, env: EnvView, *inputs: Any) -> Any:
        """Return the value of the term."""
        env.stream = self.stream
        return self.call(env, *inputs)

    def _call_with_memory(self, env: EnvView, *inputs: Any) -> Any:
        assert self._memory is not None
        # At a reset there is no step before whose memory could be read.
        memory = self._memory(env) if env.at_reset else env.memory_of(self.prefix)
        value, memory = self._object(env, memory, *inputs)
        self._remember(env, memory)
        return value

    @property
    def has_memory(self) -> bool:
        """Whether the term has a memory."""
        return self._memory is not None

    def memory_names(self, env: EnvView) -> list[str]:
        """Return the names of the entries of the term's memory that it has added to the view."""
        return [name for name in env.added_entries if name.startswith(self.prefix)]

    def start(self, env: EnvView) -> None:
        """Add the first memory of new episodes to the view, if the term has one."""
        if self._memory is not None:
            env.stream = self.stream
            self._remember(env, self._memory(env))

    def _remember(self, env: EnvView, memory: Mapping[str, Tensor]) -> None:
        for key, value in memory.items():
            env.added_entries[self.prefix + key] = value

    def _check_parameters(self, function: Any, params: Mapping[str, Any], inputs: int) -> None:
        label = f"{self.label} ({_name_of(function)})"
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return  # a builtin without a signature: its call raises the error
        # A class takes its parameters alone, a function after the view and the inputs.
        skipped = 0 if isinstance(function, type) else inputs
        parameters = list(signature.parameters.values())[skipped:]
        kinds = {parameter.kind for parameter in parameters}
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        names = [parameter.name for parameter in parameters if parameter.kind not in variadic]
        term = getattr(function, "__name__", "")
        for name in params:
            (present,) = present_settings({"term": term, "params": {name: None}})["params"]
            cure = closest(name, names) if present == name else f"; it is called '{present}' now"
            require(
                name in names or inspect.Parameter.VAR_KEYWORD in kinds,
                f"{label} has no parameter '{name}'; it takes {', '.join(names) or 'none'}{cure}.",
            )
        missing = [
            name
            for name in names
            if signature.parameters[name].default is inspect.Parameter.empty and name not in params
        ]
        require(not missing, f"{label} needs the parameters {', '.join(missing)} in `params`.")


def function_of(term: str | Callable[..., Any] | None, label: str) -> Any:
    """Return a function or a class for its import path or short name; `label` is for messages.

    Raises:
        ConfigurationError: there is none.
    """
    if not isinstance(term, str):
        require(callable(term), f"{label} is {term!r}, which cannot be called.")
        return term
    term = str(present_settings(term, "term"))  # a name of an earlier version
    if not is_import_path(term):
        names = functions.SHIPPED
        function = vars(functions).get(term) if term in names else None
        require(
            function is not None,
            f"{label} is '{term}', which is neither an import path (my_terms.{term}) nor a term of "
            f"this package: {', '.join(names)}{closest(term, names)}.",
        )
        return function
    module, _, name = term.rpartition(".")
    try:
        function = imported(term)
    except ImportError as error:
        raise ConfigurationError(
            f"{label} is '{term}', but {module} cannot be imported: {error}."
        ) from error
    except AttributeError:
        function = None
    require(
        callable(function),
        f"{label} is '{term}', but {module} has no function or class "
        f"'{name}'{closest(name, vars(sys.modules[module]))}.",
    )
    return function


def _name_of(function: Any) -> str:
    module = getattr(function, "__module__", None) or ""
    return f"{module}.{getattr(function, '__qualname__', function)}".lstrip(".")


def check_event(event: Event, label: str) -> None:
    """Refuse an interval event without times, and times of other events.

    Raises:
        ConfigurationError: names the event and the setting.
    """
    if event.mode != "interval":
        require(
            event.every_s is None and not event.at_reset,
            f"{label} has the mode {event.mode}: every_s and at_reset are for the mode interval.",
        )
        return
    require(event.every_s is not None, f"{label} has the mode interval: set every_s.")
    assert event.every_s is not None
    shortest, longest = event.every_s
    check_range(f"{label}: every_s[0]", shortest, above=0)
    check_range(f"{label}: every_s[1]", longest, minimum=shortest)
