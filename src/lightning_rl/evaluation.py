"""Run one episode per seed, and say how well a policy does, with its uncertainty."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from lightning_rl.envs import VectorEnv
from lightning_rl.policies import Policy

MAX_EPISODE_STEPS = 100_000
"""Steps after which an evaluation episode without a time limit is cut, and counted as truncated."""

Episode = dict[str, Any]
"""`seed`, `return` (undiscounted, raw reward), `length` (env steps).

`terminated` and `success` (bool or None).
"""


@torch.no_grad()
def run_episodes(policy: Policy, env: VectorEnv, seeds: Sequence[int]) -> list[Episode]:
    """Play one deterministic episode per seed, all of them side by side.

    Each env plays the one episode of its seed, however long it takes, and what it does afterwards
    is ignored: counting
    the first episodes to finish would favour the short ones. No random stream but the env's own is
    touched.

    Args:
        policy: acts by the mode of its distribution.
        env: with at least as many envs as there are seeds.
        seeds: at most N.

    Returns:
        one `Episode` per seed, in their order.
    """
    count, total = len(seeds), env.num_envs
    device = policy.version.device
    policy.eval()
    observation, _ = env.reset(seed=[*seeds, *(seeds[0] for _ in range(total - count))])
    returns = torch.zeros(total, dtype=torch.float64)
    lengths = torch.zeros(total, dtype=torch.int64)
    running = torch.arange(total) < count
    episodes: dict[int, Episode] = {}
    for step in range(1, MAX_EPISODE_STEPS + 1):
        td = TensorDict({"observation": observation}, [total]).to(device)
        observation, reward, terminated, truncated, info = env.step(
            policy(td, deterministic=True)["action"]
        )
        terminated, success = terminated.cpu(), info.get("success")
        returns += torch.where(running, reward.cpu(), 0.0)
        executed = info.get("executed")  # where an action is a chunk
        lengths += 1 if executed is None else executed.sum(-1).cpu()
        ended = running & (terminated | truncated.cpu() | torch.tensor(step == MAX_EPISODE_STEPS))
        for i in ended.nonzero().flatten().tolist():
            episodes[i] = {
                "seed": int(seeds[i]),
                "return": float(returns[i]),
                "length": int(lengths[i]),
                "terminated": bool(terminated[i]),
                "success": None if success is None else bool(success[i]),
            }
        running &= ~ended
        if not running.any():
            break
    return [episodes[i] for i in range(count)]


def summarize(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the content of `evaluation.json`: averages, a 95 % interval, and every episode."""
    returns = np.array([episode["return"] for episode in episodes])
    successes = [episode["success"] for episode in episodes if episode["success"] is not None]
    return {
        "episodes": len(episodes),
        "avg_reward": float(returns.mean()),
        "std_reward": float(returns.std()),
        "ci95": bootstrap_interval(returns),
        "avg_length": float(np.mean([episode["length"] for episode in episodes])),
        "success_rate": float(np.mean(successes)) if successes else None,
        "terminations": sum(episode["terminated"] for episode in episodes),
        "truncations": sum(not episode["terminated"] for episode in episodes),
        "returns": returns.tolist(),
        "lengths": [episode["length"] for episode in episodes],
        "seeds": [episode["seed"] for episode in episodes],
    }


def bootstrap_interval(values: np.ndarray, *, resamples: int = 10_000) -> list[float]:
    """Return [low, high], the 95 % percentile-bootstrap interval of the mean (Efron 1979).

    The resamples are the same at every call.

    Args:
        values: [M].
        resamples: how many samples of size M are drawn with replacement.
    """
    index = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(values[index].mean(axis=1), [2.5, 97.5])
    return [float(low), float(high)]
