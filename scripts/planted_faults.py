"""Plant faults in the layout or the env of a policy that others trained: are they named?

    pip download --no-deps holosoma-inference==0.1.3 holosoma==0.0.3
    python scripts/planted_faults.py FOLDER g1 fastsac LAYOUT [fault ...]

FOLDER has both wheels unpacked, LAYOUT is as in docs/foreign_policies.md. Policies: g1 or t1,
fastsac or ppo. Needs the extras mujoco and export. Prints a row of a table for each fault: policy,
fault, place of the right answer, first answer, rewards without and with it, CPU seconds.
"""

import dataclasses
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import mujoco
import onnx
import torch
import yaml

from lightning_rl import LeggedRobot, OnnxPolicy
from lightning_rl.extensions.managers.term import Observation
from lightning_rl.extensions.transfer.candidates import cure, partners
from lightning_rl.extensions.transfer.layout import read_layout
from lightning_rl.extensions.transfer.legged import terms_of
from lightning_rl.extensions.transfer.trial import Trial

WHEEL_ORDER = (
    "base_ang_vel projected_gravity command_lin_vel command_ang_vel dof_pos dof_vel actions"
)
"""Order of the terms in the wheel's table; the policies read them sorted by name."""


def world_gravity(env):
    return torch.tensor([0.0, 0.0, -1.0]).expand(env.num_envs, 3)


def ordered(layout, joints):
    return {"default_position": {joint: layout.default_position[joint] for joint in joints}}


def swapped(layout, first, second):
    swap = {first: second, second: first}
    return ordered(layout, [swap.get(joint, joint) for joint in layout.joints])


def times(layout, factor, *names):
    return {
        name: {joint: factor * v for joint, v in getattr(layout, name).items()} for name in names
    }


def scaled(layout, term, scale):
    changed = dataclasses.replace(layout.observation[term], scale=scale)
    return {"observation": layout.observation | {term: changed}}


def fault(changes, *answers, **of_env):
    """Return the changes of the layout and of the env, and the beginnings of the right answers."""
    return changes, of_env, answers


def faults_of(layout):
    """Return the faults by name."""
    left, right = [joint for joint in layout.joints if "hip" in joint and "left" in joint][:2]
    order = WHEEL_ORDER.split()
    terms = sorted(layout.observation, key=lambda t: order.index(t) if t in order else 99)
    gyro = layout.observation["base_ang_vel"].scale
    return {
        "two joints exchanged": fault(
            swapped(layout, left, right), f"{left} and {right} ex", f"{right} and {left} ex"
        ),
        "left and right mirrored": fault(
            ordered(layout, partners(layout.joints).values()), "left and right"
        ),
        "terms in another order": fault(
            {"observation": {term: layout.observation[term] for term in terms}}, "terms sorted"
        ),
        "angular velocity unscaled": fault(
            scaled(layout, "base_ang_vel", 1.0 if gyro != 1.0 else 4.0), "scale of base_ang_vel"
        ),
        "gravity in the world's frame": fault({}, "frame of projected_gravity", gravity=True),
        "gains halved": fault(
            times(layout, 0.5, "stiffness", "damping"), "gains", "mass", "stiffness"
        ),
        "action scale doubled": fault(times(layout, 2.0, "action_scale"), "action_scale"),
        "delay of two steps": fault({}, "delay", delay=2),
        "control period of 10 ms": fault({"control_period": 0.01}, "control_period"),
        "floor without friction": fault({}, "friction", friction=0.0),
    }


def spec_of(path, friction):
    spec = mujoco.MjSpec.from_file(str(path))
    plane = mujoco.mjtGeom.mjGEOM_PLANE
    spec.worldbody.add_geom(name="floor", type=plane, size=[50, 50, 0.1], contype=1, conaffinity=1)
    spec.compiler.discardvisual = True  # 71 MB of meshes per model
    if friction is not None:
        # The G1's feet have explicit pairs, with a friction of their own.
        for geom in spec.geoms:
            geom.friction[0] = friction
        for pair in spec.pairs:
            pair.friction[:2] = friction, friction
    return spec


def written(layout, path):
    settings = {name: value for name, value in vars(layout).items() if value is not None}
    settings["observation"] = {name: vars(term) for name, term in layout.observation.items()}
    settings["phases"] = list(layout.phases)
    Path(path).write_text(yaml.safe_dump(settings, sort_keys=False))
    return str(path)


def main(folder, robot, which, layout_file, *names):
    temporary = Path(tempfile.mkdtemp())
    model = onnx.load(
        f"{folder}/holosoma_inference/models/loco/{robot}_29dof/{which}_{robot}_29dof.onnx"
    )
    layout = read_layout(layout_file)
    del model.metadata_props[:]  # which would name most faults at once
    policy_file = str(temporary / "policy.onnx")
    onnx.save(model, policy_file)
    for name, (changes, of_env, answers) in faults_of(layout).items():
        if names and name not in names:
            continue
        begin = time.process_time()
        faulty = dataclasses.replace(layout, **changes)
        path = written(faulty, temporary / "layout.yaml")
        spec = spec_of(
            f"{folder}/holosoma/data/robots/{robot}/{robot}_29dof.xml", of_env.get("friction")
        )
        settings = {"delay": of_env.get("delay", 0)}
        if "gravity" in of_env:
            terms = terms_of(faulty) | {"projected_gravity": Observation(world_gravity)}
            settings["observations"] = {"policy": terms}

        make = partial(LeggedRobot, model=spec, layout=path, **settings)
        env = make(1)
        spaces = env.single_observation_space, env.single_action_space
        trial = Trial(OnnxPolicy(*spaces, path=policy_file, layout=path), make)
        findings = trial.explain()
        kinds = [finding.kind for finding in findings if finding.kind != "as it is"]
        places = [i for i, kind in enumerate(kinds, 1) if kind.startswith(answers)]
        unchanged = next(finding for finding in findings if finding.setup is trial.base)
        print(
            f"| {robot} {which} | {name} | {places[0] if places else '-'} | {kinds[0]}, "
            f"{cure(trial.base, findings[0].setup)[:50]} | {unchanged.reward:.2f} | "
            f"{findings[0].reward:.2f} | {time.process_time() - begin:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
