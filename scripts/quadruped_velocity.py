"""Measure how a quadruped follows commanded velocities, over fresh random physics.

    rl-cli fit --config ppo_quadruped.yaml --seed_everything 1
    python scripts/quadruped_velocity.py outputs/ppo_quadruped_*/checkpoints/last.ckpt

Each of the seeds is an env that training and its evaluations have not seen, with its own friction,
load, pushes and commands. An error is the mean over all steps of all episodes: of the velocity, the
length of the difference of the horizontal velocity from the command, in m/s, and the absolute
difference of the yaw rate, in rad/s. `standing` is the action 0. Measured figures stand in
docs/results.md.
"""

import argparse

import torch

from lightning_rl import Quadruped, load_policy
from scripting import table

FIRST_SEED = 1_000_000
"""Seed of the first env; training and evaluation draw theirs from below."""

DIGITS = {"velocity": 3, "yaw": 3, "return": 1, "falls": 2}


def measure(policy, seeds=20, steps=200):
    """Return mean errors, the return, and the falls per episode of one episode per seed."""
    env = Quadruped(seeds, max_episode_steps=steps + 1)
    observation, _ = env.reset(seed=[FIRST_SEED + i for i in range(seeds)])
    sums = dict.fromkeys(DIGITS, 0.0)
    for _ in range(steps):
        action = torch.zeros(seeds, 8) if policy is None else policy.act(observation.to_dict())
        observation, reward, terminated, _, info = env.step(action)
        if policy is not None:
            policy.reset(terminated)
        sums["velocity"] += info["metrics"]["velocity_error"].mean().item() / steps
        sums["yaw"] += info["metrics"]["yaw_error"].mean().item() / steps
        sums["return"] += reward.mean().item()
        sums["falls"] += terminated.float().mean().item()
    return sums


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+")
    given = parser.parse_args()
    rows = []
    for name in ("standing", *given.checkpoints):
        measured = measure(None if name == "standing" else load_policy(name))
        numbers = (f"{value:.{DIGITS[key]}f}" for key, value in measured.items())
        rows.append((name, *numbers))
    columns = ("policy", "velocity error, m/s", "yaw error, rad/s", "return", "falls per episode")
    print("\n".join(table(columns, rows)))


if __name__ == "__main__":
    main()
