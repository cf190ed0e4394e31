import numpy as np
import pytest
import torch

from lightning_rl.functional import discounted_return, gae
from tests.references import forward_returns, gae_by_sum, monte_carlo_return


def random_rollout(seed, n_envs=5, n_steps=40):
    rng = np.random.default_rng(seed)
    reward = rng.normal(size=(n_envs, n_steps))
    value = rng.normal(size=(n_envs, n_steps + 1))
    terminated = rng.random((n_envs, n_steps)) < 0.1
    truncated = rng.random((n_envs, n_steps)) < 0.1  # some steps are both
    final_value = rng.normal(size=(n_envs, n_steps))  # also where it must be ignored
    return reward, value, terminated, truncated, final_value


def tensors(*arrays):
    return [torch.from_numpy(a).float() if a.dtype != bool else torch.from_numpy(a) for a in arrays]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("gamma", "gae_lambda"), [(0.99, 0.95), (0.9, 1.0), (1.0, 0.5), (0.0, 0.0)]
)
def test_gae_is_the_sum_of_its_definition(seed, gamma, gae_lambda):
    data = random_rollout(seed)
    advantage, target = gae(*tensors(*data), gamma=gamma, gae_lambda=gae_lambda)
    expected = gae_by_sum(*data, gamma, gae_lambda)
    np.testing.assert_allclose(advantage.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(target.numpy(), expected + data[1][:, :-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_lambda_one_is_the_monte_carlo_return(seed):
    data = random_rollout(seed)
    _, target = gae(*tensors(*data), gamma=0.97, gae_lambda=1.0)
    np.testing.assert_allclose(
        target.numpy(), monte_carlo_return(*data, 0.97), rtol=1e-5, atol=1e-5
    )


def test_lambda_zero_is_the_temporal_difference():
    reward, value, terminated, truncated, final_value = random_rollout(0)
    advantage, _ = gae(
        *tensors(reward, value, terminated, truncated, final_value), gamma=0.9, gae_lambda=0.0
    )
    successor = np.where(terminated, 0.0, np.where(truncated, final_value, value[:, 1:]))
    np.testing.assert_allclose(
        advantage.numpy(), reward + 0.9 * successor - value[:, :-1], atol=1e-5
    )


def test_a_time_limit_is_not_a_failure():
    """With reward 1 for ever V = 1 / (1 - gamma) is a fixed point of the target; treated as failure it is not."""
    gamma, horizon, n_steps = 0.9, 5, 20
    exact = 1.0 / (1.0 - gamma)
    reward = torch.ones(1, n_steps)
    value = torch.full((1, n_steps + 1), exact)
    limit = torch.arange(1, n_steps + 1).remainder(horizon).eq(0)[None]
    nothing = torch.zeros_like(limit)
    final_value = torch.full((1, n_steps), exact)

    _, right = gae(reward, value, nothing, limit, final_value, gamma=gamma, gae_lambda=1.0)
    torch.testing.assert_close(right, torch.full((1, n_steps), exact))

    _, wrong = gae(reward, value, limit, nothing, final_value, gamma=gamma, gae_lambda=1.0)
    steps_left = horizon - torch.arange(n_steps) % horizon
    torch.testing.assert_close(wrong[0], (1 - gamma**steps_left) / (1 - gamma))
    assert wrong.max() < 0.45 * exact


def test_gae_refuses_flattened_data():
    flat = torch.zeros(12)
    with pytest.raises(ValueError, match="whole rollouts"):
        gae(flat, flat, flat.bool(), flat.bool(), flat, gamma=0.9, gae_lambda=0.9)
    two_d = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="bootstrap value in the last column"):
        gae(two_d, two_d, two_d.bool(), two_d.bool(), two_d, gamma=0.9, gae_lambda=0.9)


@pytest.mark.parametrize("seed", range(3))
def test_discounted_return_restarts_with_each_episode(seed):
    rng = np.random.default_rng(seed)
    reward, done, initial = rng.normal(size=(4, 30)), rng.random((4, 30)) < 0.15, rng.normal(size=4)
    result = discounted_return(*tensors(reward, done, initial), gamma=0.95)
    np.testing.assert_allclose(
        result.numpy(), forward_returns(reward, done, initial, 0.95), rtol=1e-5, atol=1e-5
    )
