"""Measure the pace of an arm at 30 Hz whose policy computes 150 ms for a chunk of actions.

    python scripts/real_time_arm.py

The arm is a stand-in in its own process; a thread computes each chunk, which continues the old one.
Prints the steps that waited for a chunk, the measured delays, and by how much the time between two
commands exceeded the period. Run it on an idle machine.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from lightning_rl import GymnasiumEnv, PerceptronBackbone, RealTime, VLAPolicy
from lightning_rl.envs.chunk_wrapper import repeated
from lightning_rl.extensions.datasets.ahead import ChunksAhead
from lightning_rl.extensions.vla.policy import RealTimeActor
from scripting import parser_of

FPS, CHUNK = 30.0, 16
SETTINGS = RealTime(execution_horizon=8, delay_steps=5)


def proprio(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Let the env observe a Dict, as a VLA reads it."""
    space = gymnasium.spaces.Dict({"proprio": env.observation_space})
    wrap = gymnasium.wrappers.TransformObservation
    return wrap(env, lambda observation: {"proprio": observation}, space)


def pace(steps: int, inference_s: float, journal: Path) -> dict[str, Any]:
    """Move the arm by `steps` commands; return the delays and the times over the period in ms."""
    settings = {
        "robot": "lightning_rl.extensions.robots.stand_in.StandInArm",
        "robot_kwargs": {"journal": str(journal)},
        "limits": {"shoulder.pos": [-90.0, 90.0], "elbow.pos": [-10.0, 45.0]},
        "max_speed": 1e6,
        "fps": FPS,
    }
    env = GymnasiumEnv(1, "lightning_rl/Robot-v0", settings, wrappers=[proprio])
    policy = VLAPolicy(
        env.single_observation_space,
        repeated(env.single_action_space, CHUNK),
        PerceptronBackbone((64,)),
        head="flow",
        real_time=SETTINGS,
    )
    actor, ahead = RealTimeActor(policy, 0), ChunksAhead(CHUNK, SETTINGS.execution_horizon)
    running = torch.ones(1, dtype=torch.bool)

    def slowly(observation: Any, running: torch.Tensor) -> torch.Tensor:
        begun = time.monotonic()
        chunk = actor(observation, running)
        time.sleep(max(0.0, inference_s - (time.monotonic() - begun)))
        return chunk

    act = ahead.episode(slowly, continue_after=actor.continue_after)
    observation, _ = env.reset(seed=0)
    acting = []
    for _ in range(steps):
        begun = time.monotonic()
        action = act(observation, running)
        acting.append(1e3 * (time.monotonic() - begun))
        observation, *_ = env.step(action)
    ahead.close()
    env.close()
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    times = np.array([line["at"] for line in lines if line["call"] == "send"])[:steps]
    over = (np.diff(times) - 1 / FPS) * 1e3
    return {
        "steps": steps,
        "waited": ahead.waited,
        "delays": {delay: ahead.skipped.count(delay) for delay in sorted(set(ahead.skipped))},
        "acting_ms": {"median": float(np.median(acting)), "largest": max(acting[1:])},
        "over_ms": {"median": float(np.median(over)), "largest": float(over.max())},
        "steps_over_2_ms": int((over > 2.0).sum()),
    }


def main() -> None:
    parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(pace(2_000, 0.15, Path(folder) / "journal")))


if __name__ == "__main__":
    main()
