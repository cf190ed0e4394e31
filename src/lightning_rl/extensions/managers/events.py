"""Change the state of envs at the start, at resets and at random times."""

import zlib
from collections.abc import Iterable, Mapping
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
        allowed = [*entries, *env.env.parameters()]
        for is_startup, term in self._at_start:
            view = env.for_startup() if is_startup else env
            entries |= _entries(term, term(view), allowed, env.num_envs)
            env.state = TensorDict(entries, [env.num_envs])
        for name in self._parameters(env, entries, allowed):
            nominal = env.env.parameters()[name]
            entries[name] = nominal.expand(env.num_envs, *nominal.shape).clone()
        fired = [term for _, term in self._at_start]
        for every_s, term in self._interval:
            if term not in fired:
                term.start(env)
            entries[_countdown(term)] = steps_until(env, every_s, term)
        env.state = TensorDict(entries, [env.num_envs])

    def _parameters(self, env: EnvView, entries: Iterable[str], allowed: list[str]) -> set[str]:
        if self._extra is None:  # found once, by firing them in the first start
            names: set[str] = set()
            for _, term in self._interval:
                names |= _entries(term, term(env), allowed, env.num_envs).keys()
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
            new_values = _entries(term, term(env), entries, env.num_envs)
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


def _entries(term: BoundTerm, value: Any, allowed: Iterable[str], rows: int) -> dict[str, Tensor]:
    if not isinstance(value, Mapping):
        raise EnvFaultError(
            f"{term.label} returned {type(value).__name__}: return the replaced entries of the "
            "state, {name: [M, ...]}."
        )
    names = [name for name in allowed if "/" not in name]
    for name, entry in value.items():
        if name not in names:
            raise EnvFaultError(
                f"{term.label} returned '{name}', but the entries of the state and the parameters "
                f"of the physics are {', '.join(names)}{closest(str(name), names)}."
            )
        if not isinstance(entry, Tensor) or entry.shape[:1] != (rows,):
            raise EnvFaultError(
                f"{term.label} returned '{name}' as {entry!r:.60}: return a tensor [{rows}, ...]."
            )
    return dict(value)
