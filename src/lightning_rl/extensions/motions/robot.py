"""A legged robot that learns to move as a recorded motion does."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extend.envs import Transition, import_mujoco
from lightning_rl.extend.errors import check_range
from lightning_rl.extensions.managers import Event
from lightning_rl.extensions.managers.term import Metric, Observation, Reward, Termination
from lightning_rl.extensions.managers.view import EnvView
from lightning_rl.extensions.motions.motion import (
    count_failures,
    read_motion,
    start_frames,
    start_probabilities,
    tracking_errors,
)
from lightning_rl.extensions.mujoco.env import MujocoView, joint_velocities
from lightning_rl.extensions.mujoco.quadruped import (
    ROOT,
    action_change,
    gravity,
    last_action,
    torso_velocity,
    turn_rate,
)
from lightning_rl.extensions.mujoco.rotations import inverse, product, rotate
from lightning_rl.extensions.transfer.layout import read_layout
from lightning_rl.extensions.transfer.legged import LeggedRobot, joint_offsets
from lightning_rl.kwargs import MotionRobotKwargs, Unpack

Starts = Literal["adaptive", "uniform", "first"]
"""The frame at which an episode starts."""


def imitation(env: EnvView, name: str, scale: float) -> Tensor:
    """Return exp(-scale * error), [M] in (0, 1], for a squared error of `MotionRobot.measure`.

    Source: Peng et al. 2018, "DeepMimic", equations 6 to 9.
    """
    return (-scale * env.measurements[name]).exp()


def deviated(env: EnvView, distance: float = 3.0, angle: float = 0.8) -> Tensor:
    """Return whether the base is far from the motion's, in m or in rad, [M] bool."""
    errors = env.measurements
    return (errors["root"] > distance**2) | (errors["rotation"] > angle**2)


def completed(env: EnvView) -> Tensor:
    """Return whether the motion has ended, [M] bool."""
    flags: Tensor = env.state["frame"] >= len(env.env.motion) - 1
    return flags


def phase(env: EnvView) -> Tensor:
    """Return the part of the motion that has passed, [M] in [0, 1]."""
    part: Tensor = env.state["frame"] / (len(env.env.motion) - 1)
    return part


def joints_ahead(env: MujocoView, frames: list[int]) -> Tensor:
    """Return the joints of coming frames relative to the robot's joints, [M, J * frames] rad."""
    position, motion = env.qpos(*env.env.joints), env.env.motion
    return torch.cat([motion.joints[_coming(env, offset)] - position for offset in frames], 1)


def base_ahead(env: MujocoView, frames: list[int]) -> Tensor:
    """Return the base of coming frames, seen from the base, [M, 7 * frames].

    The position in m, and a quaternion whose w is not below 0.
    """
    root, motion = env.qpos(ROOT), env.env.motion
    back = inverse(root[:, 3:])
    parts = []
    for offset in frames:
        frame = _coming(env, offset)
        turn = product(back, motion.rotation[frame])
        turn = torch.where(turn[:, :1] < 0, -turn, turn)
        parts += [rotate(back, motion.root[frame] - root[:, :3]), turn]
    return torch.cat(parts, 1)


def robot_style(env: MujocoView) -> Tensor:
    """Return the state that a discriminator sees, [M, 2 J + 10]; see `style_of`."""
    joints = env.qpos(*env.env.joints), env.qvel(*env.env.joints)
    return style_of(*joints, env.qpos(ROOT), env.qvel(ROOT))


def style_of_motion(env: EnvView) -> Tensor:
    """Return two consecutive states of the motion at a random frame, [M, 2 (2 J + 10)]."""
    states, count = env.env.motion_style, len(env.env.motion)
    frame = (env.uniform(1)[:, 0] * (count - 1)).long().clamp(max=count - 2)
    return torch.cat((states[frame], states[frame + 1]), 1)


def style_of(joints: Tensor, joint_velocities: Tensor, base: Tensor, velocity: Tensor) -> Tensor:
    """Return joints [M, J], their velocities, height, and gravity and velocities seen by the base.

    Args:
        joints: [M, J] rad.
        joint_velocities: [M, J] rad/s.
        base: [M, 7], position and quaternion.
        velocity: [M, 6], linear in the world and angular in the frame of the base, as MuJoCo's.
    """
    back = inverse(base[:, 3:])
    down = torch.tensor([0.0, 0.0, -1.0], device=base.device).expand(len(base), 3)
    parts = (rotate(back, down), rotate(back, velocity[:, :3]), velocity[:, 3:])
    return torch.cat((joints, joint_velocities, base[:, 2:3], *parts), 1)


def start_in_motion(env: EnvView, starts: Starts, uniform_share: float) -> dict[str, Tensor]:
    """Place the robot in a frame of the motion, with the motion's velocities."""
    motion, failures = env.env.motion, env.state["failures"]
    share = 1.0 if starts == "uniform" else uniform_share
    frame = start_frames(start_probabilities(failures, share), env.uniform(2), len(motion))
    frame = torch.zeros_like(frame) if starts == "first" else frame
    qpos, qvel = env.env.pose_at(frame)
    return {"frame": frame, "qpos": qpos, "qvel": qvel}


