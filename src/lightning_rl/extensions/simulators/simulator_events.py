"""Fire events that change a simulator."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.envs import Event, key_of
from lightning_rl.extend.errors import EnvFaultError
from lightning_rl.extensions.managers.events import steps_until
from lightning_rl.extensions.managers.term import BoundTerm, check_event, merged
from lightning_rl.extensions.managers.view import EnvView, SeesNoState


class SimulatorView(EnvView):
    """The input of a simulator's event: all N envs, and the rows [N] bool to change."""

    simulator: Any
    rows: Tensor


class SimulatorEvents(SeesNoState):
    """Events of a simulator, by name; they return nothing.

    A startup event fires at the first reset, a reset event after each reset, an interval event
    before a step. After a reset within a step, the returned observation does not show the change.

    Args:
        simulator: passed to the events as `env.simulator`.
        events: terms by name.
        owner: name of the simulator, for messages.
        num_envs: N.
        device: device of the masks.
        step_dt: seconds per env step.
        max_episode_steps: time limit, in steps, or None.
    """

    def __init__(
        self,
        simulator: Any,
        events: Mapping[str, Any],
        owner: str,
        num_envs: int,
        device: torch.device,
        step_dt: float,
        max_episode_steps: int | None,
    ) -> None:
        self.step_dt, self.max_episode_steps = step_dt, max_episode_steps
        self._simulator, self._num_envs = simulator, num_envs
        self._events: list[tuple[Event, BoundTerm]] = []
        for name, event in merged(Event, {}, events, owner).items():
            term = BoundTerm(event, "events", name, owner)
            check_event(event, term.label)
            if term.has_memory:
                raise ConfigurationError(
                    f"{term.label} has a memory (`start`), but events of a simulator save no "
                    "state: store the memory in the simulator."
                )
            self._events.append((event, term))
        self._all = torch.ones(num_envs, dtype=torch.bool, device=device)
        self.elapsed = torch.zeros(num_envs, dtype=torch.int64, device=device)
        # The first reset begins episode 0.
        self.episode = self.elapsed - 1
        self._key = key_of(torch.arange(num_envs, device=device))
        self._left: dict[str, Tensor] = {}
        self._started = False

    def reset(self, seed: Any) -> None:
        """Fire at a reset of all envs, with one seed, one for each env, or None."""
        rows = torch.arange(self._num_envs, device=self._all.device)
        self.episode = self.episode + 1
        if seed is not None:
            seeds = torch.as_tensor(seed, device=rows.device)
            # One seed for all envs: add the index, so that their draws differ.
            self._key = key_of(seeds if seeds.dim() else seeds + rows)
            self.episode = torch.zeros_like(self.episode)
        self.elapsed = torch.zeros_like(self.elapsed)
        if not self._started:
            self._fire(self._all, "startup")
            self._started = True
        self._fire(self._all, "reset")

    def before_step(self) -> None:
        for event, term in self._events:
            if event.mode == "interval":
                self._left[term.name] = remaining = self._left[term.name] - 1
                # This waits for the device, but a call of the simulator would take longer.
                if bool((remaining <= 0).any()):
                    self._call(term, remaining <= 0)
                    self._wait(event, term, remaining <= 0)

    def after_step(self, done: Tensor) -> None:
        """Fire for the envs in `done` [N] bool, which were reset in the step."""
        self.elapsed = (self.elapsed + 1).masked_fill_(done, 0)
        self.episode = self.episode + done
        self._fire(done, "reset")

    def _fire(self, rows: Tensor, mode: str) -> None:
        if not bool(rows.any()):
            return
        for event, term in self._events:
            if (event.mode or "reset") == mode or (mode == "reset" and event.at_reset):
                self._call(term, rows)
            if mode == "reset" and event.mode == "interval":
                self._wait(event, term, rows, extra=1)  # `before_step` also counts the first step

    def _call(self, term: BoundTerm, rows: Tensor) -> None:
        if (answer := term(self._view(rows))) is not None:
            raise EnvFaultError(
                f"{term.label} returned {type(answer).__name__}: the event of a simulator changes "
                "`env.simulator` itself, for the envs in `env.rows`, and returns nothing."
            )

    def _wait(self, event: Event, term: BoundTerm, rows: Tensor, extra: int = 0) -> None:
        assert event.every_s is not None
        steps = steps_until(self._view(rows), event.every_s, term) + extra
        # Other rows continue their countdowns; at the first reset there are none yet.
        self._left[term.name] = torch.where(rows, steps, self._left.get(term.name, steps))

    def _view(self, rows: Tensor) -> SimulatorView:
        state = TensorDict({}, [self._num_envs])
        env = SimulatorView(self, state, self._key, self.episode)
        env.simulator, env.rows, env.elapsed = self._simulator, rows, self.elapsed
        return env
