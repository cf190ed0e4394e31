import io

import numpy as np
import pytest
import torch

from lightning_rl.policies import ObservationNormalizer, RewardNormalizer
from lightning_rl.policies.normalization import RunningMoments
from tests.references import forward_returns


def batches(sizes, dims=3, seed=0):
    """Batches whose means and spreads differ, so that merging them wrongly shows."""
    rng = np.random.default_rng(seed)
    return [
        rng.normal(rng.normal(size=dims) * 5, rng.random(dims) * 3 + 0.1, size=(n, dims))
        for n in sizes
    ]


def feed(moments, data):
    for batch in data:
        moments.update(torch.from_numpy(batch).float())
    return moments


def reload(source, target):
    """Bring a state over as a checkpoint does."""
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    return target


# --- moments ---


@pytest.mark.parametrize("sizes", [(50,), (1, 1, 1, 1), (1, 500, 3, 64, 2), (7,) * 40])
def test_merged_moments_are_those_of_all_the_data(sizes):
    data = batches(sizes)
    moments = feed(RunningMoments(3), data)
    everything = np.concatenate(data)
    assert int(moments.count) == len(everything)
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(moments.var, everything.var(0), rtol=1e-5, atol=1e-5)


def test_moments_far_from_zero_keep_their_variance():
    data = np.random.default_rng(0).normal(1000.0, 1.0, size=(20_000, 1)).astype(np.float32)
    moments = feed(RunningMoments(1), np.split(data, 100))
    np.testing.assert_allclose(moments.var, data.astype(np.float64).var(0), rtol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("first", [False, True])
def test_a_batch_that_is_not_finite_is_left_out(bad, first):
    good = batches((20, 30))
    spoilt = good[0].copy()
    spoilt[4, 1] = bad
    data = [spoilt, *good] if first else [good[0], spoilt, good[1]]
    expected, moments = feed(RunningMoments(3), good), feed(RunningMoments(3), data)
    for key, value in expected.state_dict().items():
        assert torch.equal(moments.state_dict()[key], value)


@pytest.mark.filterwarnings("ignore:var_mean")
def test_an_empty_batch_changes_nothing():
    moments = feed(RunningMoments(3), batches((20,)))
    before = {key: value.clone() for key, value in moments.state_dict().items()}
    moments.update(torch.zeros(0, 3))
    assert all(torch.equal(value, before[key]) for key, value in moments.state_dict().items())


def test_moments_survive_a_checkpoint():
    first, second = batches((30, 12))
    whole = feed(RunningMoments(3), [first, second])
    resumed = feed(reload(feed(RunningMoments(3), [first]), RunningMoments(3)), [second])
    assert torch.equal(whole.mean, resumed.mean)
    assert torch.equal(whole.var, resumed.var)
    assert torch.equal(whole.count, resumed.count)


# --- observations ---


def test_observations_pass_unchanged_before_the_first_update():
    observation = torch.randn(5, 4, 3)
    torch.testing.assert_close(
        ObservationNormalizer(3)(observation), observation, rtol=1e-6, atol=0
    )


def test_observations_are_scaled_and_clipped():
    data = np.concatenate(batches((400, 100)))
    normalizer = feed(ObservationNormalizer(3, limit=2.0), [data])
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * 30
    exact = (x.double().numpy() - data.mean(0)) / np.sqrt(data.var(0) + 1e-8)
    assert (np.abs(exact) > 2).any()
    assert (np.abs(exact) < 2).any()
    np.testing.assert_allclose(normalizer(x), exact.clip(-2, 2), rtol=1e-4, atol=1e-4)


def test_a_constant_observation_becomes_zero():
    normalizer = feed(ObservationNormalizer(2), [np.full((50, 2), 3.0)])
    assert not normalizer(torch.full((4, 2), 3.0)).any()
    assert normalizer(torch.full((4, 2), 4.0)).tolist() == [[10.0, 10.0]] * 4


def test_scaling_does_not_move_the_statistics():
    normalizer = feed(ObservationNormalizer(3), batches((20,)))
    before = normalizer.mean.clone()
    normalizer(torch.randn(100, 3) * 9)
    assert torch.equal(normalizer.mean, before)
    assert not list(normalizer.parameters())


# --- rewards ---


def rollouts(count=4, n_envs=5, n_steps=12, seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    shape = (n_envs, n_steps)
    return [(rng.normal(1.0, scale, size=shape), rng.random(shape) < 0.15) for _ in range(count)]


def scaled_rewards(data, gamma, limit=10.0):
    """r / sqrt(variance of all forward returns so far), the returns going on from rollout to rollout."""
    running, seen, result = np.zeros(len(data[0][0])), [], []
    for reward, done in data:
        if len(running) != len(reward):
            running = np.zeros(len(reward))
        returns = forward_returns(reward, done, running, gamma)
        running = np.where(done[:, -1], 0.0, returns[:, -1])
        seen = [*seen, *returns.ravel()]
        result.append(np.clip(reward / np.sqrt(np.var(seen) + 1e-8), -limit, limit))
    return result


def scale(normalizer, data):
    return [
        normalizer(torch.from_numpy(reward).float(), torch.from_numpy(done))
        for reward, done in data
    ]


def assert_all_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_rewards_are_scaled_by_the_spread_of_their_running_return(gamma, seed):
    data = rollouts(seed=seed)
    assert_all_close(scale(RewardNormalizer(gamma), data), scaled_rewards(data, gamma))


def test_the_running_return_goes_on_from_rollout_to_rollout():
    whole = [(np.ones((2, 20)), np.zeros((2, 20), dtype=bool))]
    parts = [(np.ones((2, 10)), np.zeros((2, 10), dtype=bool))] * 2
    one, two = RewardNormalizer(0.95), RewardNormalizer(0.95)
    scale(one, whole)
    scale(two, parts)
    torch.testing.assert_close(one.var, two.var)
    # Negative control: with an end between the parts the returns are others.
    other = RewardNormalizer(0.95)
    ended = parts[0][1].copy()
    ended[:, -1] = True
    scale(other, [(parts[0][0], ended), parts[1]])
    assert abs(float(other.var - one.var)) > 0.1


def test_scaled_rewards_are_clipped():
    data = rollouts(count=1, scale=0.1)
    data[0][0][2, 3] = 500.0
    result = scale(RewardNormalizer(0.0, limit=4.0), data)[0]
    assert float(result.max()) == 4.0
    assert_all_close([result], scaled_rewards(data, 0.0, limit=4.0))


def test_a_reward_that_is_not_finite_leaves_the_statistics_alone():
    good = rollouts(count=3)
    bad = good[1][0].copy()
    bad[1, 2] = np.nan
    normalizer = RewardNormalizer(0.9)
    scale(normalizer, good[:1])
    before = normalizer.var.clone()
    scale(normalizer, [(bad, good[1][1])])
    assert torch.equal(normalizer.var, before)
    result = scale(normalizer, good[2:])[0]
    assert result.isfinite().all()
    assert int(normalizer.count) == 2 * good[0][0].size


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_reward_scaling_survives_a_checkpoint(cut):
    data = rollouts()
    whole, begun = RewardNormalizer(0.97), RewardNormalizer(0.97)
    expected = scale(whole, data)
    scale(begun, data[:cut])
    resumed = reload(begun, RewardNormalizer(0.97))
    for a, b in zip(scale(resumed, data[cut:]), expected[cut:], strict=True):
        assert torch.equal(a, b)


def test_a_fresh_normalizer_survives_a_checkpoint():
    data = rollouts(count=2)
    resumed = reload(RewardNormalizer(0.97), RewardNormalizer(0.97))
    assert_all_close(scale(resumed, data), scaled_rewards(data, 0.97))


def test_another_number_of_envs_starts_new_returns_and_keeps_the_statistics():
    wide, narrow = rollouts(count=2, n_envs=5), rollouts(count=2, n_envs=3, seed=9)
    begun = RewardNormalizer(0.97)
    scale(begun, wide)
    resumed = reload(begun, RewardNormalizer(0.97))
    assert_all_close(scale(resumed, narrow), scaled_rewards([*wide, *narrow], 0.97)[2:])
