"""Measure how a humanoid of EnvPool follows commanded velocities, over episodes of 20 seconds.

    python scripts/walking.py none outputs/sac_humanoid_*/checkpoints/best.ckpt --pushes
    python scripts/walking.py policy.onnx --episodes 1 --film walk.mp4     # MUJOCO_GL=egl

`none` is the action 0, by which a robot falls. Errors count the steps whose command is above
.3 m/s: of the velocity, the length of the difference of the horizontal velocity from the command,
in m/s, and the absolute difference of the yaw rate, in rad/s; at each step, and of means over a
second (a gait swings the trunk). A foot steps if it leaves the floor within a second. Measured
figures stand in docs/humanoid.md.
"""

import argparse
from pathlib import Path

import torch

from lightning_rl import EnvPoolEnv, load_policy
from scripting import table

SECOND = 50
"""Control steps of a second."""

COLUMNS = ("policy", "return", "not fallen", "velocity error, m/s", "yaw error, rad/s")
COLUMNS += ("of a second: velocity", "yaw", "both feet step")

FIRST_SEED = 1_000_000
"""Seed of the first env; training and evaluation draw theirs from below."""


def loaded(name):
    """Return the function from observations to actions that a checkpoint or an ONNX file holds."""
    if not name.endswith(".onnx"):
        return load_policy(name).act
    import onnxruntime

    session = onnxruntime.InferenceSession(name)
    names = [given.name for given in session.get_inputs()]
    return lambda seen: torch.from_numpy(
        session.run(
            ["action"], {name: seen[name.removeprefix("observation.")].numpy() for name in names}
        )[0]
    )


def play(act, env, episodes, frames):
    """Return what each step of one episode per env has, as tensors [T, N, ...]."""
    observation, _ = env.reset(seed=[FIRST_SEED + i for i in range(episodes)])
    joints = env.single_action_space.shape[0]
    alive = torch.ones(episodes, dtype=torch.bool)
    steps, returns, fallen = [], torch.zeros(episodes), torch.zeros(episodes, dtype=torch.bool)
    while alive.any():
        action = torch.zeros(episodes, joints) if act is None else act(dict(observation))
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
        if frames is not None and len(steps) < 8 * SECOND and len(steps) % 2 == 0:
            frames.append(env.render([0])[0])
        returns += reward * alive
        fallen |= terminated & alive
        alive &= ~(terminated | truncated)
    return {key: torch.stack([step[key] for step in steps]) for key in steps[0]}, returns, fallen


def seconds(tensor):
    """Return the means [T / SECOND, N, ...] over each second."""
    whole = len(tensor) // SECOND * SECOND
    return tensor[:whole].float().unflatten(0, (-1, SECOND)).mean(1)


def measure(act, settings, episodes, film):
    env = EnvPoolEnv(episodes, **settings)
    if film:
        env.make_renderable()
    frames = [] if film else None
    steps, returns, fallen = play(act, env, episodes, frames)
    if film:
        from imageio.v3 import imwrite

        imwrite(film, frames, fps=SECOND // 2, codec="libx264")
    walks = (steps["command"][..., :2].norm(dim=-1) > 0.3) & steps["alive"]
    whole = seconds(walks) == 1  # seconds whose steps all count
    errors = []
    for keep, average in ((walks, lambda x: x), (whole, seconds)):
        error = average(steps["velocity"]) - average(steps["command"])
        errors += [error[..., :2].norm(dim=-1)[keep].mean(), error[..., 2].abs()[keep].mean()]
    stepping = (seconds(steps["contact"]) < 1).all(-1)[whole].float().mean()
    return [returns.mean(), 1 - fallen.float().mean(), *errors, stepping]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policies", nargs="+", help="checkpoints, ONNX files, or none")
    parser.add_argument("--pushes", action="store_true")
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--film", type=Path, help="8 s of the last policy, first env")
    given = parser.parse_args()
    settings = {"id": "T1JoystickFlatTerrain-v1", "env_kwargs": {"push_enable": given.pushes}}
    print("\n".join(table(COLUMNS, ())))
    for name in given.policies:
        act = None if name == "none" else loaded(name)
        film = given.film if name == given.policies[-1] else None
        numbers = measure(act, settings, given.episodes, film)
        print(f"| {name} | {' | '.join(f'{number:.2f}' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
