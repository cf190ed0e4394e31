"""Read action masks: the key of an observation that marks the allowed categories of the action."""

from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.rollout.structured_actions import categories_of, choices_of, with_categories
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError

MASK = "action_mask"
"""Key of the observation that marks the allowed categories of the action with 1 or true."""


def has_mask(observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> bool:
    """Return whether observations have an action mask, and check that it fits the actions.

    Raises:
        ConfigurationError: if the mask does not fit the choices, or there are none, or chunks.
    """
    if not isinstance(observation_space, gymnasium.spaces.Dict):  # only a key can be a mask
        return False
    if MASK not in observation_space.spaces:
        return False
    space, sizes = observation_space[MASK], choices_of(action_space)
    drop = "Remove the mask from the observation, or rename it."
    if not sizes:
        raise ConfigurationError(
            f"The observation has '{MASK}', which marks the allowed choices, but the action space "
            f"{action_space} has no choices: it is continuous. {drop}"
        )
    if hasattr(action_space, "executed_actions"):  # of an ActionChunk
        raise ConfigurationError(
            f"The observation's '{MASK}' holds for one action, but ActionChunk chooses several at "
            f"once: remove ActionChunk, or the mask (policy.ignore_keys: [{MASK}])."
        )
    binary = isinstance(space, gymnasium.spaces.MultiBinary | gymnasium.spaces.Box) and (
        space.dtype is not None and space.dtype.kind in "biu"
    )
    if not binary or space.shape != (sum(sizes),):
        raise ConfigurationError(
            f"The observation's '{MASK}' is {space}, but the action space {action_space} has "
            f"choices of {' + '.join(map(str, sizes))} categories: the mask must be a MultiBinary, "
            f"or a Box of bool or integers 0 and 1, of shape ({sum(sizes)},), in their order."
        )
    return True


def refuse_empty_masks(
    name: str, mask: Tensor, action_space: gymnasium.Space[Any], step: int = 0
) -> None:
    """Raise if a mask [T, N, C] allows no category in a choice; this synchronizes with a device.

    `name` is the env's class, `step` the number of the first step.

    Raises:
        ConfigurationError: naming the first env and step, and the choice.
    """
    sizes = choices_of(action_space)
    allowed = torch.stack([choice.any(-1) for choice in (mask != 0).split(sizes, -1)], -1)
    if allowed.all():
        return
    t, row, choice = (~allowed).nonzero()[0].tolist()
    suffix = f" in choice {choice} of {len(sizes)}" if len(sizes) > 1 else ""
    raise ConfigurationError(
        f"{name} allows no action{suffix}: the '{MASK}' of env {row} at step {step + t} is 0 for "
        f"all of {sizes[choice]} categories. Allow at least one category, such as a neutral "
        "action, or end the episode before."
    )


def allowed_random_action(
    action_space: gymnasium.Space[Any], action: Tensor, mask: Tensor, keys: Tensor | None = None
) -> Tensor:
    """Return actions [..., *A] with allowed categories: of the largest key in each choice.

    Args:
        action_space: of one env.
        action: [..., *A]; its parts without choices are kept.
        mask: [..., C], which categories are allowed.
        keys: [..., C] random numbers, equally distributed. Default: the first allowed category.
    """
    # Of equal keys `argmax` returns the first.
    keys = torch.zeros(mask.shape, device=mask.device) if keys is None else keys
    parts = keys.masked_fill(mask == 0, -torch.inf).split(choices_of(action_space), -1)
    return with_categories(action_space, action, torch.stack([p.argmax(-1) for p in parts], -1))


def check_allowed(rollout: TensorDict, action_space: gymnasium.Space[Any]) -> None:
    """Raise if an action of a rollout [N, T+1] is forbidden by its mask; all ranks raise together.

    Raises:
        ConfigurationError: naming the first env and step.
    """
    steps = rollout.select("observation", "action", "padding", strict=False)[:, :-1]
    sizes = choices_of(action_space)
    # Where each choice begins among the categories of the mask.
    first = torch.tensor([0, *sizes[:-1]]).cumsum(0).to(rollout["action"].device)
    positions = first + categories_of(action_space, steps["action"])
    forbidden = (steps["observation"][MASK].gather(-1, positions) == 0).any(-1)
    if "padding" in rollout.keys():
        forbidden &= ~steps["padding"]  # no action was executed there
    fault = None
    if forbidden.any():
        row, step = forbidden.nonzero()[0].tolist()
        fault = (
            f"The action of env {row} at step {step} of the rollout, "
            f"{steps['action'][row, step].tolist()}, is not allowed by the '{MASK}' of its "
            "observation, so its probability is 0. Record demonstrations with the masks of the env "
            "in which the policy will act."
        )
    if ranks.agree(fault is not None):
        raise ConfigurationError(next(filter(None, ranks.gather_over_ranks(fault))))
