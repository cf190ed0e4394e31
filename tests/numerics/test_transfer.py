"""A policy in an ONNX file acts as its graph says, in the order of its layout; a robot is driven as a plain loop drives it."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tensordict import TensorDict

from lightning_rl import LeggedRobot, OnnxPolicy, load_policy
from lightning_rl.cli.app import run
from lightning_rl.extensions.transfer.layout import read_layout
from lightning_rl.extensions.transfer.legged import driven
from lightning_rl.extensions.transfer.onnx_policy import OnnxGraph
from tests.helpers import assert_same, last, load
from tests.messages import assert_names, refused

onnx = pytest.importorskip("onnx", reason="the extra export is not installed")
pytest.importorskip("onnxruntime", reason="the extra export is not installed")
mujoco = pytest.importorskip("mujoco", reason="the extra mujoco is not installed")

MODEL = """
<mujoco>
  <option timestep="0.002"/>
  <worldbody>
    <body name="base" pos="0 0 1">
      <freejoint/>
      <geom type="box" size=".1 .1 .1" mass="5"/>
      <body name="left" pos="0 .1 -.1">
        <joint name="left_hip" axis="0 1 0" armature=".01"/>
        <geom type="capsule" size=".03" fromto="0 0 0 0 0 -.4" mass="1"/>
      </body>
      <body name="right" pos="0 -.1 -.1">
        <joint name="right_hip" axis="0 1 0" armature=".01"/>
        <geom type="capsule" size=".03" fromto="0 0 0 0 0 -.4" mass="1"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor joint="left_hip" ctrlrange="-40 40" ctrllimited="true"/>
    <motor joint="right_hip" ctrlrange="-40 40" ctrllimited="true"/>
  </actuator>
</mujoco>
"""

LAYOUT = """
observation:
  dof_vel: {joints: true, scale: 0.05}
  base_ang_vel: {scale: 0.25}
  projected_gravity: {}
  dof_pos: {joints: true}
  command_lin_vel: {}
  command_ang_vel: {}
  actions: {joints: true}
  sin_phase: {}
