"""Worlds of MujocoEnv do what plain `mj_step` does, and meet resume, background, threads and export."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import lightning_rl as rl
from lightning_rl.envs.gymnasium.mujoco_bindings import import_mujoco
from lightning_rl.extensions.managers import Event
from lightning_rl.extensions.managers.actions import DeltaPosition, Force, Position
from lightning_rl.extensions.managers.term import Metric, Observation, Reward
from lightning_rl.extensions.mujoco import rotations
from lightning_rl.extensions.mujoco.reach import ARM
from lightning_rl.extensions.mujoco.rendering import Marker
from tests.commands import rl_cli
from tests.equivalence.test_async import background
from tests.helpers import assert_same, assert_same_run, last, load, scalars, train
from tests.messages import assert_names, refused
from tests.references import angle_of, matrix_of

mujoco = import_mujoco()  # as users do, who have no display

MODEL = """
<mujoco>
  <option timestep="0.01" integrator="implicitfast"/>
  <worldbody>
    <geom name="floor" type="plane" size="2 2 .1"/>
    <body name="arm" pos="0 0 .6">
      <joint name="hinge" type="hinge" axis="0 1 0" damping=".1"/>
      <geom name="rod" type="capsule" fromto="0 0 0 0 0 -.4" size=".05" mass="1"/>
      <site name="tip" pos="0 0 -.4"/>
    </body>
    <body name="ball" pos=".35 0 .12">
      <freejoint name="free"/>
      <geom name="ball" size=".1" mass=".2"/>
    </body>
  </worldbody>
  <actuator>
    <motor name="motor" joint="hinge" ctrlrange="-3 3" ctrllimited="true"/>
  </actuator>
  <sensor><jointpos name="angle" joint="hinge"/><jointvel name="speed" joint="hinge"/></sensor>
  <keyframe><key name="up" qpos="2 .3 0 .2 1 0 0 0" ctrl="0.5"/></keyframe>
</mujoco>
"""
"""A swinging rod that kicks a ball over the floor."""

SUBSTEPS = 4


def rod():
    return mujoco.MjSpec.from_string(MODEL)


def servo(name="servo"):
    spec = rod()
    spec.actuators[0].set_to_position(kp=20.0, kv=1.0)
    spec.actuators[0].ctrllimited = False
    spec.actuators[0].name = name
    return spec


def angle(env):
    return env.qpos("hinge")[:, 0]


RANDOM = {
    "friction": Event(
        "randomize", {"name": "geom_friction", "low": 0.2, "high": 1.5, "operation": "scale"}
    ),
    "mass": Event(
        "randomize", {"name": "body_mass", "low": 0.5, "high": 2.0, "operation": "scale"}
    ),
    "angle": Event("randomize", {"name": "qpos", "low": -0.2, "high": 0.2, "operation": "add"}),
}


def world(num_envs=3, model=rod, **settings):
    settings = {
        "substeps": SUBSTEPS,
        "max_episode_steps": 15,
        "rewards": {"angle": Reward(angle)},
        "metrics": {"angle": Metric(angle)},
    } | settings
    return rl.MujocoEnv(num_envs, model, **settings)


def actions(count, envs, size=1, seed=0):
    drawn = torch.rand(count, envs, size, generator=torch.Generator().manual_seed(seed))
    return drawn * 6.0 - 3.0


class Plain:
    """One world by plain `mj_step`, between env steps rounded to float32 as the env's state."""

    def __init__(self, env, row, fields=()):
        self.model = env.layout.model
        self.data = mujoco.MjData(self.model)
        for name in fields:
            getattr(self.model, name)[:] = env.state[name][row].numpy()
        mujoco.mj_setConst(self.model, self.data)
        self.data.qpos[:] = env.state["qpos"][row].numpy()
        self.data.qvel[:] = env.state["qvel"][row].numpy()

    def step(self, ctrl):
        data = self.data
        data.ctrl[:] = ctrl.numpy()
        data.qacc_warmstart[:] = 0.0
        for _ in range(SUBSTEPS):
            mujoco.mj_step(self.model, data)
        for array in (data.qpos, data.qvel, data.sensordata):
            array[:] = array.astype(np.float32)


