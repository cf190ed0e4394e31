"""Read a MuJoCo model, name the parts of its state, and define the interface of a backend."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.envs import import_mujoco
from lightning_rl.extend.errors import closest, is_import_path, reason_of, require
from lightning_rl.extensions.managers.term import function_of
from lightning_rl.extensions.mujoco.files import check_files

STATE = ("time", "qpos", "qvel", "act")
"""State entries that a simulation step reads and writes, each [N, size] float32."""

RECOMPUTED = (
    *("body_mass", "body_inertia", "body_ipos", "body_pos", "body_quat"),
    *("dof_armature", "actuator_gear"),
)
"""Fields from which MuJoCo computes others (`mj_setConst`)."""

FIELDS = (
    *RECOMPUTED,
    *("geom_friction", "geom_solref", "geom_solimp", "geom_margin"),
    *("pair_friction", "site_pos", "site_quat"),
    *("jnt_range", "jnt_stiffness", "qpos_spring", "dof_damping", "dof_frictionloss"),
    *("actuator_gainprm", "actuator_biasprm", "actuator_forcerange", "actuator_ctrlrange"),
)
"""Fields of the model, as MuJoCo names them, that may differ between worlds."""

MOVING = ("body_ipos", "site_pos", "site_quat")
"""Fields that move frames, which the compiler may have found equal; see `Layout.model_for`."""

FRAMES = {
    "xpos": ("mjOBJ_XBODY", "mjSENS_FRAMEPOS"),
    "xquat": ("mjOBJ_XBODY", "mjSENS_FRAMEQUAT"),
    "site_xpos": ("mjOBJ_SITE", "mjSENS_FRAMEPOS"),
}
"""Views of bodies and sites: kind of the object, and the sensor that measures it.

