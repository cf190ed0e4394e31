"""Act with a trained policy: map an env's observations to its actions."""

import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from lightning_rl.collectors.evaluation import EpisodeActor, generators_of
from lightning_rl.envs.step_results import bounds_of
from lightning_rl.policies import Policy
from lightning_rl.policies.networks.encoders import is_picture
from lightning_rl.policies.precision import autocast
from lightning_rl.policies.weights import check_weights_are_numbers
from lightning_rl.rollout.allocation import space_spec
from lightning_rl.rollout.structured_actions import StructuredActions, as_env_counts, first_choice
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.process import package_defaults

OVERSHOOT = 0.25
"""Allowed distance of a picture from its bounds: resampling overshoots at edges."""


class TrainedPolicy:
    """A policy that acts outside of training; `load_policy` builds it from a checkpoint.

    If the policy has a memory, call `reset` when an episode begins.

    Args:
        policy: the policy; it is put in eval mode.

    Attributes:
        module: the policy, an `nn.Module` over batches of TensorDicts.
        observation_space: space of the observations for `act`; more keys of a Dict are ignored.
        action_space: the env's action space, with the structure of its parts.

    Raises:
        ConfigurationError: if the weights are not finite numbers.
    """

    def __init__(self, policy: Policy) -> None:
        check_weights_are_numbers(policy)
        policy.put_in_eval_mode()
        self.module = policy
        self.observation_space = policy.acting_space
        space = policy.action_space
        self.action_space = space.structure if isinstance(space, StructuredActions) else space
        self.reset()

    def __repr__(self) -> str:
        label = f"{type(self.module).__name__} of version {int(self.module.version)}"
        return f"TrainedPolicy({label}, {self.observation_space} -> {self.action_space})"

    def reset(self, rows: Any = None, seed: int = 0) -> None:
        """Begin episodes, and clear the policy's memory.

        Args:
            rows: [N], bool, rows of the batch that begin an episode. Default: all; then the next
                observation may have another N.
            seed: seed of drawn actions: row i draws with seed + i. Ignored if `rows` is given.

        Raises:
            ConfigurationError: if the last observation had another N.
        """
        if rows is not None:
            if self._actor is not None:  # otherwise there is no memory yet
                starts = torch.as_tensor(rows, dtype=torch.bool)
                require(
                    starts.shape == (self._actor.num_envs,),
                    f"reset(rows) has the shape {list(starts.shape)}, but the last observation had "
                    f"{self._actor.num_envs} rows: give one bool per row.",
                )
                self._actor.begin(starts)
            return
        self._actor: EpisodeActor | None = None
        self._generators: list[torch.Generator] = []
        self._drawn = False
        self._seed = seed

    @torch.no_grad()
    @package_defaults()
    def act(self, observation: Any, deterministic: bool = True) -> Any:
        """Return the action for an observation, or the actions for a batch.

        Args:
            observation: [*O], or [N, *O] of N envs; an array, a tensor, or a dict of these for a
                Dict space. Keys that only a critic reads may be missing.
            deterministic: return the mode of the distribution; False draws by the seed of `reset`.

        Returns:
            [*A], or [N, *A] for a batch, with K before *A if the policy acts in chunks. Bounds,
            dtype, first count and parts as in the action space. Arrays for arrays; for tensors,
            tensors on the same device.

        Raises:
            ConfigurationError: if the observation does not match the space, or if N changes while a
                memory holds episodes.
        """
        leaves: list[Leaf] = []
        tree = _tensors_of(self.observation_space, observation, "", leaves)
        first = leaves[0]
        for leaf in leaves:
            require(
                leaf.rows == first.rows,
                f"The observation's '{leaf.name}' is {_counted(leaf.rows)}, but '{first.name}' is "
                f"{_counted(first.rows)}: give all parts for the same number of envs.",
            )
        rows = 1 if first.rows is None else first.rows
        actor = self._actor_for(rows, deterministic)
        policy = self.module
        batch = tree if isinstance(tree, Tensor) else TensorDict(tree, [rows])
        batch = batch.to(policy.version.device)
        with autocast(policy.version.device, policy.autocast_dtype):
            all_rows = torch.ones(rows, dtype=torch.bool)
            action = actor.choose(batch, all_rows, deterministic=deterministic)
        of_tensors = first.device is not None
        executed = (
            self.executed(policy.action_space, action.to(first.device))
            if of_tensors
            else executed_arrays(policy.action_space, action.cpu().numpy())
        )
        # One env in, one action out.
        return _mapped(executed, lambda part: part[0]) if first.rows is None else executed

    @staticmethod
    def executed(space: gymnasium.Space[Any], action: Tensor) -> Any:
        """Convert actions [N, *A] to the env's bounds, first choice and parts, in float32."""
        if isinstance(space, StructuredActions):
            return space.tensors(within(space, action))
        if isinstance(space, gymnasium.spaces.Box):
            return within(space, action)
        start = first_choice(space)
        return action + torch.as_tensor(start, device=action.device) if start.any() else action

    def _actor_for(self, rows: int, deterministic: bool) -> EpisodeActor:
        policy, actor = self.module, self._actor
        if not deterministic:
            # Row i always draws with seed + i: generators of existing rows continue.
            seeds = range(self._seed + len(self._generators), self._seed + rows)
            self._generators += generators_of(policy, seeds)
        if actor is not None and actor.num_envs == rows:
            return actor
        count = 0 if actor is None else actor.num_envs
        # Correlated noise is a state too, but only for drawn actions.
        has_state = policy.is_recurrent or ("state" in policy.extra_fields and self._drawn)
        self._drawn |= not deterministic
        require(
            actor is None or not has_state,
            f"{type(policy).__name__} has a memory of {count} episodes, but the observation has "
            f"{rows} rows: call reset() when new episodes begin.",
        )
        self._actor = EpisodeActor(policy, rows, self._generators)
        return self._actor


