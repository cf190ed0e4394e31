"""What every task keeps to: seeds, saving, endings, reward terms, action terms."""

import numpy as np
import pytest
import torch

from lightning_rl import CartPole, PointMass, PushCube
from lightning_rl.extensions.managers.actions import DeltaPosition, Force, Position, Velocity
from lightning_rl.extensions.tasks.drawing import Canvas
from tests.helpers import assert_same
from tests.messages import refused
from tests.probes import ValueProbe

TASKS = [CartPole, PushCube, PointMass]


def noise(steps, count, seed=0, scale=3.0):
    return torch.randn(steps, count, 2, generator=torch.Generator().manual_seed(seed)) * scale


def play(env, actions):
    """Return what each step gave, but the final observations of rows that went on."""
    steps = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        done = terminated | truncated
        info["final_obs"] = torch.where(done[:, None], info["final_obs"], 0.0)
        steps.append([observation, reward, terminated, truncated, info])
    return steps


def rows(tree, index):
    if isinstance(tree, dict):
        return {key: rows(value, index) for key, value in tree.items()}
    if isinstance(tree, list):
        return [rows(value, index) for value in tree]
    return tree[index]


@pytest.mark.parametrize("make", TASKS)
def test_an_env_lives_alike_alone_and_among_4096(make):
    actions = noise(40, 4096)
    many = make(4096, max_episode_steps=9)
    first = many.reset(seed=100)[0]
    everyone = play(many, actions)
    assert min(int(many.episode[i]) for i in (0, 7, 4095)) >= 4
    for index in ([0], [4095], [7, 8, 4001]):
        few = make(len(index), max_episode_steps=9)
        assert torch.equal(few.reset(seed=[100 + i for i in index])[0], first[index])
        assert_same(play(few, actions[:, index]), rows(everyone, index))


@pytest.mark.parametrize("make", TASKS)
def test_where_nobody_looks_who_is_done_the_result_is_the_same(make):
    """What an accelerator does: draw for all rows, keep those of the finished."""
    looks, blind = make(50, max_episode_steps=9), make(50, max_episode_steps=9)
    blind._on_cpu = False
    assert torch.equal(looks.reset(seed=1)[0], blind.reset(seed=1)[0])
    actions = noise(40, 50)
    assert_same(play(looks, actions), play(blind, actions))
    assert_same(looks.state_dict(), blind.state_dict())


@pytest.mark.parametrize(("axis", "sign"), [(0, -1.0), (1, 1.0)])
def test_a_cube_pushed_off_the_table_is_a_failure(axis, sign):
    env = PushCube(4)
    env.reset(seed=0)
    for key, along in (("cube", 0.985), ("pusher", 0.91)):
        env.state[key][:2] = 0.5
        env.state[key][:2, axis] = sign * along
    action = torch.zeros(4, 2)
    action[:, axis] = sign
    _, _, terminated, _, info = env.step(action)
    assert terminated.tolist() == [True, True, False, False]
    assert not info["success"].any()
    assert sign * info["final_obs"][0, 2 + axis] > 1.0


