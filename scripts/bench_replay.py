"""Time the drawing of minibatches of pictures and features: `python scripts/bench_replay.py`.

One thread, minibatches of 256 from a replay of 5,000 transitions of one env, next to which an
update can be timed (`charts/SPS_update`). CPU time, the best of ten.
"""

import time
import timeit

import numpy as np
import torch
from gymnasium.spaces import Box, Dict

from lightning_rl import ReplayBuffer
from lightning_rl.rollout.allocation import allocate_rollout
from scripting import parser_of

ACTION = Box(-1.0, 1.0, (6,))
FEATURES = Box(-np.inf, np.inf, (8192,))
CAMERA = Box(0, 255, (128, 128, 3), np.uint8)
OBSERVATIONS = {
    "a picture of 48x48": Box(0, 255, (48, 48, 3), np.uint8),
    "two pictures of 128x128": Dict({"front": CAMERA, "wrist": CAMERA}),
    "two times 8,192 features": Dict({"front": FEATURES, "wrist": FEATURES}),
}


def main() -> None:
    parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    for name, space in OBSERVATIONS.items():
        replay = ReplayBuffer(space, ACTION, 1, "cpu", 1, capacity=5_000)
        extra = {"continues": ((), torch.bool)}
        rollout = allocate_rollout(space, ACTION, 1, 500, extra_fields=extra)
        rollout["continues"] = torch.ones(1, 501, dtype=torch.bool)
        rollout["terminated"][:, 99::100] = True
        rollout["done"] = rollout["terminated"].clone()
        for _ in range(10):
            replay.extend(rollout)

        def draw(replay: ReplayBuffer = replay) -> None:
            for _ in replay.batches(8, 256):
                pass

        draw()
        seconds = min(timeit.repeat(draw, number=1, repeat=10, timer=time.process_time))
        print(f"batches(8, 256), {name}: {seconds / 8 * 1e3:.1f} ms a minibatch")


if __name__ == "__main__":
    main()
