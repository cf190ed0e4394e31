import numpy as np
import pytest
import torch

from lightning_rl.functional import discounted_return, gae, vtrace
from tests.messages import refused
from tests.references import forward_returns, gae_by_sum, vtrace_by_sum


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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("gamma", "gae_lambda"), [(0.99, 0.95), (0.9, 1.0), (0.9, 0.0), (1.0, 0.5), (0.0, 0.0)]
)
def test_gae_is_the_sum_of_its_definition(seed, gamma, gae_lambda):
    data = random_rollout(seed)
    advantage, target = gae(*tensors(*data), gamma=gamma, gae_lambda=gae_lambda)
    expected = gae_by_sum(*data, gamma, gae_lambda)
    np.testing.assert_allclose(advantage.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(target.numpy(), expected + data[1][:, :-1], rtol=1e-5, atol=1e-5)
    exact, _ = gae(*map(torch.from_numpy, data), gamma=gamma, gae_lambda=gae_lambda)
    np.testing.assert_allclose(exact.numpy(), expected, rtol=1e-11, atol=1e-11)


def test_gae_refuses_flattened_data():
    flat = torch.zeros(12)
    with refused(ValueError, names=("reward [N, T]", "value [N, T + 1]", "[12] and [12]")):
        gae(flat, flat, flat.bool(), flat.bool(), flat, gamma=0.9, gae_lambda=0.9)
    two_d = torch.zeros(3, 4)
    with refused(ValueError, names=("value [N, T + 1]", "[3, 4] and [3, 4]")):
        gae(two_d, two_d, two_d.bool(), two_d.bool(), two_d, gamma=0.9, gae_lambda=0.9)


@pytest.mark.parametrize("seed", range(3))
def test_discounted_return_restarts_with_each_episode(seed):
    rng = np.random.default_rng(seed)
    reward, done, initial = rng.normal(size=(4, 30)), rng.random((4, 30)) < 0.15, rng.normal(size=4)
    result = discounted_return(*tensors(reward, done, initial), gamma=0.95)
    np.testing.assert_allclose(
        result.numpy(), forward_returns(reward, done, initial, 0.95), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("gamma", "gae_lambda", "rho_bar", "c_bar"),
    [
        (0.99, 1.0, 1.0, 1.0),
        (0.9, 0.8, 1.0, 1.0),
        (1.0, 0.5, 2.0, 1.3),
        (0.95, 1.0, 0.7, 0.4),
        (0.0, 0.0, 1.0, 1.0),
    ],
)
def test_vtrace_is_the_sum_of_its_definition(seed, gamma, gae_lambda, rho_bar, c_bar):
    data = random_rollout(seed)
    log_ratio = np.random.default_rng(seed + 100).normal(scale=0.7, size=data[0].shape)
    settings = {"gamma": gamma, "gae_lambda": gae_lambda, "rho_bar": rho_bar, "c_bar": c_bar}
    expected = vtrace_by_sum(log_ratio, *data, *settings.values())
    for result, reference in zip(
        vtrace(*tensors(log_ratio, *data), **settings), expected, strict=True
    ):
        assert result.shape == data[0].shape
        np.testing.assert_allclose(result.numpy(), reference, rtol=1e-4, atol=1e-4)
    double = [torch.from_numpy(array) for array in (log_ratio, *data)]
    for result, reference in zip(vtrace(*double, **settings), expected, strict=True):
        np.testing.assert_allclose(result.numpy(), reference, rtol=1e-11, atol=1e-11)


def test_vtrace_stays_finite_where_a_probability_collapsed():
    data = tensors(*random_rollout(1, n_envs=1, n_steps=4))
    log_ratio = torch.tensor([[-1e5, 1e5, -np.inf, np.inf]])
    for result in vtrace(log_ratio, *data, gamma=0.9, gae_lambda=0.9):
        assert result.isfinite().all()


def test_vtrace_refuses_flattened_data():
    flat, two_d = torch.zeros(12), torch.zeros(3, 4)
    settings = {"gamma": 0.9, "gae_lambda": 0.9}
    with refused(ValueError, names=("reward [N, T]", "value [N, T + 1]", "[12] and [12]")):
        vtrace(flat, flat, flat, flat.bool(), flat.bool(), flat, **settings)
    value, nothing = torch.zeros(3, 5), two_d.bool()
    with refused(ValueError, names=("reward", "[3, 4]", "[3, 5]")):
        vtrace(value, two_d, value, nothing, nothing, two_d, **settings)