def test_the_terms_of_push_cube_by_definition():
    env = PushCube(64, rewards={"reach_kernel": 0.03, "goal_kernel": 0.8})
    before = env.reset(seed=0)[0].double().numpy()
    env.state["pusher"][:32] = env.state["cube"][:32] - torch.tensor([0.08, 0.03])
    before = env.observe(env.state).double().numpy()
    action = noise(1, 64)[0]
    info = env.step(action)[4]
    after = info["final_obs"].double().numpy()

    def distances(o):
        pusher, cube, goal = o[:, 0:2], o[:, 2:4], o[:, 4:6]
        d = np.linalg.norm(goal - cube, axis=1)
        behind = cube - 0.08 * (goal - cube) / d[:, None]
        return d, np.linalg.norm(behind - pusher, axis=1)

    (d0, r0), (d1, r1) = distances(before), distances(after)
    assert (d0 != d1).any()
    change = np.linalg.norm(action.clamp(-1, 1).double().numpy() - before[:, 10:12], axis=1)
    expected = {
        "reach_progress": r0 - r1,
        "goal_progress": 10 * (d0 - d1),
        "smoothness": -0.01 * change,
        "step": np.full(64, -0.01),
        "success": 10.0 * (d1 < 0.1),
        "reach_kernel": 0.03 * (1 - np.tanh(8 * r1)),
        "goal_kernel": 0.8 * np.exp(-(d1**2) / (2 * 0.12**2)),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(info["rewards"][name].numpy(), values, atol=3e-6, err_msg=name)


def test_the_terms_of_point_mass_by_definition():
    env = PointMass(64, rewards={"near_goal": 0.5})
    env.reset(seed=0)
    env.state["obstacles"][:20, 1] = env.state["position"][:20] + 0.03
    env.state["velocity"].uniform_(-1, 1, generator=torch.Generator().manual_seed(1))
    before = env.observe(env.state).double().numpy()
    action = noise(1, 64)[0]
    info = env.step(action)[4]
    after = info["final_obs"].double().numpy()
    a = action.clamp(-1, 1).double().numpy()
    v = before[:, 2:4] * (1 - 5 / 60) + a * 5 / 60
    x = np.clip(before[:, 0:2] + v / 60, -1, 1)
    np.testing.assert_allclose(after[:, 0:4], np.concatenate((x, v), 1), atol=1e-6)
    start, goal = before[:, 0:2], before[:, 0:2] + before[:, 4:6]
    np.testing.assert_allclose(after[:, 4:6], goal - x, atol=1e-6)
    d = np.linalg.norm(x - goal, axis=1)
    centres, radii = start[:, None] + before[:, 8:12].reshape(-1, 2, 2), before[:, 12:14]
    depth = np.maximum(0, radii - np.linalg.norm(x[:, None] - centres, axis=2))
    assert (depth[:20, 1] > 0).any()
    expected = {
        "distance": -d,
        "near_goal": 0.5 * np.exp(-(d**2) / (2 * 0.05**2)),
        "collision": -2 * (depth**2).sum(1),
        "speed": -0.01 * (v**2).sum(1),
        "smoothness": -0.001 * ((a - before[:, 6:8]) ** 2).sum(1),
        "success": 5.0 * (d < 0.03),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(info["rewards"][name].numpy(), values, atol=3e-6, err_msg=name)
    metrics = info["metrics"]
    np.testing.assert_array_equal(metrics["collision_count"].numpy(), (depth > 0).sum(1))
    length = np.linalg.norm(x - before[:, 0:2], axis=1)
    np.testing.assert_allclose(metrics["path_length"].numpy(), length, atol=1e-6)
    later = env.step(action)[4]
    y, goes_on = later["final_obs"].double().numpy()[:, 0:2], d >= 0.03
    length += np.linalg.norm(y - x, axis=1)
    found = later["metrics"]["path_length"].numpy()
    np.testing.assert_allclose(found[goes_on], length[goes_on], atol=1e-6)


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (DeltaPosition(0.02, clip=0.25), [0.005, -0.005]),
        (DeltaPosition(9.0), [0.03, -0.03]),
        (Velocity(0.2, clip=0.5), [0.01, -0.01]),
    ],
)
def test_the_pusher_moves_by_what_its_action_means(term, expected):
    env = PushCube(3, action=term)
    env.reset(seed=0)
    before = env.state["pusher"].clone()
    env.step(torch.tensor([[1.0, -0.5]]).expand(3, 2))
    moved = env.state["pusher"] - before
    torch.testing.assert_close(moved, torch.tensor([expected]).expand(3, 2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("make", [PushCube, PointMass])
def test_a_position_is_gone_to(make):
    env = make(3, action=Position(0.5))
    env.reset(seed=0)
    for _ in range(160):
        env.elapsed.zero_()
        if make is PointMass:
            env.state["goal"] += 5.0  # never reached
        env.step(torch.tensor([[0.4, 1.4]]).expand(3, 2))
    at = env.state["pusher" if make is PushCube else "position"]
    torch.testing.assert_close(at, torch.tensor([[0.2, 0.7]]).expand(3, 2), atol=5e-3, rtol=0)


def test_the_point_flies_with_the_velocity_asked_for():
    env = PointMass(3, action=Velocity(0.5))
    env.reset(seed=0)
    for _ in range(20):
        env.state["goal"] += 5.0
        env.step(torch.tensor([[1.0, -0.5]]).expand(3, 2))
    wanted = torch.tensor([[0.5, -0.25]]).expand(3, 2)
    torch.testing.assert_close(env.state["velocity"], wanted, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("term", "slider", "hinge"),
    [
        (DeltaPosition(0.1), 10 * 0.1 * 2, 0.01 * 0.1 * 3),
        (DeltaPosition(0.1, clip=1.0), 10 * 0.1, 0.01 * 0.1),
        (Position(0.1), 10 * (0.1 * 2 - 0.5), 0.01 * (0.1 * 3 - 0.25)),
        (Velocity(0.1), 0.1 * 2, 0.001 * 0.1 * 3),
        (Force(2.0), 4.0, 0.1),
        (Force(1000.0), 100.0, 0.1),
    ],
)
def test_the_drives_push_as_their_action_means(term, slider, hinge):
    """At rest the first effort is the drive's law alone."""
    env = CartPole(1, action=term)
    env.reset(seed=0)
    position = torch.tensor([[0.5, 0.25]])
    target = term.target(term.clipped_action(torch.tensor([[2.0, 3.0]])), position)
    rest = torch.zeros(1)
    efforts = [float(env._effort(i, position[:, i], rest, target[:, i])) for i in (0, 1)]
    assert efforts == pytest.approx([slider, hinge], rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PushCube(2, rewards={"goal_progres": 1.0}),
            (
                "PushCube",
                "'goal_progres'",
                "reach_progress, goal_progress",
                "close matches: goal_progress",
            ),
        ),
        (lambda: CartPole(2, rewards={"upright": float("nan")}), ("CartPole", "'upright'", "nan")),
        (
            lambda: PushCube(2, action=Force()),
            ("PushCube", "Force", "DeltaPosition, Position, Velocity"),
        ),
        (lambda: DeltaPosition(0.0), ("DeltaPosition: scale", "0")),
        (lambda: Velocity(1.0, clip=-1.0), ("Velocity: clip", "0", "-1.0")),
        (lambda: PointMass(2, max_episode_steps=0), ("max_episode_steps", "at least 1", "0")),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with refused(names=message):
        make()


def test_areas_and_edges_of_shapes():
    """The coverage of all pixels sums to the area of the shape."""
    centre = torch.tensor([[0.0, 0.0], [0.1, -0.13], [-0.2, 0.2]])
    white, angle = (1.0, 1.0, 1.0), torch.tensor([0.0, 0.3, 1.2])
    areas = {}
    for name, shape in {
        "disc": lambda c: c.disc(centre, torch.tensor([0.1, 0.2, 0.15]), white),
        "ring": lambda c: c.disc(centre, 0.2, white, ring=0.05),
        "box": lambda c: c.box(centre, (0.2, 0.1), white, angle),
        "line": lambda c: c.segment(centre, centre + 0.1, 0.05, white),
        "half": lambda c: c.disc(centre, 0.2, white, opacity=0.5),
    }.items():
        canvas = Canvas(3, 100, 160, extent=(1.6, 1.0), background=(0.0, 0.0, 0.0))
        shape(canvas)
        areas[name] = canvas.pixels()[..., 0].double().sum((1, 2)) / 255 * 1e-4
    pi = np.pi
    for name, expected in {
        "disc": [pi * 0.01, pi * 0.04, pi * 0.0225],
        "ring": [2 * pi * 0.2 * 0.05] * 3,
        "box": [0.08] * 3,
        "line": [0.1 * 2**0.5 * 0.1 + pi * 0.0025] * 3,
        "half": [pi * 0.02] * 3,
    }.items():
        assert areas[name].tolist() == pytest.approx(expected, rel=0.01), name


def test_an_env_without_pictures_says_so():
    with refused(names=("ValueProbe", "render(rows)")):
        ValueProbe(2).render([0])
