"""Random numbers by counters: uniform and unrelated."""

import pytest
import torch

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
