"""The cart-pole swing-up: its start, terms, passive hinge and success; alone and among others."""

import numpy as np
import torch

from lightning_rl import CartPoleSwingUp


def pushes(steps, count):
    return torch.randn(steps, count, 1, generator=torch.Generator().manual_seed(0))


def test_the_terms_and_the_metric_by_definition():
    env = CartPoleSwingUp(64)
    env.reset(seed=0)
    env.state["position"][:, 1] += 4 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    action = 2 * pushes(1, 64)[0]
    _, reward, terminated, _, info = env.step(action)
    x, _, sin, cos, spin = info["final_obs"].double().numpy().T
    expected = {
        "height": cos,
        "cart_position": -0.5 * x**2,
        "pole_velocity": -0.02 * spin**2,
        "force": -0.02 * action[:, 0].double().numpy() ** 2,
    }
    for name, values in expected.items():
        np.testing.assert_allclose(info["rewards"][name].numpy(), values, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(reward.numpy(), sum(expected.values()), atol=1e-5)
    angle = np.abs(np.arctan2(sin, cos))
    np.testing.assert_allclose(info["metrics"]["distance_to_goal"].numpy(), angle, atol=1e-5)
    assert not terminated.any()


def test_the_force_moves_the_cart_and_nothing_drives_the_hinge():
    env = CartPoleSwingUp(3)
    env.reset(seed=0)
    env.state["position"].copy_(torch.tensor([[0.0, np.pi]]))
    env.step(torch.tensor([[1.0], [-3.0], [0.0]]))
    torch.testing.assert_close(env.state["effort"], torch.tensor([[10.0, 0], [-10.0, 0], [0.0, 0]]))
    x = env.state["position"][:, 0]
    torch.testing.assert_close(x / x[0], torch.tensor([1.0, -1.0, 0.0]))


def test_it_succeeds_at_the_last_step_alone_after_any_number_of_turns():
    env = CartPoleSwingUp(4, max_episode_steps=3)
    env.reset(seed=0)
    for step in range(3):
        for key in ("position", "velocity"):
            env.state[key].zero_()
        env.state["position"][1:, 1] = torch.tensor([-2 * np.pi, 0.15, 0.0])
        env.state["velocity"][3, 1] = 0.6
        success = env.step(torch.zeros(4, 1))[4]["success"]
        assert success.tolist() == [step == 2, step == 2, False, False]