@pytest.mark.parametrize(
    "fields", [(), ("body_mass", "body_inertia", "geom_friction")], ids=["one model", "fields"]
)
def test_each_world_is_stepped_as_by_mj_step(fields):
    env = world(events=RANDOM if fields else {"angle": RANDOM["angle"]}, max_episode_steps=99)
    env.reset(seed=1)
    rows = 3 if fields else 1
    others = [world(1, max_episode_steps=99) for _ in range(rows)]
    plain = []
    for row, other in enumerate(others):
        other.state = env.state
        plain.append(Plain(other, row, fields))
    for action in actions(20, 3):
        env.step(action)
        for row, one in enumerate(plain):
            one.step(action[row])
            for name in ("qpos", "qvel", "sensordata"):
                expected = getattr(one.data, name).astype(np.float32)
                np.testing.assert_array_equal(env.state[name][row].numpy(), expected)
    assert one.data.ncon > 0  # the ball lies on the floor
    if fields:
        assert env.state["body_mass"][:, 1].unique().numel() == 3


def test_parts_of_the_state_have_their_names():
    env = world(keyframe="up")
    env.reset(seed=0)
    view = env.view_class(env, env.state, env.stream_key, env.episode, env.elapsed)
    data = mujoco.MjData(env.layout.model)
    mujoco.mj_resetDataKeyframe(env.layout.model, data, 0)
    mujoco.mj_forward(env.layout.model, data)
    for found, expected in (
        (view.qpos("hinge"), [2.0]),
        (view.qpos("free"), data.joint("free").qpos),
        (view.qvel("free", "hinge"), np.zeros(7)),
        (view.sensor("angle", "speed"), [2.0, 0.0]),
        (view.xpos("ball"), data.body("ball").xpos),
        (view.xpos("arm"), data.body("arm").xpos),  # its mass is elsewhere
        (view.xquat("arm"), data.body("arm").xquat),
        (view.site_xpos("tip"), data.site("tip").xpos),
        (view.ctrl("motor"), [0.5]),
    ):
        np.testing.assert_allclose(found[1].numpy(), expected, rtol=0, atol=1e-6)
    assert env.observe(env.state).shape == (3, 8 + 7 + 2)  # without the frames of bodies and sites
    with refused(names=("xpos", "'bal'", "arm, ball")):
        view.xpos("bal")


def test_the_first_sensors_are_those_of_the_keyframe_its_control_and_its_time():
    """Forces and accelerations of a first observation were those of the control 0."""
    clock = mujoco.mjtSensor.mjSENS_CLOCK
    force = {"type": mujoco.mjtSensor.mjSENS_ACTUATORFRC, "objname": "motor"}

    def measured():
        spec = rod()
        spec.keys[0].time = 3.0
        spec.add_sensor(name="clock", type=clock)
        spec.add_sensor(name="force", objtype=mujoco.mjtObj.mjOBJ_ACTUATOR, **force)
        return spec

    env = world(2, measured, events={"more": Event(lambda env: {"ctrl": env.state["ctrl"] * 2})})
    observation, _ = env.reset(seed=0)
    assert observation[:, -2:].tolist() == [[3.0, 1.0], [3.0, 1.0]]


def test_a_world_depends_on_its_own_seed_alone_and_not_on_threads():
    many, one = world(5, events=RANDOM, num_threads=2), world(1, events=RANDOM)
    assert_same(many.reset(seed=[3, 1, 4, 5, 9])[0][2:3], one.reset(seed=[4])[0])
    for action in actions(20, 5):
        left, right = many.step(action), one.step(action[2:3])
        for a, b in zip(left[:4], right[:4], strict=True):
            assert torch.equal(a[2:3], b)
    assert one.episode == 1
    for env in (many, one):
        env.close()


def test_a_world_that_diverges_is_cut_and_the_others_go_on():
    env, alone = world(3), world(3)
    env.reset(seed=0)
    alone.reset(seed=0)
    env.state["qvel"][1, 0] = 1e12  # beyond MuJoCo's limit
    with pytest.warns(RuntimeWarning, match="unstable"):
        observation, _, terminated, truncated, info = env.step(torch.zeros(3, 1))
    expected = alone.step(torch.zeros(3, 1))
    assert truncated.tolist() == [False, True, False]
    assert not terminated.any()
    assert observation.isfinite().all()
    assert torch.equal(observation[[0, 2]], expected[0][[0, 2]])
    assert info["final_obs"][1, 8] == 1e12  # the state before the step
    assert env.episode.tolist() == [0, 1, 0]