def _coming(env: EnvView, offset: int) -> Tensor:
    frame: Tensor = (env.state["frame"] + offset).clamp(max=len(env.env.motion) - 1)
    return frame


class MotionRobot(LeggedRobot):
    """Track a reference motion: any legged robot of MuJoCo, with the gains of a layout.

    An episode starts in a frame of the motion and ends with the motion, at the time limit, or as a
    failure when the robot has fallen or its base is 3 m or .8 rad from the motion's (`deviated`).
    The control of a joint is the motion's next position plus action_scale * action; see `residual`.

    `starts`: `adaptive` starts more often where the env failed (`start_probabilities`; each env
    counts its own failures, so that episodes do not depend on other envs), `uniform` anywhere,
    `first` in the first frame, for evaluations.

    Observation: gravity, turn rate and velocity seen by the base, offsets and velocities of the
    joints, the last action, the phase, and the motion's joints and base in `ahead` frames. Rewards:
    exp(-k error) of `joints` (k 2, weight .65), `joint_velocities` (.1, .1), `bodies` seen from the
    base (40, .15), `base` (10, .1), `heading` (5, .1); `action_change`, -.005. Metrics:
    `joint_error` (mean, rad), `base_error` (m). Reaching the end of the motion is a success.

    Args:
        num_envs: N.
        model: see `LeggedRobot`.
        layout: see `LeggedRobot`; its `observation` is not read.
        motion: npz file; see `read_motion`.
        joint_names: names of the file's joints in its order, if it has none.
        starts: frame at which an episode starts.
        uniform_share: share of adaptive starts anywhere.
        parts: parts of the motion in which failures are counted.
        bodies: bodies of the model whose positions are compared. Default: those without children.
        ahead: frames of the observation.
        action_clip: largest action.
        residual: add the action to the motion's joints, otherwise to the default positions.
        style: observe also `style` and `motion`, the groups of `StylePPO`.
        observations: groups next to `policy`, which has the terms above; see `ManagedEnv`.
        events: see `ManagedEnv`; added to `motion`, which starts an episode in the motion.
        kwargs: see `LeggedRobot`.

    Attributes:
        motion: the motion at the control period.
        motion_style: [F, 2 J + 10], what a discriminator sees of each frame.

    Raises:
        ConfigurationError: see `read_motion` and `LeggedRobot`, or a number is out of range.
    """

    default_rewards: ClassVar[Mapping[str, Reward]] = {
        "joints": Reward(imitation, {"name": "joints", "scale": 2.0}, weight=0.65),
        "joint_velocities": Reward(
            imitation, {"name": "joint_velocities", "scale": 0.1}, weight=0.1
        ),
        "bodies": Reward(imitation, {"name": "bodies", "scale": 40.0}, weight=0.15),
        "base": Reward(imitation, {"name": "root", "scale": 10.0}, weight=0.1),
        "heading": Reward(imitation, {"name": "rotation", "scale": 5.0}, weight=0.1),
        "action_change": Reward(action_change, weight=-0.005),
    }
    default_metrics: ClassVar[Mapping[str, Metric]] = {
        "joint_error": Metric("measurement", {"name": "joint_error"}),
        "base_error": Metric("measurement", {"name": "base_error"}),
    }
    default_terminations: ClassVar[Mapping[str, Termination]] = {
        **LeggedRobot.default_terminations,
        "deviated": Termination(deviated, ends="fail"),
        "ended": Termination(completed, ends="truncated"),
        "completed": Termination(completed, ends="nothing"),
    }
    default_events: ClassVar[Mapping[str, Event]] = {}

    def __init__(
        self,
        num_envs: int,
        model: Any,
        layout: str,
        motion: str,
        joint_names: Sequence[str] | None = None,
        starts: Starts = "adaptive",
        uniform_share: float = 0.1,
        parts: int = 10,
        bodies: Sequence[str] | None = None,
        ahead: Sequence[int] = (1, 5),
        action_clip: float = 3.0,
        residual: bool = True,
        style: bool = False,
        observations: dict[str, dict[str, Observation]] | None = None,
        events: dict[str, Event | None] | None = None,
        **kwargs: Unpack[MotionRobotKwargs],
    ) -> None:
        check_range("uniform_share", uniform_share, minimum=0, maximum=1)
        check_range("parts", parts, minimum=1)
        described = read_layout(layout)
        self.joints, self.parts, self.residual = described.joints, parts, residual
        names = None if joint_names is None else list(joint_names)
        self.motion = read_motion(motion, self.joints, described.control_period, names)
        self._bodies, self._at_rest = bodies, torch.tensor([*described.default_position.values()])
        frames = {"frames": list(ahead)}
        for frame in ahead:
            check_range("ahead", frame, minimum=0, maximum=len(self.motion) - 1)
        positions = {"positions": described.default_position}
        observation = {
            "gravity": Observation(gravity),
            "turn_rate": Observation(turn_rate, scale=0.25),
            "velocity": Observation(torso_velocity),
            "joint_offsets": Observation(joint_offsets, positions),
            "joint_speeds": Observation(joint_velocities, {"joints": self.joints}, scale=0.05),
            "action": Observation(last_action),
            "phase": Observation(phase),
            "joints_ahead": Observation(joints_ahead, frames),
            "base_ahead": Observation(base_ahead, frames),
        }
        groups = {"policy": observation}
        if style:
            groups["style"] = {"state": Observation(robot_style)}
            groups["motion"] = {"step": Observation(style_of_motion)}
        start = {"starts": starts, "uniform_share": uniform_share}
        in_motion = Event(start_in_motion, start, mode="reset")
        super().__init__(
            num_envs,
            model,
            layout,
            observations={**groups, **(observations or {})},
            action_clip=action_clip,
            events={"motion": in_motion, **(events or {})},
            **kwargs,
        )
        self.persistent_state = (*self.persistent_state, "failures")

    def make_constants(self) -> None:
        self.motion = self.motion.to(self.device)
        self._at_rest = self._at_rest.to(self.device)
        model, mujoco = self.layout.model, import_mujoco()
        parents = {int(parent) for parent in model.body_parentid}
        leaves = [model.body(i).name for i in range(1, model.nbody) if i not in parents]
        self.bodies = leaves if self._bodies is None else list(self._bodies)
        self._base = model.body(int(model.joint(ROOT).bodyid[0])).name
        # The bodies of the motion by the model's kinematics, so that files need none.
        data, rows = mujoco.MjData(model), []
        self.layout.columns("xpos", self.bodies)  # refuses unknown names
        poses, _ = self.pose_at(torch.arange(len(self.motion), device=self.device))
        for pose in poses.cpu().double().numpy():
            data.qpos[:] = pose
            mujoco.mj_kinematics(model, data)
            rows.append([data.body(name).xpos.copy() for name in self.bodies])
        places = torch.tensor(np.array(rows), dtype=torch.float32, device=self.device)
        back = inverse(self.motion.rotation)[:, None]
        self._places = rotate(back, places - self.motion.root[:, None])
        joints = self.motion.joints, self.motion.joint_velocities
        self.motion_style = style_of(*joints, self.motion.base, self.motion.base_velocity)

    def pose_at(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions [M, nq] and velocities [M, nv] of the model at frames [M]."""
        motion = self.motion
        qpos = self._first["qpos"].repeat(len(frame), 1)
        qvel = self._first["qvel"].repeat(len(frame), 1)
        columns = self.layout.columns
        for joints, positions, velocities in (
            ((ROOT,), motion.base, motion.base_velocity),
            (self.joints, motion.joints, motion.joint_velocities),
        ):
            qpos[:, columns("qpos", joints, self.device)] = positions[frame]
            qvel[:, columns("qvel", joints, self.device)] = velocities[frame]
        return qpos, qvel

    def initial_state(self, uniform: Tensor) -> TensorDict:
        state = super().initial_state(uniform)
        state["frame"] = torch.zeros(len(uniform), dtype=torch.int64, device=self.device)
        state["failures"] = torch.zeros(len(uniform), self.parts, device=self.device)
        return state

    def control(self, env: EnvView) -> Tensor:
        ctrl = super().control(env)
        return ctrl + self.motion.joints[_coming(env, 1)] - self._at_rest if self.residual else ctrl

    def simulate(self, env: EnvView) -> TensorDict:
        moved = super().simulate(env)
        moved["frame"] = _coming(env, 1)
        return moved

    def transition(self, state: TensorDict, action: Any) -> Transition:
        moved, reward, terminated, info = super().transition(state, action)
        fail = info["fail"] if "fail" in info else torch.zeros_like(terminated)
        frames = len(self.motion)
        moved["failures"] = count_failures(state["failures"], moved["frame"], fail, frames)
        return moved, reward, terminated, info

    def measure(self, env: EnvView) -> dict[str, Tensor]:
        assert isinstance(env, MujocoView)
        frame = env.state["frame"]
        velocities = env.qvel(*self.joints)
        base = env.qpos(ROOT)
        errors = tracking_errors(self.motion, frame, env.qpos(*self.joints), velocities, base)
        # Frames are measured at the beginning of the last substep: compare with the base of then.
        places = env.xpos(*self.bodies).unflatten(1, (-1, 3)) - env.xpos(self._base)[:, None]
        places = rotate(inverse(env.xquat(self._base))[:, None], places)
        errors["bodies"] = (places - self._places[frame]).square().sum((1, 2))
        errors["base_error"] = errors["root"].sqrt()
        return errors
