"""Numbers with names are matched by name: joints in settings, datasets, spaces and exports."""

import json
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict

from lightning_rl import (
    ActionChunk,
    ActorCritic,
    ConfigurationError,
    EpisodeWriter,
    Gamepad,
    GripperPenalty,
    GymnasiumEnv,
    Keyboard,
    MujocoEnv,
    SpaceMouse,
    TermWrapper,
    VLAObservation,
    read_episodes,
)
from lightning_rl.algorithms.checkpoint_checks import check_description
from lightning_rl.checkpoints.format import SPACES_KEY
from lightning_rl.envs.gymnasium.mujoco_bindings import import_mujoco
from lightning_rl.extensions.datasets.ahead import single
from lightning_rl.extensions.datasets.record import Recorder, script_action_function
from lightning_rl.extensions.managers.actions import EndEffectorPose, Position
from lightning_rl.rollout.names import named, names_of
from lightning_rl.rollout.spaces import space_data, space_from
from tests.envs import ScriptedEnv
from tests.messages import refused

mujoco = import_mujoco()

JOINTS = ("shoulder.pos", "elbow.pos")
REVERSED = JOINTS[::-1]
ARM = "lightning_rl.extensions.robots.stand_in.StandInArm"


def arm(order=JOINTS, **settings):
    settings = {"max_speed": 1e4, "fps": 200, "max_episode_steps": 5} | settings
    limits = {name: [-90, 90] for name in order}
    return gymnasium.make("lightning_rl/Robot-v0", robot=ARM, limits=limits, **settings)


@pytest.mark.parametrize("order", [JOINTS, REVERSED])
def test_step_sizes_speeds_and_homes_go_to_their_joints(order):
    def by_joint(shoulder, elbow):
        values = dict(zip(JOINTS, (shoulder, elbow), strict=True))
        return {name: values[name] for name in order}

    settings = {"step_size": by_joint(10.0, 1.0), "home": by_joint(30.0, -20.0)}
    env = arm(order, max_speed=by_joint(2e4, 1e4), **settings).unwrapped
    first, _ = env.reset()
    assert first.tolist() == [30.0, -20.0]
    assert env.step(np.ones(2, np.float32))[0].tolist() == [40.0, -19.0]
    assert env.action_of(dict.fromkeys(JOINTS, 41.0)) == pytest.approx([0.1, 1.0])
    env.close()


@pytest.mark.parametrize("setting", ["limits", "home", "step_size", "max_speed"])
def test_a_list_that_stands_for_joints_is_refused(setting):
    with refused(names=setting):
        gymnasium.make(
            "lightning_rl/Robot-v0",
            **{"robot": ARM, "limits": {name: [-9, 9] for name in JOINTS}, "max_speed": 1.0}
            | {setting: [1.0, 2.0]},
        )


STATE, ACTION = Box(-np.inf, np.inf, (2,), np.float32), Box(-90, 90, (2,), np.float32)


def dataset(path, names, key="action"):
    writer = EpisodeWriter(path, Dict({"agent_pos": STATE}), ACTION, fps=10)
    for t in range(3):
        seen = {"agent_pos": np.float32([t, -t])}
        writer.add(seen, np.float32([-60, 60]), 0.0, t == 2, False)
    writer.end_episode({"agent_pos": np.float32([3, -3])}, success=True)
    writer.finalise()
    info = json.loads((path / "meta/info.json").read_text())
    info["features"][key]["names"] = names
    (path / "meta/info.json").write_text(json.dumps(info))
    (path / "meta/lightning_rl.json").unlink()  # LeRobot's writer has none
    return path


def opened(path):
    state = Dict({"agent_pos": named(STATE, JOINTS)})
    return read_episodes(path, observation_space=state, action_space=named(ACTION, JOINTS))


FORMS = {
    "list": list(REVERSED),
    "motors": {"motors": list(REVERSED)},
    "numbered": {"shoulder.pos": 1, "elbow.pos": 0},
}