default_position: {right_hip: -0.2, left_hip: 0.1}
stiffness: {right_hip: 50.0, left_hip: 40.0}
damping: 2.0
action_scale: {right_hip: 0.5, left_hip: 0.25}
control_period: 0.02
height: 0.55
phases: [0.0, 1.5]
"""
SIZE = 2 + 3 + 3 + 2 + 2 + 1 + 2 + 2


def write_graph(path, fixed=False, metadata=None, **more_inputs):
    """Write a graph [1, SIZE] -> [1, 2]: a product; `fixed` counts the rows inside."""
    weight = np.random.default_rng(1).normal(size=(SIZE, 2)).astype(np.float32) * 0.1
    shape = np.array([1 if fixed else -1, 2], np.int64)
    nodes = [onnx.helper.make_node("MatMul", ["obs", "weight"], ["product"])]
    nodes.append(onnx.helper.make_node("Reshape", ["product", "shape"], ["action"]))
    inputs, outputs = (
        [
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, size])
            for name, size in sizes.items()
        ]
        for sizes in ({"obs": SIZE} | more_inputs, {"action": 2})
    )
    constants = {"weight": weight, "shape": shape}
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = onnx.helper.make_graph(nodes, "policy", inputs, outputs, constants)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.helper.set_model_props(model, metadata or {})
    onnx.save(model, str(path))
    return weight.astype(np.float64)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "robot.xml").write_text(MODEL)
    (tmp_path / "robot.yaml").write_text(LAYOUT)
    return write_graph(tmp_path / "policy.onnx")


def robot(num_envs=3, **settings):
    return LeggedRobot(num_envs, model="robot.xml", layout="robot.yaml", **settings)


def policy(env, path="policy.onnx", layout="robot.yaml"):
    spaces = env.single_observation_space, env.single_action_space
    return OnnxPolicy(*spaces, path=path, layout=layout)


def acting(policy, observation):
    td = TensorDict({"observation": observation}, observation.shape[:1])
    return policy.get_action(td, deterministic=True)["action"]


def test_a_policy_reads_terms_and_joints_by_their_names(files, tmp_path):
    """The env has other terms first, and its joints in the other order."""
    order = "default_position: {left_hip: 0.1, right_hip: -0.2}"
    text = LAYOUT.replace("default_position: {right_hip: -0.2, left_hip: 0.1}", order)
    first, *others = text.partition("  sin_phase: {}\n")
    (tmp_path / "env.yaml").write_text(
        first.replace("observation:", "observation:\n  sin_phase: {}") + others[-1]
    )
    env = LeggedRobot(3, model="robot.xml", layout="env.yaml")
    assert env.single_action_space.names == ("left_hip", "right_hip")
    observation, _ = env.reset(seed=1)
    for _ in range(3):
        observation, *_ = env.step(torch.rand(3, 2) - 0.5)
    read = {}
    for name, column in zip(
        env.single_observation_space.names, observation.double().T, strict=True
    ):
        read.setdefault(name.partition("/")[0], []).append(column.numpy())
    parts = [np.array(read["dof_vel"])[::-1] * 0.05, np.array(read["base_ang_vel"]) * 0.25]
    parts += [read["projected_gravity"], read["dof_pos"][::-1], read["command_lin_vel"]]
    parts += [read["command_ang_vel"], read["actions"][::-1], read["sin_phase"]]
    expected = (np.concatenate(parts).T @ files)[:, ::-1]
    np.testing.assert_allclose(acting(policy(env), observation).numpy(), expected, atol=1e-5)


def test_rows_are_computed_in_one_pass_where_the_graph_allows_it(files, tmp_path):
    free = OnnxGraph("policy.onnx")
    write_graph(tmp_path / "fixed.onnx", fixed=True)
    fixed = OnnxGraph("fixed.onnx")
    rows = np.random.default_rng(0).normal(size=(5, SIZE)).astype(np.float32)
    assert (free.takes_batches, fixed.takes_batches) == (True, False)
    np.testing.assert_allclose(free(rows), rows @ files, atol=1e-5)
    np.testing.assert_allclose(fixed(rows), rows @ files, atol=1e-5)


def test_the_metadata_of_a_file_complete_the_layout_and_must_not_contradict_it(files, tmp_path):
    metadata = {"dof_names": '["right_hip", "left_hip"]', "kp": "[50.0, 40.0]", "kd": "[2.0, 2.0]"}
    write_graph(tmp_path / "described.onnx", metadata=metadata)
    lines = [line for line in LAYOUT.splitlines() if not line.startswith(("stiffness", "damping"))]
    (tmp_path / "short.yaml").write_text("\n".join(lines))
    env = robot(1)
    described = policy(env, "described.onnx", "short.yaml").layout
    assert described == read_layout("robot.yaml")
    (tmp_path / "other.yaml").write_text(LAYOUT.replace("left_hip: 40.0", "left_hip: 20.0"))
    with refused(names=("stiffness", "left_hip", "20.0", "40.0")):
        policy(env, "described.onnx", "other.yaml")
    with refused(names=("short.yaml", "stiffness")):
        policy(env, "policy.onnx", "short.yaml")


def test_texts_of_metadata_with_commas_are_lists_of_rounded_numbers(files, tmp_path):
    """mjlab prints three decimals: its names were read as letters, its numbers ended in a TypeError."""
    metadata = {"joint_names": "right_hip, left_hip", "joint_stiffness": "50.000,40.000"}
    metadata |= {"action_scale": "0.500,0.250", "joint_damping": "2.558,6.309"}
    write_graph(tmp_path / "described.onnx", metadata=metadata)
    metadata = OnnxGraph("described.onnx").metadata
    exact = LAYOUT.replace("damping: 2.0", "damping: {right_hip: 2.5578897, left_hip: 6.3088}")
    Path("short.yaml").write_text(LAYOUT.replace("damping: 2.0\n", ""))
    Path("exact.yaml").write_text(exact)
    assert read_layout("short.yaml", metadata).damping == {"right_hip": 2.558, "left_hip": 6.309}
    assert read_layout("exact.yaml", metadata).damping["right_hip"] == 2.5578897
    Path("other.yaml").write_text(exact.replace("6.3088", "6.304"))
    with refused(names=("other.yaml", "damping", "left_hip", "6.304", "6.309")):
        read_layout("other.yaml", metadata)
    for wrong in ("2.558,6.309,1.000", "2.558,soft"):
        with refused(names=("joint_damping", "right_hip", "left_hip")):
            read_layout("short.yaml", metadata | {"joint_damping": wrong})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (("dof_vel:", "joint_speed:"), ("joint_speed", "dof_vel")),
        (("  sin_phase: {}\n", ""), ("policy.onnx", str(SIZE), str(SIZE - 2))),
        (("right_hip: -0.2", "right_knee: -0.2"), ("stiffness", "right_knee")),
        (("scale: 0.25}", "factor: 0.25}"), ("base_ang_vel", "factor", "scale")),
        (("control_period", "period"), ("period", "control_period")),
        (("0.02", "0"), ("control_period", "0")),
        (("scale: 0.25}", "scale: much}"), ("base_ang_vel", "scale", "much")),
        (("left_hip: 40.0", "left_hip: stiff"), ("stiffness", "left_hip", "stiff")),
    ],
)
def test_a_wrong_layout_is_refused(files, tmp_path, change, names):
    (tmp_path / "wrong.yaml").write_text(LAYOUT.replace(*change))
    env = robot(1)
    with refused(names=names):
        policy(env, layout="wrong.yaml")


def test_a_graph_of_two_inputs_and_a_file_that_is_none_are_refused(files, tmp_path):
    write_graph(tmp_path / "dance.onnx", time_step=1)
    outside = onnx.load("policy.onnx")
    save = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    onnx.save(outside, "outside.onnx", **save)
    (tmp_path / "text.onnx").write_text("no graph")
    named = {"dance": ("time_step",), "text": (), "none": (), "outside": ("weight",)}
    for name, words in named.items():
        with refused(names=(f"{name}.onnx", *words)):
            policy(robot(1), f"{name}.onnx")


@pytest.mark.parametrize("integrator", ["euler", "implicitfast"])
def test_a_robot_moves_as_in_a_plain_loop(files, integrator):
    env = robot(1, timestep=0.001, integrator=integrator, events={"command": None})
    env.reset(seed=0)
    implicit = integrator == "implicitfast"
    # An implicit step needs the damping in the model.
    damped = MODEL.replace('armature=".01"', 'armature=".01" damping="2"') if implicit else MODEL
    spec = mujoco.MjSpec.from_string(damped)
    spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=[5, 5, 0.1])
    if implicit:
        spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    spec.option.timestep = 0.001
    model = spec.compile()
    data = mujoco.MjData(model)
    data.qpos[2] = 0.55
    data.qpos[7:] = 0.1, -0.2
    scale, kp, start = np.array([0.25, 0.5]), np.array([40.0, 50.0]), np.array([0.1, -0.2])
    damping = 0.0 if implicit else 2.0
    for step in range(15):
        action = np.sin([0.3 * step, 0.5 * step])
        env.step(torch.tensor([[action[1], action[0]]], dtype=torch.float32))
        for _ in range(20):
            torque = kp * (start + scale * action - data.qpos[7:]) - damping * data.qvel[6:]
            data.ctrl[:] = torque
            mujoco.mj_step(model, data)
    np.testing.assert_allclose(env.state["qpos"][0].numpy(), data.qpos, atol=2e-4)


def test_servos_have_the_limits_of_force_of_the_actuators_before_them(files):
    """The range of a servo's positions in rad became the limit of its force: the robot fell."""
    positions = 'ctrlrange="-0.1 2.9"'
    limits = {
        f'<position kp="75" {positions} forcerange="-139 139"': (-139, 139),
        f'<general biastype="affine" gainprm="75" biasprm="0 -75 -2" {positions}': (0, 0),
        '<motor gear="-139" ctrlrange="-1 2"': (-278, 139),
        '<motor gear="2" forcerange="-50 50" ctrlrange="-20 90"': (-40, 100),
        '<motor ctrlrange="-40 40" ctrllimited="false"': (0, 0),
    }
    for kind, limit in limits.items():
        left_motor = MODEL[MODEL.index("<motor") : MODEL.index("/>", MODEL.index("<motor"))]
        spec = mujoco.MjSpec.from_string(MODEL.replace(left_motor, f'{kind} joint="left_hip"'))
        model = driven(spec, read_layout("robot.yaml")).compile()
        assert tuple(model.actuator("left_hip").forcerange) == limit, kind
        assert model.actuator("left_hip").forcelimited == (limit != (0, 0))
        assert tuple(model.actuator("right_hip").forcerange) == (-40, 40)


