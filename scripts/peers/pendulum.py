"""Swing up pendulums, many at once, in plain torch functions: the env of W3.

The dynamics and the reward are those of Gymnasium's Pendulum-v1; an action of ±1 is full torque.
Every library wraps the same functions.
"""

import math

import torch
from torch import Tensor

OBSERVATION_SIZE = 3
ACTION_SIZE = 1
TIME_LIMIT = 200


def start(uniform: Tensor) -> Tensor:
    """Make angle and speed [M, 2] of random numbers [M, 2] in [0, 1)."""
    return (uniform * 2.0 - 1.0) * torch.tensor([math.pi, 1.0], device=uniform.device)


def observe(state: Tensor) -> Tensor:
    """Return the observation [N, 3] of a state [N, 2]."""
    angle, speed = state.unbind(-1)
    return torch.stack((angle.cos(), angle.sin(), speed), dim=-1)


def move(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next state [N, 2] and the reward [N], given an action [N, 1]."""
    angle, speed = state.unbind(-1)
    torque = action.squeeze(-1).clamp(-1.0, 1.0) * 2.0
    wrapped = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
    reward = -(wrapped.square() + 0.1 * speed.square() + 0.001 * torque.square())
    speed = (speed + 0.05 * (15.0 * angle.sin() + 3.0 * torque)).clamp(-8.0, 8.0)
    return torch.stack((angle + 0.05 * speed, speed), dim=-1), reward


class Pendulum:
    """N pendulums with a time limit, reset in the step that ends an episode."""

    def __init__(self, num_envs: int, device: str, seed: int) -> None:
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    @torch.no_grad()
    def reset(self) -> Tensor:
        self.state = start(self._uniform())
        self.elapsed = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return observe(self.state)

    def _uniform(self) -> Tensor:
        return torch.rand(self.num_envs, 2, device=self.device, generator=self.generator)

    @torch.no_grad()
    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return observation, reward, terminated, truncated, and the true final observation."""
        moved, reward = move(self.state, action)
        self.elapsed = self.elapsed + 1
        truncated = self.elapsed >= TIME_LIMIT
        fresh = start(self._uniform())
        self.state = torch.where(truncated.unsqueeze(-1), fresh, moved)
        self.elapsed = self.elapsed.masked_fill(truncated, 0)
        terminated = torch.zeros_like(truncated)
        return observe(self.state), reward, terminated, truncated, observe(moved)
