"""Random numbers by counters: uniform, unrelated, and never the same start twice."""

import pytest
import torch

from lightning_rl import CartPole
from lightning_rl.envs.torch.counter_random import hash32, key_of, uniforms


def draw(seeds, episodes, ticks=0, count=4):
    seeds = torch.as_tensor(seeds)
    return uniforms(key_of(seeds), torch.as_tensor(episodes).expand_as(seeds), ticks, count)


def lowbias32(x):
    """The published function, in Python's integers."""
    x ^= x >> 16
    x = (x * 0x7FEB352D) % 2**32
    x ^= x >> 15
    x = (x * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def test_the_hash_is_the_published_one():
    values = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1, 0xDEADBEEF]
    assert hash32(torch.tensor(values)).tolist() == [lowbias32(x) for x in values]


SAMPLES = {
    "seeds": lambda: draw(torch.arange(50_000), 0),
    "high seeds": lambda: draw(torch.arange(50_000) << 32, 0),
    "episodes": lambda: draw(torch.full((50_000,), 7), torch.arange(50_000)),
    "ticks": lambda: draw(torch.full((50_000,), 7), 3, torch.arange(50_000)),
    "columns": lambda: draw([7], 0, 0, 200_000).view(-1, 4),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_numbers_are_uniform_and_unrelated(name):
    sample = SAMPLES[name]().double()
    n = len(sample)
    assert sample.min() >= 0
    assert sample.max() < 1
    assert (sample.mean(0) - 0.5).abs().max() < 4.5 / (12 * n) ** 0.5
    for column in sample.T:
        # chi-square of 64 cells: mean 63, standard deviation 11.2
        expected = n / 64
        chi2 = ((torch.histc(column, 64, 0, 1) - expected) ** 2 / expected).sum()
        assert 25 < chi2 < 120
    # of the columns with each other, and of each row with the next
    related = torch.corrcoef(torch.cat((sample[:-1], sample[1:]), 1).T) - torch.eye(8)
    assert related.abs().max() < 4.5 / n**0.5


def test_the_two_lanes_never_agree_on_two_episodes():
    """A key of 32 bits would repeat among 400,000 episodes, about 19 times."""
    seeds, episodes = torch.meshgrid(torch.arange(2000), torch.arange(200), indexing="ij")
    sample = draw(seeds.flatten(), episodes.flatten(), 0, 3)
    assert len(torch.unique((sample * 2**24).long(), dim=0)) == len(sample)
    one_lane = hash32(key_of(seeds.flatten())[0] ^ episodes.flatten())
    assert len(one_lane.unique()) < len(sample)


def test_without_a_seed_each_env_begins_its_next_episode():
    env, other = CartPole(3), CartPole(1)
    env.reset(seed=[4, 9, 1])
    second = env.reset()[0]
    other.reset(seed=[9])
    assert torch.equal(other.reset()[0][0], second[1])
    other.reset(seed=[9])
    assert not torch.equal(other.reset()[0], other.reset()[0])


def test_seeds_of_64_bits_and_negative_ones_count_in_full():
    env = CartPole(4)
    starts = env.reset(seed=[5, 5 + 2**32, -5, 5 - 2**62])[0]
    assert len(torch.unique(starts, dim=0)) == 4