MuJoCo's mjOBJ_BODY would be the frame of the inertia, at the centre of mass.
"""

APART = 1e-3
"""m: shift that separates equal frames during a compilation."""

SHORTEST_STEP, LARGEST_ARENA = 1e-6, 2**32
"""Smallest timestep of a model in s, and most bytes of its memory for contacts."""

SIZES = {0: 7, 1: 4, 2: 1, 3: 1}
"""Numbers of `qpos` by joint type: free, ball, slide, hinge."""

OWNERS = {"mass": "body", "stiffness": "ctrl", "damping": "ctrl", "actuator": "ctrl", "dof": "qvel"}
"""Kinds of the parts of quantities and fields, by the first word of their names."""


def read_spec(model: Any) -> Any:
    """Return a copy of the `mujoco.MjSpec` of a model.

    Args:
        model: a path, an `MjSpec`, or a function that returns one, or its import path.

    Raises:
        ConfigurationError: there is no such file or function, or MuJoCo cannot read the file.
    """
    mujoco = import_mujoco()
    if isinstance(model, str) and is_import_path(model):
        model = function_of(model, "model")
    if callable(model):
        model = model()
    if isinstance(model, mujoco.MjSpec):
        return model.copy()
    require(
        isinstance(model, str | Path),
        f"model must be the path of an MJCF file, an MjSpec or a function that returns one, got "
        f"{type(model).__name__}.",
    )
    require(os.path.isfile(model), f"model: there is no file {model}.")
    check_files(Path(model))
    try:
        return mujoco.MjSpec.from_file(str(model))
    except Exception as error:  # MuJoCo raises many types, and RuntimeError for lack of memory
        raise ConfigurationError(f"MuJoCo cannot read {model}: {reason_of(error)}") from error


class Layout:
    """A compiled model, and the columns of its named joints, actuators, sensors and frames.

    Positions of bodies and sites are measured by frame sensors, which this class adds at the end of
    the model's sensors.

    Args:
        spec: the model; changed.

    Attributes:
        model: the compiled `mujoco.MjModel`.
        drives: names of the actuators; an actuator without a name gets its joint's name.
        joints: names of the joints that the actuators move; for actuators of other kinds, their own
            names.
        kinds: kind of each actuator's control: `position`, `velocity`, `force` or `other`.
        servos: actuators whose gain belongs to their stiffness (1) or damping (2).
        num_sensordata: numbers of the model's own sensors.
        parts: for each kind of numbers, the name of the part that has each of them.

    Raises:
        ConfigurationError: the model does not compile, or its state has parts that a backend does
            not support: delays, plugins.
    """

    def __init__(self, spec: Any) -> None:
        mujoco = import_mujoco()
        num_sensors = len(spec.sensors)
        frames = [
            (view, getattr(mujoco.mjtObj, kind), getattr(mujoco.mjtSensor, sensor), part.name)
            for view, (kind, sensor) in FRAMES.items()
            for part in (spec.sites if kind == "mjOBJ_SITE" else spec.bodies)
            if part.name and part.name != "world"
        ]
        # At the end, so that the model's own sensors keep their columns.
        for _, kind, sensor, name in frames:
            spec.add_sensor(type=sensor, objtype=kind, objname=name)
        try:
            self.model = model = spec.compile()
        except Exception as error:  # see `read_spec`
            raise ConfigurationError(f"MuJoCo refuses the model: {reason_of(error)}") from error
        _check_bounds(model)
        # The backends restore only these parts: any other would differ after a resume.
        size = int(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_FULLPHYSICS))
        require(
            size == 1 + model.nq + model.nv + model.na,
            f"The model's state has {size} numbers, but MujocoEnv supports only time, qpos, qvel "
            f"and act ({1 + model.nq + model.nv + model.na}): remove delays, plugins and plastic "
            "flexes.",
        )
        self._spec, self._general = spec, None
        self.kinds = [_kind(mujoco, model, i) for i in range(model.nu)]
        is_servo = model.actuator_gaintype == int(mujoco.mjtGain.mjGAIN_FIXED)
        is_servo &= model.actuator_biastype == int(mujoco.mjtBias.mjBIAS_AFFINE)
        stiff, damped = (model.actuator_biasprm[:, column] != 0 for column in (1, 2))
        is_servo &= model.actuator_gainprm[:, 0] != 0
        # A servo's bias is (0, -stiffness, -damping).
        masks = {1: is_servo & stiff, 2: is_servo & ~stiff & damped}
        self.servos = {column: mask.nonzero()[0].tolist() for column, mask in masks.items()}
        self.num_sensordata = [*model.sensor_adr.tolist(), model.nsensordata][num_sensors]
        of_joints = model.actuator_trntype == int(mujoco.mjtTrn.mjTRN_JOINT)
        self.joints = [
            model.joint(model.actuator_trnid[i, 0]).name if of_joints[i] else model.actuator(i).name
            for i in range(model.nu)
        ]
        # Actions and settings go by these names, so that an order cannot be mistaken.
        self.drives = [model.actuator(i).name or self.joints[i] for i in range(model.nu)]
        measured = [("sensor", model.sensor(i).name) for i in range(num_sensors)]
        measured += [(view, name) for view, _, _, name in frames]
        self.parts = {"ctrl": self.drives, **_parts(model, measured)}
        self._columns: dict[tuple[Any, ...], Tensor] = {}

    def model_for(self, fields: Iterable[str]) -> Any:
        """Return the `mujoco.MjModel` of worlds that differ in `fields`.

        MuJoCo copies frames that its compiler found equal, such as a site's and its body's, and
        then ignores the position of the site. The model has no such
        shortcuts if `fields` move frames.
        """
        if not set(MOVING) & set(fields):
            return self.model
        if self._general is None:
            self._general = _without_shortcuts(self._spec.copy(), self.model)
        return self._general

    def columns(
        self, view: str, names: Sequence[str], device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return the columns [k] int64 of named parts in their tensor, which is on `device`.

        Raises:
            ConfigurationError: a name is unknown.
        """
        key = view, tuple(names), torch.device(device)
        # Cached, because terms ask for the same columns at every step.
        if key not in self._columns:
            parts = self.parts[view]
            allowed = dict.fromkeys(filter(None, parts))
            for name in names:
                require(
                    name in allowed,
                    f"The model has no {view} of '{name}'; allowed: {', '.join(allowed)}"
                    f"{closest(name, allowed)}.",
                )
            columns = [i for name in names for i, part in enumerate(parts) if part == name]
            self._columns[key] = torch.tensor(columns, device=device)
        return self._columns[key]


