"""Draw random numbers as a pure function of counters: no draw depends on another.

Each number is the hash of its env and time (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3"). The hash is lowbias32 (Chris Wellons 2018, "Prospecting for hash functions"), a
bijection of 32 bits, in int64 for equal results on every device. The key has two 32-bit words,
because with one word, some of a run's millions of episodes would share their start.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - 2**32  # the same low 32 bits, and no product leaves int64

_KEY_WORDS = (0x9E3779B9, 0x243F6A88)
_GOLDEN = 0x9E3779B9 - 2**32
"""The same low 32 bits as a number in int32, in which Triton computes a column's product."""


def hash32(x: Tensor) -> Tensor:
    """Mix 32 bits (lowbias32): [...] int64, in [0, 2^32)."""
    # Only the first operation is not in place: the argument must not change.
    x = (x ^ (x >> 16)).mul_(_FIRST).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 15).mul_(_SECOND).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 16)


def key_of(seed: Tensor) -> Tensor:
    """Return the key [2, N] of seeds [N] int64; all 64 bits of a seed count."""
    words = torch.tensor(_KEY_WORDS, device=seed.device)[:, None]
    return hash32(hash32(words ^ (seed & _MASK)) ^ ((seed >> 32) & _MASK))


def uniforms(
    key: Tensor, episode: Tensor, tick: Tensor | int, count: int, streams: Sequence[int] = ()
) -> Tensor:
    """Draw `count` numbers per row, uniform in [0, 1) in steps of 2^-24: [M, count] float32.

    A row depends only on its `key` [2, M], `episode` [M] int64 and `tick` ([M] int64 or a number,
    the step of the episode), and on the numbers of its `streams`, one stream within another.
    """
    for stream in streams:
        key = hash32(key ^ stream)
    h = hash32(hash32(key ^ (episode & _MASK)) ^ tick)
    column = torch.arange(1, count + 1, device=key.device) * _GOLDEN
    bits = hash32(h[0, :, None] ^ hash32((h[1, :, None] + column) & _MASK))
    return (bits >> 8).float() * 2.0**-24