def test_a_position_counts_from_the_keyframe_and_a_change_from_the_joint():
    for term, expected in (
        (Position(2.0), 0.5 + 2.0 * 0.25),
        (DeltaPosition(2.0), 2.0 + 2.0 * 0.25),
    ):
        env = world(2, servo, actions={"arm": term})
        env.reset(seed=0)
        env.step(torch.full((2, 1), 0.25))
        np.testing.assert_allclose(env.state["ctrl"].numpy(), expected)


@pytest.mark.parametrize("joint", ['<joint type="slide"/>', ""])
def test_an_actuator_may_move_what_is_no_joint(joint):
    """The index of its site was read as a joint's."""
    body = f'<body>{joint}<geom size=".1"/><site name="a"/><site name="b"/></body>'
    motor = '<motor name="motor" site="b" refsite="a" gear="1 0 0 0 0 0"/>'
    xml = f"<mujoco><worldbody>{body}</worldbody><actuator>{motor}</actuator></mujoco>"
    observed = {"all": {"ctrl": Observation("entry", {"name": "ctrl"})}}
    force = {"motor": Force(scale=2.0)}
    env = rl.MujocoEnv(2, mujoco.MjSpec.from_string(xml), actions=force, observations=observed)
    env.reset(seed=0)
    assert env.step(torch.ones(2, 1))[0].tolist() == [[2.0], [2.0]]


MOVED = MODEL.replace('ctrl="0.5"', 'mpos="1 0 0"').replace(
    '<body name="ball"', '<body name="goal" mocap="true"/><body name="ball"'
)
WRONG = {
    "no such file": ({"model": "robot.xml"}, "there is no file robot.xml"),
    "no such keyframe": ({"keyframe": "down"}, "no keyframe 'down'; allowed: up"),
    "a keyframe that moves a mocap body": (
        {"model": lambda: mujoco.MjSpec.from_string(MOVED)},
        "The keyframe 'up' moves mocap bodies (mpos), which MujocoEnv leaves at their place: put "
        "`pos` on the body, or change body_pos by an event.",
    ),
    "another actuator": (
        {"actions": {"arm": Position()}},
        "'arm' is Position, with a position target, but the actuator 'motor' takes a force",
    ),
    "a taken entry": ({"entries": {"ctrl": [0.0]}}, "'ctrl' is an entry already"),
    "an observed joint": (
        {"rewards": {"far": Reward(lambda env: env.qpos("hing")[:, 0])}},
        "no qpos of 'hing'; allowed: hinge, free; close matches: hinge",
    ),
}


