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

from lightning_rl.envs.step_results import say_intervention
from lightning_rl.system.errors import ConfigurationError, check_range

Event = Literal["success", "failure", "rerecord"]
"""How somebody ends an episode: it succeeded, it failed, or it shall not count."""

EVENTS: tuple[Event, ...] = ("success", "failure", "rerecord")
"""All of them."""


class Said(NamedTuple):
    """What a source says of a step.

    Attributes:
        action: [*A], what to do instead of what the policy chose; None leaves it to the policy.
        event: how the episode ends by this step, if it does.
    """

    action: Any = None
    event: Event | None = None


class InterventionSource(ABC):
    """Says at each step whether somebody takes over, and what they do.

    A source belongs to one env: `Intervention` copies the one that it is given, before that has
    opened any device.
    """

    def open(self, env: gymnasium.Env) -> None:  # noqa: B027  # a script has nothing to open
        """Get ready, before the first episode.

        Args:
            env: the one whose actions the source gives.

        Raises:
            ConfigurationError: where a device is missing or the actions cannot be given by it.
        """

    def reset(self, seed: int | None) -> None:  # noqa: B027  # not all of them care
        """Take notice that an episode begins; nobody has taken over.

        Args:
            seed: of the env, where it is given one.
        """

    def take_charge(self) -> None:  # noqa: B027  # others than people do as they are written
        """Act at every step from here on, as there is no policy beside this one."""

    @abstractmethod
    def poll(self, observation: Any) -> Said:
        """Return what is said of the step that follows an observation, without waiting."""

    def close(self) -> None:  # noqa: B027
        """Free devices. May be called more than once."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on bit for bit: plain numbers and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take up a saved state."""


class Script(InterventionSource):
    """A function of the observation takes over wherever it returns an action.

    Args:
        policy: returns an action [*A], None where it leaves the step to the policy, or a `Said`
            where it also ends the episode. One that is an object with `state_dict` and
            `load_state_dict` is saved and resumed.
    """

    def __init__(self, policy: Callable[[Any], Any]) -> None:
        self.policy = policy

    def poll(self, observation: Any) -> Said:
        said = self.policy(observation)
        return said if isinstance(said, Said) else Said(said)

    def state_dict(self) -> dict[str, Any]:
        return self.policy.state_dict() if hasattr(self.policy, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self.policy, "load_state_dict"):
            self.policy.load_state_dict(state)


