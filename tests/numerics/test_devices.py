"""Keyboard, gamepad and space-mouse say what is pressed, and what is missing; without any of them plugged in."""

import struct
import sys
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from lightning_rl import Gamepad, Intervention, Keyboard, SpaceMouse
from tests.messages import refused
from tests.numerics.test_taking_over import shows

GRIPPER = Box(np.array([-1, -1, -1, 0], np.float32), np.array([1, 1, 1, 2], np.float32))


def opened(source, space=GRIPPER):
    env = shows()
    env.action_space = space
    source.open(env)
    source.reset(None)
    return source


@pytest.fixture
def window(monkeypatch):
    """A window of pygame's that nobody sees, and what presses its keys."""
    pygame = pytest.importorskip("pygame", reason="the extra hil-devices is not installed")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("DISPLAY", ":none")
    pygame.display.quit()

    def press(name, up=False):
        kind = pygame.KEYUP if up else pygame.KEYDOWN
        pygame.event.post(pygame.event.Event(kind, key=pygame.key.key_code(name)))

    yield press
    pygame.display.quit()


def test_arrows_and_modifiers_count_and_are_held_until_they_are_let_go(window):
    """LeRobot #2345: special keys were dropped."""
    keys = {"take_over": "left shift"}
    steering = {"up": "+0", "left ctrl": "-3", "left": "+1"}
    board = opened(Keyboard(keys, steering))
    window("up")
    assert board.poll(None) == (None, None), "the policy acts"
    window("left shift")
    assert board.poll(None).action.tolist() == [1, 0, 0, 1], "up is held since; the gripper stays"
    window("left ctrl")
    window("left ctrl", up=True)
    assert board.poll(None).action.tolist() == [1, 0, 0, 0], "a key that was let go at once too"
    window("up", up=True)
    assert board.poll(None).action.tolist() == [0, 0, 0, 1]
    window("left shift")
    assert board.poll(None).action is None
    board.close()


def test_events_that_are_not_ours_are_left_to_their_reader(window):
    """LeRobot #2345: reading keys emptied the queue that the env's window read."""
    import pygame

    board = opened(Keyboard())
    pygame.event.post(pygame.event.Event(pygame.QUIT))
    window("return")
    assert board.poll(None).event == "success"
    assert pygame.event.get(pygame.QUIT)
    board.close()


def test_a_full_queue_takes_no_key_from_a_person(window):
    """The mouse over a window whose env reads no events filled the queue: pygame dropped the keys."""
    import pygame

    board, moved = opened(Keyboard()), pygame.event.Event(pygame.MOUSEMOTION, pos=(1, 1))
    for _ in range(70):
        for _ in range(1000):  # of at most 65,535 events
            pygame.event.post(moved)
        assert board.poll(None) == (None, None)
    window("space")
    assert board.poll(None).action is not None
    board.close()


def test_a_window_shows_the_env_and_who_acts(window):
    import pygame

    inner = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    env = Intervention(inner, Keyboard(steering={"left": "0", "right": "1"}))
    env.reset()
    window("space")
    window("right")
    *_, info = env.step(np.int64(0))
    assert info["executed_action"] == 1
    env.step(np.int64(0))
    assert pygame.display.get_caption()[0].startswith("you act (space: take_over")
    assert pygame.surfarray.array3d(pygame.display.get_surface()).std() > 1
    window("backspace")
    *_, terminated, _, info = env.step(np.int64(0))
    assert (terminated, info["success"]) == (True, False)
    env.close()
    assert pygame.display.get_surface() is None


def test_one_person_steers_one_env(window):
    env, other = (Intervention(shows(), Keyboard()) for _ in range(2))
    env.reset()
    with refused(names=("Keyboard", "data.num_envs: 1")):
        other.reset()
    env.close()
    other.reset()
    other.close()


