"""Allocate a rollout for the spaces of an env."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.rollout.contract import STEP_FIELDS, FieldSpec, FinalObservations, time_major
from lightning_rl.system.errors import ConfigurationError

WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Dtypes into whose tensors torch cannot write by index, and those that store their numbers."""


def allocate_rollout(
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    num_envs: int,
    num_steps: int,
    *,
    extra_fields: Mapping[str, FieldSpec] | None = None,
    device: torch.device | str = "cpu",
) -> TensorDict:
    """Allocate a zeroed rollout [N, T+1] for the spaces of one env.

    `extra_fields` are fields of a policy besides `action`, from which the update recomputes
    log-probs.
    """
    size = (num_steps + 1, num_envs)

    def field(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros((*size, *shape), dtype=dtype, device=device)

    fields: dict[str, Tensor | TensorDict] = {
        "observation": _zeros(observation_space, size, device),
        "action": field(*space_spec(action_space)),
    }
    # Every rollout has these keys; what an env does not report stays zero.
    fields |= {key: field((), dtype) for key, dtype in STEP_FIELDS.items()}
    fields |= {key: field(shape, dtype) for key, (shape, dtype) in (extra_fields or {}).items()}
    rollout = time_major(TensorDict(fields, size, device=device))
    allocate_final_storage(rollout, observation_space)
    return rollout


def _zeros(
    space: gymnasium.Space[Any], size: tuple[int, ...], device: torch.device | str
) -> Tensor | TensorDict:
    if isinstance(space, gymnasium.spaces.Dict):
        fields = {key: _zeros(child, size, device) for key, child in space.items()}
        return TensorDict(fields, size, device=device)
    shape, dtype = space_spec(space)
    return torch.zeros((*size, *shape), dtype=dtype, device=device)


def space_spec(space: gymnasium.Space[Any]) -> FieldSpec:
    """Return the shape and dtype that store one element of a space: floats as float32, and `WIDER`.

    Raises:
        ConfigurationError: if the space is not one array (for Dict spaces, see `allocate_rollout`).
    """
    if isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.MultiBinary):
        dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype  # torch's dtype for NumPy's
        dtype = torch.float32 if dtype.is_floating_point else WIDER.get(dtype, dtype)
        return tuple(space.shape or ()), dtype
    if isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete):
        return tuple(space.shape or ()), torch.int64
    raise ConfigurationError(
        f"Space {space} cannot be stored in a rollout: use Box, Discrete, MultiDiscrete or "
        "MultiBinary, or a Dict of them for observations (gymnasium.wrappers.FlattenObservation "
        "turns most others into a Box)."
    )


def intervention_fields(action_space: gymnasium.Space[Any]) -> dict[str, FieldSpec]:
    """Return the extra fields of an env with interventions."""
    return {"executed_action": space_spec(action_space), "intervened": ((), torch.bool)}


def allocate_final_storage(rollout: TensorDict, observation_space: gymnasium.Space[Any]) -> None:
    """Give a rollout [N, T+1] its own storage for final observations."""
    envs, slots = rollout.batch_size
    # Row 0, for steps without a final observation.
    none = _zeros(observation_space, (1,), rollout["final_index"].device)
    storage = FinalObservations(none, initial_rows=envs, max_rows=envs * (slots - 1))
    rollout.set_non_tensor("final_observation", storage)
