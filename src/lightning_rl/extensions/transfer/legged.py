"""A legged robot from an MJCF file, driven as the layout of a policy says."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extend.envs import import_mujoco
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extensions.managers import Event
from lightning_rl.extensions.managers.actions import Position
from lightning_rl.extensions.managers.term import Observation, Reward, Termination
from lightning_rl.extensions.managers.view import EnvView
from lightning_rl.extensions.mujoco import quadruped
from lightning_rl.extensions.mujoco.env import MujocoEnv, MujocoView, joint_velocities
from lightning_rl.extensions.mujoco.model import read_spec
from lightning_rl.extensions.transfer.layout import PolicyLayout, read_layout
from lightning_rl.kwargs import LeggedRobotKwargs, Unpack

LYING = 0.5
"""Part of the standing height below which a robot has fallen."""

ON_ITS_SIDE = -0.3
"""z of gravity's direction in the frame of the base, above which a robot has fallen."""


def commanded(env: EnvView, columns: list[int]) -> Tensor:
    """Return parts of the command, [M, k]: m/s forwards, m/s to the left, rad/s to the left."""
    value: Tensor = env.state["command"][:, columns]
    return value


def joint_offsets(env: MujocoView, positions: dict[str, float]) -> Tensor:
    """Return the positions of joints relative to `positions`, [M, A] rad."""
    return env.qpos(*positions) - torch.tensor([*positions.values()], device=env.device)


def clock(
    env: EnvView, phases: list[float], period: float, function: Literal["sin", "cos"]
) -> Tensor:
    """Return sine or cosine of clocks, [M, P], that turn once per `period` seconds."""
    angle: Tensor = env.state["time"] * (2.0 * math.pi / period) + torch.tensor(
        phases, device=env.device
    )
    return angle.sin() if function == "sin" else angle.cos()


def fallen(env: MujocoView) -> Tensor:
    """Return whether the base is low or on its side, [M] bool."""
    height: float = env.env.standing_height
    return (quadruped.torso_height(env) < LYING * height) | (
        quadruped.gravity(env)[:, 2] > ON_ITS_SIDE
    )


