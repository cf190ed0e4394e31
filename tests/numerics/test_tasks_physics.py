"""The physics and the starts of the tasks by definition."""

import numpy as np
import pytest
import torch

from lightning_rl import CartPole, PointMass, PushCube
from lightning_rl.extensions.managers.actions import Force
from lightning_rl.extensions.tasks.cart_pole import accelerate
from lightning_rl.extensions.tasks.push_cube import push

M, m, l, g = 1.0, 0.1, 0.5, 9.81  # noqa: E741


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


def test_starts_are_in_their_ranges_and_free():
    env = PushCube(4096)
    env.reset(seed=0)
    for key, low, high in [
        ("pusher", [-0.52, -0.02], [-0.48, 0.02]),
        ("cube", [-0.8, -0.6], [-0.42, -0.2]),
        ("goal", [-0.3, -0.3], [0.3, 0.3]),
    ]:
        share = (env.state[key] - torch.tensor(low)) / (torch.tensor(high) - torch.tensor(low))
        assert share.aminmax() == pytest.approx((0.0, 1.0), abs=0.02)
    env = PointMass(4096)
    env.reset(seed=0)
    start, goal, obstacles = (env.state[key] for key in ("position", "goal", "obstacles"))
    for value, most in ((start, 0.6), (goal, 0.7), (obstacles, 0.8)):
        assert most - 0.02 < value.abs().max() <= most
    assert (goal - start).norm(dim=1).min() >= 0.2
    assert 0.25 <= (obstacles - goal[:, None]).norm(dim=2).min() < 0.3
    assert ((obstacles - start[:, None]).norm(dim=2) - env.state["radii"]).min() >= 0.05
