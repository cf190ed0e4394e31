"""Let a person or a script take over from the policy, in any Gymnasium env."""

import copy
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
import torch

from lightning_rl import ConfigurationError
from lightning_rl.extend.envs import report_intervention
from lightning_rl.extend.errors import check_range

Event = Literal["success", "failure", "rerecord"]
"""How a person ends an episode: success, failure, or record it again."""

EVENTS: tuple[Event, ...] = ("success", "failure", "rerecord")
"""All events."""


class InterventionDecision(NamedTuple):
    """Decision of a source for one step.

    Attributes:
        action: [*A], replaces the policy's action; None: the policy acts.
        event: how this step ends the episode; None: it continues.
    """

    action: Any = None
    event: Event | None = None


class InterventionSource(ABC):
    """Decides at each step whether a person or script takes over, and its action.

    `Intervention` copies the given source before opening it.
    """

    def open(self, env: gymnasium.Env) -> None:  # noqa: B027  # a script has nothing to open
        """Prepare for the first episode of `env`, for example open a device.

        Raises:
            ConfigurationError: a device is missing or cannot give the env's actions.
        """

    def reset(self, seed: int | None) -> None:  # noqa: B027  # many sources need no reset
        """Begin an episode in the policy's control, without the events between two episodes.

        `seed` is the env's seed, if given.
        """

    def take_charge(self) -> None:  # noqa: B027  # only devices need it
        """Act at every step from now on, without a policy."""

    @abstractmethod
    def poll(self, observation: Any) -> InterventionDecision:
        """Return the decision for the step after an observation, without waiting."""

    def close(self) -> None:  # noqa: B027
        """Free devices. May be called more than once."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for an exact resume: plain numbers and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore a saved state."""


class ScriptedIntervention(InterventionSource):
    """A function of the observation takes over whenever it returns an action.

    Args:
        policy: returns an action [*A], None for the policy's action, or an `InterventionDecision`
            to end the episode. An object with `state_dict` and `load_state_dict` is saved and
            restored.
    """

    def __init__(self, policy: Callable[[Any], Any]) -> None:
        self.policy = policy

    def poll(self, observation: Any) -> InterventionDecision:
        decision = self.policy(observation)
        return (
            decision
            if isinstance(decision, InterventionDecision)
            else InterventionDecision(decision)
        )

    def state_dict(self) -> dict[str, Any]:
        return self.policy.state_dict() if hasattr(self.policy, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self.policy, "load_state_dict"):
            self.policy.load_state_dict(state)


class QueueSource(InterventionSource):
    """Items of a queue, put by any thread, take over.

    An action takes over until the next action, or until None hands back; `"success"`, `"failure"`
    and `"rerecord"` end the episode. Each step reads all items since the last step, and uses the
    newest action. Events that were put between two episodes are dropped.

    Args:
        items: the queue.

    Raises:
        ConfigurationError: from `poll` or `reset`, for an unknown event.
    """

    def __init__(self, items: "queue.Queue[Any]") -> None:
        self.items = items
        self._action: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "QueueSource":
        return QueueSource(self.items)  # do not copy the queue of other threads

    def reset(self, seed: int | None) -> None:
        self._action = None
        # An action put between two episodes acts in the next one, but an event does not end it.
        self.poll(None)

    def poll(self, observation: Any) -> InterventionDecision:
        event: Event | None = None
        while True:
            try:
                item = self.items.get_nowait()
            except queue.Empty:
                return InterventionDecision(self._action, event)
            if isinstance(item, str):
                if item not in EVENTS:
                    raise ConfigurationError(
                        f"The queue of interventions holds '{item}': put an action, None to hand "
                        f"back, or one of {', '.join(EVENTS)}."
                    )
                event = item
            else:
                self._action = item


class Pace:
    """Waits for the ticks of a clock.

    Args:
        fps: ticks per second; None never waits.

    Attributes:
        missed: number of ticks that passed before `wait` was called.
    """

    def __init__(self, fps: float | None) -> None:
        check_range("fps", fps, above=0)
        self._period = None if fps is None else 1.0 / fps
        self._next: float | None = None
        self.missed = 0

    def restart(self) -> None:
        """Restart the clock at the next `wait`, which returns immediately."""
        self._next = None

    def wait(self) -> None:
        """Sleep until the next tick; after missed ticks, count them and restart the clock."""
        if self._period is None:
            return
        now = time.perf_counter()
        if self._next is None:
            self._next = now
        elif now < self._next:
            time.sleep(self._next - now)
        else:
            late = int((now - self._next) / self._period)
            self.missed += late
            # Whole periods, so that the clock keeps its phase.
            self._next += late * self._period
        self._next += self._period


