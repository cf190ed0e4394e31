"""Time the replay buffer, and measure its memory: `python scripts/bench_replay.py`.

One thread, observations and actions like HalfCheetah-v5's (17 and 6 numbers), and a full buffer of
1M transitions. Measures `extend` with one env and one step, and a minibatch of 256 alone and among
64; minibatches of 256 of pictures and of features, next to which an update can be timed
(`charts/SPS_update`); and the memory.
"""

import time
import timeit
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import Box, Dict

from lightning_rl import ReplayBuffer
from lightning_rl.rollout.allocation import allocate_rollout
from scripting import parser_of

VECTOR, ACTION = Box(-np.inf, np.inf, (17,)), Box(-1.0, 1.0, (6,))
FEATURES = Box(-np.inf, np.inf, (8192,))
CAMERA = Box(0, 255, (128, 128, 3), np.uint8)
SEEN = {
    "a picture of 48x48": Box(0, 255, (48, 48, 3), np.uint8),
    "two pictures of 128x128": Dict({"front": CAMERA, "wrist": CAMERA}),
    "two times 8,192 features": Dict({"front": FEATURES, "wrist": FEATURES}),
}
FIELDS = 4 * (17 + 6 + 1) + 2
"""Bytes of a transition's fields: observation, action, reward, terminated, truncated."""


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def rollout_of(space: Box | Dict, steps: int, episode: int) -> object:
    """Return a rollout of one env with episodes of that many steps."""
    extra = {"continues": ((), torch.bool)}
    rollout = allocate_rollout(space, ACTION, 1, steps, extra_fields=extra)
    rollout["continues"] = torch.ones(1, steps + 1, dtype=torch.bool)
    rollout["truncated"][:, episode - 1 :: episode] = True
    rollout["done"] = rollout["truncated"].clone()
    return rollout


def microseconds(call: object, number: int) -> float:
    """Return the CPU time of a call, the best of ten."""
    call()
    times = timeit.repeat(call, number=number // 10, repeat=10, timer=time.process_time)
    return min(times) / (number // 10) * 1e6


def drawn(replay: ReplayBuffer, count: int, **settings: int) -> None:
    for _ in replay.batches(count, 256, **settings):
        pass


def main() -> None:
    parser_of(__doc__).parse_args()
    torch.set_num_threads(1)

    before = anonymous_bytes()
    replay = ReplayBuffer(VECTOR, ACTION, 1, "cpu", 1, capacity=1_000_000)
    reserved = anonymous_bytes() - before
    for _ in range(101):
        replay.extend(rollout_of(VECTOR, 10_000, 1_000))
    taken = anonymous_bytes() - before
    print(f"1M transitions: {taken:,} bytes, {taken / (1_000_000 * FIELDS):.3f} of their fields'")
    print(f"before the first one: {reserved:,} bytes")
    for name, rollout, number in (
        ("extend, N=1, T=1:             ", rollout_of(VECTOR, 1, 1_000), 5000),
        ("the same where an episode ends:", rollout_of(VECTOR, 1, 1), 500),
    ):
        print(f"{name} {microseconds(partial(replay.extend, rollout), number):.0f} us")
    for count, number in ((1, 3000), (64, 50)):
        for n_steps in (1, 3):
            draw = partial(drawn, replay, count, n_steps=n_steps)
            each = microseconds(draw, number) / count
            print(f"batches({count}, 256), n_steps={n_steps}: {each:.0f} us a minibatch")

    for name, space in SEEN.items():
        seen = ReplayBuffer(space, ACTION, 1, "cpu", 1, capacity=5_000)
        for _ in range(10):
            seen.extend(rollout_of(space, 500, 100))
        each = microseconds(partial(drawn, seen, 8), 10) / 8
        print(f"batches(8, 256), {name}: {each / 1e3:.1f} ms a minibatch")


if __name__ == "__main__":
    main()
