"""Reach poses with the tool of an arm."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extensions.managers import Event
from lightning_rl.extensions.managers.actions import DeltaPosition
from lightning_rl.extensions.managers.term import Metric, Observation, Reward, Termination
from lightning_rl.extensions.managers.view import EnvView
from lightning_rl.extensions.mujoco.env import MujocoEnv, MujocoView
from lightning_rl.extensions.mujoco.rendering import Marker
from lightning_rl.extensions.mujoco.rotations import angle_between, inverse, product, rotate
from lightning_rl.extensions.tasks.drawing import GREEN, RED
from lightning_rl.kwargs import ReachKwargs, Unpack

ARM = Path(__file__).parent / "assets" / "arm.xml"
"""The model: six joints, position servos, and the site `tip` on the body `tool`."""

FINGER = 0.1
"""m: length of the line that shows a goal's direction."""


def goal(env: EnvView) -> Tensor:
    """Return the goal's pose [M, 7]: position in m, and unit quaternion."""
    value: Tensor = env.state["goal"]
    return value


def joint_angles(env: EnvView) -> Tensor:
    """Return the joint positions, [M, 6] rad."""
    value: Tensor = env.state["qpos"]
    return value


def joint_speeds(env: EnvView) -> Tensor:
    """Return the joint velocities, [M, 6] rad/s."""
    value: Tensor = env.state["qvel"]
    return value


def to_goal(env: MujocoView) -> Tensor:
    """Return the way to the goal in m, and the rotation to it as a quaternion with w >= 0, [M, 7].

    Both are in the frame of the tool.
    """
    turned = inverse(env.xquat("tool"))
    way = rotate(turned, goal(env)[:, :3] - env.site_xpos("tip"))
    turn = product(turned, goal(env)[:, 3:])
    # q and -q are the same rotation: show one of them.
    return torch.cat((way, torch.where(turn[:, :1] < 0.0, -turn, turn)), 1)


def random_start(env: EnvView, noise: float = 0.3) -> dict[str, Tensor]:
    """Start with joints at most `noise` rad away from the keyframe, at rest."""
    qpos = env.state["qpos"] + (env.uniform(6) * 2.0 - 1.0) * noise
    # The control, too: otherwise the servos would pull back to the keyframe.
    return {"qpos": qpos, "ctrl": qpos}


def random_goal(env: EnvView, part: float = 0.5) -> dict[str, Tensor]:
    """Draw the pose of the tool at random joint positions, so that it can be reached.

    `part` is the used part of the joints' ranges, around their middles.
    """
    layout = env.env.layout
    limits = torch.tensor(layout.model.jnt_range, dtype=torch.float32, device=env.device)
    low, high = limits.unbind(1)
    joints = (low + high) / 2.0 + (env.uniform(6) - 0.5) * (high - low) * part
    # The simulator computes where the tool is at these joints.
    sensed = env.env.physics.sense(TensorDict({**env.state, "qpos": joints}, [env.num_envs]))
    tip, turn = layout.columns("site_xpos", ("tip",)), layout.columns("xquat", ("tool",))
    return {"goal": torch.cat((sensed[:, tip], sensed[:, turn]), 1)}


def distance(env: EnvView) -> Tensor:
    """Return the distance to the goal, [M] m."""
    return env.measurements["distance"]


def angle(env: EnvView) -> Tensor:
    """Return the angle to the goal's rotation, [M] rad."""
    return env.measurements["angle"]


def near(env: EnvView, name: str, width: float) -> Tensor:
    """Return 1 - tanh(error / width) of a measured error, [M]."""
    return 1.0 - (env.measurements[name] / width).tanh()


def both_near(env: EnvView, distance: float, angle: float) -> Tensor:
    """Return the product of `near` for position and rotation, [M]."""
    # A product: a small error of one kind alone earns nothing.
    return near(env, "distance", distance) * near(env, "angle", angle)


def reached(env: EnvView, distance: float = 0.03, angle: float = 0.2) -> Tensor:
    """Return whether the tool is within `distance` m and `angle` rad of the goal, [M] bool."""
    return (env.measurements["distance"] < distance) & (env.measurements["angle"] < angle)