class LeggedRobot(MujocoEnv):
    """Walk with commanded velocities: any legged robot of MuJoCo, with the gains of a layout.

    Each joint of the layout gets a position servo with the layout's gains, instead of the model's
    actuators, and their limits of force: `forcerange`, and for motors `ctrlrange`. The action is in
    the order of the layout's joints: position = default_position + action_scale * action. A model
    without a floor or light gets one.

    Observation: the layout's terms without their scales, of `base_ang_vel` (rad/s) and
    `base_lin_vel` (m/s) in the frame of the base, `projected_gravity`, `command_lin_vel`,
    `command_ang_vel`, `dof_pos` (relative to `default_position`), `dof_vel`, `actions` (the last
    one), `sin_phase` and `cos_phase`; `OnnxPolicy` scales them.

    Rewards: `velocity` and `yaw`, exp(-error^2 / 0.25), weights 1 and 0.5;
    `action_change`, weight -0.005. Metrics: `velocity_error` (m/s), `yaw_error` (rad/s).
    A fallen robot is `terminated`. Event: `command`, drawn at the start and every 10 s.

    Args:
        num_envs: N.
        model: see `MujocoEnv`; its first joint is free.
        layout: YAML file of a `PolicyLayout`.
        timestep: seconds per simulation step; divides the control period.
        integrator: of MuJoCo. `implicitfast` takes the servos' damping into account; `euler` needs
            steps of 1 ms for light joints.
        action_clip: largest action.
        delay: control steps from an action to its effect.
        observations: groups next to `policy`, which has the layout's terms; see `ManagedEnv`.
        max_episode_steps: time limit.
        kwargs: see `MujocoEnv`.

    Raises:
        ConfigurationError: the model has no free joint or misses a joint of the layout, the control
            period is no multiple of the time step, or a term is unknown.
    """

    default_rewards: ClassVar[Mapping[str, Reward]] = {
        "velocity": Reward(quadruped.tracking, {"name": "velocity_error"}, weight=1.0),
        "yaw": Reward(quadruped.tracking, {"name": "yaw_error"}, weight=0.5),
        "action_change": Reward(quadruped.action_change, weight=-0.005),
    }
    default_metrics = quadruped.Quadruped.default_metrics
    default_terminations: ClassVar[Mapping[str, Termination]] = {
        **MujocoEnv.default_terminations,
        "fallen": Termination(fallen, ends="fail"),
    }
    default_events: ClassVar[Mapping[str, Event]] = {
        "command": Event(
            quadruped.random_command, mode="interval", every_s=(10.0, 10.0), at_reset=True
        ),
    }

    def __init__(
        self,
        num_envs: int,
        model: Any,
        layout: str,
        timestep: float = 0.005,
        integrator: Literal["implicitfast", "euler"] = "implicitfast",
        action_clip: float = 10.0,
        delay: int = 0,
        observations: dict[str, dict[str, Observation]] | None = None,
        max_episode_steps: int = 1000,
        **kwargs: Unpack[LeggedRobotKwargs],
    ) -> None:
        described = read_layout(layout)
        check_range("timestep", timestep, above=0)
        check_range("delay", delay, minimum=0)
        substeps = round(described.control_period / timestep)
        require(
            math.isclose(substeps * timestep, described.control_period, rel_tol=1e-6),
            f"timestep {timestep} does not divide the control period {described.control_period} "
            f"of {layout}.",
        )
        spec = driven(read_spec(model), described)
        spec.option.timestep = timestep
        kinds = import_mujoco().mjtIntegrator
        implicit = integrator == "implicitfast"
        spec.option.integrator = kinds.mjINT_IMPLICITFAST if implicit else kinds.mjINT_EULER
        self.standing_height, self.delay = described.height, delay
        super().__init__(
            num_envs,
            spec,
            substeps=substeps,
            actions={"joints": Position(described.action_scale, clip=action_clip)},
            entries={
                "command": [0.0, 0.0, 0.0],
                "waiting": [0.0] * delay * len(described.joints),
            },
            observations={"policy": terms_of(described), **(observations or {})},
            max_episode_steps=max_episode_steps,
            **kwargs,
        )

    def simulate(self, env: EnvView) -> TensorDict:
        if self.delay == 0:
            return super().simulate(env)
        latest, size = env.action, env.action.shape[1]
        actions = torch.cat((env.state["waiting"], latest), 1)
        env.action, waiting = actions.split((size, actions.shape[1] - size), 1)
        moved = super().simulate(env)
        env.action = moved["action"] = latest
        moved["waiting"] = waiting
        return moved

    measure = quadruped.Quadruped.measure
    markers = quadruped.Quadruped.markers


def terms_of(layout: PolicyLayout) -> dict[str, Observation]:
    """Return the observation terms of a layout, without scales.

    Raises:
        ConfigurationError: for an unknown term.
    """
    phases = {"phases": list(layout.phases), "period": layout.phase_period}
    functions: dict[str, tuple[Any, dict[str, Any]]] = {
        "base_ang_vel": (quadruped.turn_rate, {}),
        "base_lin_vel": (quadruped.torso_velocity, {}),
        "projected_gravity": (quadruped.gravity, {}),
        "command_lin_vel": (commanded, {"columns": [0, 1]}),
        "command_ang_vel": (commanded, {"columns": [2]}),
        "dof_pos": (joint_offsets, {"positions": layout.default_position}),
        "dof_vel": (joint_velocities, {"joints": layout.joints}),
        "actions": (quadruped.last_action, {}),
        "sin_phase": (clock, {**phases, "function": "sin"}),
        "cos_phase": (clock, {**phases, "function": "cos"}),
    }
    for name in layout.observation:
        require(
            name in functions,
            f"LeggedRobot has no term {name}; allowed: {', '.join(functions)}. For others write a "
            "MujocoEnv with terms of these names.",
        )
    return {
        name: Observation(*functions[name], history=term.history)
        for name, term in layout.observation.items()
    }


