"""Walk on four legs with commanded velocities, over random friction, loads and pushes."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extend.envs import import_mujoco
from lightning_rl.extensions.managers import Event
from lightning_rl.extensions.managers.actions import Position
from lightning_rl.extensions.managers.term import Metric, Observation, Reward, Termination
from lightning_rl.extensions.managers.view import EnvView
from lightning_rl.extensions.mujoco.env import MujocoEnv, MujocoView
from lightning_rl.extensions.mujoco.rendering import Marker
from lightning_rl.extensions.mujoco.rotations import heading, inverse, rotate
from lightning_rl.extensions.tasks.drawing import GREEN
from lightning_rl.kwargs import QuadrupedKwargs, Unpack

ROOT = "root"
"""Name of the free joint of the torso."""

JOINTS = tuple(f"{part}_{leg}" for leg in (1, 2, 3, 4) for part in ("hip", "ankle"))
"""Driven joints of Ant."""

BENT = (0.0, 0.87, 0.0, -0.87, 0.0, -0.87, 0.0, 0.87)
"""rad: positions of the joints at which the robot stands."""

STANDING, FALLEN, TILTED = 0.55, 0.22, -0.3
"""Limits of a fallen robot.

m: height of the torso at the start, and below which the robot has fallen; z of gravity's direction
in the frame of the torso, above which it has fallen.
"""

COMMANDS = ((-1.0, 1.0), (-0.5, 0.5), (-1.0, 1.0))
"""Ranges of the commands: m/s forwards, m/s to the left, rad/s to the left."""

WIDTH = 0.25
"""(m/s)^2 and (rad/s)^2: squared error at which a tracking reward is 1/e."""


def ant(stiffness: float = 40.0, damping: float = 2.0, max_torque: float = 60.0) -> Any:
    """Return the `mujoco.MjSpec` of Gymnasium's Ant with position servos and a keyframe `home`.

    Differs from Gymnasium's: servos instead of motors, and the integrator `implicitfast`, four
    times as fast as the Runge-Kutta integrator.

    Args:
        stiffness: N m/rad.
        damping: N m s/rad.
        max_torque: N m.

    Raises:
        ConfigurationError: MuJoCo is not installed.
    """
    mujoco = import_mujoco()
    path = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "ant.xml"
    spec = mujoco.MjSpec.from_file(str(path))
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    for texture in spec.textures:  # every world has a copy
        texture.width = texture.height = 32
    # A copy of the list, because `delete` shortens it.
    for actuator in list(spec.actuators):
        spec.delete(actuator)
    for joint in JOINTS:
        servo = spec.add_actuator(
            name=joint,
            target=joint,
            trntype=mujoco.mjtTrn.mjTRN_JOINT,
            forcelimited=True,
            forcerange=[-max_torque, max_torque],
        )
        servo.set_to_position(kp=stiffness, kv=damping)
    pose = [0.0, 0.0, STANDING, 1.0, 0.0, 0.0, 0.0, *BENT]
    spec.add_key(name="home", qpos=pose, ctrl=BENT)
    return spec


def command(env: EnvView) -> Tensor:
    """Return the commanded velocities [M, 3]: m/s forwards and to the left, rad/s to the left."""
    value: Tensor = env.state["command"]
    return value


def turn_rate(env: MujocoView) -> Tensor:
    """Return the angular velocity in the frame of the torso, [M, 3] rad/s: a gyroscope."""
    return env.qvel(ROOT)[:, 3:]


def gravity(env: MujocoView) -> Tensor:
    """Return the direction of gravity in the frame of the torso, [M, 3]."""
    down = torch.tensor([0.0, 0.0, -1.0], device=env.device).expand(env.num_envs, 3)
    return rotate(inverse(env.qpos(ROOT)[:, 3:]), down)


def joint_offsets(env: MujocoView) -> Tensor:
    """Return the joint positions relative to standing, [M, 8] rad."""
    return env.qpos(*JOINTS) - torch.tensor(BENT, device=env.device)


def joint_speeds(env: MujocoView) -> Tensor:
    """Return the joint velocities, [M, 8] rad/s."""
    return env.qvel(*JOINTS)


def last_action(env: EnvView) -> Tensor:
    """Return the last action, [M, 8]."""
    value: Tensor = env.state["action"]
    return value


def torso_velocity(env: MujocoView) -> Tensor:
    """Return the linear velocity in the frame of the torso, [M, 3] m/s; a robot estimates it."""
    # MuJoCo has a free joint's linear velocity in the world, its angular velocity in the body.
    root = env.qpos(ROOT)
    return rotate(inverse(root[:, 3:]), env.qvel(ROOT)[:, :3])


def torso_height(env: MujocoView) -> Tensor:
    """Return the height of the torso, [M] m."""
    return env.qpos(ROOT)[:, 2]


def friction_and_load(env: EnvView) -> Tensor:
    """Return the friction of the feet and the mass of the torso in kg, [M, 2]."""
    nominal = env.env.parameters()
    # The state has only the fields that events have changed.
    friction = env.state.get("geom_friction", None)
    mass = env.state.get("body_mass", None)
    rows = env.num_envs
    friction = nominal["geom_friction"].expand(rows, -1, -1) if friction is None else friction
    mass = nominal["body_mass"].expand(rows, -1) if mass is None else mass
    # Geom 0 is the floor, body 0 the world.
    return torch.stack((friction[:, 1, 0], mass[:, 1]), 1)


def random_pose(env: MujocoView, joint_noise: float = 0.1) -> dict[str, Tensor]:
    """Start with a random heading, and joints at most `joint_noise` rad away from standing."""
    uniform = env.uniform(9)
    half = (uniform[:, 0] * 2.0 - 1.0) * (math.pi / 2)
    qpos = env.state["qpos"].clone()
    # The quaternion of a turn around z: cosine and sine of half the angle.
    qpos[:, 3], qpos[:, 6] = half.cos(), half.sin()
    # The free joint of the torso takes the first seven numbers.
    qpos[:, 7:] += (uniform[:, 1:] * 2.0 - 1.0) * joint_noise
    return {"qpos": qpos}


def random_command(
    env: EnvView, ranges: list[tuple[float, float]] | None = None
) -> dict[str, Tensor]:
    """Draw commands, uniform in `ranges` (default: `COMMANDS`)."""
    low, high = torch.tensor(ranges or COMMANDS, device=env.device).unbind(1)
    return {"command": low + env.uniform(3) * (high - low)}


def random_load(env: EnvView, low: float = 0.75, high: float = 1.5) -> dict[str, Tensor]:
    """Scale mass and inertia of the torso by a number in [low, high]."""
    mass = env.env.parameters()["body_mass"].repeat(env.num_envs, 1)
    mass[:, 1] *= low + env.uniform(1)[:, 0] * (high - low)
    # The quantity, not the field `body_mass`, so that the inertia changes, too.
    return env.entries_for("mass", mass)


def push(env: EnvView, speed: float = 0.5) -> dict[str, Tensor]:
    """Change the horizontal velocity by at most `speed` m/s along each axis."""
    qvel = env.state["qvel"].clone()
    qvel[:, :2] += (env.uniform(2) * 2.0 - 1.0) * speed
    return {"qvel": qvel}


def velocity_errors(env: EnvView) -> dict[str, Tensor]:
    """Measure `velocity_error`, [M] m/s, and `yaw_error`, [M] rad/s, of a torso with commands."""
    command, velocity = env.state["command"], env.state["qvel"]
    yaw = heading(env.state["qpos"][:, 3:7])
    cos, sin = yaw.cos(), yaw.sin()
    # Commands are relative to the heading; roll and pitch do not change them.
    forward_error = cos * velocity[:, 0] + sin * velocity[:, 1] - command[:, 0]
    left_error = cos * velocity[:, 1] - sin * velocity[:, 0] - command[:, 1]
    return {
        "velocity_error": (forward_error * forward_error + left_error * left_error).sqrt(),
        "yaw_error": (velocity[:, 5] - command[:, 2]).abs(),
    }


def velocity_error(env: EnvView) -> Tensor:
    """Return the length of the error of the horizontal velocity, [M] m/s."""
    return env.measurements["velocity_error"]


def yaw_error(env: EnvView) -> Tensor:
    """Return the absolute error of the yaw rate, [M] rad/s."""
    return env.measurements["yaw_error"]


def tracking(env: EnvView, name: str) -> Tensor:
    """Return exp(-error^2 / 0.25) of a measured error, [M]."""
    return (env.measurements[name].square() / -WIDTH).exp()


def bounce(env: MujocoView) -> Tensor:
    """Return the squared vertical velocity, [M] m^2/s^2."""
    return env.qvel(ROOT)[:, 2].square()


def roll_and_pitch(env: MujocoView) -> Tensor:
    """Return the squared roll and pitch rates, [M] rad^2/s^2."""
    return turn_rate(env)[:, :2].square().sum(1)


def tilt(env: MujocoView) -> Tensor:
    """Return the squared sine of the torso's tilt, [M]."""
    return gravity(env)[:, :2].square().sum(1)


