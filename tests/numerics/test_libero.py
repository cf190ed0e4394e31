"""LIBERO's tasks: what they observe, and where their episodes begin. Most tests need its wheels, which hold the models."""

import importlib.util
import math
import multiprocessing

import numpy as np
import pytest
from scripts.libero_experts import TASKS, play

from lightning_rl import LiberoEnv
from lightning_rl.extensions.libero.env import LiberoTask, axis_angle
from tests.messages import refused

HAS_WHEELS = importlib.util.find_spec("libero") is not None
needs_wheels = pytest.mark.skipif(not HAS_WHEELS, reason="needs constraints-libero.txt")


def turned(vector, point):
    """Rodrigues: a point [3] after a turn about a vector [3] by its length, in rad."""
    angle = np.linalg.norm(vector)
    axis = vector / angle
    along = axis * (axis @ point)
    return along + math.cos(angle) * (point - along) + math.sin(angle) * np.cross(axis, point)


@pytest.mark.parametrize("seed", range(5))
def test_the_rotation_vector_turns_as_the_quaternion_does(seed):
    generator = np.random.default_rng(seed)
    quaternion = generator.normal(size=4)
    quaternion /= np.linalg.norm(quaternion)
    point = generator.normal(size=3)
    xyz, w = quaternion[:3], quaternion[3]
    expected = point + 2 * np.cross(xyz, np.cross(xyz, point) + w * point)  # q p q*
    assert turned(axis_angle(quaternion), point) == pytest.approx(expected, abs=1e-12)


def test_no_rotation_is_a_vector_of_zeros():
    assert axis_angle(np.array([0.0, 0.0, 0.0, 1.0])).tolist() == [0, 0, 0]


@pytest.mark.skipif(HAS_WHEELS, reason="asks what is told without constraints-libero.txt")
def test_without_its_wheels_it_names_its_environment():
    with refused(names=("constraints-libero.txt", ".[libero]", "LiberoEnv")):
        LiberoEnv(1, "libero_object")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"cameras": ()}, ("cameras", "objects")),
        ({"cameras": ("agentview",)}, ("cameras", "agentview", "image", "image2")),
    ],
)
def test_settings_are_refused_by_name(settings, names):
    with refused(names=names):
        LiberoEnv(1, "libero_object", **settings)


@needs_wheels
@pytest.mark.parametrize(
    ("suite", "task_id", "names"),
    [
        ("libero_objects", 0, ("libero_objects", "libero_object")),
        ("libero_object", 10, ("task_id", 10, "libero_object", 9)),
    ],
)
def test_unknown_tasks_are_refused_by_name(suite, task_id, names):
    with refused(names=names):
        LiberoEnv(1, suite, task_id, cameras=(), objects=True)


def settled(warm):
    """Observe the start of seed 53, state 3 of 50, and the step after it."""
    env = LiberoTask("libero_object", 0, cameras=(), size=64, objects=True, relative=True)
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 7)).astype(np.float32)
    if warm:
        env.reset(seed=7)
        for action in actions:
            env.step(action)
    observation, info = env.reset(seed=53)
    assert info == {"state_number": 3}
    state = env.simulation().get_sim_state().tobytes()
    for action in actions[:5]:
        after = env.step(action)[0]
    env.close()
    return state, observation["environment_state"].tobytes(), after["state"].tobytes()


@needs_wheels
def test_two_processes_begin_alike_whatever_happened_before():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        cold, warm = pool.map(settled, [False, True])
    assert cold == warm


@needs_wheels
@pytest.mark.parametrize("name", list(TASKS))
def test_the_expert_solves_its_task(name):
    suite, number = name.split(":")
    env = LiberoTask(suite, int(number), cameras=(), size=64, objects=True, relative=True)
    episode = play(env, TASKS[name], number=3, noise=0.2)
    env.close()
    assert episode.success
    assert len(episode) < 280
    assert episode.reward.sum() == 1


@needs_wheels
def test_the_env_is_stepped_as_any_other():
    import torch

    env = LiberoEnv(1, "libero_object", 1, cameras=("image2",), size=32, max_episode_steps=3)
    assert env.max_episode_steps == 3
    observation, _ = env.reset(seed=0)
    assert observation["image2"].shape == (1, 32, 32, 3)
    assert observation["state"].shape == (1, 8)
    for _ in range(3):
        _, reward, terminated, truncated, info = env.step(torch.zeros(1, 7))
    assert truncated.all()
    assert not terminated.any()
    assert not info["success"].any()
    assert reward.sum() == 0
    env.close()


@needs_wheels
def test_an_absolute_action_holds_the_pose_of_the_gripper():
    from robosuite.utils.transform_utils import mat2quat, quat2axisangle

    env = LiberoTask("libero_spatial", 0, cameras=(), size=64, objects=True, relative=False)
    start = env.reset(seed=0)[0]["state"]
    (robot,) = env.simulation().robots
    turn = quat2axisangle(mat2quat(robot.controller.ee_ori_mat))
    pose = np.array([*robot.controller.ee_pos, *turn, -1.0], np.float32)
    assert env.action_space.contains(pose)
    for _ in range(10):
        state = env.step(pose)[0]["state"]
    env.close()
    assert state[:3] == pytest.approx(start[:3], abs=2e-3)