def _add_floor(spec: Any, mujoco: Any) -> None:
    """Add a floor with squares of one metre, which show in a film how fast a robot walks."""
    spec.add_texture(
        name="added_floor",
        type=mujoco.mjtTexture.mjTEXTURE_2D,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_CHECKER,
        rgb1=[0.5, 0.55, 0.6],
        rgb2=[0.65, 0.7, 0.75],
        width=128,
        height=128,
    )
    material = spec.add_material(name="added_floor", texrepeat=[0.5, 0.5], texuniform=True)
    material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "added_floor"
    spec.worldbody.add_geom(
        name="floor",
        type=mujoco.mjtGeom.mjGEOM_PLANE,
        size=[50, 50, 0.1],
        contype=1,
        conaffinity=1,
        material="added_floor",
    )


def force_limit(actuator: Any) -> tuple[float, float] | None:
    """Return the least and the greatest force of an actuator on its joint; None: no limit."""
    mujoco = import_mujoco()
    off = mujoco.mjtLimited.mjLIMITED_FALSE
    ranges = [] if actuator.forcelimited == off else [actuator.forcerange]
    # A motor's commands are forces, but a servo's are positions.
    if actuator.ctrllimited != off and actuator.biastype == mujoco.mjtBias.mjBIAS_NONE:
        ranges.append(actuator.gainprm[0] * actuator.ctrlrange)
    limits = [sorted(actuator.gear[0] * limit) for limit in ranges if np.ptp(limit) > 0]
    if not limits:
        return None
    lows, highs = zip(*limits, strict=True)
    return max(lows), min(highs)


def driven(spec: Any, layout: PolicyLayout) -> Any:
    """Return the `MjSpec` with the servos, the start and the floor of a robot; it is changed.

    Raises:
        ConfigurationError: see `LeggedRobot`.
    """
    mujoco = import_mujoco()
    joints = {joint.name: joint for joint in spec.joints}
    free = [joint for joint in spec.joints if joint.type == mujoco.mjtJoint.mjJNT_FREE]
    require(len(free) == 1, "LeggedRobot needs a model with one free joint, its base.")
    missing = [name for name in layout.joints if name not in joints]
    require(
        not missing,
        f"The model has no joint {', '.join(missing)}; it has {', '.join(filter(None, joints))}.",
    )
    free[0].name = quadruped.ROOT
    limits = {actuator.target: force_limit(actuator) for actuator in spec.actuators}
    for actuator in list(spec.actuators):
        spec.delete(actuator)
    for name in layout.joints:
        servo = spec.add_actuator(name=name, target=name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        servo.set_to_position(kp=layout.stiffness[name], kv=layout.damping[name])
        if (limit := limits.get(name)) is not None:
            servo.forcelimited, servo.forcerange = True, limit
    if not any(geom.type == mujoco.mjtGeom.mjGEOM_PLANE for geom in spec.geoms):
        _add_floor(spec, mujoco)
    if not spec.lights:
        # From everywhere, because a robot walks far.
        sun = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL
        spec.worldbody.add_light(type=sun, dir=[0.4, 0.4, -1], castshadow=False)
    for key in list(spec.keys):  # of other actuators: a compilation would refuse them
        spec.delete(key)
    model = spec.copy().compile()
    pose = np.array(model.qpos0)
    pose[model.joint(quadruped.ROOT).qposadr[0] + 2] = layout.height
    for name, position in layout.default_position.items():
        pose[model.joint(name).qposadr[0]] = position
    spec.add_key(name="home", qpos=pose, ctrl=[*layout.default_position.values()])
    return spec