def action_size(env: EnvView) -> Tensor:
    """Return the squared size of the action, [M]."""
    size: Tensor = env.state["action"].square().sum(1)
    return size


class Reach(MujocoEnv):
    """Bring the tool of a six-joint arm to a pose (position and rotation).

    Observation [25]: joint positions and velocities (each [6]), the last action [6], and the
    translation and rotation to the goal in the frame of the tool [7]. Action [6]: change of the
    joints' positions, in units of 0.2 rad.

    The goal is the pose of the tool at random joint positions. An episode terminates with success
    within 0.03 m and 0.2 rad of the goal. Events: `start`, `goal`. Rewards: `distance` (m, weight
    -1), `angle` (rad, weight -0.2), `near` (weight 0.5), `success` 10, `action` -0.005. Metrics:
    `distance` (m), `angle` (rad).

    Args:
        num_envs: N.
        model: path or function; see `MujocoEnv`. Default: `ARM`.
        action_scale: rad per unit of action.
        max_episode_steps: time limit; a step lasts 0.05 s.
        camera: see `MujocoEnv`.
        kwargs: see `MujocoEnv`.
    """

    default_observations: ClassVar[Mapping[str, Mapping[str, Observation]]] = {
        "state": {
            "joint_angles": Observation(joint_angles),
            "joint_speeds": Observation(joint_speeds, scale=0.2),
            "action": Observation("entry", {"name": "action"}),
            "to_goal": Observation(to_goal),
        }
    }
    default_rewards: ClassVar[Mapping[str, Reward]] = {
        "distance": Reward(distance, weight=-1.0),
        "angle": Reward(angle, weight=-0.2),
        "near": Reward(both_near, {"distance": 0.1, "angle": 0.5}, weight=0.5),
        "success": Reward("is_success", weight=10.0),
        "action": Reward(action_size, weight=-0.005),
    }
    default_terminations: ClassVar[Mapping[str, Termination]] = {
        **MujocoEnv.default_terminations,
        "reached": Termination(reached, ends="success"),
    }
    default_metrics: ClassVar[Mapping[str, Metric]] = {
        "distance": Metric(distance),
        "angle": Metric(angle),
    }
    default_events: ClassVar[Mapping[str, Event]] = {
        "start": Event(random_start, mode="reset"),
        "goal": Event(random_goal, mode="reset"),
    }

    def __init__(
        self,
        num_envs: int,
        model: Any = None,
        action_scale: float = 0.2,
        max_episode_steps: int = 100,
        camera: str | None = "front",
        **kwargs: Unpack[ReachKwargs],
    ) -> None:
        super().__init__(
            num_envs,
            model or str(ARM),  # no default: checkpoints would name a path of this machine
            actions={"arm": DeltaPosition(action_scale, clip=1.0)},
            entries={"goal": [0.4, 0.0, 0.4, 1.0, 0.0, 0.0, 0.0]},
            max_episode_steps=max_episode_steps,
            camera=camera,
            **kwargs,
        )

    def measure(self, env: EnvView) -> dict[str, Tensor]:
        assert isinstance(env, MujocoView)
        target = goal(env)
        return {
            "distance": (env.site_xpos("tip") - target[:, :3]).norm(dim=1),
            "angle": angle_between(env.xquat("tool"), target[:, 3:]),
        }

    def markers(self, state: TensorDict) -> list[list[Marker]]:
        center, turn = state["goal"].split((3, 4), 1)
        # The direction of a goal, and by the smaller ball its roll.
        forward = center + rotate(turn, torch.tensor([[0.0, 0.0, FINGER]]))
        side = center + rotate(turn, torch.tensor([[FINGER / 2, 0.0, 0.0]]))
        triples = zip(*(point.double().numpy() for point in (center, forward, side)), strict=True)
        return [
            [Marker(ball, 0.03, GREEN), Marker(end, 0.015, RED), Marker(side, 0.01, RED)]
            for ball, end, side in triples
        ]