class Intervention(gymnasium.Wrapper):
    """An env in which a person or a script may take over from the policy, and end the episode.

    The info of each step has `executed_action` and `intervened`, which rollouts and replay store.
    An episode ended as success or failure is terminated, with `info["success"]`; an episode to
    record again is truncated, with `info["rerecord"]`.

    Put this wrapper last: the source's actions are in the action space of the wrapped env.

    A checkpoint holds the executed actions of the episode and the state of the source: a resumed
    run continues in the middle of an intervention, exactly if the source is a script.

    Args:
        env: the wrapped env.
        source: decides who acts: an `InterventionSource`, a function of the observation that
            returns an action or None (see `ScriptedIntervention`), or a `queue.Queue` (see
            `QueueSource`).
        fps: steps per second of real time, for a person; null: no limit.
        success_reward: reward of the step that ends an episode as a success; null keeps the env's
            reward.

    Attributes:
        pace: the clock for `fps`.

    Raises:
        ConfigurationError: the source is invalid, or the env cannot execute its action.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        source: InterventionSource | Callable[[Any], Any],
        fps: float | None = None,
        success_reward: float | None = 1.0,
    ) -> None:
        super().__init__(env)
        self.metadata = {**env.metadata, "reports_interventions": True}
        self.source = _as_source(source)
        self.pace = Pace(fps)
        self.success_reward = success_reward
        self._stopped = self._opened = False
        self._observation: Any = None
        self._clear_episode()
        self._restoring: dict[str, Any] | None = None

    def stop_interventions(self) -> None:
        """Disable interventions and pacing from now on, for evaluations."""
        self._stopped = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        # Not in the constructor: an env that is made to read its spaces opens no device.
        if not (self._opened or self._stopped):
            self.source.open(self.env)
            self._opened = True
        self._observation, info = self.env.reset(seed=seed, options=options)
        self._clear_episode()
        if not self._stopped:
            self.source.reset(seed)
            self.pace.restart()
            # After the source's own reset, which would clear the restored state.
            self._finish_restoring()
        return self._observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        decision = InterventionDecision() if self._stopped else self._poll_source()
        intervened = decision.action is not None
        executed = self._checked(decision.action) if intervened else action
        observation, reward, terminated, truncated, info = self.env.step(executed)
        info = report_intervention(info, executed, intervened)
        if intervened:
            self._taken.append(self._steps)
            # A copy, because the source may reuse its array.
            self._executed.append(np.array(executed))
        self._steps += 1
        self._observation = observation
        if decision.event == "rerecord":
            truncated, info["rerecord"] = True, True
        elif decision.event is not None:
            terminated, info["success"] = True, decision.event == "success"
            if decision.event == "success" and self.success_reward is not None:
                reward = self.success_reward
        if not self._stopped and self._restoring is None:
            # Wait after the step, so that the newest weights choose the next action.
            self.pace.wait()
        self._finish_restoring()
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        if self._opened:
            self._opened = False
            self.source.close()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """Return the executed actions of the episode, and the state of the source."""
        executed = np.stack(self._executed) if self._executed else np.zeros(0)
        return {
            "steps": self._steps,
            "taken": torch.tensor(self._taken, dtype=torch.int64),
            "executed": torch.from_numpy(executed.copy()),
            "source": self.source.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state: the next episode replays the saved one."""
        intervened_steps, executed = state["taken"].tolist(), state["executed"].numpy()
        actions = dict(zip(intervened_steps, executed, strict=True))
        self._restoring = {**state, "actions": actions}

    def _clear_episode(self) -> None:
        self._steps = 0
        self._taken: list[int] = []
        self._executed: list[np.ndarray] = []

    def _finish_restoring(self) -> None:
        if self._restoring is not None and self._steps >= self._restoring["steps"]:
            # The replayed steps did not ask the source: give it the state of the checkpoint now.
            self.source.load_state_dict(self._restoring["source"])
            self._restoring = None

    def _poll_source(self) -> InterventionDecision:
        # While the episode is replayed, the checkpoint decides; no person is asked.
        if self._restoring is not None:
            return InterventionDecision(self._restoring["actions"].get(self._steps))
        return self.source.poll(self._observation)

    def _checked(self, action: Any) -> Any:
        space = self.env.action_space
        array = np.asarray(action)
        if isinstance(space, gymnasium.spaces.Box) and array.shape == space.shape:
            # A person's action beyond the bounds is clipped, not refused.
            return array.astype(space.dtype).clip(space.low, space.high)
        if array.shape == space.shape and space.contains(array.astype(space.dtype)):
            return array.astype(space.dtype)[()]  # [()]: a number, not a 0-d array
        raise ConfigurationError(
            f"{type(self.source).__name__} returned the action {action!r}, which is not in "
            f"{space}: return an action of that space, or None for the policy's action."
        )


def _as_source(source: Any) -> InterventionSource:
    if isinstance(source, InterventionSource):
        # Envs are made from one config: a shared source would mix their episodes.
        return copy.deepcopy(source)
    if isinstance(source, queue.Queue):
        # Not copied: another thread fills this queue.
        return QueueSource(source)
    if callable(source):
        return ScriptedIntervention(copy.deepcopy(source))
    raise ConfigurationError(
        f"The source of interventions is {source!r}: give a Keyboard, a Gamepad, a SpaceMouse, a "
        "function of the observation that returns an action or None, or a queue.Queue."
    )
