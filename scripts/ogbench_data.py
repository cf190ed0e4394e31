"""Record OGBench's oracles, and write a dataset for each task of a cube env.

    python scripts/ogbench_data.py demonstrations --cubes single --kind play
    python scripts/ogbench_data.py demonstrations --cubes double --kind noisy --tasks 2

The wheel of OGBench has the oracles, but not the script that recorded its datasets. `play` follows
plans with correlated noise; `noisy` closes the loop with Gaussian noise and a tenth random actions.
Episodes of 1,000 steps have random goals, and are written once for each single-task env, with its
rewards: the number of cubes at their goals minus the number of cubes. As in the env, the step that
begins with all cubes at their goals terminates the episode. Differs from the published datasets:
the steps after it are left out until a cube leaves its goal, where another episode begins.

Source: Park et al. 2025, "OGBench: Benchmarking Offline Goal-Conditioned RL", appendix E.
Needs the environment of constraints-ogbench.txt.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import ogbench.manipspace  # noqa: F401  # registers the envs
import torch
from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle
from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle

from lightning_rl import Episode, EpisodeWriter
from scripting import parser_of

STEPS = 1_000
"""Steps of a recorded episode."""

NOISE, LEAST_NORM, RANDOM_SHARE = 0.1, 0.4, 0.1
"""Noise of an oracle, smallest norm of a Markov oracle's action, share of random actions."""

TOLERANCE = 0.04
"""Largest distance of a cube from its goal, in metres, that counts as success."""

STACKING = {"single": (0.0, 0.0), "double": (0.0, 0.25)}
"""Range of the probability that a cube goes on top of another one, drawn per episode."""


class Recording(NamedTuple):
    """Observations [L+1, D], actions [L, A] and positions of the cubes [L+1, C, 3]."""

    observation: np.ndarray
    action: np.ndarray
    cubes: np.ndarray


def recordings(env: gymnasium.Env, kind: str, stacking: tuple[float, float]) -> Iterator[Recording]:
    """Play episodes without end by an oracle, with NumPy's global generator."""
    count = env.unwrapped._num_cubes
    if kind == "play":
        oracle: Any = CubePlanOracle(env=env, noise=NOISE, noise_smoothing=0.5)
    else:
        oracle = CubeMarkovOracle(env=env, min_norm=LEAST_NORM)
    while True:
        observation, info = env.reset(seed=int(np.random.randint(2**31)))
        stacks, level = np.random.uniform(*stacking), np.random.uniform(0, NOISE)
        oracle.reset(observation, info)
        observations, actions, cubes = [observation], [], [positions(info, count)]
        for _ in range(STEPS):
            if kind == "noisy" and np.random.rand() < RANDOM_SHARE:
                action = env.action_space.sample()
            else:
                action = np.array(oracle.select_action(observation, info))
                if kind == "noisy":
                    scales = level * np.array([1, 1, 1, 3, 10])
                    action = action + np.random.normal(0, scales, action.shape)
            action = action.clip(-1, 1).astype(np.float32)
            observation, _, _, _, info = env.step(action)
            observations.append(observation)
            actions.append(action)
            cubes.append(positions(info, count))
            if oracle.done:
                oracle.reset(*env.unwrapped.set_new_target(p_stack=stacks))
        yield Recording(*(np.stack(part) for part in (observations, actions, cubes)))


def positions(info: dict[str, Any], count: int) -> np.ndarray:
    """Return the positions of the cubes [C, 3], in metres."""
    return np.stack([info[f"privileged/block_{i}_pos"] for i in range(count)])


def episodes(recording: Recording, goals: np.ndarray) -> Iterator[Episode]:
    """Cut a recording into episodes of the task with these goals [C, 3]."""
    at_goal = np.linalg.norm(recording.cubes - goals, axis=-1) <= TOLERANCE
    reward, reached = at_goal.sum(-1) - float(len(goals)), at_goal.all(-1)
    first = 0
    while first < len(recording.action):
        # The step that begins in success ends the episode, with reward 0.
        ends = reached[first:-1].nonzero()[0]
        stop = first + ends[0] + 1 if len(ends) else len(recording.action)
        ended = torch.zeros(stop - first, dtype=torch.bool)
        ended[-1] = True
        steps = {
            "observation": torch.from_numpy(recording.observation[first : stop + 1]).float(),
            "action": torch.from_numpy(recording.action[first:stop]),
            "reward": torch.from_numpy(reward[first:stop]).float(),
            "terminated": ended & bool(len(ends)),
            "truncated": ended & (not len(ends)),
        }
        yield replace(Episode.of_steps(steps), success=bool(len(ends)))
        others = (~reached[stop:-1]).nonzero()[0]
        first = stop + others[0] if len(others) else len(recording.action)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="of the datasets")
    parser.add_argument("--cubes", default="single", choices=tuple(STACKING))
    parser.add_argument("--kind", default="play", choices=("play", "noisy"))
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    arguments = parser.parse_args()
    np.random.seed(arguments.seed)
    env = gymnasium.make(
        f"cube-{arguments.cubes}-v0",
        terminate_at_goal=False,
        mode="data_collection",
        max_episode_steps=STEPS + 1,
    )
    env.action_space.seed(arguments.seed)
    goals, writers = {}, {}
    for number in arguments.tasks:
        task = gymnasium.make(f"cube-{arguments.cubes}-singletask-task{number}-v0")
        goals[number] = np.asarray(task.unwrapped.task_infos[number - 1]["goal_xyzs"])
        path = arguments.folder / f"cube_{arguments.cubes}_{arguments.kind}_task{number}"
        fps = round(1.0 / task.unwrapped.control_timestep())
        writers[number] = EpisodeWriter(path, task.observation_space, task.action_space, fps)
    successes = dict.fromkeys(arguments.tasks, 0)
    played = recordings(env, arguments.kind, STACKING[arguments.cubes])
    for _ in range(-(-arguments.steps // STEPS)):
        recording = next(played)
        for number, writer in writers.items():
            for episode in episodes(recording, goals[number]):
                writer.write(episode)
                successes[number] += bool(episode.success)
    for number, writer in writers.items():
        writer.finalise()
        print(f"{writer.path}: {successes[number]} successes")


if __name__ == "__main__":
    main()
