"""Compare the two backends of MujocoEnv: their states, and their speed.

    pip install -e '.[warp]'
    python scripts/mujoco_backends.py [--envs 64] [--device cuda]

The first run on a machine compiles MuJoCo Warp's kernels, for one to two minutes a model on a CPU.
WARP_CACHE_PATH is the folder that keeps them. Measured figures stand in docs/results.md.
"""

import argparse
import time
from functools import partial

import torch

from lightning_rl import MujocoEnv, Quadruped, Reach
from lightning_rl.envs.gymnasium.mujoco_bindings import import_mujoco

CONTACTS = """
<mujoco>
  <option timestep="0.01" integrator="implicitfast"/>
  <worldbody>
    <geom type="plane" size="2 2 .1"/>
    <body name="arm" pos="0 0 .6">
      <joint name="hinge" type="hinge" axis="0 1 0" damping=".1"/>
      <geom type="capsule" fromto="0 0 0 0 0 -.4" size=".05" mass="1"/>
    </body>
    <body name="ball" pos=".35 0 .12"><freejoint/><geom size=".1" mass=".2"/></body>
  </worldbody>
  <actuator><motor joint="hinge" ctrlrange="-3 3" ctrllimited="true"/></actuator>
</mujoco>
"""


def of(xml):
    """Return what makes an env of a model."""
    spec = import_mujoco().MjSpec.from_string(xml)
    return partial(MujocoEnv, model=lambda: spec, max_episode_steps=10_000)


def difference(model, steps, substeps=4, num_envs=4, device="cpu", amplitude=1.0):
    """Return the largest difference of `qpos`, `qvel` and frames after `steps` env steps.

    Both backends get the same starts, fields and random actions.
    """
    make = of(model) if isinstance(model, str) else model
    c = make(num_envs, substeps=substeps, backend="c")
    warp = make(num_envs, substeps=substeps, backend="warp", device=device)
    worst = 0.0
    for env in (c, warp):
        env.reset(seed=1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        drawn = torch.rand(num_envs, *c.single_action_space.shape, generator=generator)
        action = amplitude * (drawn * 2.0 - 1.0)
        c.step(action)
        warp.step(action)
        for name in ("qpos", "qvel", "sensordata"):
            apart = (c.state[name] - warp.state[name].cpu()).abs()
            worst = max(worst, float(apart.max()))
    return worst


def overflow(model, device="cpu"):
    """Step with too few contacts: this raises an error."""
    env = of(model)(4, backend="warp", device=device, max_contacts=1, max_constraints=1)
    env.reset(seed=1)
    for _ in range(50):
        env.step(torch.zeros(4, *env.single_action_space.shape))


def speed(make, num_envs, backend, device, seconds=5.0):
    """Return env steps per second."""
    env = make(num_envs, backend=backend, device=device)
    env.reset(seed=1)
    action = torch.zeros(num_envs, *env.single_action_space.shape, device=device)
    for _ in range(3):
        env.step(action)
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        env.step(action)
        done += num_envs
    if device != "cpu":
        torch.cuda.synchronize()
    return done / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    print("| model | largest difference after 20 env steps | c, env steps/s | warp, env steps/s |")
    print("|---|---|---|---|")
    for name, make in {
        "rod and ball": of(CONTACTS),
        "Reach": Reach,
        "Quadruped": Quadruped,
    }.items():
        apart = difference(make, 20, device=given.device)
        c = speed(make, given.envs, "c", "cpu")
        warp = speed(make, given.envs, "warp", given.device)
        print(f"| {name} | {apart:.1e} | {c:,.0f} | {warp:,.0f} |", flush=True)
    try:
        overflow(CONTACTS, given.device)
    except ValueError as error:
        print(error)


if __name__ == "__main__":
    main()
