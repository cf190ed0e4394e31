"""Numbers of a physical model that belong together: servos, masses, gains, frames."""

from functools import partial

import pytest
import torch

from lightning_rl import ConfigurationError, MujocoEnv
from lightning_rl.envs.gymnasium.mujoco_bindings import import_mujoco
from lightning_rl.extensions.managers import Event
from lightning_rl.extensions.managers.actions import Force, Position, Velocity
from tests.messages import refused

mujoco = import_mujoco()

SLIDE = """<mujoco><option timestep="0.005" gravity="0 0 0" integrator="implicitfast"/><worldbody>
<body name="b"><joint name="j" type="slide" damping="5"/><geom size=".1" mass="1"/></body></worldbody>
<actuator>{}</actuator></mujoco>"""

SERVO = '<position name="a" joint="j" kp="100" kv="2" ctrlrange="-1 1"/>'

BAR = """<mujoco><option timestep="0.005" gravity="0 0 0"/><worldbody>
<body><joint name="j" axis="0 1 0"/>
<geom type="capsule" fromto="-.5 0 0 .5 0 0" size=".03" mass="1"/></body></worldbody>
<actuator><motor name="a" joint="j" ctrlrange="-1 1"/></actuator></mujoco>"""

FREE = """<mujoco><option timestep="0.005"/><worldbody>
<body name="arm" pos="1 0 1"><joint name="hinge" axis="0 1 0"/>
<geom type="box" size=".1 .1 .1"/><site name="tip"/></body>
<body name="ball" pos="0 0 1"><freejoint/><geom size=".1" mass="1"/></body>
</worldbody></mujoco>"""


def spec_of(text):
    return mujoco.MjSpec.from_string(text)


def randomized(text, name, operation="scale", **bounds):
    event = Event("randomize", {"name": name, "operation": operation, **bounds})
    env = MujocoEnv(1, partial(spec_of, text), events={"physics": event})
    env.reset(seed=0)
    return env


def after(env, steps, action=0.5):
    for _ in range(steps):
        env.step(torch.full((1, env.layout.model.nu), action))
    return env.state


NO_SERVOS = {
    "integrated velocity": '<intvelocity name="a" joint="j" kp="200" actrange="-1 1"/>',
    "muscle": '<muscle name="a" joint="j" lengthrange="-1 1"/>',
    "cylinder": '<cylinder name="a" joint="j" timeconst=".1" bias="0 -1 0"/>',
    "damper": '<damper name="a" joint="j" kv="3" ctrlrange="0 1"/>',
    "another gain": '<general name="a" joint="j" gainprm="10" biastype="affine" biasprm="0 -5 0"/>',
    "an offset": '<general name="a" joint="j" gainprm="5" biastype="affine" biasprm="1 -5 0"/>',
    "a gear": '<position name="a" joint="j" kp="100" gear="3"/>',
}


@pytest.mark.parametrize("term", [Position, Velocity])
@pytest.mark.parametrize("actuator", NO_SERVOS.values(), ids=NO_SERVOS)
def test_an_actuator_that_does_not_reach_its_control_is_no_servo(actuator, term):
    with refused(names=("'joint'", term.__name__, "'a'", "force")):
        MujocoEnv(1, partial(spec_of, SLIDE.format(actuator)), actions={"joint": term()})


@pytest.mark.parametrize("extra", ["", ' timeconst=".02"', ' kv="5"'])
def test_a_servo_goes_to_its_position(extra):
    model = SLIDE.format(f'<position name="a" joint="j" kp="200"{extra}/>')
    env = MujocoEnv(1, partial(spec_of, model), actions={"joint": Position()})
    env.reset(seed=0)
    assert after(env, 200, 0.3)["qpos"].item() == pytest.approx(0.3, abs=0.02)


def test_a_bias_that_an_actuator_does_not_read_makes_no_servo():
    motor = '<general name="a" joint="j" gainprm="5" biastype="none" biasprm="0 -5 0"/>'
    env = partial(MujocoEnv, 1, partial(spec_of, SLIDE.format(motor)))
    with refused(names=("'a'", "force")):
        env(actions={"joint": Position()})
    env = env(actions={"joint": Force()})
    assert env.metadata["joint_stiffness"] == [0.0]


@pytest.mark.parametrize("name", ["mass", "body_mass"])
def test_a_body_of_twice_the_mass_is_twice_as_slow_to_turn(name):
    speeds = [after(randomized(BAR, name, low=x, high=x), 4)["qvel"].item() for x in (1.0, 2.0)]
    assert speeds[1] == pytest.approx(speeds[0] / 2, rel=1e-3)


@pytest.mark.parametrize("name", ["stiffness", "damping", "actuator_gainprm"])
@pytest.mark.parametrize("kind", ["position", "velocity"])
def test_a_servo_with_other_gains_still_goes_to_its_target(name, kind):
    servo = SERVO if kind == "position" else '<velocity name="a" joint="j" kv="100"/>'
    model = SLIDE.format(servo).replace(' damping="5"', "")
    if (name, kind) == ("stiffness", "velocity"):
        with pytest.raises(ConfigurationError, match="stiffness"):
            randomized(model, name, low=1.5, high=1.5)
        return
    env = randomized(model, name, low=1.5, high=1.5)
    state = after(env, 200)
    reached = state["qpos" if kind == "position" else "qvel"]
    assert reached.item() == pytest.approx(0.5, abs=0.01)
    expected = {"stiffness": [-150.0, -2.0], "damping": [-100.0, -3.0]}.get(name, [-150.0, -2.0])
    if kind == "position":
        assert state["actuator_biasprm"][0, 0, 1:3].tolist() == expected