class Leaf(NamedTuple):
    """A part of an observation: its keys, joined by dots; N of a batch; the device of a tensor."""

    name: str
    rows: int | None
    device: torch.device | None


def _tensors_of(space: gymnasium.Space[Any], tree: Any, name: str, leaves: list[Leaf]) -> Any:
    if not isinstance(space, gymnasium.spaces.Dict):
        return _tensor(space, tree, name or "observation", leaves)
    require(
        isinstance(tree, Mapping | TensorDictBase),
        f"The observation{f' {name}' if name else ''} is {type(tree).__name__}, but the policy "
        f"reads a dict with {', '.join(space.keys())}.",
    )
    missing = [key for key in space.keys() if key not in tree.keys()]
    require(
        not missing,
        f"The observation has no '{', '.join(missing)}', which the policy reads; it has "
        f"{', '.join(map(str, tree.keys())) or 'nothing'}.",
    )
    return {
        key: _tensors_of(child, tree[key], f"{name}.{key}" if name else key, leaves)
        for key, child in space.items()
    }


def _tensor(space: gymnasium.Space[Any], array: Any, name: str, leaves: list[Leaf]) -> Tensor:
    shape, dtype = space_spec(space)
    try:
        # A copy: `from_numpy` refuses negative strides, and warns of read-only arrays.
        tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.asarray(array).copy())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The observation's '{name}' is {textwrap.shorten(repr(array), 60)}, which is not an "
            f"array of numbers {list(shape)}."
        ) from error
    batched = tuple(tensor.shape[1:]) == shape and tensor.dim() > len(shape)
    require(
        batched or tuple(tensor.shape) == shape,
        f"The observation's '{name}' has the shape {list(tensor.shape)}, but the policy was "
        f"trained with {list(shape)}: give that shape, or a batch [N, ...].",
    )
    require(
        # `can_cast` lets whole numbers become floats, but not floats whole numbers.
        torch.can_cast(tensor.dtype, dtype),
        f"The observation's '{name}' has the dtype {tensor.dtype}, but the policy was trained with "
        f"{dtype}, which cannot hold its numbers.",
    )
    require(not batched or len(tensor) > 0, f"The observation's '{name}' is a batch of no rows.")
    if dtype.is_floating_point:
        fits, allowed = tensor.to(dtype).isfinite(), "finite numbers"
    else:  # a larger number would wrap around; torch compares no 16-bit numbers without a sign
        low, high = (torch.as_tensor(b).to(tensor.device).long() for b in bounds_of(space))
        fits = (tensor.long() >= low) & (tensor.long() <= high)
        allowed = f"numbers from {low.min()} to {high.max()}"
    if not fits.all():
        raise ConfigurationError(
            f"The observation's '{name}' has {tensor[~fits][0]}, but the policy was trained with "
            f"{allowed}."
        )
    device = array.device if isinstance(array, Tensor) else None
    leaves.append(Leaf(name, len(tensor) if batched else None, device))
    tensor = (tensor if batched else tensor[None]).to(dtype)
    if dtype.is_floating_point and len(shape) >= 3:
        _check_unit(space, tensor, name)
    return tensor


