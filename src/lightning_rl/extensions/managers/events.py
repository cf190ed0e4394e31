"""Change the state of envs at the start, at resets and at random times."""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extend.envs import Event
from lightning_rl.extend.errors import EnvFaultError, closest
from lightning_rl.extensions.managers.term import BoundTerm, check_event
from lightning_rl.extensions.managers.view import EnvView, entries_of


class Events:
    """Named events of an env; an interval event counts down in the state."""

    def __init__(self, terms: Mapping[str, Event], owner: str) -> None:
        self._at_start: list[tuple[bool, BoundTerm]] = []
        self._interval: list[tuple[tuple[float, float], BoundTerm]] = []
        for name, event in terms.items():
            term = BoundTerm(event, "events", name, owner)
            check_event(event, term.label)
            if event.mode == "interval":
                assert event.every_s is not None
                self._interval.append((event.every_s, term))
            if event.mode != "interval" or event.at_reset:
                self._at_start.append((event.mode == "startup", term))
        self._extra: set[str] | None = None  # parameters that only interval events replace
        # Startup events come before reset events.
        self._at_start.sort(key=lambda pair: not pair[0])

    def __bool__(self) -> bool:
        return bool(self._at_start or self._interval)

    @property
    def startup_names(self) -> list[str]:
        """Names of the startup events."""
        return [term.name for is_startup, term in self._at_start if is_startup]

    def start(self, env: EnvView) -> None:
        entries = entries_of(env.state)
        nominal = {
            name: value.expand(env.num_envs, *value.shape)
            for name, value in env.env.parameters().items()
        }
        for is_startup, term in self._at_start:
            view = env.for_startup() if is_startup else env
            entries |= _entries(term, term(view), entries | nominal)
            env.state = TensorDict(entries, [env.num_envs])
        for name in self._parameters(env, entries, nominal):
            entries[name] = nominal[name].clone()
        fired = [term for _, term in self._at_start]
        for every_s, term in self._interval:
            if term not in fired:
                term.start(env)
            entries[_countdown(term)] = steps_until(env, every_s, term)
        env.state = TensorDict(entries, [env.num_envs])

    def _parameters(
        self, env: EnvView, entries: dict[str, Tensor], nominal: dict[str, Tensor]
    ) -> set[str]:
        if self._extra is None:  # found once, by firing them in the first start
            names: set[str] = set()
            for _, term in self._interval:
                names |= _entries(term, term(env), entries | nominal).keys()
            self._extra = names - set(entries)
        return self._extra

    def after_step(self, env: EnvView) -> None:
        """Change, in the view, the next states of rows with due interval events."""
        if not self._interval:
            return
        entries = entries_of(env.state)
        for every_s, term in self._interval:
            countdown = entries[_countdown(term)] - 1
            fires = countdown <= 0
            # Compute all rows and select below: a test for due rows would wait for the device.
            new_values = _entries(term, term(env), entries)
            # The memory belongs to the firings: in the other rows it stays.
            memory = {name: env.added_entries[name] for name in term.memory_names(env)}
            for values in (new_values, memory):
                for name, value in values.items():
                    mask = fires.view(-1, *[1] * (value.dim() - 1))
                    values[name] = torch.where(mask, value, entries[name])
            entries |= new_values
            env.added_entries |= memory
            steps = steps_until(env, every_s, term)
            entries[_countdown(term)] = torch.where(fires, steps, countdown)
            env.state = TensorDict(entries, [env.num_envs])


def _countdown(term: BoundTerm) -> str:
    return f"{term.prefix.removesuffix('/')}.left"  # not below the prefix of the term's memory


def steps_until(env: EnvView, every_s: tuple[float, float], term: BoundTerm) -> Tensor:
    """Draw the number of steps until an interval event fires, [M] int64, at least 1."""
    shortest, longest = (seconds / env.step_dt for seconds in every_s)
    env.stream = zlib.crc32(f"{term.prefix}left".encode())
    steps = shortest + env.uniform(1)[:, 0] * (longest - shortest)
    return steps.round().long().clamp_min(1)


def _entries(term: BoundTerm, value: Any, current: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries [M, ...] that an event replaces, in the dtypes of the current ones."""
    if not isinstance(value, Mapping):
        raise EnvFaultError(
            f"{term.label} returned {type(value).__name__}: return the replaced entries of the "
            "state, {name: [M, ...]}."
        )
    names = [name for name in current if "/" not in name]
    for name, entry in value.items():
        if name not in names:
            raise EnvFaultError(
                f"{term.label} returned '{name}', but the entries of the state and the parameters "
                f"of the physics are {', '.join(names)}{closest(str(name), names)}."
            )
        like = current[name]
        # A later `torch.where` would broadcast another shape, and promote another dtype.
        if not isinstance(entry, Tensor) or _form(entry) != _form(like):
            returned = _described(entry) if isinstance(entry, Tensor) else f"{entry!r:.60}"
            raise EnvFaultError(
                f"{term.label} returned '{name}' as {returned}: return {_described(like)}, with a "
                "row for each of env.num_envs."
            )
    return {name: entry.to(current[name].dtype) for name, entry in value.items()}


def _form(entry: Tensor) -> tuple[Any, ...]:
    """Return shape and kind of an entry; floats of any precision are of one kind."""
    return entry.shape, entry.is_floating_point(), entry.dtype == torch.bool


def _described(entry: Tensor) -> str:
    return f"a tensor {list(entry.shape)} of {entry.dtype}"
