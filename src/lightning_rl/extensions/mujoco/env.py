"""Make any MuJoCo model a batched task, by terms alone."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extend.envs import import_mujoco
from lightning_rl.extend.errors import check_range, closest, require
from lightning_rl.extend.spaces import named
from lightning_rl.extensions.managers import Event
from lightning_rl.extensions.managers.actions import Actions, ActionTerm, DeltaPosition, Position
from lightning_rl.extensions.managers.managed_env import ManagedEnv, TermSettings
from lightning_rl.extensions.managers.term import (
    Curriculum,
    Metric,
    Observation,
    Reward,
    Termination,
)
from lightning_rl.extensions.managers.view import EnvView
from lightning_rl.extensions.mujoco.model import (
    FIELDS,
    OWNERS,
    STATE,
    Layout,
    Physics,
    fields_in,
    read_spec,
)
from lightning_rl.extensions.mujoco.quantities import fields_of, nominal_of
from lightning_rl.extensions.mujoco.rendering import Camera, Marker
from lightning_rl.extensions.mujoco.threads import ThreadedPhysics
from lightning_rl.extensions.mujoco.warp import WarpPhysics

Backend = Literal["auto", "c", "warp"]
"""The simulator: MuJoCo's C library, MuJoCo Warp, or the choice by the device."""

_OTHER_CONTROL = (
    "none of position, velocity and force: its gain, bias, gear or dynamics differ from "
    "MuJoCo's <position>, <velocity> and <motor>. Use one of these, or leave out `actions`: the "
    "action is then its control."
)

LARGEST = 1e10
"""Largest number of a state that counts as simulated: MuJoCo's mjMAXVAL."""