def _check_unit(space: Any, tensor: Tensor, name: str) -> None:
    """Refuse a picture of 0 to 255 for a policy of pictures in [0, 1]; states may leave a Box."""
    low, high = (number.item() for number in tensor.aminmax())

    def fits(lower: float, upper: float) -> bool:
        return lower - OVERSHOOT <= low and high <= upper + OVERSHOOT

    # The bounds of one number first: reading the bounds of all numbers takes longer.
    if fits(space.low.flat[0], space.high.flat[0]) or not is_picture(space):
        return
    lower, upper = space.low.min(), space.high.max()
    require(
        fits(lower, upper),
        f"The observation's '{name}' has numbers from {low:g} to {high:g}, but the policy was "
        f"trained with pictures from {lower:g} to {upper:g}: divide a picture of 0 to 255 by "
        "255, or scale it as the env of the training did.",
    )


def _counted(rows: int | None) -> str:
    return "of one env" if rows is None else f"of {rows} envs"


def _mapped(executed: Any, function: Any) -> Any:
    if isinstance(executed, dict):
        return {key: _mapped(part, function) for key, part in executed.items()}
    if isinstance(executed, tuple):
        return tuple(_mapped(part, function) for part in executed)
    return function(executed)


# --- convert a policy's actions to the env's action space ---


def executed_arrays(space: gymnasium.Space[Any], action: np.ndarray) -> Any:
    """Convert a policy's actions [N, *A] to the env's bounds, first choice, parts and dtype."""
    if isinstance(space, StructuredActions):
        return space.unflatten(action)
    if isinstance(space, gymnasium.spaces.Box):
        # Clip in the space's dtype: a float64 bound may be tighter than the nearest float32.
        return action.astype(space.dtype).clip(space.low, space.high)
    return as_env_counts(action, first_choice(space)).astype(space.dtype)


def within(space: gymnasium.spaces.Box, action: Tensor) -> Tensor:
    """Clip actions [N, *A] to the bounds of a Box."""
    low, high = space.low, space.high
    if isinstance(space, StructuredActions):
        low, high = space.exact_bounds
    return action.clamp(_inside(low, np.inf, action), _inside(high, -np.inf, action))


def _inside(bound: np.ndarray, inwards: float, like: Tensor) -> Tensor:
    """Return a bound [*A] in float32, rounded inwards so that clipped actions are in the space."""
    nearest = bound.astype(np.float32)
    outside = nearest < bound if inwards > 0 else nearest > bound
    inner = np.nextafter(nearest, np.float32(inwards))
    return torch.as_tensor(np.where(outside, inner, nearest)).to(like)
