"""A trial of a changed setup is an env with that change; the changes that help are found and named."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lightning_rl import ActorCritic, CartPole, LeggedRobot
from lightning_rl.cli.app import run
from lightning_rl.extensions.managers import Event
from lightning_rl.extensions.managers.term import Observation
from lightning_rl.extensions.mujoco.quadruped import turn_rate
from lightning_rl.extensions.transfer import trial
from lightning_rl.extensions.transfer.candidates import candidates, cure, partners, physics
from lightning_rl.extensions.transfer.command import table
from lightning_rl.extensions.transfer.layout import read_layout
from lightning_rl.extensions.transfer.legged import terms_of
from lightning_rl.extensions.transfer.ranges import terms_outside
from tests.messages import assert_names, refused
from tests.numerics.test_transfer import (  # noqa: F401  # a fixture
    LAYOUT,
    MODEL,
    MODEL_AND_LAYOUT,
    ONNX,
    files,
    policy,
    robot,
    sac_of,
    train,
    train_nothing,
)

FAULTS = {
    "joints": ("{right_hip: -0.2, left_hip: 0.1}", "{left_hip: 0.1, right_hip: -0.2}", "exchanged"),
    "scale": ("base_ang_vel: {scale: 0.25}", "base_ang_vel: {scale: 1.0}", "scale of base_ang_vel"),
    "terms": (
        "  projected_gravity: {}\n  dof_pos: {joints: true}",
        "  dof_pos: {joints: true}\n  projected_gravity: {}",
        "dof_pos and projected_gravity exchanged",
    ),
    "gains": ("50.0, left_hip: 40.0}\ndamping: 2.0", "25, left_hip: 20}\ndamping: 1.0", "gains"),
    "action": (
        "{right_hip: 0.5, left_hip: 0.25}",
        "{right_hip: 1.0, left_hip: 0.5}",
        "action_scale",
    ),
    "period": ("control_period: 0.02", "control_period: 0.01", "control_period"),
    "sign": ("phases:", "signs: {left_hip: -1}\nphases:", "direction of left_hip"),
    "delay": ("", "", "delay"),
    "gravity": ("", "", "frame of projected_gravity"),
}


def a_trial(layout="robot.yaml", fault="", **settings):
    if fault == "gravity":
        down = Observation(lambda env: torch.tensor([0.0, 0.0, -1.0]).expand(env.num_envs, 3))
        terms = terms_of(read_layout(layout)) | {"projected_gravity": down}
        settings["observations"] = {"policy": terms}
    if fault == "delay":
        settings["delay"] = 2

    def make(num_envs):
        return LeggedRobot(num_envs, model="robot.xml", layout=layout, **settings)

    return trial.Trial(policy(make(1), layout=layout), make)


def numbers(findings):
    return [list(finding[2:]) for finding in findings]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_cured_by_the_candidate_of_its_name(files, tmp_path, fault):  # noqa: F811
    right, wrong, kind = FAULTS[fault]
    assert right in LAYOUT
    (tmp_path / "wrong.yaml").write_text(LAYOUT.replace(right, wrong))
    healthy, faulty = a_trial(), a_trial("wrong.yaml", fault)
    expected = numbers(healthy.play([("", healthy.base)], range(3), 0.6))
    before = numbers(faulty.play([("", faulty.base)], range(3), 0.6))
    assert not np.allclose(before, expected, rtol=1e-3)
    listed = [*physics(faulty.base), *candidates(faulty.base, faulty.layout, faulty.orders)]
    tried = [pair for pair in listed if kind in pair[0]]
    cured = faulty.play(tried, range(3), 0.6)
    fits = [np.allclose(row, expected[0], rtol=1e-3, atol=1e-4) for row in numbers(cured)]
    assert any(fits)
    text = cure(faulty.base, cured[fits.index(True)].setup)
    changes = yaml.safe_load(f"{{{text}}}")
    assert len(changes) <= 2  # gains are two settings
    assert None not in changes.values()


def test_a_trial_of_the_env_as_it_is_follows_a_plain_loop(files, monkeypatch):  # noqa: F811
    monkeypatch.setattr(trial, "PUSH", 0.0)
    tried = a_trial(delay=1)
    (finding,) = tried.play([("", tried.base)], [5], 0.3)
    env = robot(1, delay=1)
    acting = policy(env)
    observation, _ = env.reset(seed=[5])
    total, lived = 0.0, 0.0
    for _ in range(15):
        td = trial.TensorDict({"observation": observation}, [1])
        action = acting.get_action(td, deterministic=True)["action"]
        observation, reward, terminated, _, _ = env.step(action)
        if terminated.any():
            break
        total, lived = total + 0.02 * float(reward), lived + 0.02
    assert finding.seconds == pytest.approx(lived)
    assert finding.reward == pytest.approx(total, rel=1e-4)


def test_an_action_takes_effect_after_the_delay(files):  # noqa: F811
    late, prompt = robot(2, delay=2), robot(2)
    late.reset(seed=3), prompt.reset(seed=3)
    actions = torch.rand(8, 2, 2) - 0.5
    for step in range(8):
        late.step(actions[step])
        prompt.step(actions[step - 2] if step >= 2 else torch.zeros(2, 2))
        torch.testing.assert_close(late.state["qpos"], prompt.state["qpos"])
        torch.testing.assert_close(late.state["action"], actions[step])


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("left_hip", "right_hip"),
        ("FL_calf", "FR_calf"),
        ("leftKnee", "rightKnee"),
        ("waist", "waist"),
    ],
)
def test_a_joint_has_a_partner_on_the_other_side(name, other):
    assert partners([name, other])[name] == other
    assert partners([other, name])[name] == other
    assert partners([name]) == {name: name}


@pytest.mark.parametrize(("reward", "end"), [(4.3, "No change helps."), (6.0, "Cure: mass: 2.0")])
def test_a_change_that_is_as_good_by_chance_is_no_cure(files, reward, end):  # noqa: F811
    base = a_trial().base
    unchanged = trial.Finding("as it is", base, 5.0, 4.2, 0.4, 2.8)
    heavier = trial.Finding("mass", replace(base, mass=2.0), 5.0, reward, 0.4, 2.6)
    assert table([heavier, unchanged], base).splitlines()[-1] == end


ROBOT = ["--data.env=LeggedRobot", "--data.env.model=robot.xml", "--data.env.layout=robot.yaml"]


def test_the_command_prints_a_table_and_draws_it(files, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(trial, "ROUNDS", ((1, 0.1, 5), (1, 0.1, 5)))
    run(["transfer", "policy.onnx", "--layout", "robot.yaml", *ROBOT, "--data.env.delay", "2"])
    out = capsys.readouterr().out
    assert_names(out, "as it is", "delay", "Cure", "transfer.svg")
    assert "as it is" in Path("transfer.svg").read_text()


def test_a_term_that_leaves_the_range_of_a_recording_is_named(files, capsys, monkeypatch):  # noqa: F811
    train_nothing()
    record = ["--episodes", "8", "--max_steps", "100", "--real_time", "false"]
    run(["record", "--ckpt_path", "fixed", "--path", "recorded", *ROBOT, *record])
    monkeypatch.setattr(trial, "ROUNDS", ((1, 0.1, 2),))
    run(["transfer", "fixed", *ROBOT, "--recording", "recorded", "--plot", "other.svg"])
    assert_names(capsys.readouterr().out, "recorded", "as it is", "other.svg")
    shares = {term.term: term.share for term in terms_outside(a_trial(), "recorded")}
    assert shares.get("base_ang_vel", 0.0) < 0.1
    faster = Observation(lambda env: 10.0 * turn_rate(env))
    terms = terms_of(read_layout("robot.yaml")) | {"base_ang_vel": faster}
    worst, *_ = terms_outside(a_trial(observations={"policy": terms}), "recorded")
    assert worst.term == "base_ang_vel"
    assert worst.share > 0.3
    assert_names(str(worst), "base_ang_vel", worst.number)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["policy.onnx", *ROBOT], ("--layout", "policy.onnx")),
        (["policy.onnx", "--layout", "robot.yaml"], ("--data.env", "policy.onnx")),
        (
            ["policy.onnx", "--layout", "robot.yaml", "--data.env", "CartPole"],
            ("OnnxPolicy", "names"),
        ),
        (["--layout", "robot.yaml"], ("ckpt_path",)),
    ],
)
def test_what_is_missing_is_named(files, capsys, options, names):  # noqa: F811
    with pytest.raises(SystemExit):
        run(["transfer", *options])
    assert_names(capsys.readouterr().err, *names)


def test_an_env_with_other_observations_is_refused(files):  # noqa: F811
    other = {"critic": {"turning": Observation(turn_rate)}}
    with refused(names=("LeggedRobot", "critic", "groups and terms")):
        trial.Trial(policy(robot()), lambda num_envs: robot(num_envs, observations=other))


def test_an_env_without_joints_is_refused():
    env = CartPole(1)
    policy = ActorCritic(env.single_observation_space, env.single_action_space, (4,))
    with refused(names=("CartPole", "default_joint_pos", "--data.env LeggedRobot")):
        trial.Trial(policy, CartPole)


PAIR = """
  <contact><pair geom1="shin" geom2="floor" condim="3" friction="1 1 .005 .0001 .0001"/></contact>