@pytest.mark.parametrize("names", FORMS.values(), ids=FORMS)
def test_columns_in_another_order_are_permuted_with_a_warning(names, tmp_path):
    with pytest.warns(UserWarning, match="order.*elbow.pos, shoulder.pos"):
        episodes = opened(dataset(tmp_path, names))
    assert episodes[0].action.tolist() == [[60.0, -60.0]] * 3


def test_an_observation_in_another_order_is_permuted_to_its_end(tmp_path):
    path = dataset(tmp_path, list(REVERSED), "observation.state")
    with pytest.warns(UserWarning, match="observation.state"):
        episode = opened(path)[0]
    assert episode.observation["agent_pos"][-1].tolist() == [-3.0, 3.0]
    assert episode.action.tolist() == [[-60.0, 60.0]] * 3


@pytest.mark.parametrize("names", [None, ["a"], ["x", "x"], list(JOINTS)])
def test_columns_without_names_of_their_numbers_are_read_as_they_are(names, tmp_path, recwarn):
    assert opened(dataset(tmp_path, names))[0].action.tolist() == [[-60.0, 60.0]] * 3
    assert not [one for one in recwarn if "order" in str(one.message)]


def test_other_names_are_refused_with_both_lists(tmp_path):
    with refused(names=("action", "wrist.pos, elbow.pos", "shoulder.pos, elbow.pos", "info.json")):
        opened(dataset(tmp_path, ["wrist.pos", "elbow.pos"]))


def recorded(path, env, episodes=1):
    spaces = env.single_observation_space, env.single_action_space
    writer = EpisodeWriter(path, *spaces, env.render_fps, pictures="png")
    recorder = Recorder(env)
    script = script_action_function(lambda observation: [30.0, -30.0], spaces[1])
    list(recorder.record_episodes(writer, episodes, lambda _: script))
    writer.finalise()
    env.close()
    return json.loads((path / "meta/info.json").read_text())["features"]


def robot(**settings):
    settings = {"max_speed": 1e4, "fps": 200, "max_episode_steps": 3} | settings
    limits = {name: [-90, 90] for name in JOINTS}
    return GymnasiumEnv(
        1, "lightning_rl/Robot-v0", env_kwargs={"robot": ARM, "limits": limits} | settings
    )


def test_a_recording_of_a_robot_names_its_joints(tmp_path):
    features = recorded(tmp_path, robot(robot_kwargs={"picture": 16}))
    assert features["action"]["names"] == list(JOINTS)
    assert features["observation.state"]["names"] == list(JOINTS)
    observations, actions = read_episodes(tmp_path).spaces()
    assert names_of(observations["state"]) == names_of(actions) == JOINTS


def test_a_dataset_is_extended_by_the_same_names_alone(tmp_path):
    def extended(names):
        return EpisodeWriter(tmp_path, STATE, named(ACTION, names), fps=10)

    def add(writer):
        writer.add(np.zeros(2, np.float32), np.zeros(2, np.float32), 0.0, True, False)
        writer.end_episode(np.zeros(2, np.float32))
        writer.finalise()
        info = json.loads((tmp_path / "meta/info.json").read_text())
        return info["features"]["action"]["names"]

    assert add(extended(())) is None
    assert add(extended(JOINTS)) == list(JOINTS)  # recorded before there were names
    assert add(extended(())) == list(JOINTS)
    with pytest.raises(ConfigurationError, match="action"):
        extended(REVERSED)


def test_names_survive_chunks_checkpoints_and_wrappers_that_keep_the_numbers():
    space = named(ACTION, JOINTS)
    chunks = ActionChunk(1, lambda n: robot(), chunk_size=3)
    assert names_of(single(chunks.single_action_space, 3)) == JOINTS
    chunks.close()
    assert names_of(space_from(space_data(space))) == JOINTS

    class Named(gymnasium.Wrapper):
        metadata = {"action_names": ["torque"], "render_modes": []}  # noqa: RUF012

    scaled = partial(gymnasium.wrappers.RescaleAction, min_action=-1.0, max_action=1.0)
    env = GymnasiumEnv(1, "Pendulum-v1", wrappers=[Named, scaled])
    assert names_of(env.single_action_space) == ("torque",)
    env.close()


