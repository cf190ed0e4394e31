"""Terms of a user, as docs/terms.md has them in a file of their own: my_terms.py."""

import torch


def near_wall(env, margin=0.1):
    """Reward: 1 where the cube is near the edge of the table, [M]."""
    return (env.state["cube"].abs().amax(1) > 1.0 - margin).float()


class Idle:
    """Termination: the pusher has not moved for some steps, [M] bool."""

    def __init__(self, steps=20, min_distance=0.001):
        self.steps, self.min_distance = steps, min_distance

    def start(self, env):
        return {"count": torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)}

    def __call__(self, env, memory):
        moved = (env.state["pusher"] - env.previous_state["pusher"]).abs().amax(
            1
        ) > self.min_distance
        count = (memory["count"] + 1).masked_fill(moved, 0)
        return count >= self.steps, {"count": count}


def bump(env, size=0.02):
    """Event: move the cube, [M, 2]."""
    return {"cube": env.state["cube"] + (env.uniform(2) * 2.0 - 1.0) * size}


def compass(env):
    """Observation: the direction from the cube to the goal, [M, 2]."""
    way = env.state["goal"] - env.state["cube"]
    return way / (way * way).sum(1, keepdim=True).clamp_min(1e-9).sqrt()
