"""Compare a foreign policy in `LeggedRobot` with the same policy in a plain MuJoCo loop.

    pip download --no-deps holosoma-inference==0.1.3 holosoma==0.0.3
    python scripts/foreign_walks.py FOLDER g1 fastsac LAYOUT [episodes] [seconds]

FOLDER has both wheels unpacked, LAYOUT is as in docs/foreign_policies.md. Policies: g1 or t1,
fastsac or ppo. Both walk with equal commands, starts, steps of 1 ms and Euler's integrator. Prints
a row of a table, loop / env: falls, mean speed along the command in m/s, its relative difference,
largest difference of a mean velocity, policy steps per CPU second.
"""

import sys
import time

import mujoco
import numpy as np
import torch
from tensordict import TensorDict

from lightning_rl import LeggedRobot, OnnxPolicy
from lightning_rl.extensions.transfer.layout import read_layout

STEP = 0.001


def velocity_of(quaternion, velocity):
    """Return velocities [3]: forwards and to the left in the frame of a base [4], yaw; of [6]."""
    mujoco.mju_quat2Mat(frame := np.zeros(9), quaternion.astype(float))
    forward = frame.reshape(3, 3).T @ velocity[:3]
    return [*forward[:2], velocity[5]]


def plain(model_file, layout, session, commands, steps):
    """Walk in a loop of one's own; return velocities [N, T, 3] (NaN after a fall)."""
    spec = mujoco.MjSpec.from_file(model_file)
    plane = mujoco.mjtGeom.mjGEOM_PLANE
    spec.worldbody.add_geom(name="floor", type=plane, size=[50, 50, 0.1], contype=1, conaffinity=1)
    model = spec.compile()
    model.opt.timestep, data = STEP, mujoco.MjData(model)
    joints = layout.joints
    position = np.array([model.joint(name).qposadr[0] for name in joints])
    velocity = np.array([model.joint(name).dofadr[0] for name in joints])
    drive = np.array([model.actuator(name).id for name in joints])
    described = layout.default_position, layout.stiffness, layout.damping, layout.action_scale
    pose, kp, kd, scale = (np.array([part[name] for name in joints]) for part in described)
    speeds = np.full((len(commands), steps, 3), np.nan)
    for episode, command in enumerate(commands):
        mujoco.mj_resetData(model, data)
        data.qpos[2], data.qpos[position] = layout.height, pose
        action = np.zeros(len(joints))
        for step in range(steps):
            rotation = np.zeros(9)
            mujoco.mju_quat2Mat(rotation, data.qpos[3:7])
            rotation = rotation.reshape(3, 3)
            phase = np.array(layout.phases) + 2 * np.pi * data.time / layout.phase_period
            terms = {
                "actions": action,
                "base_ang_vel": data.qvel[3:6],
                "command_ang_vel": command[2:],
                "command_lin_vel": command[:2],
                "cos_phase": np.cos(phase),
                "dof_pos": data.qpos[position] - pose,
                "dof_vel": data.qvel[velocity],
                "projected_gravity": rotation.T @ [0, 0, -1],
                "sin_phase": np.sin(phase),
            }
            parts = [terms[name] * term.scale for name, term in layout.observation.items()]
            action = session(np.concatenate(parts).astype(np.float32)[None])[0]
            target = pose + scale * action
            for _ in range(round(layout.control_period / STEP)):
                data.ctrl[drive] = kp * (target - data.qpos[position]) - kd * data.qvel[velocity]
                mujoco.mj_step(model, data)
            if data.qpos[2] < layout.height / 2:
                break
            speeds[episode, step] = velocity_of(data.qpos[3:7], data.qvel)
    return speeds


def ours(model_file, layout_file, policy_file, commands, steps):
    """Walk in `LeggedRobot`; return velocities [N, T, 3] (NaN after a fall)."""
    env = LeggedRobot(
        len(commands),
        model_file,
        layout_file,
        timestep=STEP,
        integrator="euler",
        action_clip=100.0,
        events={"command": None},
        max_episode_steps=steps + 1,
    )
    spaces = env.single_observation_space, env.single_action_space
    policy = OnnxPolicy(*spaces, path=policy_file, layout=layout_file)
    names = list(spaces[0].names)
    columns = [names.index(f"command_{name}") for name in ("lin_vel/0", "lin_vel/1", "ang_vel/0")]
    observation, _ = env.reset(seed=0)
    env.state["command"] = torch.tensor(commands, dtype=torch.float32)
    observation[:, columns] = env.state["command"]
    alive = np.ones(len(commands), bool)
    speeds = np.full((len(commands), steps, 3), np.nan)
    for step in range(steps):
        td = TensorDict({"observation": observation}, [len(commands)])
        action = policy.get_action(td, deterministic=True)["action"]
        observation, _, terminated, _, _ = env.step(action)
        alive &= ~terminated.numpy()
        root, velocity = env.state["qpos"].numpy(), env.state["qvel"].numpy()
        for row in np.flatnonzero(alive):
            speeds[row, step] = velocity_of(root[row, 3:7], velocity[row])
    return speeds, policy.graph


def main(folder, robot, which, layout_file, episodes="20", seconds="20"):
    model_file = f"{folder}/holosoma/data/robots/{robot}/{robot}_29dof.xml"
    policy_file = (
        f"{folder}/holosoma_inference/models/loco/{robot}_29dof/{which}_{robot}_29dof.onnx"
    )
    layout = read_layout(layout_file)
    steps = round(float(seconds) / layout.control_period)
    box = np.array([1.0, 0.5, 1.0])
    commands = np.random.default_rng(0).uniform(-box, box, (int(episodes), 3))
    begin = time.process_time()
    in_env, graph = ours(model_file, layout_file, policy_file, commands, steps)
    middle = time.process_time()
    in_loop = plain(model_file, layout, graph, commands, steps)
    end = time.process_time()
    falls = [int(np.isnan(speeds[:, -1, 0]).sum()) for speeds in (in_loop, in_env)]
    both = ~(np.isnan(in_loop[:, -1, 0]) | np.isnan(in_env[:, -1, 0]))
    # Along the command, per episode, after two seconds.
    first = round(2.0 / layout.control_period)
    means = [speeds[both, first:].mean(1) for speeds in (in_loop, in_env)]
    along = [float((mean * np.sign(commands[both])).mean(0)[:2].sum()) for mean in means]
    largest = float(np.abs(means[0] - means[1]).max())
    rates = [len(commands) * steps / spent for spent in (end - middle, middle - begin)]
    print(
        f"| {robot} {which} | {falls[0]} / {falls[1]} | {along[0]:.3f} / {along[1]:.3f} | "
        f"{abs(along[1] / along[0] - 1):.1%} | {largest:.3f} | {rates[0]:.0f} / {rates[1]:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
