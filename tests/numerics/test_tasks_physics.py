"""The physics of the tasks by definition, and that they can be solved."""

import numpy as np
import pytest
import torch

from lightning_rl import CartPole, PointMass, PushCube
from lightning_rl.extensions.managers.actions import Force
from lightning_rl.extensions.tasks.cart_pole import accelerate
from lightning_rl.extensions.tasks.push_cube import push

M, m, l, g = 1.0, 0.1, 0.5, 9.81  # noqa: E741


def energy(x, q, v, w):
    """Kinetic energy of the cart and of a uniform rod of length 2 l, and the rod's height (J)."""
    vx, vy = v + l * w * np.cos(q), -l * w * np.sin(q)
    return M * v**2 / 2 + m * (vx**2 + vy**2) / 2 + m * l**2 / 3 * w**2 / 2 + m * g * l * np.cos(q)


def test_forces_accelerate_as_the_equations_of_motion_say():
    rng = np.random.default_rng(1)
    q, w, push_, torque = rng.uniform(-1, 1, (4, 100)) * [[3.0], [4.0], [20.0], [2.0]]
    a, turn = accelerate(*(torch.from_numpy(value) for value in (q, w, push_, torque)))
    inertia = np.full_like(q, m * l**2 * 4 / 3)
    mass = np.array([[np.full_like(q, M + m), m * l * np.cos(q)], [m * l * np.cos(q), inertia]])
    right = np.stack((push_ + m * l * np.sin(q) * w**2, torque + m * g * l * np.sin(q)))
    solved = np.linalg.solve(mass.transpose(2, 0, 1), right.T[..., None])[..., 0].T
    np.testing.assert_allclose(a.numpy(), solved[0], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(turn.numpy(), solved[1], rtol=1e-9, atol=1e-9)


def test_an_undriven_env_keeps_its_energy_until_the_pole_has_fallen():
    env = CartPole(100, action=Force(1.0))
    env.reset(seed=0)

    def total(state):
        (x, q), (v, w) = (state[key].double().numpy().T for key in ("position", "velocity"))
        return energy(x, q, v, w)

    first, drift, fastest = total(env.state), [], 0.0
    for _ in range(25):
        env.step(torch.zeros(100, 2))
        fastest = max(fastest, float(env.final_state["velocity"][:, 1].abs().max()))
        drift.append(np.abs(total(env.final_state) - first)[env.episode.numpy() == 0])
    assert fastest > 1.0
    assert max(d.max() for d in drift if len(d)) < 0.02  # of 0.49 J between upright and level
    env.reset(seed=0)
    env.step(torch.tensor([[3.0, 0.0]]).expand(100, 2))
    assert np.abs(total(env.final_state) - first).min() > 5e-3


def test_the_cart_stops_at_the_end_of_the_rail():
    env = CartPole(2, action=Force(50.0))
    env.reset(seed=0)
    furthest = 0.0
    for _ in range(30):
        env.step(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        x, v = env.final_state["position"][:, 0], env.final_state["velocity"][:, 0]
        assert x.abs().max() <= 1.0
        assert not v[x.abs() == 1.0].any()
        furthest = max(furthest, float(x.abs().max()))
    assert furthest == 1.0


def test_the_pole_is_balanced_by_a_linear_law():
    env = CartPole(32)
    observation, _ = env.reset(seed=0)
    returns = torch.zeros(32)
    for _ in range(499):
        x, q = (observation[:, 0] * 2 - 1), (observation[:, 1] - 0.5) * np.pi
        v, w = observation[:, 2], observation[:, 3]
        lead = 2.6 * x + 5.1 * v + 38.5 * q + 9.4 * w  # of a linear-quadratic regulator
        observation, reward, terminated, *_ = env.step(torch.stack((lead, 0 * lead), 1))
        returns += reward
        assert not terminated.any()
    info = env.step(torch.zeros(32, 2))[4]
    assert info["success"].float().mean() > 0.9
    assert returns.min() > 490


def gap(pusher, cube):
    """From the pusher's centre to the cube (m)."""
    offset = (pusher - cube).abs().double() - 0.05
    return offset.clamp_min(0).square().sum(1).sqrt()


def chase(steps=60, count=512):
    """Move pushers about at cubes that are near; yield (pusher, cube, move, new pusher, new cube)."""
    generator = torch.Generator().manual_seed(0)
    cube = torch.zeros(count, 2)
    pusher = torch.where(torch.rand(count, 2, generator=generator) < 0.5, -0.1, 0.1)
    for _ in range(steps):
        towards = (cube - pusher) * 0.5
        move = (towards + 0.03 * torch.randn(count, 2, generator=generator)).clamp(-0.03, 0.03)
        after = push(pusher, cube, move)
        yield pusher, cube, move, *after
        pusher, cube = after


def test_pusher_and_cube_never_overlap():
    touched = 0
    for _, before, _, pusher, cube in chase():
        assert gap(pusher, cube).min() > 0.02 - 1e-6
        touched += int((before != cube).any(1).sum())
    assert touched > 1000


def test_an_untouched_cube_stays_exactly_where_it_is():
    untouched = 0
    for pusher, cube, move, _, after in chase():
        clear = gap(pusher, cube) > 0.02 + move.norm(dim=1).double()
        assert torch.equal(after[clear], cube[clear])
        untouched += int(clear.sum())
    assert untouched > 500


@pytest.mark.parametrize(
    ("move", "moved"),
    [
        ([0.03, 0.0], [0.03, 0.0]),
        ([0.03, 0.01], [0.03, 0.01]),  # within the friction cone: the cube goes along
        ([0.03, -0.03], [0.03, -0.8 * 0.03]),  # beyond it: dragged by the coefficient of friction
        ([-0.03, 0.03], [0.0, 0.0]),
    ],
)
def test_a_face_that_is_pushed(move, moved):
    pusher, cube = torch.tensor([[-0.07, 0.01]]), torch.zeros(1, 2)
    _, after = push(pusher, cube, torch.tensor([move]))
    assert after[0].tolist() == pytest.approx(moved, abs=1e-6)
    swapped = push(pusher.flip(1), cube, torch.tensor([move]).flip(1))[1]
    assert swapped.flip(1)[0].tolist() == pytest.approx(moved, abs=1e-6)


def test_starts_of_push_cube_are_in_their_ranges_and_free():
    env = PushCube(4096)
    env.reset(seed=0)
    pusher, cube, goal = (env.state[key] for key in ("pusher", "cube", "goal"))
    for value, low, high in [
        (pusher, [-0.52, -0.02], [-0.48, 0.02]),
        (cube, [-0.8, -0.6], [-0.42, -0.2]),
        (goal, [-0.3, -0.3], [0.3, 0.3]),
    ]:
        low, high = torch.tensor(low), torch.tensor(high)
        assert (value >= low).all()
        assert (value <= high).all()
        assert (value.amin(0) - low).max() < 0.02 * (high - low).max()
        assert (high - value.amax(0)).max() < 0.02 * (high - low).max()
    assert (goal - cube).norm(dim=1).min() > 0.1
    assert gap(pusher, cube).min() > 0.02
    behind = cube + 0.08 * torch.nn.functional.normalize(cube - goal)
    assert behind.abs().max() < 1.0


def test_starts_of_point_mass_are_in_their_ranges_and_free():
    env = PointMass(4096)
    env.reset(seed=0)
    state = env.state
    start, goal, obstacles, radii = (state[k] for k in ("position", "goal", "obstacles", "radii"))
    for value, most in ((start, 0.6), (goal, 0.7), (obstacles, 0.8)):
        assert most - 0.02 < value.abs().max() <= most
    assert radii.min() >= 0.08
    assert radii.max() <= 0.15
    assert (goal - start).norm(dim=1).min() >= 0.2
    assert (obstacles - goal[:, None]).norm(dim=2).min() >= 0.25
    assert ((obstacles - start[:, None]).norm(dim=2) - radii).min() >= 0.05
    # as near as they may be, somewhere: the rule is no stricter than it says
    assert (obstacles - goal[:, None]).norm(dim=2).min() < 0.3
    # and everywhere: of 16 parts of the square, each holds its share
    count = torch.histogramdd(obstacles.flatten(0, 1), [4, 4], range=[-0.8, 0.8, -0.8, 0.8]).hist
    assert count.min() > 8192 / 16 * 0.5


def first_results(env, act, steps=100):
    """Play one episode in each env; return whether it succeeded, and its return."""
    observation, _ = env.reset(seed=0)
    running = torch.ones(env.num_envs, dtype=torch.bool)
    success, returns = torch.zeros_like(running), torch.zeros(env.num_envs)
    for _ in range(steps):
        observation, reward, terminated, truncated, info = env.step(act(observation))
        success |= running & info["success"]
        returns += torch.where(running, reward, 0.0)
        running &= ~(terminated | truncated)
    assert not running.any()
    return success, returns


def push_by_hand(observation):
    """Push along x from the left until the cube is under the goal, then along y."""
    p, c, goal = observation[:, 0:2], observation[:, 2:4], observation[:, 4:6]
    (px, py), (cx, cy), (gx, gy) = p.unbind(1), c.unbind(1), goal.unbind(1)

    def choose(condition, a, b):
        return torch.where(condition[:, None], torch.stack(a, 1), torch.stack(b, 1))

    left = cx - 0.09
    beside = choose((py - cy).abs() > 0.015, (left, cy), (px + 0.03, cy))
    along_x = torch.where(
        (px < cx - 0.068)[:, None], beside, torch.stack((left, py.maximum(cy + 0.09)), 1)
    )
    side = torch.where(gy > cy, 1.0, -1.0)
    under = cy - 0.09 * side
    below = (cy - py) * side > 0.068
    lift = choose((px - cx).abs() > 0.015, (cx, under), (cx, py + 0.03 * side))
    along_y = torch.where(below[:, None], lift, torch.stack((left, under), 1))
    target = torch.where(((gx - cx) > 0.05)[:, None], along_x, along_y)
    return (target - p) / 0.03


def test_push_cube_is_solved_by_a_scripted_controller():
    success, returns = first_results(PushCube(256), push_by_hand)
    assert success.float().mean() > 0.97
    # The negative control: standing still solves nothing.
    idle, less = first_results(PushCube(256), lambda o: torch.zeros(len(o), 2))
    assert not idle.any()
    assert returns[success].min() > less.max() + 10


def test_point_mass_is_solved_by_a_scripted_controller():
    success, returns = first_results(PointMass(256), lambda o: 6 * o[:, 4:6])
    assert success.float().mean() > 0.97
    idle, less = first_results(PointMass(256), lambda o: torch.zeros(len(o), 2))
    assert not idle.any()
    assert returns.mean() > less.mean() + 10