</mujoco>
"""
RANDOM = {"low": 2.0, "high": 2.0, "operation": "scale", "shared": True}
FRICTION = {"term": "randomize", "params": {"name": "pair_friction"} | RANDOM, "mode": "reset"}
MASS = {"term": "randomize", "params": {"name": "mass"} | RANDOM, "mode": "reset"}
PUSHED = {"term": "lightning_rl.extensions.mujoco.quadruped.push", "params": {"speed": 0.5}}
PUSHED |= {"mode": "interval", "every_s": [0.04, 0.04]}


def test_events_change_friction_of_pairs_masses_and_velocities(files, tmp_path):  # noqa: F811
    """The feet of some robots have explicit contact pairs, whose friction is not their geoms'."""
    floor = '<worldbody><geom name="floor" type="plane" size="5 5 .1"/>'
    text = MODEL.replace("<worldbody>", floor).replace("</mujoco>", PAIR)
    shin = '<geom type="capsule" size=".03" fromto="0 0 0 0 0 -.4" mass="1"/>'
    (tmp_path / "robot.xml").write_text(
        text.replace(shin, shin.replace("<geom", '<geom name="shin"'), 1)
    )
    env = robot(2, events={"friction": Event(**FRICTION), "mass": Event(**MASS)})
    plain, nominal = robot(2), env.layout.model
    env.reset(seed=0), plain.reset(seed=0)
    np.testing.assert_allclose(
        env.state["pair_friction"], 2 * nominal.pair_friction[None].repeat(2, 0)
    )
    np.testing.assert_allclose(env.state["body_mass"], 2 * nominal.body_mass[None].repeat(2, 0))
    for _ in range(10):
        env.step(torch.zeros(2, 2)), plain.step(torch.zeros(2, 2))
    assert not torch.allclose(env.state["qvel"], plain.state["qvel"], atol=1e-3)
    pushed, plain = robot(2, events={"push": Event(**PUSHED)}), robot(2)
    pushed.reset(seed=0), plain.reset(seed=0)
    for _ in range(3):
        pushed.step(torch.zeros(2, 2)), plain.step(torch.zeros(2, 2))
    change = (pushed.state["qvel"] - plain.state["qvel"])[:, :2].abs()
    assert (change > 1e-3).all()
    assert (change <= 1.0).all()
