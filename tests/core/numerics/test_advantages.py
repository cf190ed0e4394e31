import numpy as np
import pytest
import torch

from lightning_rl.functional import discounted_return, gae, vtrace
from tests.messages import refused
from tests.references import forward_returns, gae_by_sum, monte_carlo_return, vtrace_by_sum


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


@pytest.mark.parametrize("seed", range(3))
def test_lambda_one_is_the_monte_carlo_return(seed):
    data = random_rollout(seed)
    _, target = gae(*tensors(*data), gamma=0.97, gae_lambda=1.0)
    np.testing.assert_allclose(
        target.numpy(), monte_carlo_return(*data, 0.97), rtol=1e-5, atol=1e-5
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


@pytest.mark.parametrize("seed", range(5))
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("bar", [1.0, 3.0])
def test_vtrace_at_ratio_one_is_gae(seed, gae_lambda, bar):
    data = tensors(*random_rollout(seed))
    settings = {"gamma": 0.97, "gae_lambda": gae_lambda}
    on_policy = torch.zeros_like(data[0])
    advantage, target = vtrace(on_policy, *data, **settings, rho_bar=bar, c_bar=bar)
    expected_advantage, expected_target = gae(*data, **settings)
    assert torch.equal(target, expected_target)
    torch.testing.assert_close(advantage, expected_advantage, rtol=1e-6, atol=1e-6)


def test_vtrace_without_bounds_is_unbiased_for_the_other_policy():
    """Over all action sequences of mu, weighted by their probability, v_0 averages to the value of pi."""
    steps, gamma = 3, 0.8
    pi, mu = np.array([[0.9, 0.1], [0.3, 0.7], [0.5, 0.5]]), np.array([[0.4, 0.6]] * 3)
    rng = np.random.default_rng(0)
    reward_of, value = rng.normal(size=(steps, 2)), rng.normal(size=steps + 1)
    actions = np.array(list(np.ndindex(*[2] * steps)))
    step = np.arange(steps)
    log_ratio = np.log(pi[step, actions] / mu[step, actions])
    nothing = np.zeros(actions.shape, dtype=bool)
    reward, zeros = reward_of[step, actions], np.zeros(actions.shape)
    values = np.tile(value, (len(actions), 1))
    data = [torch.from_numpy(a) for a in (log_ratio, reward, values, nothing, nothing, zeros)]
    _, target = vtrace(*data, gamma=gamma, gae_lambda=1.0, rho_bar=np.inf, c_bar=np.inf)
    average = (mu[step, actions].prod(1)[:, None] * target.numpy()).sum(0)
    rewards_of_pi = (pi * reward_of).sum(1)
    value_of_pi = rewards_of_pi @ gamma**step + gamma**steps * value[-1]
    assert average[0] == pytest.approx(value_of_pi, abs=1e-12)
    _, bounded = vtrace(*data, gamma=gamma, gae_lambda=1.0)  # the negative control
    biased = (mu[step, actions].prod(1)[:, None] * bounded.numpy()).sum(0)
    assert abs(biased[0] - value_of_pi) > 0.1


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


def test_ratios_of_vtrace_are_bounded_by_one():
    data = tensors(*random_rollout(0))
    ratios = torch.linspace(-1.0, 1.0, data[0].numel()).view_as(data[0])
    expected = vtrace(ratios, *data, gamma=0.9, gae_lambda=0.8, rho_bar=1.0, c_bar=1.0)
    for part, bounded in zip(
        vtrace(ratios, *data, gamma=0.9, gae_lambda=0.8), expected, strict=True
    ):
        torch.testing.assert_close(part, bounded)
