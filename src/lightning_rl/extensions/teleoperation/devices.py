"""Take over by keyboard, gamepad or space-mouse, without root rights (extra `hil-devices`)."""

import os
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import gymnasium
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rl import ConfigurationError
from lightning_rl.extend.envs import one_picture
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.spaces import by_name, names_of
from lightning_rl.extensions.teleoperation.intervention import (
    Event,
    InterventionDecision,
    InterventionSource,
)
from lightning_rl.kwargs import GamepadKwargs, KeyboardKwargs, SpaceMouseKwargs, Unpack

INSTALL = "pip install -e '.[hil-devices]'"
"""How to install the packages."""

PLUG_IN = "plug it in again, and resume the run: rl-cli fit --ckpt_path last."
"""What to do if a device was pulled out."""

FLOODS = ("MOUSEMOTION", "FINGERMOTION", "TEXTINPUT", "JOYAXISMOTION")
"""Events that soon fill pygame's queue if the env does not read it; pygame then drops new ones."""

Neutral = list[float] | Mapping[str, float] | None
"""The action of an idle person: numbers in the order of the env, or by name."""

Steering = Mapping[str, str]
"""Maps a key or an axis to a signed action component, `+elbow` or `+0`, or a discrete action."""

_KEYS = {"take_over": "space", "success": "return", "failure": "backspace", "rerecord": "x"}
_BUTTONS = {"take_over": 5, "success": 3, "failure": 0, "rerecord": 2}
_BOX_KEYS: Steering = {
    "up": "+0",
    "down": "-0",
    "left": "+1",
    "right": "-1",
    "r": "+2",
    "f": "-2",
    "c": "-3",  # a gripper's command: 0 close, 1 stay, 2 open
    "o": "+3",
}
_DISCRETE_KEYS: Steering = {str(digit): str(digit) for digit in range(10)}
_GAMEPAD_AXES: Steering = {"1": "-0", "0": "-1", "4": "-2"}
_GAMEPAD_BUTTONS: Steering = {"7": "+3", "6": "-3"}
_MOUSE_AXES: Steering = {"1": "-0", "0": "-1", "2": "-2"}
_MOUSE_BUTTONS: Steering = {"0": "+3", "1": "-3"}