def test_a_keyframe_of_other_actuators_is_not_compiled_with_the_servos(files):
    text = '<position joint="left_hip"/></actuator><keyframe><key ctrl="1 2 3"/></keyframe>'
    spec = mujoco.MjSpec.from_string(MODEL.replace("</actuator>", text))
    model = driven(spec, read_layout("robot.yaml")).compile()
    assert (model.nu, model.key_ctrl.tolist()) == (2, [[-0.2, 0.1]])


MODEL_AND_LAYOUT = {"model": "robot.xml", "layout": "robot.yaml"}
ENV = {"class_path": "LeggedRobot", "init_args": MODEL_AND_LAYOUT | {"max_episode_steps": 8}}
ONNX = {"class_path": "OnnxPolicy", "init_args": {"path": "policy.onnx", "layout": "robot.yaml"}}
DATA = {"env": ENV, "num_envs": 2, "buffer_size": 8, "num_eval_episodes": 1}


def write_config(name, model, **data):
    config = {"model": model, "data": DATA | {"total_env_steps": 32} | data}
    config["trainer"] = {"accelerator": "cpu", "run_dir": name}
    Path(f"{name}.yaml").write_text(yaml.safe_dump(config))
    return f"{name}.yaml"


def train(name, model, *options, **data):
    run(["fit", "--config", write_config(name, model, **data), *options])
    return load(last(Path(name)))["state_dict"]