def _parts(model: Any, measured: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the part of each number, by kind; `measured` are kind and name of each sensor."""
    counts = {"jnt": model.njnt, "body": model.nbody, "geom": model.ngeom, "site": model.nsite}
    parts = {k: [getattr(model, k)(i).name for i in range(n)] for k, n in counts.items()}
    parts["qvel"] = [parts["jnt"][i] for i in model.dof_jntid]
    sizes = [SIZES[int(joint_type)] for joint_type in model.jnt_type]
    parts["qpos"] = np.repeat(parts["jnt"], sizes).tolist()
    for view in ("sensor", *FRAMES):
        names = [name if kind == view else "" for kind, name in measured]
        parts[view] = np.repeat(names, model.sensor_dim).tolist()
    return parts


def _kind(mujoco: Any, model: Any, i: int) -> str:
    """Return what the control of an actuator sets.

    `position` and `velocity` are for MuJoCo's servos of these names, which reach their control
    itself: other gains, gears and dynamics scale, integrate or delay it.
    """
    gain, bias = model.actuator_gainprm[i, 0], model.actuator_biasprm[i, :3]
    affine = model.actuator_biastype[i] == int(mujoco.mjtBias.mjBIAS_AFFINE)
    unbiased = model.actuator_biastype[i] == int(mujoco.mjtBias.mjBIAS_NONE)
    dynamics = mujoco.mjtDyn(model.actuator_dyntype[i]).name.removeprefix("mjDYN_")
    if model.actuator_gaintype[i] != int(mujoco.mjtGain.mjGAIN_FIXED):
        return "other"
    # MuJoCo's <motor>: the control is the force, perhaps filtered.
    if unbiased or (affine and not bias.any()):
        return "force" if dynamics in ("NONE", "FILTER", "FILTEREXACT") else "other"
    of_joint = model.actuator_trntype[i] == int(mujoco.mjtTrn.mjTRN_JOINT)
    servo = affine and bias[0] == 0.0 and not (of_joint and model.actuator_gear[i, 0] != 1.0)
    if servo and dynamics in ("NONE", "FILTEREXACT") and gain == -bias[1] > 0.0:
        return "position"
    if servo and dynamics == "NONE" and bias[1] == 0.0 and gain == -bias[2] > 0.0:
        return "velocity"
    return "other"


def _without_shortcuts(spec: Any, nominal: Any) -> Any:
    """Return the model of a spec for frames that may move, with the numbers of `nominal`."""
    mujoco = import_mujoco()
    spec.compiler.inertiafromgeom = mujoco.mjtInertiaFromGeom.mjINERTIAFROMGEOM_FALSE
    for body in spec.bodies[1:]:
        body.explicitinertial, body.fullinertia = True, [np.nan] * 6
        body.mass, body.inertia = nominal.body_mass[body.id], nominal.body_inertia[body.id]
        body.ipos, body.iquat = nominal.body_ipos[body.id] + APART, nominal.body_iquat[body.id]
    model = spec.compile()
    model.site_sameframe[:] = 0
    # The compilation needed shifted frames; now write the exact numbers back.
    for name in dir(nominal):
        array = getattr(nominal, name)
        if isinstance(array, np.ndarray) and array.dtype.kind == "f":
            getattr(model, name)[...] = array
    return model


def _check_bounds(model: Any) -> None:
    step = float(model.opt.timestep)
    require(
        SHORTEST_STEP <= step < math.inf,  # never true for nan
        f"The model's timestep is {step}: it must be a number of at least {SHORTEST_STEP} s.",
    )
    require(
        model.narena <= LARGEST_ARENA,
        f"The model's size has memory for {model.narena:,} bytes; at most {LARGEST_ARENA:,}.",
    )


def fields_in(state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the fields that a state holds for each world."""
    return tuple(name for name in FIELDS if name in state.keys())


def write_fields(model: Any, data: Any, fields: Mapping[str, np.ndarray]) -> None:
    """Write the fields of one world into its model, and what MuJoCo computes from them."""
    for name, value in fields.items():
        array = getattr(model, name)
        array[:] = value.reshape(array.shape)
    if any(name in RECOMPUTED for name in fields):
        import_mujoco().mj_setConst(model, data)


class Physics(ABC):
    """N worlds of one model; a step is a function of state, fields and control."""

    @abstractmethod
    def step(self, state: Mapping[str, Tensor], ctrl: Tensor) -> dict[str, Tensor]:
        """Return the entries `STATE` and `sensordata` of all N worlds after the substeps.

        Args:
            state: entries `STATE`, and fields of the model [N, ...] that differ between worlds.
            ctrl: [N, nu], held during the substeps.

        Raises:
            EnvFaultError: a buffer of the backend overflowed.
        """

    @abstractmethod
    def sense(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return `sensordata` [M, ...] of a state [M] under its control `ctrl`, M <= N."""

    def close(self) -> None:  # noqa: B027  # a backend without threads holds nothing
        """Free threads. May be called more than once."""