@pytest.mark.parametrize("name", ["stiffness", "actuator_gainprm"])
@pytest.mark.parametrize("actuator", ["a gear", "another gain", "an offset"])
def test_other_servos_rest_where_they_did(actuator, name):
    model = SLIDE.format(NO_SERVOS[actuator])
    rest = [after(randomized(model, name, low=x, high=x), 300)["qpos"].item() for x in (1.0, 1.5)]
    assert rest[1] == pytest.approx(rest[0], abs=1e-3)


def test_stiffness_and_damping_of_two_events_both_count():
    events = {
        name: Event("randomize", {"name": name, "low": x, "high": x})
        for name, x in {"stiffness": 80.0, "damping": 7.0}.items()
    }
    env = MujocoEnv(1, partial(spec_of, SLIDE.format(SERVO)), events=events)
    env.reset(seed=0)
    bias = env.state["actuator_biasprm"][0, 0, :3].tolist()
    assert bias == pytest.approx([0.0, -80.0, -7.0])
    assert env.state["actuator_gainprm"][0, 0, 0].item() == pytest.approx(80.0)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("body_inertia", "mass"),
        ("actuator_biasprm", "stiffness or damping"),
        ("actuator_gear", "stiffness"),
    ],
)
def test_a_field_that_belongs_to_others_is_not_randomized_alone(name, instead):
    with refused(names=(name, instead)):
        randomized(SLIDE.format(SERVO), name, low=1.5, high=1.5)


@pytest.mark.parametrize("field", ["site_pos", "site_quat", "body_ipos"])
def test_moved_frames_are_where_a_compiled_model_has_them(field):
    value = [0.8, 0.0, 0.6, 0.0] if field == "site_quat" else 0.02
    env = randomized(FREE, field, "set", low=value, high=value)
    spec = spec_of(FREE)
    nominal = spec.compile()
    for body in spec.bodies[1:]:
        body.explicitinertial, body.mass = True, nominal.body_mass[body.id]
        body.inertia = nominal.body_inertia[body.id]
        if field == "body_ipos":
            body.ipos = [0.02] * 3
    if field == "site_pos":
        spec.sites[0].pos = [0.02] * 3
    after(env, 20)
    model = spec.compile()
    data = mujoco.MjData(model)
    for _ in range(100):
        mujoco.mj_step(model, data)
    torch.testing.assert_close(
        env.state["qpos"][0], torch.tensor(data.qpos).float(), rtol=0, atol=1e-5
    )
    view = env.view_class(env, env.with_derived_entries(env.state), env.stream_key, env.episode)
    mujoco.mj_forward(model, data)
    torch.testing.assert_close(
        view.site_xpos("tip")[0], torch.tensor(data.site_xpos[0]).float(), rtol=0, atol=1e-5
    )
    if field == "site_quat":  # seen by a sensor of the site
        general = env.layout.model_for([field])
        assert general.site_sameframe[0] == 0


def test_randomised_parts_go_by_their_names():
    """A list for several bodies followed the order of the model's file, in silence."""
    env = randomized(FREE, "mass", low={"ball": 2.0}, high={"ball": 2.0})
    mass = env.state["body_mass"][0]
    assert mass[2] == 2.0
    assert mass[1] == env.parameters()["body_mass"][1], "what is not named keeps its mass"
    assert randomized(FREE, "qpos", "set", low={"hinge": 0.1}, high=0.1).state["qpos"][0, 0] == 0.1
    assert randomized(FREE, "body_ipos", "set", low=0.1, high={"arm": 0.1}).state["body_ipos"][
        0
    ].sum(1).tolist() == pytest.approx([0, 0.3, 0])
    with refused(UserWarning, names=("randomize mass", "world, arm, ball", "{name: number}")):
        randomized(FREE, "mass", low=[1.0, 1.0, 1.0], high=2.0)


@pytest.mark.parametrize(
    ("low", "high"), [({"bal": 1.0}, 1.0), ({"ball": 1.0}, {"arm": 1.0}), ([1.0, 1.0], 1.0)]
)
def test_bounds_of_other_parts_are_refused(low, high):
    with refused(names=("randomize mass", "world, arm, ball", low, high)):
        randomized(FREE, "mass", low=low, high=high)


def test_entries_of_ones_own_have_no_parts():
    event = Event("randomize", {"name": "site_goal", "low": [1.0, 2.0, 3.0], "high": 3.0})
    entries = {"site_goal": [0.0, 0.0, 0.0]}
    env = MujocoEnv(1, partial(spec_of, FREE), entries=entries, events={"goal": event})
    env.reset(seed=0)
    assert env.state["site_goal"][0, 2] == 3.0