class Device(InterventionSource):
    """A device of one person, for one env per process.

    Idle components stay at their neutral value: the middle of the bounds, or 0 without bounds.

    Args:
        speed: deflection by a key or a full stick, as a fraction of the way from the neutral value
            to the bound; without bounds in units of the action.
        neutral: [A], or {name: number}, the action of an idle person; for a Box.
    """

    # By class: two keyboards would read the same keys.
    _in_use: ClassVar[dict[type, "Device"]] = {}

    def __init__(self, speed: float = 1.0, neutral: Neutral = None) -> None:
        check_range("speed", speed, above=0)
        self.speed, self.given_neutral = speed, neutral
        self._typed_targets: list[str] = []
        self._space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(1)
        self._in_charge = False

    def take_charge(self) -> None:
        self._in_charge = True

    def open(self, env: gymnasium.Env) -> None:
        name, kind = type(self).__name__, type(self)
        require(
            self._in_use.get(kind, self) is self,
            f"A {name} already controls another env of this process: a device controls one env. "
            "Set data.num_envs: 1.",
        )
        self._space = env.action_space
        # Check the space before the device opens, and register after: a failed open leaves no
        # trace.
        self._check_space()
        self.connect(env)
        self._in_use[kind] = self

    def close(self) -> None:
        if self._in_use.get(type(self)) is self:
            del self._in_use[type(self)]
            self.disconnect()

    @abstractmethod
    def connect(self, env: gymnasium.Env) -> None:
        """Open the device for `env`.

        Raises:
            ConfigurationError: the device is missing or not readable; the message names the cure.
        """

    @abstractmethod
    def disconnect(self) -> None:
        """Free the device."""

    def _check_space(self) -> None:
        space = self._space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise ConfigurationError(
                f"A {type(self).__name__} returns actions [A] of a Box, but the action space is "
                f"{space}: use a function of the observation, or a queue.Queue."
            )
        size = space.shape[0]
        low, high = space.low.astype(float), space.high.astype(float)
        bounded = np.isfinite(low) & np.isfinite(high)
        # The inner `where` keeps -inf + inf out of the sum, which would be NaN with a warning.
        middle = np.where(bounded, (np.where(bounded, low, 0) + np.where(bounded, high, 0)) / 2, 0)
        typed, names = self.given_neutral, names_of(space)
        if isinstance(typed, Mapping):
            typed = list(by_name("neutral", typed, names).values())
        neutral = middle if typed is None else np.asarray(typed, float)
        require(
            neutral.shape == space.shape and bool(((neutral >= low) & (neutral <= high)).all()),
            f"neutral={self.given_neutral} is not an action of {space}: give {size} numbers "
            "within its bounds.",
        )
        self._neutral, self._low, self._high = neutral, low, high
        self._components = {str(i): i for i in range(size)} | {x: i for i, x in enumerate(names)}
        targets = {target.lstrip("+-") for target in self._typed_targets}
        places = ", ".join(names or self._components)
        require(
            targets <= self._components.keys(),
            f"A {type(self).__name__} steers {', '.join(sorted(targets))}, but the action has the "
            f"components {places}.",
        )
        if names and (not targets <= {*names} or isinstance(self.given_neutral, list)):
            rank_zero_warn(
                f"A {type(self).__name__} reads steering or neutral in the order {places}, which "
                f"another env may change: use the names, as in +{names[0]}."
            )

    def _steer(self, deflections: Mapping[int, float]) -> np.ndarray:
        action = self._neutral.copy()
        for i, share in deflections.items():
            # The neutral value may lie off the middle: each direction has a scale of its own.
            bound = self._high[i] if share > 0 else self._low[i]
            distance = abs(bound - action[i]) if np.isfinite(bound) else 1.0
            action[i] += np.clip(share, -1, 1) * self.speed * distance
        return action.clip(self._low, self._high)

    def _moved(self, shares: Mapping[str, float], steering: Steering) -> dict[int, float]:
        deflections: dict[int, float] = {}
        for key, share in shares.items():
            target = steering.get(key)
            if share and target is not None:
                sign, name = (-1 if target.startswith("-") else 1), target.lstrip("+-")
                # The defaults steer up to four components; an env may have fewer. Opposite keys
                # cancel.
                if (component := self._components.get(name)) is not None:
                    deflections[component] = deflections.get(component, 0.0) + sign * share
        return deflections


