"""Take over with a leader arm or another device of LeRobot."""

from collections.abc import Mapping
from typing import Any

import gymnasium

from lightning_rl.extend.errors import check_range, require
from lightning_rl.extensions.robots.env import RobotEnv, check_import_path
from lightning_rl.extensions.robots.process import RobotProcess
from lightning_rl.extensions.teleoperation.intervention import (
    Event,
    InterventionDecision,
    InterventionSource,
)

TAKES_OVER = "is_intervention"
"""Event of LeRobot: the person acts."""

ENDS: Mapping[str, Event] = {
    "success": "success",
    "rerecord_episode": "rerecord",
    "terminate_episode": "failure",
}
"""Events of LeRobot that end an episode, the strongest first."""


class Teleoperator(InterventionSource):
    """A device with the methods of LeRobot's `Teleoperator`, in a process of its own.

    It takes over while its `get_teleop_events` says `is_intervention`. A device without events,
    such as a leader arm, acts at every step, for `rl-cli record`.

    Args:
        teleoperator: import path of a function or class that makes the device.
        kwargs: arguments of `teleoperator`.
        timeout_s: seconds that a call of the device may take.
        python: interpreter of its process; see `RobotEnv`.

    Raises:
        ConfigurationError: when opened, if the env is no `RobotEnv`, or the names of the actions
            differ.
        EnvFaultError: the device cannot be made, fails or does not answer.
    """

    def __init__(
        self,
        teleoperator: str,
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float = 10.0,
        python: str | None = None,
    ) -> None:
        check_import_path("teleoperator", teleoperator)
        check_range("timeout_s", timeout_s, above=0)
        self._settings = {"robot": teleoperator, "kwargs": dict(kwargs or {}), "heartbeat_s": 1.0}
        self._timeout_s, self._python = timeout_s, python
        self._process: RobotProcess | None = None
        self._in_charge = False

    def take_charge(self) -> None:
        # Recording without a policy: the device acts at each step.
        self._in_charge = True

    def open(self, env: gymnasium.Env) -> None:
        robot_env = env.unwrapped
        require(
            isinstance(robot_env, RobotEnv),
            f"A Teleoperator steers a RobotEnv, but this env is {type(robot_env).__name__}: use a "
            "Gamepad, a Keyboard or a function.",
        )
        # `require` narrows no type for mypy.
        assert isinstance(robot_env, RobotEnv)
        self._robot_env = robot_env
        self._process = RobotProcess(self._settings, self._timeout_s, self._python)
        given_names = list(self._process.described)
        require(
            # The order may differ, because `action_of` matches by name.
            set(given_names) == set(robot_env.action_names),
            f"The teleoperator gives {', '.join(given_names)}, but the robot takes "
            f"{', '.join(robot_env.action_names)}. For moves use a Gamepad or a Keyboard of this "
            "package, with step_size.",
        )
        self._process.ask("connect")

    def reset(self, seed: int | None) -> None:
        if self._process is not None:
            # The device keeps an event until it is read: drop those between two episodes.
            self._process.ask("read")

    def poll(self, observation: Any) -> InterventionDecision:
        assert self._process is not None
        action, events = self._process.ask("read")
        # Only an answer tells whether the device has events.
        require(
            self._in_charge or events is not None,
            "This teleoperator has no get_teleop_events, so that it cannot say when it takes over: "
            "it can only act at every step, in rl-cli record without --script and --ckpt_path.",
        )
        events = events or {}
        # The first match wins: success before failure.
        event = next((end for name, end in ENDS.items() if events.get(name)), None)
        if not (self._in_charge or events.get(TAKES_OVER)):
            return InterventionDecision(None, event)
        # The robot may be slower than the leader arm: the action is a target, or a whole step.
        return InterventionDecision(self._robot_env.action_of(action), event)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
