"""Measure how a humanoid of EnvPool follows commanded velocities, over episodes of 20 seconds.

    python scripts/walking.py standing outputs/sac_humanoid_*/checkpoints/best.ckpt --pushes

`standing` is the action 0. Errors count the steps whose command is above .3 m/s: of the velocity,
the length of the difference of the horizontal velocity from the command, in m/s, and the absolute
difference of the yaw rate, in rad/s; at each step, and of means over a second (a gait swings the
trunk). A foot steps if it leaves the floor within a second. Measured figures stand in
docs/humanoid.md.
"""

import argparse

import torch

from lightning_rl import EnvPoolEnv, load_policy

SECOND = 50
"""Control steps of a second."""

FIRST_SEED = 1_000_000
"""Seed of the first env; training and evaluation draw theirs from below."""


def play(policy, env, episodes):
    """Return what each step of one episode per env has, as tensors [T, N, ...]."""
    observation, _ = env.reset(seed=[FIRST_SEED + i for i in range(episodes)])
    joints = env.single_action_space.shape[0]
    alive = torch.ones(episodes, dtype=torch.bool)
    steps, returns, fallen = [], torch.zeros(episodes), torch.zeros(episodes, dtype=torch.bool)
    while alive.any():
        action = torch.zeros(episodes, joints) if policy is None else policy.act(dict(observation))
        observation, reward, terminated, truncated, info = env.step(action)
        seen = info.get("final_obs", observation)
        truth = seen["privileged_state"][:, seen["state"].shape[1] :]
        contact = 15 + 3 * joints + 1  # after the trunk's sensors, the joints', and the height
        steps.append(
            {
                "command": seen["state"][:, 9:12],
                "velocity": torch.cat([truth[:, 9:11], truth[:, 2:3]], 1),
                "contact": truth[:, contact : contact + 2] > 0.5,
                "alive": alive.clone(),
            }
        )
        returns += reward * alive
        fallen |= terminated & alive
        alive &= ~(terminated | truncated)
    return {key: torch.stack([step[key] for step in steps]) for key in steps[0]}, returns, fallen


def seconds(tensor):
    """Return the means [T / SECOND, N, ...] over each second."""
    whole = len(tensor) // SECOND * SECOND
    return tensor[:whole].float().unflatten(0, (-1, SECOND)).mean(1)


def measure(policy, settings, episodes):
    env = EnvPoolEnv(episodes, **settings)
    steps, returns, fallen = play(policy, env, episodes)
    walks = (steps["command"][..., :2].norm(dim=-1) > 0.3) & steps["alive"]
    whole = seconds(walks) == 1  # seconds with one command, from their first step to their last
    errors = []
    for keep, average in ((walks, lambda x: x), (whole, seconds)):
        error = average(steps["velocity"]) - average(steps["command"])
        errors += [error[..., :2].norm(dim=-1)[keep].mean(), error[..., 2].abs()[keep].mean()]
    stepping = (seconds(steps["contact"]) < 1).all(-1)[whole].float().mean()
    return [returns.mean(), 1 - fallen.float().mean(), *errors, stepping]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policies", nargs="+", help="checkpoints, run directories or `standing`")
    parser.add_argument("--id", default="T1JoystickFlatTerrain-v1")
    parser.add_argument("--pushes", action="store_true")
    parser.add_argument("--episodes", type=int, default=50)
    given = parser.parse_args()
    settings = {"id": given.id, "env_kwargs": {"push_enable": given.pushes}}
    print(
        "| policy | return | not fallen | velocity error, m/s | yaw error, rad/s | of a second: "
        "velocity | yaw | both feet step |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in given.policies:
        policy = None if name == "standing" else load_policy(name)
        numbers = measure(policy, settings, given.episodes)
        print(f"| {name} | {' | '.join(f'{number:.2f}' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