def sac_of(**correction):
    """SAC of a correction of a policy."""
    policy = {"class_path": "ResidualActorCritic", "init_args": correction}
    settings = {"batch_size": 8, "random_env_steps": 0, "updates_per_env_step": 0.25}
    return {"class_path": "SAC", "init_args": settings | {"policy": policy}}


def train_nothing():
    """Leave a checkpoint of the policy in the file, named `fixed`."""
    train("fixed", {"class_path": "FixedPolicy", "init_args": {"policy": ONNX}})


def test_a_run_without_training_has_a_checkpoint_that_acts_alike_while_the_file_stays(files):
    train_nothing()
    env = robot(2)
    observation, _ = env.reset(seed=0)
    original = policy(env)
    loaded = load_policy("fixed")
    expected = acting(original, observation).numpy()
    np.testing.assert_array_equal(loaded.act(observation.numpy()), expected)
    for copied in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        np.testing.assert_array_equal(acting(copied, observation).numpy(), expected)
    run(["validate", "--ckpt_path", "fixed"])
    write_graph("policy.onnx", metadata={"trained": '"again"'})
    with refused(names="policy.onnx"):
        load_policy("fixed")


@pytest.mark.parametrize("source", ["base", "checkpoint", "critic_reads_velocity"])
def test_a_correction_of_it_is_trained_resumed_and_collected_in_the_background(
    files, source, monkeypatch
):
    base = {"base": ONNX}
    if source == "critic_reads_velocity":
        velocity = {"term": "lightning_rl.extensions.mujoco.quadruped.torso_velocity"}
        settings = ENV["init_args"] | {"observations": {"critic": {"velocity": velocity}}}
        monkeypatch.setitem(DATA, "env", ENV | {"init_args": settings})
        base = {"base": ONNX | {"init_args": ONNX["init_args"] | {"key": "policy"}}}
        base |= {"actor_keys": ["policy"], "critic_keys": ["policy", "critic"]}
    if source == "checkpoint":
        train_nothing()
        base = {"checkpoint": "fixed"}
    sac, data = sac_of(**base, hidden_sizes=[8]), {"replay": "ReplayBuffer", "total_env_steps": 64}
    whole = train("whole", sac, **data)
    train("half", sac, "--trainer.max_steps", "2", **data)
    run(["fit", "--ckpt_path", "half", "--trainer.max_steps", "-1"])
    assert_same(load(last(Path("half")))["state_dict"], whole)
    background = {"class_path": "AsyncCollector", "init_args": {"max_staleness": 0}}
    assert_same(train("async", sac, **data, collector=background), whole)


def test_a_compiled_update_of_a_correction_follows_the_eager_one(files, traced_only):
    sac = sac_of(base=ONNX, hidden_sizes=[8])
    data = {"replay": "ReplayBuffer", "total_env_steps": 64}
    eager = train("eager", sac, "--model.compile", "false", **data)
    compiled = train("compiled", sac, "--model.compile", "true", **data)
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-4)


def test_ppo_corrects_it_and_resumes_exactly_and_no_graph_is_exported(files, capsys):
    correction = {"class_path": "GaussianResidualActorCritic"}
    correction["init_args"] = {"base": ONNX, "hidden_sizes": [8]}
    ppo = {"class_path": "PPO", "init_args": {"policy": correction, "batch_size": 8}}
    whole = train("whole", ppo, total_env_steps=64)
    train("half", ppo, "--trainer.max_steps", "2", total_env_steps=64)
    run(["fit", "--ckpt_path", "half", "--trainer.max_steps", "-1"])
    assert_same(load(last(Path("half")))["state_dict"], whole)
    with pytest.raises(SystemExit):
        run(["export", "--ckpt_path", "half", "--format", "torch"])
    assert_names(capsys.readouterr().err, "policy.onnx", "--format safetensors")
