"""A robot as a Gymnasium env: `lightning_rl/Robot-v0`."""

import time
from collections.abc import Mapping
from typing import Any, Literal

import gymnasium
import numpy as np

from lightning_rl.extend.envs import report_intervention
from lightning_rl.extend.errors import EnvFaultError, check_range, imported, is_import_path, require
from lightning_rl.extend.spaces import by_name, named
from lightning_rl.extensions.robots.process import RobotProcess

MOST_HOME_STEPS = 10_000
"""Maximum steps on the way home."""

AT_HOME = 1e-6
"""Distance from home that counts as reached, in seconds at `max_speed`."""


class RobotEnv(gymnasium.Env[Any, np.ndarray]):
    """A robot with the methods of LeRobot's `Robot`, in a process of its own.

    The robot connects at the first `reset`. A step sends the action, and returns the observation at
    the next tick of the clock. The process of the robot clips each target to `limits`, and each
    motion to `max_speed`; `info["executed_action"]` is what was sent. If the learner is late, the
    arm does not move; a late action gets a whole period.

    Observation: the numbers of `observation_features` [S], or with cameras a Dict of them (`state`)
    and of the pictures uint8 [H, W, C]. Action: target positions [A] in the order of
    `action_features`; with `step_size` moves [-1, 1] from the last position sent; with `kinematics`
    actions of its `action_space`. The reward is 0: `Intervention` (a person's key) or
    `RewardClassifierWrapper` gives one.

    `info["metrics"]` has, for each step, `late_ticks` (ticks of the clock that passed before the
    action came) and `dropped_frames` (failed calls of the robot).

    Args:
        robot: import path of a function or class that makes the robot.
        limits: {name: [low, high]} for each action, in the robot's units.
        max_speed: units per second, as one number or {name: number}.
        robot_kwargs: arguments of `robot`: numbers, texts, lists and dicts.
        fps: steps per second.
        step_size: makes an action a move of at most this many units per step; as `max_speed`.
        kinematics: import path of a function that makes an object with `action_space` and
            `joints(state, action)`: target positions by name for an action [A], such as a step of
            the end effector. `state` has the numbers of the last observation by name.
        home: {name: position} to which the arm moves at each reset, at `max_speed`.
        reset_script: import path of a function that maps the observation to an action, or None when
            the scene is ready; called at each reset, after `home`.
        reset_s: seconds that a person has at each reset to prepare the scene.
        on_stop: at the end, after a failure, and if the learner is killed, `hold` holds the arm's
            position; `relax` disconnects the robot, which usually switches its motors off.
        heartbeat_s: seconds of silence after which the learner counts as killed.
        timeout_s: seconds that a call of the robot may take.
        max_dropped: failed calls in a row that are bridged by the last observation.
        python: interpreter of the robot's process, if the robot's packages need an environment of
            their own. Default: this interpreter.
        render_mode: `rgb_array` shows the first camera; `human`: people look at the robot.

    Raises:
        ConfigurationError: a setting does not fit the robot.
        EnvFaultError: the robot cannot be made, fails or does not answer; the arm has been stopped.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012  # Gymnasium's own declaration
        "render_modes": ["human", "rgb_array"],
        "reports_interventions": True,
        "is_real": True,
    }

    def __init__(
        self,
        robot: str,
        limits: Mapping[str, tuple[float, float]],
        max_speed: float | Mapping[str, float],
        robot_kwargs: Mapping[str, Any] | None = None,
        fps: float = 30.0,
        step_size: float | Mapping[str, float] | None = None,
        kinematics: str | None = None,
        home: Mapping[str, float] | None = None,
        reset_script: str | None = None,
        reset_s: float = 0.0,
        on_stop: Literal["hold", "relax"] = "hold",
        heartbeat_s: float = 1.0,
        timeout_s: float = 10.0,
        max_dropped: int = 5,
        python: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        check_range("fps", fps, above=0)
        check_range("heartbeat_s", heartbeat_s, above=0)
        check_range("timeout_s", timeout_s, above=0)
        check_range("max_dropped", max_dropped, minimum=0)
        check_range("reset_s", reset_s, minimum=0)
        require(on_stop in ("hold", "relax"), f"on_stop must be hold or relax, got {on_stop!r}.")
        require(
            step_size is None or kinematics is None,
            "step_size and kinematics both define the actions: give one of them.",
        )
        check_import_path("robot", robot)
        self.metadata = {**self.metadata, "render_fps": fps}
        self.render_mode = render_mode
        names = list(limits)
        intervals = by_name("limits", limits, names)
        self._limits = {name: _interval(name, pair) for name, pair in intervals.items()}
        self._speed = _positive("max_speed", max_speed, names)
        steps = None if step_size is None else _positive("step_size", step_size, names)
        home = {} if home is None else by_name("home", home, list(home))
        self._home = {name: float(at) for name, at in home.items()}
        self._kinematics: Any = None if kinematics is None else imported(kinematics)()
        self._script: Any = None if reset_script is None else imported(reset_script)
        self._reset_s, self._fps = reset_s, fps
        self._picture: np.ndarray | None = None
        self._connected = False
        settings = {
            "robot": robot,
            "kwargs": dict(robot_kwargs or {}),
            "limits": self._limits,
            "max_speed": self._speed,
            "fps": fps,
            "on_stop": on_stop,
            "heartbeat_s": heartbeat_s,
            "max_dropped": max_dropped,
        }
        self._process = RobotProcess(settings, timeout_s, python)  # connects no motor yet
        try:
            self._take_features(steps, *self._process.described)
        except BaseException:  # nothing closes an env whose constructor failed
            self._process.close()
            raise

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if not self._connected:
            # Connect before the way home: the answer tells the measured positions, where the way
            # begins.
            self._take(self._process.ask("connect"))
            self._connected = True
        if self._home:
            self._go_home(self._home)
        # Observe after the motion, so that the script sees the arm where it is now.
        observation = self._take(self._process.ask("observe"))
        if self._script is not None:
            while (action := self._script(observation)) is not None:
                observation = self._move(self._target(np.asarray(action)))
        if self._reset_s:
            time.sleep(self._reset_s)
        # The scene may have changed since. `observe` restarts the clock: waiting counts no late
        # tick.
        return self._take(self._process.ask("observe")), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        # `_move` replaces `_sent`.
        previous_target, space = self._sent, self.action_space
        assert isinstance(space, gymnasium.spaces.Box)
        observation = self._move(self._target(action))
        info: dict[str, Any] = {"metrics": self._metrics}
        # With kinematics the sent joint positions cannot be turned back into an action.
        if self._kinematics is None:
            executed = self._sent
            if self._step_sizes is not None:
                # The part of the move that the limits and max_speed allowed.
                executed = (self._sent - previous_target) / self._step_sizes
            # The clip matters for an arm that starts outside its limits and is still on its way
            # back; it is no intervention.
            executed = executed.astype(np.float32).clip(space.low, space.high)
            info = report_intervention(info, executed, False)
        return observation, 0.0, False, False, info

    def render(self) -> Any:
        return self._picture if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        self._process.close()

    @property
    def action_names(self) -> list[str]:
        """Names of the robot's actions."""
        return self._names

    def action_of(self, target: Mapping[str, float]) -> np.ndarray:
        """Return the action [A] that moves to target positions by name.

        Raises:
            ConfigurationError: the env has `kinematics`.
        """
        require(self._kinematics is None, "kinematics cannot turn positions into actions.")
        positions = np.array([target[name] for name in self._names])
        if self._step_sizes is not None:
            # A leader arm that is further away than one step moves the arm by one whole step.
            positions = ((positions - self._sent) / self._step_sizes).clip(-1.0, 1.0)
        return positions.astype(np.float32)

    def _take_features(
        self,
        steps: Mapping[str, float] | None,
        actions: dict[str, Any],
        observations: dict[str, Any],
    ) -> None:
        """Make the spaces and arrays in the robot's order, and check the settings' names."""
        require(
            set(actions) == set(self._limits),
            f"limits has {', '.join(self._limits) or 'nothing'}, but the robot takes the actions "
            f"{', '.join(actions)}: give each of them its [low, high].",
        )
        unknown = set(self._home) - set(actions)
        require(
            not unknown, f"home has {', '.join(sorted(unknown))}, but the robot has no such action."
        )
        self._names = list(actions)
        # `bus` gives a number an empty shape.
        self._numbers = [name for name, shape in observations.items() if not shape]
        self._cameras = {name: shape for name, shape in observations.items() if shape}
        spaces = gymnasium.spaces
        size = (len(self._numbers),)
        state = named(spaces.Box(-np.inf, np.inf, size, np.float32), self._numbers)
        cameras = {n: spaces.Box(0, 255, shape, np.uint8) for n, shape in self._cameras.items()}
        self.observation_space = spaces.Dict({"state": state, **cameras}) if cameras else state
        low, high = np.array([self._limits[name] for name in self._names], "f4").T
        self._step_sizes: np.ndarray | None = None
        if steps is not None:
            self._step_sizes = np.array([steps[name] for name in self._names])
            low, high = -np.ones_like(low), np.ones_like(high)
        if self._kinematics is not None:
            self.action_space = self._kinematics.action_space
        else:
            self.action_space = named(spaces.Box(low, high), self._names)
            self.metadata["action_names"] = self._names

    def _target(self, action: np.ndarray) -> dict[str, float]:
        if self._kinematics is not None:
            # A copy, because user code might change it.
            joints = self._kinematics.joints(dict(self._state), action)
            missing = [name for name in self._names if name not in joints]
            require(
                not missing, f"kinematics did not set {', '.join(missing)}; it must set each joint."
            )
            return {name: float(joints[name]) for name in self._names}
        target = action
        if self._step_sizes is not None:
            target = self._sent + action * self._step_sizes
        return dict(zip(self._names, map(float, target), strict=True))

    def _move(self, target: dict[str, float]) -> Any:
        return self._take(self._process.ask("step", target))

    def _go_home(self, home: dict[str, float]) -> None:
        for _ in range(MOST_HOME_STEPS):
            now = dict(zip(self._names, map(float, self._sent), strict=True))
            # Compare sent positions: under load the measured ones may never equal home.
            if all(abs(now[name] - at) < AT_HOME * self._speed[name] for name, at in home.items()):
                return
            # Joints without a home stay where they are.
            self._move({**now, **home})
        raise EnvFaultError(
            f"The arm is not at home after {MOST_HOME_STEPS} steps: it is at {now}, and home is "
            f"{home}. Does the robot limit its motions further, or is home beyond the limits?"
        )

    def _take(self, answer: tuple[dict[str, Any], dict[str, Any]]) -> Any:
        """Return the observation in an answer; keep the report."""
        observation, report = answer
        missing = [name for name in (*self._numbers, *self._cameras) if name not in observation]
        if missing:
            raise EnvFaultError(f"The robot's observation has no {', '.join(missing)}.")
        self._sent = np.array([report["sent"][name] for name in self._names])
        self._metrics = {"late_ticks": report["missed"], "dropped_frames": report["dropped"]}
        self._state = {name: observation[name] for name in self._numbers}
        state = np.array(list(self._state.values()), np.float32)
        pictures = {
            name: _picture(name, observation[name], shape) for name, shape in self._cameras.items()
        }
        self._picture = next(iter(pictures.values()), None)
        return {"state": state, **pictures} if pictures else state


