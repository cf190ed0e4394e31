"""Terms of a manager: a reward, and a termination that remembers earlier steps."""

from typing import Any

import torch
from torch import Tensor


def near_wall(env: Any, margin: float = 0.1) -> Tensor:
    """Return 1 where the cube is near the edge of the table, [M]."""
    cube: Tensor = env.state["cube"]
    return (cube.abs().amax(1) > 1.0 - margin).float()


class Idle:
    """End an episode whose pusher has not moved for some steps, [M] bool."""

    def __init__(self, steps: int = 20) -> None:
        self.steps = steps

    def start(self, env: Any) -> dict[str, Tensor]:
        """Return the first memory."""
        return {"count": torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)}

    def __call__(self, env: Any, memory: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the ends, and the next memory."""
        moved = (env.state["pusher"] - env.previous_state["pusher"]).abs().amax(1) > 0.001
        count = (memory["count"] + 1).masked_fill(moved, 0)
        return count >= self.steps, {"count": count}