class Keyboard(Device):
    """One key takes over and hands back; other keys steer or end the episode.

    Keys are read from the env's own pygame window, or from a new window, which shows the env if its
    `render_mode` is `rgb_array`.

    Args:
        keys: maps `take_over`, `success`, `failure` and `rerecord` to pygame key names.
        steering: maps key names to signed action components, `+elbow` or `+0`, or to discrete
            actions. Default: arrows move the first two components, `r` and `f` the third; `c` and
            `o` lower and raise the fourth (close and open a gripper); digits are discrete actions.
        kwargs: see `Device`.

    Raises:
        ConfigurationError: a key has two meanings; when opened: there is no display.
    """

    def __init__(
        self,
        keys: Mapping[str, str] | None = None,
        steering: Mapping[str, str] | None = None,
        **kwargs: Unpack[KeyboardKwargs],
    ) -> None:
        super().__init__(**kwargs)
        self.keys = _KEYS | dict(keys or {})
        _check_meanings("keys", self.keys)
        self.given_steering = steering
        used = [*self.keys.values(), *(steering or {})]
        double = sorted({key for key in used if used.count(key) > 1})
        require(not double, f"The keys {double} have two meanings each: give each key one meaning.")
        self._window: _Window | None = None
        self._taken_over = False

    def reset(self, seed: int | None) -> None:
        # Drop keys that were pressed between two episodes: they would end or steer the next one.
        self.poll(None)
        self._taken_over = False

    def connect(self, env: gymnasium.Env) -> None:
        require(
            has_display(),
            "The Keyboard reads the keys of a window, but there is no display: set DISPLAY or "
            "WAYLAND_DISPLAY (ssh -X, or a desktop), or use a Gamepad, a function, or a "
            "queue.Queue.",
        )
        self._window = _Window(env, self.keys)

    def disconnect(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None

    def poll(self, observation: Any) -> InterventionDecision:
        assert self._window is not None
        pressed, held_keys = self._window.read(self._taken_over or self._in_charge)
        event: Event | None = None
        for key in pressed:
            if key == self.keys["take_over"]:
                self._taken_over = not self._taken_over
            for name in ("success", "failure", "rerecord"):
                if key == self.keys[name]:
                    event = name
        acts = self._taken_over or self._in_charge
        # `pressed` also has keys that were released between two steps.
        return InterventionDecision(self._action({*held_keys, *pressed}) if acts else None, event)

    def _check_space(self) -> None:
        if isinstance(self._space, gymnasium.spaces.Discrete):
            self._steering = _DISCRETE_KEYS if self.given_steering is None else self.given_steering
            invalid = [a for a in self._steering.values() if not a.isdecimal()]
            require(not invalid, f"steering names {invalid}; this env's actions are {self._space}.")
            return
        self._typed_targets = [*(self.given_steering or {}).values()]
        super()._check_space()
        self._steering = _BOX_KEYS if self.given_steering is None else self.given_steering

    def _action(self, keys: set[str]) -> Any:
        if isinstance(self._space, gymnasium.spaces.Discrete):
            # Sorted, because a set has no order: two keys together always give the same action.
            actions = [int(self._steering[key]) for key in keys if key in self._steering]
            return next((a for a in sorted(actions) if self._space.contains(a)), None)
        return self._steer(self._moved(dict.fromkeys(keys, 1.0), self._steering))


class Gamepad(Device):
    """One button takes over while a person holds it; sticks steer; other buttons end the episode.

    Read by pygame, without a display. Axes and buttons have pygame's numbers. Defaults, for an Xbox
    pad on Linux: left stick; right stick up and down; RB takes over, Y success, A failure, X
    rerecord; the left menu button closes a gripper, the right one opens it.

    Args:
        buttons: maps `take_over`, `success`, `failure` and `rerecord` to button numbers.
        axes: maps axis numbers to signed action components, `-elbow` or `-0`.
        steering: maps button numbers to signed action components.
        number: index of the gamepad.
        dead_zone: smallest stick deflection that counts, from 0 to 1.
        kwargs: see `Device`.

    Raises:
        ConfigurationError: a number is out of range; when opened: there is no gamepad; when polled:
            it was unplugged.
    """

    def __init__(
        self,
        buttons: Mapping[str, int] | None = None,
        axes: Mapping[str, str] | None = None,
        steering: Mapping[str, str] | None = None,
        number: int = 0,
        dead_zone: float = 0.1,
        **kwargs: Unpack[GamepadKwargs],
    ) -> None:
        super().__init__(**kwargs)
        check_range("number", number, minimum=0)
        check_range("dead_zone", dead_zone, minimum=0, below=1)
        self.buttons = _BUTTONS | dict(buttons or {})
        _check_meanings("buttons", self.buttons)
        self.axes = _GAMEPAD_AXES if axes is None else axes
        self.steering = _GAMEPAD_BUTTONS if steering is None else steering
        self._typed_targets = [*(axes or {}).values(), *(steering or {}).values()]
        self.number, self.dead_zone = number, dead_zone
        self._pad: Any = None
        self._last_buttons: set[int] = set()

    def connect(self, env: gymnasium.Env) -> None:
        pygame = _package("pygame", "A Gamepad")
        # SDL ignores a gamepad while another window has the focus.
        os.environ.setdefault("SDL_JOYSTICK_ALLOW_BACKGROUND_EVENTS", "1")
        if not has_display():
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        pygame.display.init()  # required for events of any device
        pygame.joystick.init()
        count = pygame.joystick.get_count()
        require(
            count > self.number,
            f"There is no gamepad {self.number}: {count} found. Plug it in, and check that your "
            "user may read /dev/input/js* (group input on most systems: usermod -aG input $USER, "
            "and log in again).",
        )
        self._pygame, self._pad = pygame, pygame.joystick.Joystick(self.number)
        self._pad.init()

    def disconnect(self) -> None:
        self._pad.quit()

    def reset(self, seed: int | None) -> None:
        # Ignore buttons held since the last episode.
        self._last_buttons = set(self.buttons.values())

    def poll(self, observation: Any) -> InterventionDecision:
        # A removed pad reads as idle. The env's window may have taken the event of a removal.
        removed = [event.instance_id for event in _events(self._pygame, "JOYDEVICEREMOVED")]
        require(
            self._pad.get_instance_id() not in removed and self._pygame.joystick.get_count() > 0,
            f"The gamepad {self.number} was unplugged: {PLUG_IN}",
        )
        down = {i for i in range(self._pad.get_numbuttons()) if self._pad.get_button(i)}
        event: Event | None = None
        for name in ("success", "failure", "rerecord"):
            # Only a new press counts: a held button would end the next episode, too.
            if self.buttons[name] in down - self._last_buttons:
                event = name
        self._last_buttons = down
        if self.buttons["take_over"] not in down and not self._in_charge:
            return InterventionDecision(None, event)
        axes = {str(i): self._pad.get_axis(i) for i in range(self._pad.get_numaxes())}
        live = {name: x for name, x in axes.items() if abs(x) > self.dead_zone}
        deflections = self._moved(live, self.axes)
        # A button wins over an axis of the same component.
        deflections |= self._moved({str(i): 1.0 for i in down}, self.steering)
        return InterventionDecision(self._steer(deflections), event)


class SpaceMouse(Device):
    """A 3Dconnexion mouse takes over while it moves, and shortly afterwards.

    Read by hidapi. Axes 0 to 2 are left/right, forth/back, up/down; axes 3 to 5 are rotations; the
    two buttons are 0 and 1. It cannot end an episode.

    Args:
        axes: maps axis numbers to signed action components, `-elbow` or `-0`.
        steering: maps button numbers to signed action components.
        linger_s: seconds for which it stays in control after the last movement.
        dead_zone: smallest axis deflection that counts, from 0 to 1.
        kwargs: see `Device`.

    Raises:
        ConfigurationError: a number is out of range; when opened: there is no space-mouse, or your
            user may not read it.
    """

    VENDORS = (0x256F, 0x046D)
    """USB vendor ids of 3Dconnexion and of Logitech, the earlier vendor."""

    FULL_SCALE = 350.0
    """Raw axis value at full deflection."""

    def __init__(
        self,
        axes: Mapping[str, str] | None = None,
        steering: Mapping[str, str] | None = None,
        linger_s: float = 0.5,
        dead_zone: float = 0.05,
        **kwargs: Unpack[SpaceMouseKwargs],
    ) -> None:
        super().__init__(**kwargs)
        check_range("linger_s", linger_s, minimum=0)
        check_range("dead_zone", dead_zone, minimum=0, below=1)
        self.axes = _MOUSE_AXES if axes is None else axes
        self.steering = _MOUSE_BUTTONS if steering is None else steering
        self._typed_targets = [*(axes or {}).values(), *(steering or {}).values()]
        self.linger_s, self.dead_zone = linger_s, dead_zone
        self._mouse: Any = None
        self._values, self._buttons = [0.0] * 6, 0
        self._until = 0.0

    def connect(self, env: gymnasium.Env) -> None:
        hid = _package("hid", "A SpaceMouse")
        mice = [device for device in hid.enumerate() if _is_space_mouse(device, self.VENDORS)]
        require(
            bool(mice),
            "There is no space-mouse: plug it in, or give another source (Keyboard, Gamepad).",
        )
        self._mouse = hid.device()
        try:
            # The first of several is enough: they have no number, unlike gamepads.
            self._mouse.open_path(mice[0]["path"])
        except OSError as error:
            raise ConfigurationError(
                f"The space-mouse {mice[0].get('product_string')} may not be read ({error}). Let "
                "your user read it: put the line "
                f'KERNEL=="hidraw*", ATTRS{{idVendor}}=="{mice[0]["vendor_id"]:04x}", '
                'TAG+="uaccess" into /etc/udev/rules.d/70-space-mouse.rules, and plug it in again.'
            ) from error
        # `poll` must not wait for a movement.
        self._mouse.set_nonblocking(True)

    def disconnect(self) -> None:
        self._mouse.close()

    def reset(self, seed: int | None) -> None:
        self._until = 0.0

    def poll(self, observation: Any) -> InterventionDecision:
        try:
            # Read all waiting reports: with one per step the steering would lag behind the hand.
            while report := self._mouse.read(64):
                self._take(bytes(report))
        except OSError as error:
            raise ConfigurationError(
                f"The space-mouse has become unreadable ({error}): {PLUG_IN}"
            ) from error
        live = {str(i): x for i, x in enumerate(self._values) if abs(x) > self.dead_zone}
        down = {str(i): 1.0 for i in range(16) if self._buttons >> i & 1}
        now = time.monotonic()
        if live or down:
            self._until = now + self.linger_s
        if (now > self._until or not self._until) and not self._in_charge:
            return InterventionDecision()
        return InterventionDecision(
            self._steer(self._moved(live, self.axes) | self._moved(down, self.steering))
        )

    def _take(self, report: bytes) -> None:
        """Parse a report: number 1 has three axes, or all six; 2 the other three; 3 the buttons."""
        kind, payload = report[0], report[1:]
        if kind == 3:
            self._buttons = int.from_bytes(payload[:2], "little")
        elif kind in (1, 2):
            first = 3 * (kind - 1)
            # `frombuffer` refuses an odd number of bytes.
            numbers = np.frombuffer(payload[: len(payload) // 2 * 2], "<i2")[: 6 - first]
            for i, number in enumerate(numbers, first):
                self._values[i] = float(np.clip(number / self.FULL_SCALE, -1, 1))


def _check_meanings(setting: str, meanings: Mapping[str, Any]) -> None:
    unknown = sorted(meanings.keys() - _KEYS)
    require(not unknown, f"{setting} has {unknown}; allowed: {', '.join(_KEYS)}.")


def has_display() -> bool:
    """Return whether this process can open a window."""
    return sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )


def _is_space_mouse(device: Mapping[str, Any], vendors: tuple[int, ...]) -> bool:
    name = str(device.get("product_string") or "").lower()
    return device["vendor_id"] == vendors[0] or (device["vendor_id"] in vendors and "space" in name)


def _package(name: str, device: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"{device} needs the package {name}, which cannot be imported ({error}): {INSTALL}"
        ) from error


def _events(pygame: Any, *names: str) -> list[Any]:
    """Take the waiting events of these kinds from pygame's queue, and drop `FLOODS`.

    The others stay: the env's window handles them, such as its closing.
    """
    kinds, floods = ([getattr(pygame, name) for name in group] for group in (names, FLOODS))
    return [event for event in pygame.event.get([*kinds, *floods]) if event.type in kinds]


class _Window:
    """The pygame window that receives keys: the env's own window, or a new one."""

    SIZE = (480, 360)

    def __init__(self, env: gymnasium.Env, keys: Mapping[str, str]) -> None:
        self._pygame = pygame = _package("pygame", "A window for the Keyboard")
        self._env, self._keys = env, keys
        self._held: set[str] = set()
        try:
            pygame.display.init()
            # An env with render_mode human has its window, which then receives the keys.
            self._owns_window = pygame.display.get_surface() is None
            if self._owns_window:
                pygame.display.set_mode(self.SIZE)
                pygame.display.set_caption("lightning_rl")
        except pygame.error as error:
            raise ConfigurationError(
                f"Keyboard: no window can be opened ({error}). Set DISPLAY to a running display."
            ) from error

    def read(self, taken_over: bool) -> tuple[list[str], set[str]]:
        pygame = self._pygame
        if self._owns_window:
            self._draw(taken_over)
        pressed = []
        for event in _events(pygame, "KEYDOWN", "KEYUP"):
            name = pygame.key.name(event.key)
            if event.type == pygame.KEYDOWN:
                pressed.append(name)
                self._held.add(name)
            else:
                self._held.discard(name)
        return pressed, set(self._held)

    def close(self) -> None:
        if self._owns_window:
            self._pygame.display.quit()

    def _draw(self, taken_over: bool) -> None:
        pygame = self._pygame
        surface = pygame.display.get_surface()
        # The env may have closed its window.
        if surface is None:
            return
        if self._env.render_mode == "rgb_array":
            picture = one_picture(str(self._env), self._env.render())
            # pygame indexes pictures by x first, NumPy by row first.
            frame = pygame.surfarray.make_surface(picture.swapaxes(0, 1))
            pygame.transform.scale(frame, surface.get_size(), surface)
        status = "you act" if taken_over else "the policy acts"
        keys = ", ".join(f"{key}: {meaning}" for meaning, key in self._keys.items())
        pygame.display.set_caption(f"{status} ({keys})")
        pygame.display.flip()
