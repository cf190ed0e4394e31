"""Play scripted experts of LIBERO, and write their episodes as datasets.

    python scripts/libero_experts.py demonstrations                      # 50 episodes of each task
    python scripts/libero_experts.py demonstrations --tasks libero_object:0 --episodes 10

In the environment of `constraints-libero.txt`. Episode k begins from the listed state k modulo
their number. The expert reads the observation of `LiberoEnv` with `objects: true`, and has no
memory: the poses of gripper and object decide what comes next. Noise on its motion shows a clone
how to come back from a deviation (Laskey et al. 2017, "DART").
"""

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lightning_rl import Episode, EpisodeWriter
from lightning_rl.extensions.libero.env import CAMERAS, LIMITS, OBJECT_NUMBERS, LiberoTask

GAIN = 12.0
"""Share of the largest motion per metre of distance."""

LIFT = 0.12
"""Largest height, in metres, above the point where the gripper holds or drops an object."""

TURN_GAIN = 4.0
"""Share of the largest rotation per radian."""

STEEPNESS = 3.0
"""Height of the way to a point per distance aside."""

NEAR = 0.015
"""Distance, in metres, at which a point is reached."""

OPEN, CLOSED = -1.0, 1.0

NOISE = 0.2
"""On the motion, 1 is its bound."""

SHARES = np.array([1.0, 1.0, 1.0, 0.3, 0.3, 0.3])
"""Of the noise, on motion and rotation."""


class Task(NamedTuple):
    """How to pick an object and where to place it.

    Attributes:
        target: number of the object on which, or in which, object 0 is placed.
        grasp: position of the gripper that holds object 0, relative to it, in m.
        width: distance of the fingers, in m, below which they hold it.
        release: position of the gripper that drops the object, relative to the target, in m.
    """

    target: int
    grasp: tuple[float, float, float]
    width: float
    release: tuple[float, float, float]


TASKS = {
    "libero_object:0": Task(1, (0.0, 0.0, 0.01), 0.07, (0.0, 0.0, 0.12)),
    "libero_object:6": Task(1, (0.0, 0.0, -0.002), 0.045, (0.0, 0.0, 0.12)),
    "libero_spatial:0": Task(4, (0.0, 0.047, 0.022), 0.015, (0.0, 0.045, 0.03)),
}


def act(observation: dict[str, np.ndarray], task: Task) -> np.ndarray:
    """Return the expert's action [7]: motion, rotation, gripper."""
    state = observation["state"].astype(np.float64)
    objects = observation["environment_state"].astype(np.float64).reshape(-1, OBJECT_NUMBERS)
    gripper, width = state[:3], state[6] - state[7]
    grasp = objects[0, :3] + task.grasp
    release = objects[task.target, :3] + task.release
    # What is held may tilt.
    at_object = np.abs(gripper - grasp).max() < (NEAR if width > task.width else 2 * NEAR)
    fingers = OPEN
    if not at_object:
        # A funnel, because a clone learns no sudden change of the motion.
        goal = grasp + funnel(gripper - grasp)
    elif width > task.width:
        goal, fingers = grasp, CLOSED
    else:
        goal, fingers = release + funnel(gripper - release), CLOSED
        is_low = np.clip((goal[2] - gripper[2]) / LIFT, 0.0, 1.0)
        goal[:2] += is_low * (gripper - goal)[:2]
        if np.abs(gripper - release).max() < NEAR:
            fingers = OPEN
    motion = np.clip(GAIN * (goal - gripper), -1.0, 1.0)
    turn = np.clip(TURN_GAIN * turn_down(state[3:6]), -1.0, 1.0)
    return np.array([*motion, *turn, fingers], np.float32)


def turn_down(vector: np.ndarray) -> np.ndarray:
    """Return the turn [3], in rad, from a rotation vector [3] to a gripper that points down.

    The controller holds the rotation only while this part of the action is exactly 0. A clone acts
    by almost 0, and drifts, if its demonstrations do not show how to turn back.
    """
    angle = np.linalg.norm(vector)
    x, y, z = vector * np.sin(angle / 2) / angle
    # For small angles, twice the vector of the quaternion (1, 0, 0, 0) times the inverse.
    turn: np.ndarray = 2 * np.sign(x) * np.array([np.cos(angle / 2), z, -y])
    return turn


def funnel(offset: np.ndarray) -> np.ndarray:
    """Return the height [3], in m, at which a point is approached from `offset` [3]."""
    aside = np.linalg.norm(offset[:2])
    return np.array([0.0, 0.0, np.clip(STEEPNESS * (aside - NEAR / 2), 0.0, LIFT)])


def play(env: LiberoTask, task: Task, number: int, noise: float) -> Episode:
    """Play the episode from the listed state `number`, with noise on the motion."""
    observation, _ = env.reset(seed=number)
    generator = np.random.default_rng(number)
    observations, actions, rewards, success = [observation], [], [], False
    while len(actions) < LIMITS[""] and not success:
        action = act(observation, task)
        action[:6] += noise * SHARES * generator.normal(size=6)
        actions.append(action.clip(-1.0, 1.0))
        observation, reward, success, _, _ = env.step(actions[-1])
        observations.append(observation)
        rewards.append(reward)
    ended = torch.zeros(len(actions), dtype=torch.bool)
    ended[-1] = True
    steps = {
        "observation": {
            key: torch.from_numpy(np.stack([step[key] for step in observations]))
            for key in observation
        },
        "action": torch.from_numpy(np.stack(actions)),
        "reward": torch.tensor(rewards),
        "terminated": ended & success,
        "truncated": ended & (not success),
    }
    return replace(Episode.of_steps(steps, env.task), success=success)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the datasets")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--episodes", type=int, default=50, help="of each task")
    parser.add_argument("--cameras", nargs="*", default=[], choices=list(CAMERAS))
    parser.add_argument("--size", type=int, default=64, help="of the pictures")
    arguments = parser.parse_args()
    for name in arguments.tasks:
        suite, task_id = name.split(":")
        began = time.process_time()
        seen = {"cameras": arguments.cameras, "size": arguments.size, "objects": True}
        env = LiberoTask(suite, int(task_id), **seen, relative=True)
        path = arguments.folder / f"{suite}_{task_id}"
        spaces = env.observation_space, env.action_space
        writer = EpisodeWriter(path, *spaces, env.metadata["render_fps"], env.task)
        successes, steps = 0, 0
        for number in range(arguments.episodes):
            episode = play(env, TASKS[name], number, NOISE)
            writer.write(episode)
            successes += bool(episode.success)
            steps += len(episode)
        writer.finalise()
        env.close()
        seconds = time.process_time() - began
        share = f"{successes} of {arguments.episodes} succeed"
        print(f"{path}: {share}, {steps} steps, {seconds:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
    # robosuite's contexts of EGL raise errors at the end of the interpreter.
    os._exit(0)