def test_spaces_of_two_orders_differ_and_say_so():
    one, other = named(ACTION, JOINTS), named(ACTION, REVERSED)
    assert one != other
    assert one == ACTION == other
    assert "elbow.pos, shoulder.pos" in str(other)


@pytest.mark.parametrize("part", ["observation", "action"])
def test_weights_are_not_loaded_for_another_order(part):
    spaces = {"observation": Dict({"state": named(STATE, JOINTS)}), "action": named(ACTION, JOINTS)}
    other = {"observation": Dict({"state": named(STATE, REVERSED)})}
    other |= {"action": named(ACTION, REVERSED)}
    described = zip(("observation_space", "action_space"), spaces.values(), strict=True)
    saved = {SPACES_KEY: {name: space_data(space) for name, space in described}}
    check_description(ActorCritic(*spaces.values()), saved, "")
    check_description(ActorCritic(Dict({"state": STATE}), ACTION), saved, "")
    with refused(names=(f"{part}_space", ", ".join(JOINTS), ", ".join(REVERSED))):
        check_description(ActorCritic(*(spaces | {part: other[part]}).values()), saved, "")


MODEL = """<mujoco><worldbody><body><joint name="a" type="slide"/><geom size=".1" mass="1"/>
<body><joint name="b" axis="0 1 0"/><geom size=".1" mass="1"/></body></body></worldbody><actuator>
<position name="a" joint="a" kp="10"/><position name="b" joint="b" kp="20"/></actuator></mujoco>"""


def two_servos(**actions):
    return MujocoEnv(1, lambda: mujoco.MjSpec.from_string(MODEL), actions=actions)


@pytest.mark.parametrize("drives", [None, ["b", "a"], ["*"]])
def test_scales_and_clips_by_name_go_to_their_drives(drives):
    term = Position({"b": 2.0, "a": 10.0}, clip={"a": 0.5, "b": 1.0}, drives=drives)
    env = two_servos(arm=term)
    env.reset(seed=0)
    env.step(torch.full((1, 2), 2.0))
    assert env.state["ctrl"].tolist() == [[5.0, 2.0]]
    order = drives if drives == ["b", "a"] else ["a", "b"]
    assert names_of(env.single_action_space) == tuple(order)
    assert env.single_action_space.high.tolist() == [{"a": 0.5, "b": 1.0}[name] for name in order]
    exported = env.metadata
    assert exported["action_names"] == exported["joint_names"] == order
    assert exported["action_scale"] == [{"a": 10.0, "b": 2.0}[name] for name in order]
    assert exported["joint_stiffness"] == [{"a": 10.0, "b": 20.0}[name] for name in order]


@pytest.mark.parametrize("setting", ["scale", "clip"])
def test_other_names_of_drives_are_refused(setting):
    with refused(names=("'arm'", setting, "'c'", "a, b")):
        two_servos(arm=Position(**{setting: {"a": 1.0, "c": 2.0}}))


def test_an_end_effector_has_its_own_numbers():
    term = EndEffectorPose(lambda env, change: change[:, :2], size=3, scale=[1.0, 2.0, 3.0])
    assert "action_scale" not in two_servos(arm=term).metadata


def test_terms_around_an_env_scale_by_name():
    servos = partial(MujocoEnv, model=lambda: mujoco.MjSpec.from_string(MODEL))
    env = TermWrapper(1, servos, action=Position({"b": 0.1, "a": 0.2}, clip=1.0))
    env.reset(seed=0)
    env.step(torch.ones(1, 2))
    np.testing.assert_allclose(env.env.state["ctrl"].tolist(), [[0.2, 0.1]], rtol=1e-6)
    assert names_of(env.single_action_space) == ("a", "b")