class FromQueue(InterventionSource):
    """Whoever puts something into a queue takes over, from any thread.

    An action takes over until the next one, or until None hands back; `"success"`, `"failure"` and
    `"rerecord"` end the episode. All that has come since the last step is read: the newest action
    counts, and no event is lost.

    Args:
        items: the queue.

    Raises:
        ConfigurationError: from `poll`, for a text that is no event.
    """

    def __init__(self, items: "queue.Queue[Any]") -> None:
        self.items = items
        self._action: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "FromQueue":
        return FromQueue(self.items)  # it is how others reach this source

    def reset(self, seed: int | None) -> None:
        self._action = None

    def poll(self, observation: Any) -> Said:
        event: Event | None = None
        while True:
            try:
                item = self.items.get_nowait()
            except queue.Empty:
                return Said(self._action, event)
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
        missed: how many ticks came while nobody waited.

    Raises:
        ConfigurationError: for a number that is not above 0.
    """

    def __init__(self, fps: float | None) -> None:
        check_range("fps", fps, above=0)
        self._period = None if fps is None else 1.0 / fps
        self._next: float | None = None
        self.missed = 0

    def restart(self) -> None:
        """Have the clock begin at the next `wait`, which returns at once."""
        self._next = None

    def wait(self) -> None:
        """Sleep until the next tick; where that has passed, take note, and go on from now."""
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
            self._next += late * self._period
        self._next += self._period


class Intervention(gymnasium.Wrapper):
    """An env in which somebody may take over from the policy, and end the episode.

    What they do is executed instead of what the policy chose, and the info of each step says so:
    `executed_action` and `intervened`, which rollouts and replay hold. An episode that they end as
    a success or a failure is terminated, with `info["success"]`; one that is to be recorded again
    is truncated, with `info["rerecord"]`.

    It belongs inside of wrappers that change the meaning of actions no more than outside of them:
    the actions of the source, and `executed_action`, are those of the env that it is put around. Of
    several wrappers let it be the last.

    A checkpoint holds what was executed since the episode began, and the state of the source: a
    resumed run goes on in the middle of an intervention, exactly where the source is a script.

    Args:
        env: is stepped.
        source: says who takes over when: an `InterventionSource`, any function of the observation
            that returns an action or None (see `Script`), or a `queue.Queue` (see `FromQueue`).
        fps: steps per second of real time, for a person beside an env that does not keep a pace of
            its own; null for as fast as it goes.
        success_reward: the reward of a step by which somebody ends an episode as a success; null
            leaves the env's.

    Attributes:
        pace: what it waits for.

    Raises:
        ConfigurationError: for a source that is none, or an action of it that the env cannot take.
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
        self._forget_episode()
        self._restoring: dict[str, Any] | None = None

    def stop_interventions(self) -> None:
        """Leave every step to the policy from here on, and keep no pace: for evaluations."""
        self._stopped = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, in which nobody has taken over."""
        if not (self._opened or self._stopped):
            self.source.open(self.env)
            self._opened = True
        self._observation, info = self.env.reset(seed=seed, options=options)
        self._forget_episode()
        if not self._stopped:
            self.source.reset(seed)
            self.pace.restart()
            self._finish_restoring()
        return self._observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step by the action of the source, if it has one, or by the policy's."""
        said = Said() if self._stopped else self._ask()
        taken = said.action is not None
        told = self._checked(said.action) if taken else action
        observation, reward, terminated, truncated, info = self.env.step(told)
        info = say_intervention(info, told, taken)
        if taken:
            self._taken.append(self._steps)
            self._executed.append(np.array(told))
        self._steps += 1
        self._observation = observation
        if said.event == "rerecord":
            truncated, info["rerecord"] = True, True
        elif said.event is not None:
            terminated, info["success"] = True, said.event == "success"
            if said.event == "success" and self.success_reward is not None:
                reward = self.success_reward
        if not self._stopped and self._restoring is None:
            # After the step: the next action is then chosen by the newest weights.
            self.pace.wait()
        self._finish_restoring()
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the source and the env."""
        if self._opened:
            self._opened = False
            self.source.close()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """Return what was executed since the episode began, and the state of the source."""
        executed = np.stack(self._executed) if self._executed else np.zeros(0)
        return {
            "steps": self._steps,
            "taken": torch.tensor(self._taken, dtype=torch.int64),
            "executed": torch.from_numpy(executed.copy()),
            "source": self.source.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state: the next episode is that which it was saved in, played again.

        Its steps are those that were executed; the source is not asked before they are over.
        """
        taken, executed = state["taken"].tolist(), state["executed"].numpy()
        actions = dict(zip(taken, executed, strict=True))
        self._restoring = {**state, "actions": actions}

    def _forget_episode(self) -> None:
        self._steps = 0
        self._taken: list[int] = []
        self._executed: list[np.ndarray] = []

    def _finish_restoring(self) -> None:
        """Have the source go on, once the episode has come to where it was saved."""
        if self._restoring is not None and self._steps >= self._restoring["steps"]:
            self.source.load_state_dict(self._restoring["source"])
            self._restoring = None

    def _ask(self) -> Said:
        if self._restoring is not None:
            return Said(self._restoring["actions"].get(self._steps))
        return self.source.poll(self._observation)

    def _checked(self, action: Any) -> Any:
        """Return an action of the source as the env takes it, within its bounds.

        Raises:
            ConfigurationError: for one of another shape or set.
        """
        space = self.env.action_space
        given = np.asarray(action)
        if isinstance(space, gymnasium.spaces.Box) and given.shape == space.shape:
            return given.astype(space.dtype).clip(space.low, space.high)
        if given.shape == space.shape and space.contains(given.astype(space.dtype)):
            return given.astype(space.dtype)[()]  # a number is one, and no array without dimensions
        raise ConfigurationError(
            f"{type(self.source).__name__} gave the action {action!r}, which is none of {space}: "
            "give one of the env's, or None to leave the step to the policy."
        )


def _as_source(given: Any) -> InterventionSource:
    """Return the source that was given, as a copy of this env's own."""
    if isinstance(given, InterventionSource):
        return copy.deepcopy(given)
    if isinstance(given, queue.Queue):
        return FromQueue(given)
    if callable(given):
        return Script(copy.deepcopy(given))
    raise ConfigurationError(
        f"The source of interventions is {given!r}: give a Keyboard, a Gamepad, a SpaceMouse, a "
        "function of the observation that returns an action or None, or a queue.Queue."
    )
