"""Take pictures of a MuJoCo model, by MuJoCo's renderer or, without OpenGL, as a drawing."""

import copy
from collections.abc import Mapping, Sequence
from math import cos, radians, sin
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_rl.extend.envs import import_mujoco
from lightning_rl.extend.errors import closest, require
from lightning_rl.extensions.mujoco.model import write_fields
from lightning_rl.extensions.tasks.drawing import BLUE, GREY, PAPER, Canvas, Colour

SIZE = (256, 384)
"""Height and width of a picture, in pixels."""

AZIMUTH, ELEVATION = 135.0, -25.0
"""Degrees: direction in which the free camera looks."""


class Marker(NamedTuple):
    """A ball in a picture, such as a goal: its position [3] and radius in m, and its colour."""

    position: np.ndarray
    radius: float
    colour: Colour


class Camera:
    """Draw pictures of one world at a time.

    `name` is a camera of the model. Default: a free camera that follows the first moving body.
    """

    def __init__(self, model: Any, name: str | None) -> None:
        names = [model.cam(i).name for i in range(model.ncam)]
        require(
            name is None or name in names,
            f"The model has no camera '{name}'; allowed: {', '.join(names) or 'none'}"
            f"{closest(name or '', names)}.",
        )
        self._mujoco, self._model, self._name = import_mujoco(), model, name
        geom = self._mujoco.mjtGeom
        self._flat = (geom.mjGEOM_PLANE, geom.mjGEOM_HFIELD)
        self._data: Any = None
        self._renderer: Any = None

    def picture(
        self,
        qpos: np.ndarray,
        markers: Sequence[Marker] = (),
        fields: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Return a picture of a world with positions `qpos` and its own fields of the model."""
        mujoco = self._mujoco
        if self._data is None:
            # At the first picture, because most envs never take one.
            self._model = copy.copy(self._model)
            for part in ("body", "geom", "site"):  # frames that are equal until `fields` move them
                getattr(self._model, f"{part}_sameframe")[:] = 0
            self._data = mujoco.MjData(self._model)
            self._renderer = self._opened()
        write_fields(self._model, self._data, fields or {})
        mujoco.mj_resetData(self._model, self._data)  # mocap bodies go to their place
        self._data.qpos[:] = qpos
        # Positions alone suffice for a picture: no dynamics.
        for part in ("kinematics", "comPos", "camlight", "flex", "tendon"):
            getattr(mujoco, f"mj_{part}")(self._model, self._data)
        if self._renderer is None:
            return self._drawn(markers)
        self._renderer.update_scene(self._data, self._name or self._following())
        scene = self._renderer.scene
        for position, radius, colour in markers:
            mujoco.mjv_initGeom(
                scene.geoms[scene.ngeom],
                mujoco.mjtGeom.mjGEOM_SPHERE,
                np.full(3, radius),
                np.asarray(position, np.float64),
                np.eye(3).flatten(),
                np.array([*colour, 0.8], np.float32),
            )
            scene.ngeom += 1
        picture: np.ndarray = self._renderer.render()
        return picture

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
        self._data = self._renderer = None

    def _opened(self) -> Any:
        # MuJoCo refuses pictures that are larger than this buffer.
        self._model.vis.global_.offwidth = max(SIZE[1], self._model.vis.global_.offwidth)
        try:
            return self._mujoco.Renderer(self._model, *SIZE)
        except (self._mujoco.FatalError, ImportError, RuntimeError, AttributeError):
            return None

    def _following(self) -> Any:
        camera = self._mujoco.MjvCamera()
        camera.azimuth, camera.elevation = AZIMUTH, ELEVATION
        middle, reach = self._around()
        camera.distance, camera.lookat[:] = 4.0 * reach, middle
        return camera

    def _around(self) -> tuple[np.ndarray, float]:
        """Return the first moving body's position, and the m to the farthest moving part."""
        model = self._model
        middle = self._data.xpos[(model.body_jntnum > 0).argmax()].copy()
        distances = np.linalg.norm(self._data.geom_xpos - middle, axis=1) + model.geom_rbound
        solid = ~np.isin(model.geom_type, list(self._flat))
        # What is fixed stays behind when a robot walks away from it.
        moving = solid & (model.body_weldid[model.geom_bodyid] != 0)
        solid = moving if moving.any() else solid
        return middle, max(float(distances[solid].max(initial=0.0)), 0.1)

    def _drawn(self, markers: Sequence[Marker]) -> np.ndarray:
        model, data = self._model, self._data
        a, e = radians(AZIMUTH), radians(ELEVATION)
        right_axis = np.array([sin(a), -cos(a), 0.0])
        forward = np.array([cos(a) * cos(e), sin(a) * cos(e), sin(e)])
        plane = np.stack([right_axis, np.cross(right_axis, forward)])
        middle, reach = self._around()
        canvas = Canvas(1, *SIZE, extent=(2.5 * reach, 2.5 * reach), background=PAPER)
        parts = [(marker.position, np.zeros(3), marker.radius, marker.colour) for marker in markers]
        for i in range(model.ngeom):
            if model.geom_type[i] in self._flat:
                continue
            # The local axis along which the geom is longest; planes have no size.
            half = model.geom_aabb[i, 3:]
            axis = int(half.argmax())
            radius = float(np.delete(half, axis).mean())
            along = data.geom_xmat[i].reshape(3, 3)[:, axis] * max(float(half[axis]) - radius, 0.0)
            colour = BLUE if model.body_weldid[model.geom_bodyid[i]] else GREY
            parts.append((data.geom_xpos[i], along, radius, colour))
        # Far parts first, so that near ones cover them.
        for position, along, radius, colour in sorted(parts, key=lambda part: -forward @ part[0]):
            begin, end = (
                torch.tensor(plane @ (position + side * along - middle))[None].float()
                for side in (-1.0, 1.0)
            )
            canvas.segment(begin, end, radius, colour)
        return canvas.pixels()[0].numpy()