def check_import_path(setting: str, import_path: str) -> None:
    """Refuse a text that is no import path. A checkpoint without trust cannot name an import path.

    Raises:
        ConfigurationError: names the setting.
    """
    require(
        isinstance(import_path, str) and is_import_path(import_path),
        f"{setting} must be the import path of a function, as my_robot.make, got {import_path!r}.",
    )


def _positive(setting: str, value: Any, names: list[str]) -> dict[str, float]:
    numbers = by_name(setting, value, names)
    for name, number in numbers.items():
        check_range(f"{setting} of {name}", number, above=0)
    return numbers


def _interval(name: str, limits: Any) -> tuple[float, float]:
    pair = tuple(limits) if isinstance(limits, list | tuple) else ()
    require(
        len(pair) == 2 and bool(np.isfinite(pair).all()) and pair[0] < pair[1],
        f"The limits of {name} are {limits!r}: give [low, high], finite, low below high.",
    )
    return float(pair[0]), float(pair[1])


def _picture(name: str, parts: Any, shape: tuple[int, ...]) -> np.ndarray:
    # A feature with a shape may still arrive as a plain number.
    kind, sent_shape, content = parts if isinstance(parts, tuple) else ("number", (), b"")
    if kind != "|u1" or tuple(sent_shape) != shape:
        raise EnvFaultError(
            f"The robot's camera {name} returned {kind} {list(sent_shape)}, but its feature is a "
            f"picture uint8 {list(shape)}. Leave out other sensors, such as depth, in the robot's "
            "settings."
        )
    # An array from `frombuffer` is read-only, and it shares the memory of the message.
    return np.frombuffer(content, np.uint8).reshape(shape).copy()
