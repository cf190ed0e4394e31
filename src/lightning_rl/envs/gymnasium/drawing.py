"""Choose the settings with which a Gymnasium env draws pictures, or opens a window."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from lightning_rl.envs.gymnasium.making import spec_of
from lightning_rl.envs.gymnasium.mujoco_bindings import draw_offscreen
from lightning_rl.system.errors import require


def kwargs_to_draw(id: str, metadata: Mapping[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the `env_kwargs` with which an env draws pictures.

    Raises:
        ConfigurationError: for an env that draws none.
    """
    modes = metadata.get("render_modes", [])
    require(
        "rgb_array" in modes,
        f"Env '{id}' cannot be drawn: its render modes are {modes}, without rgb_array.",
    )
    draw_offscreen()
    camera = {}
    spec = spec_of(id)
    if spec is not None and str(spec.entry_point).startswith("gymnasium.envs.mujoco"):
        # The default camera of Gymnasium 1.4 does not follow the robot.
        camera = {"camera_name": "track"} if "camera_id" not in kwargs else {}
    # The user's settings come later, so they win.
    return {**camera, **kwargs, "render_mode": "rgb_array"}


def kwargs_to_show(id: str, metadata: Mapping[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the `env_kwargs` with which an env opens a window.

    Raises:
        ConfigurationError: for an env without a window, or a machine without a screen.
    """
    modes = metadata.get("render_modes", [])
    require(
        "human" in modes,
        f"Env '{id}' cannot open a window: its render modes are {modes}, without human. Film it: "
        "--video true.",
    )
    screen = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    require(
        sys.platform != "linux"
        or metadata.get("is_real", False)  # people look at the robot
        or any(os.environ.get(name) for name in screen),
        "There is no screen here to open a window on (neither DISPLAY nor WAYLAND_DISPLAY is set). "
        "Film it: --video true.",
    )
    return {**kwargs, "render_mode": "human"}
