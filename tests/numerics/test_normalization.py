from functools import partial

import numpy as np
import pytest
import torch

from lightning_rl import PPO, AsyncCollector, BehaviorCloning, DatasetCollector, SyncCollector
from lightning_rl.collectors import EpisodeSettings
from lightning_rl.extensions.datasets.writer import EpisodeWriter
from lightning_rl.policies import ObservationNormalizer, RewardNormalizer
from lightning_rl.policies.normalization import RunningMoments
from tests.helpers import assert_same, make_data, train
from tests.references import forward_returns
from tests.variants import before, variant


def batches(sizes):
    """Batches whose means and spreads differ, so that merging them wrongly shows."""
    rng = np.random.default_rng(0)
    return [rng.normal(rng.normal(size=3) * 5, rng.random(3) * 3 + 0.1, (n, 3)) for n in sizes]


def feed(moments, data):
    for batch in data:
        moments.update(torch.from_numpy(batch).float())
    return moments


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


@pytest.mark.parametrize("first", [False, True])
def test_a_batch_that_is_not_finite_is_left_out(first):
    good = batches((20, 30))
    spoilt = good[0].copy()
    spoilt[4, 1] = np.nan
    data = [spoilt, *good] if first else [good[0], spoilt, good[1]]
    expected, moments = feed(RunningMoments(3), good), feed(RunningMoments(3), data)
    assert_same(expected.state_dict(), moments.state_dict())


def test_observations_are_scaled_and_clipped():
    data = np.concatenate(batches((400, 100)))
    normalizer = feed(ObservationNormalizer(3, limit=2.0), [data])
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * 30
    exact = (x.double().numpy() - data.mean(0)) / np.sqrt(data.var(0) + 1e-8)
    assert (np.abs(exact) > 2).any()
    assert (np.abs(exact) < 2).any()
    np.testing.assert_allclose(normalizer(x), exact.clip(-2, 2), rtol=1e-4, atol=1e-4)


def scaled_rewards(data, gamma):
    """r / sqrt(variance of all forward returns so far), the returns going on from rollout to rollout."""
    running, seen, result = np.zeros(len(data[0][0])), [], []
    for reward, done in data:
        returns = forward_returns(reward, done, running, gamma)
        running = np.where(done[:, -1], 0.0, returns[:, -1])
        seen = [*seen, *returns.ravel()]
        result.append(np.clip(reward / np.sqrt(np.var(seen) + 1e-8), -10.0, 10.0))
    return result


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_rewards_are_scaled_by_the_spread_of_their_running_return(gamma):
    rng, shape = np.random.default_rng(0), (5, 12)
    data = [(rng.normal(1.0, 3.0, size=shape), rng.random(shape) < 0.15) for _ in range(4)]
    normalizer = RewardNormalizer()
    for (reward, done), expected in zip(data, scaled_rewards(data, gamma), strict=True):
        rewards = torch.from_numpy(reward).float()
        normalizer.observe(rewards, torch.from_numpy(done), discount=gamma)
        np.testing.assert_allclose(normalizer(rewards).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_chunk_of_k_steps_decays_the_running_return_by_gamma_to_the_k():
    """Rewards of 1 per env step: the running return is the same by chunks as by steps, at their ends."""
    gamma, chunk = 0.99, 4
    rewards = torch.full((3, 100), float(sum(gamma**i for i in range(chunk))))
    done = torch.zeros(3, 100, dtype=torch.bool)
    by_chunk, taken_for_steps = RewardNormalizer(), RewardNormalizer()
    discount = torch.full((3, 100), gamma**chunk)
    by_chunk.observe(rewards, done, discount=discount)
    taken_for_steps.observe(rewards, done, discount=gamma)
    by_step = forward_returns(np.ones((1, 400)), np.zeros((1, 400), dtype=bool), np.zeros(1), gamma)
    assert float(by_chunk.carry[0]) == pytest.approx(by_step[0, -1], rel=1e-5)
    assert float(taken_for_steps.carry[0]) > 2 * by_step[0, -1]


@pytest.mark.parametrize("collector", [SyncCollector, AsyncCollector])
@pytest.mark.parametrize("resets", [False, True])
def test_in_a_run_the_running_return_goes_on_where_the_episodes_do(resets, collector, tmp_path):
    carries, continued = [np.zeros(4)], []

    def check_carry(module, rollout, batch_idx):
        continues = rollout["continues"][:, 0]
        reward, done = (rollout[key][:, :-1].numpy() for key in ("reward", "done"))
        returns = forward_returns(reward, done, carries[-1] * continues.numpy(), module.gamma)
        carries.append(np.where(done[:, -1], 0.0, returns[:, -1]))
        np.testing.assert_allclose(module.reward_normalizer.carry, carries[-1], rtol=1e-5)
        continued.append(continues.tolist())

    settings = EpisodeSettings(reset_every_rollout=resets)
    ppo = before(variant(PPO, episode_settings=settings), training_step=check_carry)
    data = {"collector": collector}
    model = {"algorithm": ppo, "normalize_reward": True}
    train(tmp_path, data=data, model=model, trainer={"limit_val_batches": 0})
    assert continued == [[False] * 4] + [[not resets] * 4] * 5


def test_demonstrations_are_counted_once_without_padding_and_before_the_first_pass(tmp_path):
    """Demonstrations of 3, 5 and 9 steps of a plain env, filled up with zeros."""
    means = []

    def look(module, minibatch):
        means.append(module.policy.normalizer.mean.tolist())

    pytest.importorskip("pyarrow", reason="needs the extra data")
    pytest.importorskip("av", reason="needs the extra data")
    lengths = (3, 5, 9)
    env = make_data(num_envs=3)._env
    spaces = env.single_observation_space, env.single_action_space
    writer = EpisodeWriter(tmp_path / "demonstrations", *spaces, env.render_fps)
    for row, length in enumerate(lengths):
        for t in range(length):
            writer.add(np.full(4, 5.0 + row), 0, 0.0, t == length - 1, False)
        writer.end_episode(np.full(4, 100.0))
    collector = partial(DatasetCollector, path=str(tmp_path / "demonstrations"))
    data = {"collector": collector, "num_envs": 3, "buffer_size": 12, "total_env_steps": 10}
    model = {"algorithm": before(BehaviorCloning, loss=look), "batch_size": 8, "n_epochs": 2}
    trainer = {"limit_val_batches": 0, "enable_checkpointing": False}
    policy = {"normalize_observation": True}
    module, _, _ = train(tmp_path / "run", data=data, model=model, policy=policy, trainer=trainer)
    env.close()
    assert module.env_steps == sum(lengths)
    seen = [5.0 + row for row, length in enumerate(lengths) for _ in range(length)]
    assert module.policy.normalizer.count == len(seen)
    assert module.policy.normalizer.mean.tolist() == pytest.approx([np.mean(seen)] * 4)
    assert means == [module.policy.normalizer.mean.tolist()] * 6, "trained as it acts"
