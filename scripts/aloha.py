r"""ALOHA's transfer of a cube from arm to arm, from states: env, scripted expert, datasets.

    python scripts/aloha.py demonstrations/transfer_cube --episodes 50
    PYTHONPATH=scripts rl-cli fit --config push_cube_bc.yaml \
        --data.env GymnasiumEnv --data.env.id aloha:TransferCube-v0

In the environment of `constraints-robots.txt`; `reproduce.sh aloha` has the whole commands. The
env is that of gym-aloha with other observations and actions; its physics and its success are kept.
The expert has no memory: positions of grippers and cube decide what comes next. Noise on its
motion shows a clone how to come back from a deviation (Laskey et al. 2017, "DART").
"""

from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
from dm_control.rl import control
from gym_aloha.constants import DT
from gym_aloha.tasks.sim import TransferCubeTask
from numpy.typing import NDArray

from lightning_rl import EpisodeWriter
from scripting import parser_of

ARMS = ("left", "right")

LARGEST_CHANGE = 0.1
"""rad: change of a joint that the action 1 asks for."""

FINGERTIP = np.array([0.135, 0.0, 0.0])
"""Point between the fingertips, in metres, in the frame of a gripper."""

MEETING = np.array([0.0, 0.5, 0.25])
"""Where the right arm holds the cube, in metres, for the left one."""

WAITING = MEETING + np.array([-0.1, 0.0, 0.0])
"""Where the left gripper waits."""

BESIDE = np.array([-0.005, 0.0, 0.0])
"""Point of the cube, in metres, where the left gripper takes it."""

UP = np.array([0.0, 0.0, 1.0])

CLOSED = 0.0455
"""Position of a finger, in metres, below which it holds the cube."""

FASTEST, FASTEST_TURN = 0.02, 0.06
"""Largest motion, in metres and rad, of a control step."""

DAMPING = 0.01
"""Of the inverse kinematics, by damped least squares."""

NOISE = 0.1
"""On the motion, 1 is its bound."""

MOST_STEPS = 300
"""Time limit of gym-aloha."""


class StateTask(TransferCubeTask):
    """The task without its pictures, which take most of the time of a step."""

    def get_observation(self, physics: Any) -> dict[str, Any]:
        """Return what gym-aloha reads, with a picture of one pixel."""
        return {"qpos": self.get_qpos(physics), "images": {"top": np.zeros((1, 1, 3), np.uint8)}}