@pytest.mark.parametrize(("settings", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_refused_by_name(settings, message):
    def opened():
        env = world(2, **settings)
        env.reset(seed=0)
        env.step(torch.zeros(2, 1))

    with pytest.raises(rl.ConfigurationError) as error:
        opened()
    assert message in str(error.value)


def test_a_delayed_sensor_is_refused_because_its_history_would_be_lost():
    spec = rod()
    spec.sensors[0].nsample, spec.sensors[0].delay = 3, 0.02
    with refused(names=("qpos, qvel", "delays")):
        world(2, lambda: spec)


RUN = {
    "env": partial(world, events=RANDOM),
    "policy": {"log_std": "state_dependent"},
    "model": {"lr_schedule": "constant"},
    "data": {"total_env_steps": 2 * 4 * 16 * 3},
}


def test_a_run_that_is_stopped_and_resumed_ends_as_uninterrupted(tmp_path):
    train(tmp_path / "whole", **RUN)
    train(tmp_path / "parts", **RUN | {"data": {"total_env_steps": 4 * 16 * 3}})
    names = load(last(tmp_path / "parts"))["RLDataModule"]["collectors"][0]["loop"]["env"]["state"]
    assert {"geom_friction", "body_mass", "qpos", "time", "sensordata"} <= names.keys()
    train(tmp_path / "parts", **RUN, ckpt_path=last(tmp_path / "parts"))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


TINY = (
    *("--config", "ppo_reach.yaml", "--data.num_envs", "2", "--data.buffer_size", "8"),
    *("--model.batch_size", "16", "--data.total_env_steps", "16", "--trainer.run_dir", "run"),
    *("--data.num_eval_episodes", "1", "--data.env.max_episode_steps", "5"),
)


@pytest.mark.parametrize("model", ["arm.xml", "mine.arm"])
def test_a_run_of_a_model_of_ones_own_is_evaluated_and_only_a_function_needs_trust(
    model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("arm.xml").write_text(ARM.read_text())
    Path("mine.py").write_text("import mujoco\narm = lambda: mujoco.MjSpec.from_file('arm.xml')\n")
    made = rl_cli("fit", *TINY, "--data.env.model", model)
    assert made.returncode == 0, made.stderr
    asked = rl_cli("validate", "--ckpt_path", "run")
    if model == "arm.xml":
        assert_names(asked.stderr, "arm.xml")
    else:
        assert_names(asked.stderr, "'mine.arm'", "data.env.init_args.model", "--trust_code true")
        asked = rl_cli("validate", "--ckpt_path", "run", "--trust_code", "true")
    assert asked.returncode == 0, asked.stderr


def test_collected_in_the_background_without_lag_it_is_as_in_the_foreground(tmp_path):
    for name, collector in {"here": rl.SyncCollector, "there": background(0)}.items():
        train(tmp_path / name, **RUN | {"data": RUN["data"] | {"collector": collector}})
    a, b = load(last(tmp_path / "here")), load(last(tmp_path / "there"))
    assert_same(a["state_dict"], b["state_dict"])
    assert_same(
        scalars(tmp_path / "here")["rewards/angle"], scalars(tmp_path / "there")["rewards/angle"]
    )


def test_compiled_steps_are_refused_with_the_reason(tmp_path, traced_only):
    short = {"total_env_steps": 4 * 16, "num_eval_episodes": 1}
    train(tmp_path, env=world, data=short, model={"compile": True})
    assert "MujocoEnv is simulated outside of torch" in (tmp_path / "run.json").read_text()


def test_an_exported_policy_knows_joints_gains_and_scales():
    said = rl.Quadruped(1).metadata
    assert said["joint_names"][:2] == ["hip_1", "ankle_1"]
    assert said["joint_stiffness"] == [40.0] * 8
    assert said["joint_damping"] == [2.0] * 8
    assert said["action_scale"] == [0.5] * 8
    assert said["control_period"] == pytest.approx(0.05)
    np.testing.assert_allclose(said["default_joint_pos"][:4], [0, 0.87, 0, -0.87], rtol=1e-6)


def test_the_quadruped_stands_and_its_commands_friction_and_load_differ():
    env = rl.Quadruped(16)
    env.reset(seed=0)
    for _ in range(20):
        _, _, terminated, _, info = env.step(torch.zeros(16, 8))
    assert not terminated.any()
    root = env.state["qpos"]
    assert (root[:, 2] > 0.4).all()
    assert rotations.heading(root[:, 3:7]).std() > 1.0  # of +-pi
    command = env.state["command"]
    assert (command.abs() <= torch.tensor([1.0, 0.5, 1.0])).all()
    assert command.std(0).tolist() > [0.4, 0.2, 0.4]
    for name in ("geom_friction", "body_mass", "body_inertia"):
        assert env.state[name].flatten(1).std(0).max() > 0
    wanted = (command[:, :2].square().sum(1)).sqrt()
    np.testing.assert_allclose(info["metrics"]["velocity_error"], wanted, atol=0.25)


def test_commands_are_in_the_frame_of_the_robot():
    """Seen from above, a robot that is turned by a right angle walks along y."""
    env = rl.Quadruped(1)
    env.reset(seed=0)
    half = torch.tensor(torch.pi / 4)
    env.state["qpos"][0, 3:7] = torch.stack((half.cos(), *torch.zeros(2), half.sin()))
    env.state["qvel"][0, :6] = torch.tensor([-0.4, 0.9, 0, 0, 0, 0.7])
    env.state["command"][0] = torch.tensor([0.9, 0.4, 0.2])
    view = env.view_class(env, env.state, env.stream_key, env.episode, env.elapsed)
    errors = env.measure(view)
    assert errors["velocity_error"].item() == pytest.approx(0.0, abs=1e-6)
    assert errors["yaw_error"].item() == pytest.approx(0.5)


def test_goals_of_the_arm_can_be_reached_and_reaching_one_is_success():
    env, sensed = rl.Reach(8), []
    sense = env.physics.sense
    env.physics.sense = lambda state: sensed.append(state["qpos"]) or sense(state)
    env.reset(seed=0)
    assert env.state["goal"][:, :3].std(0).min() > 0.05
    joints = sensed[0]  # at which the event measured the tool
    env.state["qpos"], env.state["qvel"] = joints, torch.zeros(8, 6)
    _, reward, terminated, _, info = env.step(torch.zeros(8, 6))
    assert info["success"].all()
    assert terminated.all()
    assert (reward > 9.0).all()


def test_pictures_follow_the_state_with_opengl_and_without():
    env = world(2)
    env.reset(seed=0)
    env.state["qpos"][1, 0] = 1.5
    first, second = env.render([0, 1])
    assert first.shape == (256, 384, 3)
    assert first.dtype == np.uint8
    assert (first != second).any()
    camera = env._camera
    camera.close()
    camera._opened = lambda: None  # a machine without OpenGL
    pictures = env.render([0, 1])
    assert (pictures[0] != pictures[1]).any()
    marked = camera.picture(
        env.state["qpos"][0].numpy(), [Marker(np.array([0.0, 0, 0.6]), 0.1, (0.0, 1.0, 0.0))]
    )
    assert (marked[128, 192] != pictures[0][128, 192]).any()


def test_pictures_show_the_places_of_a_world_and_follow_the_first_body_that_moves():
    """Cameras on a centre of mass stood still, and bodies were drawn where the model has them."""
    xml = MODEL.replace('<body name="arm"', '<body name="goal" mocap="true"/><body name="arm"')
    camera = '<camera name="track" mode="trackcom" pos="0 -2 0"/>'
    xml = xml.replace("<freejoint", f"{camera}<freejoint")
    low, high = ({"arm": bound, "goal": bound} for bound in (-1, 1))
    moved = {"name": "body_pos", "low": low, "high": high, "operation": "add"}
    events = {"place": Event("randomize", moved)}
    env = world(2, lambda: mujoco.MjSpec.from_string(xml), events=events)
    env.reset(seed=0)
    env._camera._opened = lambda: None
    pictures = env.render([0, 1])
    assert (pictures[0] != pictures[1]).any()
    drawn, plain = env._camera._data, Plain(env, 1, ("body_pos",))
    mujoco.mj_forward(plain.model, plain.data)
    for name in ("cam_xpos", "geom_xpos", "site_xpos"):
        np.testing.assert_allclose(getattr(drawn, name), getattr(plain.data, name), atol=1e-6)
    np.testing.assert_allclose(env._camera._around()[0], plain.data.body("arm").xpos, atol=1e-6)
    np.testing.assert_array_equal(drawn.body("goal").xpos, env.state["body_pos"][1, 1])


def test_quaternions_rotate_as_matrices_do():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 20, 4))
    first, second = (q / np.linalg.norm(q, axis=1, keepdims=True) for q in (first, second))
    vector = rng.normal(size=(20, 3))
    a, b, v = (torch.tensor(x) for x in (first, second, vector))
    left, right = matrix_of(first), matrix_of(second)
    np.testing.assert_allclose(
        rotations.rotate(a, v), np.einsum("nij,nj->ni", left, vector), atol=1e-12
    )
    np.testing.assert_allclose(
        rotations.rotate(rotations.inverse(a), v), np.einsum("nji,nj->ni", left, vector), atol=1e-12
    )
    np.testing.assert_allclose(
        rotations.rotate(rotations.product(a, b), v),
        np.einsum("nij,njk,nk->ni", left, right, vector),
        atol=1e-12,
    )
    np.testing.assert_allclose(
        rotations.heading(a), np.arctan2(left[:, 1, 0], left[:, 0, 0]), atol=1e-12
    )
    np.testing.assert_allclose(rotations.angle_between(a, b), angle_of(left, right), atol=1e-7)


@pytest.mark.slow
def test_mujoco_warp_steps_as_the_c_library_does():
    """The first run on a machine compiles kernels for two minutes; scripts/mujoco_backends.py."""
    pytest.importorskip("mujoco_warp")
    from scripts.mujoco_backends import difference, overflow

    assert difference(MODEL, 20, SUBSTEPS) < 1e-5
    with refused(names="max_contacts"):
        overflow(MODEL)


def test_without_mujoco_warp_its_backend_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "warp", None)
    with refused(names=("backend: warp", "pip install -e '.[warp]'")):
        world(2, backend="warp")