@pytest.mark.parametrize("setting", ["scale", "clip"])
def test_a_list_is_read_in_an_order_that_is_named(setting):
    with refused(UserWarning, names=(f"{setting} [2.0, 3.0]", "a, b", "{name: number}")):
        two_servos(arm=Position(**{setting: [2.0, 3.0]}))


def test_a_list_next_to_the_names_of_its_drives_is_not_warned_of(recwarn):
    two_servos(arm=Position([2.0, 10.0], drives=["b", "a"]))
    assert not [warning for warning in recwarn if "order" in str(warning.message)]


def test_an_idle_person_rests_at_numbers_by_name():
    def rest(neutral):
        device = Keyboard(neutral=neutral)
        device._space = named(ACTION, JOINTS)
        device._check_space()
        return device._neutral.tolist()

    assert rest({"elbow.pos": 2.0, "shoulder.pos": 1.0}) == [1.0, 2.0]
    with refused(UserWarning, names=("Keyboard", "neutral", *JOINTS)):
        assert rest([1.0, 2.0]) == [1.0, 2.0]
    with refused(names=("neutral", "elbow.pos", "wrist")):
        rest({"elbow.pos": 2.0, "wrist": 1.0})


@pytest.mark.parametrize(
    ("device", "steering"),
    [(Keyboard, "steering"), (Gamepad, "axes"), (SpaceMouse, "steering")],
    ids=lambda value: str(value),
)
def test_keys_and_axes_steer_joints_by_name(device, steering):
    def deflections(target):
        source = device(**{steering: {"7": target}})
        source._space = named(ACTION, JOINTS)
        source._check_space()
        return source._moved({"7": 1.0}, {"7": target})

    assert deflections(f"-{JOINTS[1]}") == {1: -1.0}
    assert deflections(JOINTS[0]) == {0: 1.0}
    with refused(UserWarning, names=(device.__name__, *JOINTS, f"+{JOINTS[0]}")):
        assert deflections("+1") == {1: 1.0}
    for unknown in ("+wrist", "-2"):
        with refused(names=(device.__name__, unknown[1:], *JOINTS)):
            deflections(unknown)


def test_a_gripper_is_found_by_its_name():
    env = ScriptedEnv(named(STATE, JOINTS), ACTION)
    assert GripperPenalty(env, JOINTS[1], open_at=1.0, closed_at=0.0)._index == 1
    with refused(names=("GripperPenalty", "wrist", *JOINTS)):
        GripperPenalty(env, "wrist", open_at=1.0, closed_at=0.0)


CAMERAS = ("front", "wrist")


def two_cameras(cameras):
    spaces = {name: Box(0, 255, (8, 8, 3), np.uint8) for name in CAMERAS}
    spaces |= {"proprio": named(STATE, JOINTS), "depth": Box(0, 9, (8, 8), np.float32)}
    env = ScriptedEnv(Dict(spaces), ACTION)
    return VLAObservation(env, rgb=cameras, depth=["depth", "depth"]).observation_space


def test_cameras_and_joints_of_a_vla_have_their_names():
    space, other = two_cameras(CAMERAS), two_cameras(CAMERAS[::-1])
    assert names_of(space["rgb"], 0) == CAMERAS
    assert names_of(space["rgb"]) == names_of(space["depth"]) == ()
    assert names_of(space["proprio"]) == JOINTS
    assert space_from(space_data(space)) == space != other
    saved = {SPACES_KEY: {"observation_space": space_data(space)}}
    check_description(variant_of(space), saved, "")
    with refused(names=("observation_space", "front, wrist", "wrist, front")):
        check_description(variant_of(other), saved, "")


def variant_of(space):
    """Return what `check_description` reads of a policy."""
    return SimpleNamespace(observation_space=space, action_space=ACTION)