class TransferCube(gymnasium.Wrapper[Any, Any, Any, Any]):
    """gym-aloha's task with states as observations, and changes of the joints as actions.

    Observation [39]: positions of 14 joints (rad; a gripper from 0, closed, to 1, open), pose of
    the cube (7), positions of both fingertips and of the cube relative to them (12, m), direction
    of both grippers (6). Action [14]: per arm six changes of joints from where they are, in units
    of `LARGEST_CHANGE`, and the gripper from -1, closed, to 1, open. gym-aloha takes positions of
    joints in rad, of which some are beyond the bounds [-1, 1] of its action space. The reward is 1
    for success, and 0 otherwise: with gym-aloha's 3 per step for a held cube that the other arm
    touches, an agent earns more if it never ends the episode by handing it over.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        aloha: Any = env.unwrapped
        self.physics = aloha._env.physics
        aloha._env = control.Environment(
            self.physics, StateTask(), float("inf"), control_timestep=DT
        )
        self.model, self.data = self.physics.model.ptr, self.physics.data.ptr
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (39,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (14,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; without a seed, gym-aloha would draw the cube's place from the OS."""
        if seed is not None:
            self.np_random = np.random.default_rng(seed)
        _, info = self.env.reset(seed=int(self.np_random.integers(2**31)), options=options)
        return self.observation(), info

    def step(self, action: NDArray[Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move both arms for a control step of 20 ms."""
        change = np.asarray(action, np.float64).reshape(2, 7)
        target = [
            [*(self.joints(arm) + LARGEST_CHANGE * change[i, :6]), (change[i, 6] + 1) / 2]
            for i, arm in enumerate(ARMS)
        ]
        _, reward, terminated, truncated, info = self.env.step(np.concatenate(target))
        return self.observation(), float(reward == 4), terminated, truncated, info

    def observation(self) -> NDArray[np.float32]:
        """Return the observation [39]."""
        cube = self.data.qpos[16:23]
        tips, turns = zip(*(self.fingertip(arm) for arm in ARMS), strict=True)
        parts = [StateTask.get_qpos(self.physics), cube, *tips, *(cube[:3] - tip for tip in tips)]
        return np.concatenate([*parts, *(turn[:, 0] for turn in turns)]).astype(np.float32)

    def joints(self, arm: str) -> NDArray[Any]:
        """Return the joints [6] of an arm, in rad."""
        start = 8 * ARMS.index(arm)
        joints: NDArray[Any] = self.data.qpos[start : start + 6]
        return joints

    def fingertip(self, arm: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return position [3] and rotation [3, 3] of the point between the fingertips."""
        gripper = self.data.body(f"vx300s_{arm}/gripper_link")
        turn = gripper.xmat.reshape(3, 3)
        return gripper.xpos + turn @ FINGERTIP, turn

    def motion(self, arm: str, goal: NDArray[Any], turn: NDArray[Any]) -> NDArray[Any]:
        """Return the changes of the joints [6] that move the fingertips towards a pose, in rad."""
        tip, now = self.fingertip(arm)
        gripper = self.model.body(f"vx300s_{arm}/gripper_link").id
        move, rotate = np.zeros((2, 3, self.model.nv))
        mujoco.mj_jac(self.model, self.data, move, rotate, tip, gripper)
        start = 8 * ARMS.index(arm)
        jacobian = np.vstack([move, rotate])[:, start : start + 6]
        quaternion, angle = np.zeros(4), np.zeros(3)
        mujoco.mju_mat2Quat(quaternion, (turn @ now.T).ravel())
        mujoco.mju_quat2Vel(angle, quaternion, 1.0)
        error = [limited(goal - tip, FASTEST), limited(angle, FASTEST_TURN)]
        squares = jacobian @ jacobian.T + DAMPING * np.eye(6)
        change: NDArray[Any] = jacobian.T @ np.linalg.solve(squares, np.concatenate(error))
        return change


def limited(vector: NDArray[Any], most: float) -> NDArray[Any]:
    """Return a vector that is shortened to a length."""
    return vector * min(1.0, most / max(float(np.linalg.norm(vector)), 1e-9))


def rotation(axis: tuple[float, float, float], degrees: float) -> NDArray[Any]:
    """Return a rotation matrix [3, 3]."""
    quaternion, matrix = np.zeros(4), np.zeros(9)
    mujoco.mju_axisAngle2Quat(quaternion, np.array(axis), np.deg2rad(degrees))
    mujoco.mju_quat2Mat(matrix, quaternion)
    return matrix.reshape(3, 3)


DOWN = rotation((0, 0, 1), 180) @ rotation((0, 1, 0), 60)
"""Rotation of the right gripper: 60 degrees below the direction to the other arm."""

ROLLED = rotation((1, 0, 0), 90)
"""Rotation of the left gripper, whose fingers close from above and below."""


def act(env: TransferCube) -> NDArray[np.float32]:
    """Return the expert's action [14]."""
    cube = env.data.qpos[16:19]
    (left, _), (right, turn) = (env.fingertip(arm) for arm in ARMS)
    holds = env.data.qpos[14] < CLOSED
    goal, waiting, fingers = cube, WAITING, [1.0, 1.0]
    if np.abs(right - cube).max() > (0.02 if holds else 0.008):
        # From above, with the fingers on either side.
        aside = np.linalg.norm((right - cube)[:2])
        tilt = np.arccos(np.clip((np.trace(DOWN.T @ turn) - 1) / 2, -1, 1))
        height = np.clip(max(8 * (aside - 0.008), 0.5 * (tilt - 0.1)), 0, 0.1)
        goal = cube + height * UP
    else:
        fingers[1] = -1.0
        goal = MEETING if holds else cube
        if holds and np.abs(cube - MEETING).max() < 0.02:
            waiting = cube + BESIDE
            fingers[0] = -1.0 if np.abs(left - waiting).max() < 0.01 else 1.0
    motions = env.motion("left", waiting, ROLLED), env.motion("right", goal, DOWN)
    parts = [[*motion / LARGEST_CHANGE, f] for motion, f in zip(motions, fingers, strict=True)]
    return np.clip(np.concatenate(parts), -1, 1).astype(np.float32)


def play(env: TransferCube, writer: EpisodeWriter, seed: int) -> tuple[bool, int]:
    """Record an episode of the expert, with noise on the motion; return success and length."""
    observation, _ = env.reset(seed=seed)
    generator = np.random.default_rng(seed)
    success, steps = False, 0
    while steps < MOST_STEPS and not success:
        action = act(env)
        action[np.arange(14) % 7 < 6] += NOISE * generator.normal(size=12)
        action, steps = action.clip(-1, 1), steps + 1
        following, reward, terminated, _, _ = env.step(action)
        success = bool(terminated)
        writer.add(observation, action, reward, success, steps == MOST_STEPS and not success)
        observation = following
    writer.end_episode(observation, success)
    return success, steps


def make() -> TransferCube:
    """Make the env, without a time limit."""
    return TransferCube(
        gymnasium.make("gym_aloha/AlohaTransferCube-v0", max_episode_steps=-1).unwrapped
    )


gymnasium.register("TransferCube-v0", make, max_episode_steps=MOST_STEPS)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="of the dataset")
    parser.add_argument("--episodes", type=int, default=50)
    arguments = parser.parse_args()
    env = make()
    spaces = env.observation_space, env.action_space
    writer = EpisodeWriter(arguments.folder, *spaces, round(1 / DT), "transfer the cube")
    played = [play(env, writer, seed) for seed in range(arguments.episodes)]
    writer.finalise()
    successes, steps = map(sum, zip(*played, strict=True))
    print(f"{successes} of {arguments.episodes} succeed, {steps} steps")


if __name__ == "__main__":
    main()