class MujocoView(EnvView):
    """A view with named parts of a MuJoCo state; see `EnvView`.

    `env.state["qpos"]` also has joints without names.
    """

    def qpos(self, *joints: str) -> Tensor:
        """Return the positions of joints, [M, k]: 7 numbers of a free joint, 1 of a hinge."""
        return self._named("qpos", joints)

    def qvel(self, *joints: str) -> Tensor:
        """Return the velocities of joints, [M, k]: 6 numbers of a free joint, 1 of a hinge."""
        return self._named("qvel", joints)

    def ctrl(self, *actuators: str) -> Tensor:
        """Return the last controls of actuators, [M, k]."""
        return self._named("ctrl", actuators)

    def sensor(self, *sensors: str) -> Tensor:
        """Return the measurements of sensors, [M, k]."""
        return self._named("sensor", sensors)

    def xpos(self, *bodies: str) -> Tensor:
        """Return the positions of bodies in the world, in m: [M, 3] of one body."""
        return self._named("xpos", bodies)

    def xquat(self, *bodies: str) -> Tensor:
        """Return the rotations of bodies, unit quaternions with w first: [M, 4] of one body."""
        return self._named("xquat", bodies)

    def site_xpos(self, *sites: str) -> Tensor:
        """Return the positions of sites in the world, in m: [M, 3] of one site."""
        return self._named("site_xpos", sites)

    def nominal(self, name: str) -> Tensor | None:
        return nominal_of(name, self.env.parameters(), self.env.layout.servos)

    def number_names(self, name: str, size: int) -> list[str]:
        kind = name.partition("_")[0] if name in FIELDS else name
        parts: list[str] = self.env.layout.parts.get(OWNERS.get(kind, kind), [])
        return [part for part in parts for _ in range(size // len(parts))]

    def entries_for(self, name: str, value: Tensor) -> dict[str, Tensor]:
        env, state = self.env, self.state
        return fields_of(name, value, env.parameters(), state, env.layout.servos)

    def _named(self, view: str, names: Sequence[str]) -> Tensor:
        columns: Tensor = self.env.layout.columns(view, names, self.device)
        entry = view if view in ("qpos", "qvel", "ctrl") else "sensordata"
        part: Tensor = self.state[entry][:, columns]
        return part


def diverged(env: EnvView) -> Tensor:
    """Return whether the simulation of the step diverged, [M] bool; its state was then kept."""
    flags: Tensor = env.state["diverged"]
    return flags


def joint_positions(env: MujocoView, joints: list[str]) -> Tensor:
    """Return the positions of joints, [M, k]."""
    return env.qpos(*joints)


def joint_velocities(env: MujocoView, joints: list[str]) -> Tensor:
    """Return the velocities of joints, [M, k]."""
    return env.qvel(*joints)


def sensors(env: MujocoView, names: list[str]) -> Tensor:
    """Return the measurements of sensors, [M, k]."""
    return env.sensor(*names)


class MujocoEnv(ManagedEnv):
    """N worlds of a MuJoCo model, whose rewards, ends, observations and events are terms.

    The state has the entries `time`, `qpos`, `qvel`, `act`, `sensordata`, `ctrl`, `action` (the
    last one), `diverged` (bool), and `entries`; the others are float32. Terms read named parts by
    `MujocoView`. As after `mj_step`, sensors and frames describe the beginning of the last substep.
    An event may write state entries and fields of the model (`geom_friction`, `body_mass`, ...; see
    `FIELDS`), which then differ between worlds.

    Results of the backends differ by rounding. The C library steps in float64 between states of
    float32. A world that diverges keeps its last state, and `diverged` cuts its episode.

    Args:
        num_envs: N.
        model: path of an MJCF or URDF file, or the import path of a function that returns an
            `MjSpec`; in Python also the function or the `MjSpec`.
        substeps: simulation steps per env step.
        actions: action terms by name, each for its drives, named as the model's actuators. A
            `Position` is relative to the control of the keyframe. Default: the action is `ctrl`.
        keyframe: name of the keyframe at which episodes start. Default: the first, or the model's
            reference pose.
        entries: further state entries with their initial values, such as commands.
        rewards, terminations, metrics, observations, events, curriculum: see `ManagedEnv`. Default
            observation: `qpos`, `qvel` and the model's sensors.
        rewards_per_second: multiply the weights of rewards by the seconds of a step.
        max_episode_steps: time limit, in steps.
        backend: `auto` is `c` on a CPU and `warp` on a GPU.
        num_threads: threads of the C library.
        max_contacts: for `warp`: contacts per world, on average. Default: MuJoCo Warp's guess.
        max_constraints: for `warp`: constraint rows of any world. Default: MuJoCo Warp's guess.
        camera: name of the camera of pictures. Default: a free camera that follows the first moving
            body.
        device: device of the state.

    Attributes:
        layout: the compiled model and the columns of its parts.

    Raises:
        ConfigurationError: the model cannot be read or simulated; or an unknown name.
    """

    start_size, in_torch = 0, False
    view_class: ClassVar[type[EnvView]] = MujocoView
    default_terminations: ClassVar[Mapping[str, Termination]] = {
        "diverged": Termination(diverged, ends="truncated")
    }

    def __init__(
        self,
        num_envs: int,
        model: Any,
        substeps: int = 5,
        actions: dict[str, ActionTerm] | None = None,
        keyframe: str | None = None,
        entries: dict[str, list[float]] | None = None,
        rewards: dict[str, float | Reward | None] | None = None,
        terminations: dict[str, Termination | None] | None = None,
        metrics: dict[str, Metric | None] | None = None,
        observations: dict[str, dict[str, Observation]] | None = None,
        events: dict[str, Event | None] | None = None,
        curriculum: dict[str, Curriculum | None] | None = None,
        rewards_per_second: bool = False,
        max_episode_steps: int = 1000,
        backend: Backend = "auto",
        num_threads: int = 1,
        max_contacts: int | None = None,
        max_constraints: int | None = None,
        camera: str | None = None,
        device: str = "cpu",
    ) -> None:
        check_range("substeps", substeps, minimum=1)
        check_range("num_threads", num_threads, minimum=1)
        self.layout = Layout(read_spec(model))
        compiled = self.layout.model
        self.step_dt = substeps * float(compiled.opt.timestep)
        self.render_fps = 1.0 / self.step_dt
        name, on_gpu = type(self).__name__, torch.device(device).type != "cpu"
        backend = ("warp" if on_gpu else "c") if backend == "auto" else backend
        require(
            not (on_gpu and backend == "c"),
            f"backend: c simulates on the CPU, but the device is {device}: set backend: warp.",
        )
        self.physics: Physics = (
            ThreadedPhysics(self.layout, num_envs, substeps, num_threads)
            if backend == "c"
            else WarpPhysics(self.layout, num_envs, substeps, device, max_contacts, max_constraints)
        )
        self._camera = Camera(compiled, camera)
        self._first = self._start_of(keyframe, entries or {}, device)
        self._parameters = {
            field: torch.tensor(np.array(getattr(compiled, field)), dtype=torch.float32).to(device)
            for field in FIELDS
        }
        self.actions = None if actions is None else Actions(actions, self.layout.drives, name)
        if actions is not None:
            self._offset = self._check_actions(actions)
        terms = rewards, terminations, metrics, observations, events, curriculum
        super().__init__(
            num_envs,
            self._state_space(),
            self._control_space() if self.actions is None else self.actions.space,
            max_episode_steps,
            device,
            terms=TermSettings(*terms, rewards_per_second),
        )
        self.metadata = self._described()

    def parameters(self) -> Mapping[str, Tensor]:
        return self._parameters

    def initial_state(self, uniform: Tensor) -> TensorDict:
        rows = len(uniform)
        values = {name: value.repeat(rows, 1) for name, value in self._first.items()}
        values["action"] = uniform.new_zeros(rows, *(self.single_action_space.shape or ()))
        values["diverged"] = torch.zeros(rows, dtype=torch.bool, device=self.device)
        state = TensorDict(values, [rows])
        # With events, `draw_starts` computes the sensors after the last change.
        return state if self.events else self.with_derived_entries(state)

    def with_derived_entries(self, state: TensorDict) -> TensorDict:
        state["sensordata"] = self.physics.sense(state)
        return state

    def observe(self, state: TensorDict) -> Tensor:
        sensed = state["sensordata"][:, : self.layout.num_sensordata]
        return torch.cat((state["qpos"], state["qvel"], sensed), 1)

    def simulate(self, env: EnvView) -> TensorDict:
        state, action = env.state, env.action
        assert action is not None
        ctrl = self.control(env)
        moved = self.physics.step(state, ctrl)
        numbers = torch.cat([moved[name] for name in STATE[1:]], 1)
        invalid = ~(numbers.abs() < LARGEST).all(1)  # also true for NaN
        # Do not check for diverged worlds, which would synchronize with a GPU.
        values = {
            name: torch.where(invalid[:, None], state[name], value) for name, value in moved.items()
        }
        values |= {"ctrl": ctrl, "action": action, "diverged": invalid}
        # Without the memories of terms, whose names have a slash: `ManagedEnv` adds them.
        unchanged = {
            name: state[name] for name in state.keys() if name not in values and "/" not in name
        }
        return TensorDict(unchanged | values, [self.num_envs])

    def control(self, env: EnvView) -> Tensor:
        """Return the control [N, nu] of an action."""
        assert env.action is not None
        if self.actions is None:
            return env.action
        # Actuators without an action keep the control of the keyframe.
        ctrl = self._rest.repeat(self.num_envs, 1)
        qpos = env.state["qpos"]
        position = qpos[:, self._joints] if qpos.shape[1] else ctrl  # without joints: not read
        for drive in self.actions.targets(env, env.action, position):
            ctrl[:, drive.columns] = drive.target
        return ctrl + self._offset

    def markers(self, state: TensorDict) -> list[list[Marker]]:
        """Return the markers in pictures of states [M], M lists."""
        return [[] for _ in range(len(state))]

    def render(self, rows: Sequence[int]) -> np.ndarray:
        # Copy only the shown worlds from the device.
        state = self.state[list(rows)].cpu()
        pictures = []
        for i, markers in enumerate(self.markers(state)):
            fields = {name: state[name][i].numpy() for name in fields_in(state)}
            pictures.append(self._camera.picture(state["qpos"][i].numpy(), markers, fields))
        return np.stack(pictures)

    def close(self) -> None:
        self.physics.close()
        self._camera.close()

    def _start_of(
        self, keyframe: str | None, entries: dict[str, list[float]], device: str
    ) -> dict[str, Tensor]:
        model = self.layout.model
        names = [model.key(i).name for i in range(model.nkey)]
        require(
            keyframe is None or keyframe in names,
            f"The model has no keyframe '{keyframe}'; allowed: {', '.join(names) or 'none'}"
            f"{closest(keyframe or '', names)}.",
        )
        key = names.index(keyframe) if keyframe is not None else 0
        at_key = model.nkey > 0
        is_mocap = model.body_mocapid >= 0
        for part in ("pos", "quat") if at_key and is_mocap.any() else ():
            place = getattr(model, f"body_{part}")[is_mocap]
            require(
                np.allclose(getattr(model, f"key_m{part}")[key], place.flatten()),
                f"The keyframe '{names[key]}' moves mocap bodies (m{part}), which MujocoEnv leaves "
                f"at their place: put `{part}` on the body, or change body_{part} by an event.",
            )
        values: dict[str, Any] = {
            "time": [model.key_time[key] if at_key else 0.0],
            "qpos": model.key_qpos[key] if at_key else model.qpos0,
            "qvel": model.key_qvel[key] if at_key else np.zeros(model.nv),
            "act": model.key_act[key] if at_key else np.zeros(model.na),
            "ctrl": model.key_ctrl[key] if at_key else np.zeros(model.nu),
            "sensordata": np.zeros(model.nsensordata),
        }
        reserved = {*values, "action", "diverged", *FIELDS}
        # A slash marks memories of terms, which `simulate` does not pass on.
        for name in entries:
            require(
                name not in reserved and "/" not in name,
                f"entries: '{name}' is an entry already, or has a slash: choose another name.",
            )
        values |= entries
        return {
            name: torch.as_tensor(np.array(value), dtype=torch.float32).to(device)
            for name, value in values.items()
        }

    def _check_actions(self, actions: Mapping[str, ActionTerm]) -> Tensor:
        """Return the offset [nu] of the controls, and find the joints of the drives."""
        assert self.actions is not None
        model, kinds = self.layout.model, self.layout.kinds
        self._rest = self._first["ctrl"]
        offset = torch.zeros_like(self._rest)
        for name, term in actions.items():
            columns = self.actions.columns[name]
            for column in columns:
                require(
                    term.kind == kinds[column],
                    f"The action '{name}' is {type(term).__name__}, with a {term.kind} target, "
                    f"but the actuator '{self.layout.drives[column]}' takes "
                    + (f"a {kinds[column]}." if kinds[column] != "other" else _OTHER_CONTROL),
                )
                # Joint types 2 and 3, slide and hinge, have one position.
                joint = model.actuator_trnid[column, 0]
                moves = model.actuator_trntype[column] == 0 and model.jnt_type[joint] >= 2
                require(
                    not isinstance(term, DeltaPosition) or bool(moves),
                    f"The action '{name}' is relative to a joint's position, but the actuator "
                    f"'{self.layout.drives[column]}' moves no joint with one position.",
                )
            # Not isinstance: velocities and forces are subclasses, and have no offset.
            if type(term) is Position:
                offset[columns] = self._rest[columns]
        # The targets of other actuators are bodies, sites or tendons. Only `DeltaPosition` reads
        # these positions, and it refuses such drives.
        of_joints = model.actuator_trntype == 0
        joints = np.zeros(model.nu, np.int64)
        joints[of_joints] = model.jnt_qposadr[model.actuator_trnid[of_joints, 0]]
        self._joints = torch.as_tensor(joints, device=offset.device)
        return offset

    def _control_space(self) -> gymnasium.Space[Any]:
        model = self.layout.model
        # Without a limit, the range of an actuator has no meaning (0 to 0).
        limited = model.actuator_ctrllimited.astype(bool)[:, None]
        bounds = np.where(limited, model.actuator_ctrlrange, [-np.inf, np.inf]).astype(np.float32)
        box = gymnasium.spaces.Box(bounds[:, 0], bounds[:, 1], dtype=np.float32)
        return named(box, self.layout.drives)

    def _state_space(self) -> gymnasium.spaces.Box:
        size = self.layout.model.nq + self.layout.model.nv + self.layout.num_sensordata
        return gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)

    def _described(self) -> dict[str, Any]:
        model = self.layout.model
        affine = int(import_mujoco().mjtBias.mjBIAS_AFFINE)  # others do not read it as gains
        bias = np.where(model.actuator_biastype[:, None] == affine, model.actuator_biasprm, 0.0)
        names, order = self.layout.drives, list(range(model.nu))
        if self.actions is not None:  # the order of the action; other drives follow
            names = self.actions.names
            driven = [column for columns in self.actions.columns.values() for column in columns]
            order = [*driven, *(i for i in order if i not in driven)] if names else order
        joints = {
            "joint_names": np.array(self.layout.joints),
            # 0.0 - x, because -x would write -0.0 into files.
            "joint_stiffness": 0.0 - bias[:, 1],
            "joint_damping": 0.0 - bias[:, 2],
            "default_joint_pos": self._first["ctrl"].cpu().numpy(),
        }
        description = {name: values[order].tolist() for name, values in joints.items()}
        description |= {"render_fps": self.render_fps, "control_period": self.step_dt}
        if names:
            description["action_names"] = list(names)
        if names and self.actions is not None:
            # Drives without an action have the scale 1.
            scale = torch.ones(model.nu)
            for name, term in self.actions.terms.items():
                scale[self.actions.columns[name]] = torch.as_tensor(term.scale)
            description["action_scale"] = scale[order].tolist()
        return description
