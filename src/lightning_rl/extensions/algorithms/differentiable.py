"""Sum the rewards of steps of an env with gradients."""

from collections.abc import Callable
from typing import Any

import torch
from gymnasium.spaces import Box, Dict
from torch import Tensor

from lightning_rl import TorchEnv, VectorEnv
from lightning_rl.extend.errors import require


def gain_of(
    env: Any,
    start: dict[str, Any],
    act: Callable[[Any, Tensor], Tensor],
    noise: Tensor,
    gamma: float,
    end_value: Callable[[Any], Tensor | None],
) -> Tensor:
    """Return the discounted rewards [N] of T steps from a state of the env, with gradients.

    The discount starts again with each episode. The last step and each truncation add `end_value`
    of the true final observation; a termination adds nothing.

    Source: Xu et al. 2022, "Accelerated Policy Learning with Parallel Differentiable Simulation",
    equation 5 (with values). Differs from it: a truncated episode has a value too, and the discount
    starts again with each episode.

    Args:
        env: env with N rows.
        start: state of the env, of `state_dict`.
        act: returns actions [N, *A] for an observation [N, ...] and noise [N, A].
        noise: [N, T, A].
        gamma: discount per step.
        end_value: returns values [N] of observations [N, ...]; or None for no values.
    """
    # The loaded state has no gradient: gradients stop where the rollout begins.
    observation = env.load_state_dict(start)
    steps = noise.unbind(1)
    gain = torch.zeros(len(noise), device=noise.device, dtype=noise.dtype)
    discount = torch.ones_like(gain)
    for t, step_noise in enumerate(steps):
        # The noise is fixed, but the actions follow the states that earlier actions change.
        observation, reward, terminated, truncated, info = env.step(act(observation, step_noise))
        gain = gain + discount * reward
        cut = (truncated | (t + 1 == len(steps))) & ~terminated
        # Without the look at the flags each step would take a value; an accelerator is not asked.
        if cut.device.type != "cpu" or cut.any():
            value = end_value(info["final_obs"])
            if value is not None:
                gain = gain + torch.where(cut, discount * gamma * value, 0.0)
        discount = torch.where(terminated | truncated, 1.0, discount * gamma)
    return gain


def check_differentiable(algorithm: str, env: VectorEnv) -> None:
    """Refuse an env without gradients.

    Raises:
        ConfigurationError: with the name of the env.
    """
    require(
        isinstance(env, TorchEnv) and env.differentiable,
        f"{algorithm} needs gradients through the steps of the env, but {type(env).__name__} has "
        "none: use PointMass, CartPole or CartPoleSwingUp, or a TorchEnv of your own that sets "
        "differentiable = True (no ActionChunk or other wrapper around it), or PPO.",
    )
    space = env.single_observation_space
    parts = space.spaces if isinstance(space, Dict) else {"observation": space}
    discrete = [k for k, s in parts.items() if not isinstance(s, Box) or s.dtype.kind != "f"]
    require(
        not discrete,
        f"{algorithm} needs gradients through observations, but {', '.join(discrete)} of "
        f"{type(env).__name__} has none (pictures): observe the state, or use PPO or SAC.",
    )
