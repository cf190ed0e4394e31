"""Run a robot in a process of its own, which checks limits and stops the arm without a learner.

This file uses the standard library alone, so that any Python with the robot's package can run it:
`RobotProcess` starts it, and talks to it through two inherited files.

A killed learner runs no handler. So this process watches a heartbeat once the arm is connected: if
it is silent for longer than `heartbeat_s`, or its pipe closes, the arm is stopped and the process
ends.
"""

import inspect
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

STOP_ATTEMPTS = 5
"""Times that a stop is tried, because a bus may lose a packet."""


class LearnerGone(Exception):  # noqa: N818  # what happened, as in `BrokenPipe`
    """The learner's heartbeat stopped, or its pipe closed."""


class RobotLost(Exception):  # noqa: N818
    """The robot failed several times in a row, or is not ready."""


class Arm:
    """A robot within limits.

    Args:
        robot: an object with the methods of LeRobot's `Robot`.
        settings: `limits` {name: (low, high)}, `max_speed` {name: units/s}, `fps`, `on_stop`
            (`hold` or `relax`), and `max_dropped`, the number of failed calls in a row that are
            bridged: by the last observation, or by a step without motion.
        sleep_until: waits for a time of `time.monotonic`; raises `LearnerGone`.
    """

    def __init__(
        self, robot: Any, settings: Mapping[str, Any], sleep_until: Callable[[float], None]
    ) -> None:
        self._robot, self._sleep_until = robot, sleep_until
        self._limits: dict[str, tuple[float, float]] = settings["limits"]
        self._speed: dict[str, float] = settings["max_speed"]
        self._period: float = 1.0 / settings["fps"]
        self._on_stop, self._max_dropped = settings["on_stop"], settings["max_dropped"]
        self._connected = False
        # `_dropped` counts the failures of one step, for the report; `_in_a_row` ends the run.
        self._dropped = self._in_a_row = 0
        self._seen: dict[str, Any] = {}
        self._due: float | None = None  # time of the last observation, on the clock's grid

    def connect(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Connect, and return the first observation and report.

        Raises:
            RobotLost: the robot is not calibrated, fails, or does not measure its actions.
        """
        _connect(self._robot)
        self._connected = True
        _check_calibrated(self._robot)
        # A lost first frame is no error yet: `_call` raises after `max_dropped` failures in a
        # row.
        while not self._seen:
            self._observe()
        missing = [name for name in self._limits if name not in self._seen]
        if missing:
            raise RobotLost(f"its observation has no {', '.join(missing)}, but actions set them")
        # The speed limit of the first step starts from the measured position.
        self._sent = {name: float(self._seen[name]) for name in self._limits}
        return self._seen, {"sent": self._sent, "missed": 0, "dropped": 0}

    def step(self, target: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Move towards `target` for one period; return the next observation, and a report.

        Raises:
            RobotLost: the robot fails, or a target is not finite.
        """
        now, missed, self._dropped = time.monotonic(), 0, 0
        if self._due is None:
            self._due = now
        elif now - self._due > self._period:
            # The arm stood still for these ticks.
            missed = int((now - self._due) / self._period)
            self._due = now  # a late action, too, gets a whole period
        goal = {name: self._limited(name, target[name]) for name in self._limits}
        # If sending fails, `_sent` keeps its value, and the next step is limited from there.
        self._call(lambda: self._send(goal))
        self._due += self._period
        # Sleeping also watches the heartbeat.
        self._sleep_until(self._due)
        self._observe()
        return self._seen, {"sent": self._sent, "missed": missed, "dropped": self._dropped}

    def observe(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a new observation, and restart the clock with the next step."""
        self._due, self._dropped = None, 0
        self._observe()
        return self._seen, {"sent": self._sent, "missed": 0, "dropped": self._dropped}

    def stop(self) -> str:
        """Hold or relax the arm, as set, and return a message. May be called more than once."""
        if not self._connected:
            return "The arm was not connected."
        # Before the attempts: a second `stop` must not command the arm again.
        self._connected, failure = False, ""
        for _ in range(STOP_ATTEMPTS):
            try:
                if self._on_stop == "relax":
                    self._robot.disconnect()
                    return "The arm is relaxed."
                # The measured position, not the target: the arm may push against something.
                observation = self._robot.get_observation()
                self._robot.send_action({name: float(observation[name]) for name in self._limits})
                return "The arm holds its position."
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        return f"The arm could not be stopped ({failure})."

    def _limited(self, name: str, target: float) -> float:
        """Return the next position: within the limits, or on the way to them, at most at speed."""
        if not math.isfinite(target):
            raise RobotLost(f"the action {name} is {target}")
        low, high = self._limits[name]
        position, max_move = self._sent[name], self._speed[name] * self._period
        # First the limits, then the speed: an arm outside its limits comes back slowly.
        return position + min(max(min(max(target, low), high) - position, -max_move), max_move)

    def _send(self, goal: dict[str, float]) -> None:
        # The robot returns what it sent, perhaps clipped by limits of its own.
        sent = self._robot.send_action(goal) or {}
        self._sent = {name: float(sent.get(name, goal[name])) for name in goal}

    def _observe(self) -> None:
        def read() -> None:
            observation = self._robot.get_observation()
            self._seen = {key: _plain(observation[key]) for key in observation}

        self._call(read)

    def _call(self, function: Callable[[], None]) -> None:
        """Call the robot, and bridge a failure."""
        try:
            function()
        except Exception as error:  # each robot has its own, for a packet, a frame, a cable
            self._dropped += 1
            self._in_a_row += 1
            if self._in_a_row > self._max_dropped:
                raise RobotLost(
                    f"{self._in_a_row} calls in a row failed, the last with "
                    f"{type(error).__name__}: {error}"
                ) from error
        else:
            self._in_a_row = 0


class Leader:
    """A leader arm: an object with the methods of LeRobot's `Teleoperator`."""

    def __init__(self, leader: Any) -> None:
        self._leader = leader
        self._connected = False

    def connect(self) -> None:
        """Connect it.

        Raises:
            RobotLost: it is not calibrated.
        """
        _connect(self._leader)
        self._connected = True
        _check_calibrated(self._leader)

    def read(self) -> tuple[dict[str, float], dict[str, bool] | None]:
        """Return its action, and its events if it has any."""
        events = getattr(self._leader, "get_teleop_events", None)
        action = {name: float(value) for name, value in self._leader.get_action().items()}
        flags = None if events is None else {_name(k): bool(v) for k, v in events().items()}
        return action, flags

    def stop(self) -> str:
        """Disconnect it."""
        if self._connected:
            self._connected = False
            self._leader.disconnect()
        return "The leader arm is disconnected."


class Server:
    """Answers the learner's commands, and watches its heartbeat."""

    def __init__(self, commands: Connection, beats: int) -> None:
        self._commands, self._beats = commands, beats
        # Infinite until `connect`: see `run`.
        self._silence = math.inf
        self._alive_until = math.inf

    def run(self) -> None:
        """Answer until the learner closes or is gone, then stop the robot."""
        served: Any = None
        try:
            settings = self._next()
            device = _make(settings)
            if "limits" in settings:
                served = Arm(device, settings, self._sleep_until)
                features = device.action_features, device.observation_features
                self._answer(tuple(_shapes(feature) for feature in features))
            else:
                served = Leader(device)
                self._answer(_shapes(device.action_features))
            # An answer is sent for each command, so that the learner knows when the motion is
            # over.
            while True:
                name, *arguments = self._next()
                if name == "close":
                    break
                answer = getattr(served, name)(*arguments)
                if name == "connect":  # before, imports and motors delay the heartbeat
                    self._silence = settings["heartbeat_s"]
                    self._alive_until = time.monotonic() + self._silence
                self._answer(answer)
            self._end(served, "ok", "")
        except LearnerGone as error:
            self._end(served, "gone", str(error) or "The learner has ended.")
        except Exception as error:
            robot_is_lost = isinstance(error, RobotLost)
            text = str(error) if robot_is_lost else f"{type(error).__name__}: {error}"
            self._end(served, "failed", f"The robot failed: {text}.")

    def _answer(self, answer: Any) -> None:
        try:
            self._commands.send(("ok", answer))
        except OSError:
            raise LearnerGone from None

    def _end(self, served: Any, kind: str, reason: str) -> NoReturn:
        text = f"{reason} {served.stop()}".strip() if served is not None else reason
        if kind == "gone":
            with suppress(OSError):  # the terminal is lost
                os.write(sys.stderr.fileno(), f"{text}\n".encode())
        with suppress(OSError):  # a learner that was stopped by SIGSTOP may continue, and read this
            self._commands.send((kind, text))
        # Skip destructors: LeRobot's disconnects the robot, which would relax an arm set to hold.
        os._exit(0)

    def _next(self) -> Any:
        """Return the learner's next command."""
        # Watch the heartbeat while no command waits.
        while not self._commands.poll(0):
            self._watch(None)
        try:
            return self._commands.recv()
        except (EOFError, OSError):
            raise LearnerGone from None

    def _sleep_until(self, deadline: float) -> None:
        while (remaining := deadline - time.monotonic()) > 0:
            self._watch(remaining)

    def _watch(self, seconds: float | None) -> None:
        """Wait for a beat, for a command if `seconds` is None, or for `seconds`."""
        remaining = self._alive_until - time.monotonic()
        timeout = remaining if seconds is None else min(remaining, seconds)
        # During a motion a command has to wait: the period must not become shorter.
        channels: list[Any] = [self._beats] + ([self._commands] if seconds is None else [])
        readable = wait(channels, None if timeout == math.inf else max(0.0, timeout))
        if self._beats in readable:
            # An empty read is the end of the pipe, which the system closes when the learner is
            # killed.
            if not os.read(self._beats, 4096):
                raise LearnerGone
            self._alive_until = time.monotonic() + self._silence
        elif time.monotonic() > self._alive_until:
            raise LearnerGone(
                f"The learner's heartbeat stopped for longer than heartbeat_s: {self._silence:g} "
                "seconds. If the learner was only slow, raise heartbeat_s."
            )


def _make(settings: Mapping[str, Any]) -> Any:
    module, _, name = settings["robot"].rpartition(".")
    return getattr(import_module(module), name)(**settings["kwargs"])


def _connect(device: Any) -> None:
    # Without calibration: it would ask questions on a terminal.
    settings = {"calibrate": False}
    try:
        inspect.signature(device.connect).bind(**settings)
    except TypeError:  # LeRobot's gamepad has no such setting
        settings = {}
    device.connect(**settings)


def _check_calibrated(device: Any) -> None:
    # A property of LeRobot's arms, and a method of its gamepad.
    answer = getattr(device, "is_calibrated", True)
    is_calibrated = answer() if callable(answer) else answer
    # LeRobot's keyboard says None.
    if is_calibrated is not None and not is_calibrated:
        raise RobotLost(
            f"{type(device).__name__} is not calibrated: calibrate it first (lerobot-calibrate)"
        )


def _shapes(features: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of features; a number has none."""
    # LeRobot's gamepad has {"dtype": ..., "shape": (4,), "names": {"delta_x": 0, ...}}.
    if isinstance(features.get("names"), Mapping):
        return dict.fromkeys(features["names"], ())
    return {name: tuple(kind) if isinstance(kind, tuple) else () for name, kind in features.items()}


def _plain(value: Any) -> Any:
    """Return a number, or the parts of a picture, for a Python with another version of NumPy."""
    if getattr(value, "shape", ()):
        return value.dtype.str, tuple(value.shape), value.tobytes()
    return float(value)


def _name(event: Any) -> str:
    return str(getattr(event, "value", event))


def _on_signal(number: int, frame: Any) -> NoReturn:
    raise LearnerGone("The robot's process was stopped by SIGTERM.")


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGUSR1):  # the learner closes the robot
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_default_signals)  # processes of the robot's package
    signal.signal(signal.SIGTERM, _on_signal)
    files = [int(text) for text in sys.argv[1:]]
    Server(Connection(files[0]), files[1]).run()