def test_without_a_display_it_says_what_to_do(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with refused(names=("Keyboard", "DISPLAY", "WAYLAND_DISPLAY", "Gamepad", "queue.Queue")):
        opened(Keyboard())


def test_keys_end_an_episode_and_the_next_one_begins_with_the_policy(window):
    board = opened(Keyboard())
    window("space")
    assert board.poll(None).action is not None
    for key, event in {"return": "success", "backspace": "failure", "x": "rerecord"}.items():
        window(key)
        assert board.poll(None).event == event
    for key in ("return", "space"):  # while the env resets
        window(key)
    board.reset(None)
    assert board.poll(None) == (None, None)
    board.close()


def test_a_display_that_cannot_be_opened_says_so(monkeypatch):
    pygame = pytest.importorskip("pygame", reason="the extra hil-devices is not installed")
    pygame.display.quit()
    monkeypatch.setenv("DISPLAY", ":77")
    monkeypatch.setenv("SDL_VIDEODRIVER", "x11")
    with refused(names=("Keyboard", "DISPLAY")):
        opened(Keyboard())


def test_keys_for_numbered_actions(window):
    board = opened(Keyboard(), Discrete(3))
    window("space")
    assert board.poll(None).action is None, "none is pressed: the policy acts"
    window("2")
    assert board.poll(None).action == 2
    window("2", up=True)
    window("7")
    assert board.poll(None).action is None, "there is none"
    board.close()


WRONG = {
    "actions": (lambda: opened(SpaceMouse(), Discrete(2)), ("SpaceMouse", "Box", "Discrete(2)", "queue.Queue")),
    "neutral": (
        lambda: opened(Gamepad(neutral=[0.0, 3.0]), Box(-1, 1, (2,))),
        ("neutral=[0.0, 3.0]", "Box(-1.0, 1.0, (2,), float32)"),
    ),
    "unknown": (lambda: Keyboard({"takeover": "a"}), ("keys", "['takeover']", "take_over, success, failure, rerecord")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name):
    make, message = WRONG[name]
    with refused(names=message):
        make()


@pytest.fixture
def pads(monkeypatch):
    """What is plugged in: a gamepad as pygame has it."""
    pygame = pytest.importorskip("pygame", reason="the extra hil-devices is not installed")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    axes, buttons = [0.0] * 6, [0] * 8
    pad = Mock(axes=axes, get_axis=axes.__getitem__, get_numaxes=lambda: 6)
    pad.configure_mock(buttons=buttons, get_button=buttons.__getitem__, get_numbuttons=lambda: 8)
    plugged = [pad]
    monkeypatch.setattr(pygame.joystick, "get_count", lambda: len(plugged))
    monkeypatch.setattr(pygame.joystick, "Joystick", lambda i: plugged[i])
    yield plugged
    pygame.display.quit()


def test_a_gamepad_takes_over_while_its_button_is_held(pads):
    (pad,) = pads
    source = opened(Gamepad(speed=0.5))
    pad.axes[1] = -1.0  # up
    assert source.poll(None) == (None, None)
    pad.buttons[5] = 1
    assert source.poll(None).action.tolist() == [0.5, 0, 0, 1]
    pad.axes[:2], pad.buttons[7] = [0.05, 0.0], 1
    assert source.poll(None).action.tolist() == [0, 0, 0, 1.5], (
        "closing; a stick that is not quite at rest"
    )
    pad.buttons[:8] = [1, 0, 0, 0, 0, 0, 0, 0]
    assert source.poll(None) == (None, "failure")
    assert source.poll(None).event is None, "once for as long as it is held"
    pad.buttons[3] = 1
    source.reset(None)
    assert source.poll(None).event is None, "held since the episode before"
    source.close()


@pytest.mark.parametrize("told", [True, False])
def test_a_gamepad_that_is_pulled_out(pads, told):
    """It read as idle, in silence; the env's window may have taken the event that tells of it."""
    import pygame

    source, (pad,) = opened(Gamepad()), pads
    pad.get_instance_id = lambda: 3
    pygame.event.post(pygame.event.Event(pygame.JOYDEVICEREMOVED, instance_id=2))
    assert source.poll(None) == (None, None), "another one"
    if told:
        pygame.event.post(pygame.event.Event(pygame.JOYDEVICEREMOVED, instance_id=3))
    else:
        pads.clear()
    with refused(names=("gamepad 0", "rl-cli fit --ckpt_path last")):
        source.poll(None)
    source.close()


def test_no_gamepad(pads):
    pads.clear()
    with refused(names=("gamepad 0", "/dev/input/js*", "usermod -aG input $USER")):
        opened(Gamepad())


@pytest.fixture
def mouse(monkeypatch):
    """A space-mouse as hidapi has it."""
    wheel = {"vendor_id": 0x046D, "product_string": "Wheel", "path": b"0"}
    compact = {"vendor_id": 0x256F, "product_string": "SpaceMouse Compact", "path": b"1"}
    device = Mock(plugged=[compact], allowed=True, reports=[])

    def open_path(path):
        if not device.allowed:
            raise OSError("open failed")

    device.open_path = open_path
    device.read = lambda size: device.reports.pop(0) if device.reports else []
    hid = Mock(enumerate=lambda: [wheel, *device.plugged], device=lambda: device)
    monkeypatch.setitem(sys.modules, "hid", hid)
    return device


def test_a_space_mouse_takes_over_while_it_moves(mouse, monkeypatch):
    now = [50.0]
    monkeypatch.setattr(
        "lightning_rl.extensions.teleoperation.devices.time.monotonic", lambda: now[0]
    )
    source = opened(SpaceMouse())
    assert source.poll(None) == (None, None)
    mouse.reports = [
        list(struct.pack("<B3h", 1, 0, -700, 35)),
        list(struct.pack("<B3h", 1, 0, -700, 175)),
    ]
    assert source.poll(None).action.tolist() == [1, 0, -0.5, 1], "the newest report, not the oldest"
    mouse.reports = [list(struct.pack("<B6h", 1, 0, 0, 0, 0, 0, 0)), [3, 1, 0]]
    assert source.poll(None).action.tolist() == [0, 0, 0, 2]
    mouse.reports = [[3, 0, 0]]
    now[0] += 0.4
    assert source.poll(None).action.tolist() == [0, 0, 0, 1], "lingers"
    now[0] += 0.2
    assert source.poll(None).action is None
    source.close()


def test_a_space_mouse_that_is_pulled_out(mouse, monkeypatch):
    source = opened(SpaceMouse())

    def fail(size):
        raise OSError("read error")

    monkeypatch.setattr(mouse, "read", fail)
    with refused(names=("space-mouse", "read error", "rl-cli fit --ckpt_path last")):
        source.poll(None)
    source.close()


def test_no_space_mouse(mouse):
    mouse.plugged = []
    with refused(names=("space-mouse", "Keyboard, Gamepad")):
        opened(SpaceMouse())


def test_a_space_mouse_that_may_not_be_read(mouse):
    mouse.allowed = False
    with refused(
        names=(
            "SpaceMouse Compact",
            "open failed",
            'ATTRS{idVendor}=="256f"',
            "/etc/udev/rules.d/70-space-mouse.rules",
        )
    ):
        opened(SpaceMouse())


def test_a_missing_package_is_named_with_what_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "hid", None)
    with refused(names=("SpaceMouse", "hid", "pip install -e '.[hil-devices]'")):
        opened(SpaceMouse())