def action_change(env: EnvView) -> Tensor:
    """Return the squared change of the action, [M]."""
    assert env.previous_state is not None
    change: Tensor = (env.state["action"] - env.previous_state["action"]).square().sum(1)
    return change


def fallen(env: MujocoView) -> Tensor:
    """Return whether the torso lies on the ground or on its side, [M] bool."""
    return (torso_height(env) < FALLEN) | (gravity(env)[:, 2] > TILTED)


class Quadruped(MujocoEnv):
    """Walk with commanded velocities: Gymnasium's Ant with position servos.

    Observation: a Dict of `proprioception` [33], the robot's measurements: command, turn rate,
    gravity (each [3]), joint positions, joint velocities and last action (each [8]); and
    `privileged` [6]: velocity of the torso, its height, friction, mass. A policy without
    `actor_keys` reads both. Action [8]: joint positions around standing.

    Commands are drawn at the start and every 3 to 6 s, uniform in [-1, 1] m/s forwards, [-0.5, 0.5]
    m/s to the left and [-1, 1] rad/s. Events: `pose`, `command`, `friction` (0.4 to 1.2 of the
    model's), `load` (0.75 to 1.5 of the torso's mass), `push` (up to 0.5 m/s along each axis, every
    4 to 8 s). Rewards: `velocity` and `yaw`, exp(-error^2 / 0.25), weights 1 and 0.75;
    `velocity_error` and `yaw_error`, weights -0.5 and -0.25; `bounce`, `roll_and_pitch`, `tilt`,
    `action_change` (weights below 0). A fallen robot is `terminated`.

    Metrics: `velocity_error` (m/s), `yaw_error` (rad/s).

    Args:
        num_envs: N.
        model: path or function; see `MujocoEnv`. Default: `ant`.
        action_scale: rad per unit of action.
        max_episode_steps: time limit; a step lasts 0.05 s.
        kwargs: see `MujocoEnv`.
    """

    default_observations: ClassVar[Mapping[str, Mapping[str, Observation]]] = {
        "proprioception": {
            "command": Observation(command, scale=2.0),
            "turn_rate": Observation(turn_rate, scale=0.5),
            "gravity": Observation(gravity),
            "joint_offsets": Observation(joint_offsets),
            "joint_speeds": Observation(joint_speeds, scale=0.1),
            "action": Observation(last_action),
        },
        "privileged": {
            "velocity": Observation(torso_velocity, scale=2.0),
            "height": Observation(torso_height),
            "physics": Observation(friction_and_load),
        },
    }
    default_rewards: ClassVar[Mapping[str, Reward]] = {
        "velocity": Reward(tracking, {"name": "velocity_error"}, weight=1.0),
        "yaw": Reward(tracking, {"name": "yaw_error"}, weight=0.75),
        "velocity_error": Reward(velocity_error, weight=-0.5),
        "yaw_error": Reward(yaw_error, weight=-0.25),
        "bounce": Reward(bounce, weight=-0.5),
        "roll_and_pitch": Reward(roll_and_pitch, weight=-0.05),
        "tilt": Reward(tilt, weight=-1.0),
        "action_change": Reward(action_change, weight=-0.01),
    }
    default_terminations: ClassVar[Mapping[str, Termination]] = {
        **MujocoEnv.default_terminations,
        "fallen": Termination(fallen, ends="fail"),
    }
    default_metrics: ClassVar[Mapping[str, Metric]] = {
        "velocity_error": Metric(velocity_error),
        "yaw_error": Metric(yaw_error),
    }
    default_events: ClassVar[Mapping[str, Event]] = {
        "pose": Event(random_pose, mode="reset"),
        "friction": Event(
            "randomize",
            {
                "name": "geom_friction",
                "low": 0.4,
                "high": 1.2,
                "operation": "scale",
                "shared": True,
            },
            mode="reset",
        ),
        "load": Event(random_load, mode="reset"),
        "command": Event(random_command, mode="interval", every_s=(3.0, 6.0), at_reset=True),
        "push": Event(push, mode="interval", every_s=(4.0, 8.0)),
    }

    def __init__(
        self,
        num_envs: int,
        model: Any = None,
        action_scale: float = 0.5,
        max_episode_steps: int = 200,
        **kwargs: Unpack[QuadrupedKwargs],
    ) -> None:
        super().__init__(
            num_envs,
            model or ant,  # no default: checkpoints would name a function, which needs trust_code
            actions={"legs": Position(action_scale, clip=1.0)},
            entries={"command": [0.0, 0.0, 0.0]},
            max_episode_steps=max_episode_steps,
            **kwargs,
        )

    def measure(self, env: EnvView) -> dict[str, Tensor]:
        return velocity_errors(env)

    def markers(self, state: TensorDict) -> list[list[Marker]]:
        # The ball is where the robot would be after a second.
        velocity = torch.cat((state["command"][:, :2], torch.zeros(len(state), 1)), 1)
        root = state["qpos"]
        half = heading(root[:, 3:7])[:, None] / 2
        none = torch.zeros_like(half)
        turn = torch.cat((half.cos(), none, none, half.sin()), 1)
        positions = (root[:, :3] + rotate(turn, velocity)).numpy().astype(np.float64)
        return [[Marker(position, 0.08, GREEN)] for position in positions]
