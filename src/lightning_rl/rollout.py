"""Define the rollout: the one container that flows from the collector to the loss.

A rollout is a TensorDict of batch shape [N, T+1]: N envs, T steps, and one bootstrap slot at index
T, where only `observation`, `value` and `state` are valid. It is stored time-major, as [T+1, N],
and handed out transposed: each env step then writes contiguous memory, and the first T slots
flatten to [T*N] without a copy.

| key                           | shape [N, T+1, ...] | dtype   | written by                    |
|-------------------------------|---------------------|---------|-------------------------------|
| observation (tensor or tree)  | env's               | env's   | collector                     |
| final_observation (likewise)  | env's               | env's   | collector, at episode ends    |
| action                        | env's               | env's   | policy                        |
| sample_log_prob               | -                   | float32 | policy (the behaviour policy) |
| value                         | -                   | float32 | algorithm, one batched pass   |
| final_value, where time ran out | -                 | float32 | the same pass                 |
| reward                        | -                   | float32 | env                           |
| terminated, truncated, done   | -                   | bool    | env (done is their or)        |
| policy_version                | -                   | int64   | collector                     |
| continues, of slot 0          | -                   | bool    | collector: see below          |
| padding, where rows differ in length | -            | bool    | collector: nothing happened   |
| success, where the env says so | -                  | bool    | collector                     |
| state, where the policy has one | policy's    | float32 | policy: that before the step  |
| executed_action, where a person or a script may take over | env's | env's | env: what it did |
| intervened, likewise          | -                   | bool    | env: whether they took over   |
| executed, where an action is a chunk | K            | bool    | env: which of its K actions   |
| step_reward, likewise         | K                   | float32 | env: what each of them earned |

`sample_log_prob` may be [N, T+1, L], of the parts of an action in their order: L is a multiple of
the K actions of a chunk. `reward` is the plain sum over a chunk; see `env_steps`.

`continues` says of the first step whether it goes on where the rollout before this one, as the
learner got it, has ended; it does not after a reset, nor where a rollout in between was dropped.

`state` is zero where an episode begins, and what the policy returned as `next_state` elsewhere.
`executed_action` is `action`, within its bounds where the env clips, unless the env named another.

An algorithm adds fields of its own (`advantage`, `return`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.distributed import ranks
from lightning_rl.errors import ConfigurationError

FieldSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape of one step of one env, and dtype."""

STEP_FIELDS: dict[str, torch.dtype] = {
    "sample_log_prob": torch.float32,
    "value": torch.float32,
    "final_value": torch.float32,
    "reward": torch.float32,
    "terminated": torch.bool,
    "truncated": torch.bool,
    "done": torch.bool,
    "success": torch.bool,
    "policy_version": torch.int64,
}
"""The fields with one number per env and step."""


def allocate_rollout(
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    num_envs: int,
    num_steps: int,
    *,
    extra_fields: Mapping[str, FieldSpec] | None = None,
    device: torch.device | str = "cpu",
) -> TensorDict:
    """Allocate a zeroed rollout, batch shape [N, T+1], for the spaces of one env.

    `extra_fields` are what a policy stores beside `action` so that the update can recompute its
    log-prob.
    """
    size = (num_steps + 1, num_envs)

    def field(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros((*size, *shape), dtype=dtype, device=device)

    def tree(space: gymnasium.Space[Any]) -> Tensor | TensorDict:
        if isinstance(space, gymnasium.spaces.Dict):
            return TensorDict(
                {key: tree(child) for key, child in space.items()}, size, device=device
            )
        return field(*space_spec(space))

    fields: dict[str, Tensor | TensorDict] = {
        "observation": tree(observation_space),
        "final_observation": tree(observation_space),
        "action": field(*space_spec(action_space)),
    }
    fields |= {key: field((), dtype) for key, dtype in STEP_FIELDS.items()}
    fields |= {key: field(shape, dtype) for key, (shape, dtype) in (extra_fields or {}).items()}
    return time_major(TensorDict(fields, size, device=device))


def space_spec(space: gymnasium.Space[Any]) -> FieldSpec:
    """Return the shape and dtype with which one element of a space is stored.

    Floats are stored as float32.

    Raises:
        ConfigurationError: for a space that is not one array (Dict spaces are trees of arrays: see
            `allocate_rollout`).
    """
    if isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.MultiBinary):
        dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
        return tuple(space.shape or ()), torch.float32 if dtype.is_floating_point else dtype
    if isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete):
        return tuple(space.shape or ()), torch.int64
    raise ConfigurationError(
        f"Space {space} cannot be stored in a rollout: use Box, Discrete, MultiDiscrete or "
        "MultiBinary, or a Dict of "
        "them for observations (gymnasium.wrappers.FlattenObservation turns most others into a "
        "Box)."
    )


def intervention_fields(action_space: gymnasium.Space[Any]) -> dict[str, FieldSpec]:
    """Return what a rollout holds of an env in which a person or a script may take over."""
    return {"executed_action": space_spec(action_space), "intervened": ((), torch.bool)}


def time_major(data: TensorDict) -> TensorDict:
    """Swap the first two batch dimensions of every field, as views.

    [N, T] becomes [T, N] and back.
    """

    def swap(value: Any) -> Any:
        return time_major(value) if isinstance(value, TensorDict) else value.transpose(0, 1)

    size = (data.batch_size[1], data.batch_size[0], *data.batch_size[2:])
    return TensorDict({key: swap(value) for key, value in data.items()}, size, device=data.device)


def step_views(rollout: TensorDict) -> list[TensorDict]:
    """Return, for each of the T+1 slots, a TensorDict [N] of views that write into the rollout.

    Make them once per allocation: slicing a TensorDict costs several times what the write itself
    does.
    """
    return list(time_major(rollout).unbind(0))


def map_tree(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to the tensors or arrays of a tree, and of others of the same structure.

    Returns:
        what it returned; where the tree is a dict or a TensorDict, a dict of that.
    """
    if isinstance(tree, Tensor | np.ndarray):
        return function(tree, *others)
    return {
        key: map_tree(function, child, *(other[key] for other in others))
        for key, child in tree.items()
    }


def copy_tree(target: Any, source: Any) -> None:
    """Copy a tensor or a tree of tensors into storage of the same structure."""
    if isinstance(target, Tensor):
        target.copy_(source)
        return
    for key, value in target.items():
        copy_tree(value, source[key])


BOOTSTRAP_FIELDS = ("observation", "value", "state")
"""What is valid in the last slot of a rollout; everything else there is zero."""


def clear_bootstrap_slot(slot: TensorDict) -> None:
    """Zero what has no meaning in a bootstrap slot [N], where an earlier rollout has left it."""
    for key, value in slot.items():
        if key not in BOOTSTRAP_FIELDS:
            value.zero_()


def transition_view(rollout: TensorDict) -> TensorDict:
    """Return the [N, T] part of a rollout as a view, with `next_value`, one slot later."""
    validate(rollout)
    transitions = rollout[:, :-1]
    transitions["next_value"] = rollout["value"][:, 1:]
    return transitions


def successors(rollout: TensorDict) -> Any:
    """Return the observation that followed each step [N, T, ...], a tensor or a tree.

    That is the next slot's, or the true final one where an episode ended: never the one that the
    next episode begins with.

    Args:
        rollout: [N, T+1].
    """
    validate(rollout)

    def after(observation: Any, final: Any) -> Any:
        if isinstance(observation, Tensor):
            ended = done.view(*done.shape, *[1] * (observation.dim() - 2))
            return torch.where(ended, final[:, :-1], observation[:, 1:])
        fields = {key: after(child, final.get(key)) for key, child in observation.items()}
        return TensorDict(fields, done.shape, device=observation.device)

    done: Tensor = rollout["done"][:, :-1]
    return after(rollout.get("observation"), rollout.get("final_observation"))


def validate(rollout: TensorDict) -> None:
    """Check that data has the batch shape [N, T+1] and the fields of a rollout.

    Raises:
        ValueError: naming the field, what it is, what it should be, and how to get it.
    """
    if len(rollout.batch_size) != 2 or rollout.batch_size[1] < 2:
        raise ValueError(
            "Expected a rollout of batch shape [num_envs, steps + 1], got "
            f"{list(rollout.batch_size)}. Returns and "
            "advantages need the time structure: pass what the buffer hands out, before "
            "flattening it into minibatches."
        )
    for key in ("observation", "action", *STEP_FIELDS):
        if key not in rollout.keys():
            raise ValueError(f"The rollout has no field '{key}'; it has {sorted(rollout.keys())}.")
    for key, dtype in STEP_FIELDS.items():
        value = rollout[key]
        in_parts = key == "sample_log_prob" and (
            value.shape[2:] > (1,) or "executed" in rollout.keys()
        )
        shape = value.shape[:2] if in_parts else value.shape
        if shape != rollout.batch_size or value.dtype != dtype:
            raise ValueError(
                f"Rollout field '{key}' is {value.dtype} of shape {list(value.shape)}; expected "
                f"{dtype} of shape "
                f"{list(rollout.batch_size)}, without a trailing dimension of one."
            )


def check_finite(rollout: TensorDict) -> None:
    """Refuse what an env returned where it is not finite, before it spoils any statistics.

    Costs one sum per field and rollout [N, T+1], nothing per step. All ranks do so together, and
    all end where one has to.

    Raises:
        FloatingPointError: naming the field, and the first env and step.
    """
    fault = _first_fault(rollout)
    if ranks.agree(fault is not None):
        raise FloatingPointError(next(filter(None, ranks.gather_over_ranks(fault))))


def _first_fault(rollout: TensorDict) -> str | None:
    """Say what is not finite, or return None."""
    for name, field in _returned(rollout):
        if not field.sum().isfinite() and not (finite := field.isfinite()).all():
            row, step, *entry = (~finite).nonzero()[0].tolist()
            value = field[(row, step, *entry)].item()
            where = f", entry {entry}" if entry else ""
            return (
                f"The env returned a {name} that is not finite: {value} in env {row}, at step "
                f"{step} of the rollout{where}. Training cannot go on from it; mend the env, or "
                "bound what it returns by a wrapper. last.ckpt holds the last epoch's end."
            )
    return None


def _returned(rollout: TensorDict) -> Iterator[tuple[str, Tensor]]:
    """Yield what the env wrote into a rollout, as far as it may be NaN."""
    fields = rollout.select("observation", "final_observation", "reward", strict=False)
    for name, field in fields.flatten_keys(".").items():
        if field.is_floating_point():
            yield name, field


def flat_transitions(
    rollout: TensorDict, keys: Sequence[str], *, bootstrap: bool = False
) -> TensorDict:
    """Return the named fields as one TensorDict of batch shape [T*N], time-major.

    A view where storage allows.

    With `bootstrap` the slot at index T is kept: [(T+1)*N].
    """
    slots = rollout.batch_size[1] - (0 if bootstrap else 1)

    def flat(value: Any) -> Any:
        """Do in one go what takes TensorDict four: time-major, cut, flattened."""
        if isinstance(value, TensorDict):
            fields = {key: flat(child) for key, child in value.items()}
            return TensorDict(fields, [slots * rollout.batch_size[0]], device=value.device)
        return value.transpose(0, 1)[:slots].flatten(0, 1)

    return flat(rollout.select(*keys))  # type: ignore[no-any-return]  # a TensorDict gives one


def add_transition_field(rollout: TensorDict, key: str, value: Tensor) -> None:
    """Add a field to a rollout [N, T+1] from its values at the transitions.

    It is zero in the bootstrap slot.

    Args:
        rollout: [N, T+1].
        key: of the field.
        value: [N, T, ...].
    """
    envs, slots = rollout.batch_size
    storage = value.new_zeros((slots, envs, *value.shape[2:]))
    storage[:-1].copy_(value.transpose(0, 1))
    rollout[key] = storage.transpose(0, 1)


def env_steps(rollout: TensorDict) -> Tensor | None:
    """Return how many env steps each action took, [N, T]; None where each took one."""
    if "executed" not in rollout.keys():
        return None
    steps: Tensor = rollout["executed"][:, :-1].sum(-1)
    return steps


def env_steps_in(rollout: TensorDict) -> int:
    """Return how many env steps a rollout [N, T+1] holds, padding left out."""
    steps = env_steps(rollout)
    if steps is not None:
        return int(steps.sum())
    if "padding" in rollout.keys():
        return int((~rollout["padding"][:, :-1]).sum())
    reward: Tensor = rollout["reward"]
    return reward[:, :-1].numel()


def without_padding(rollout: TensorDict) -> TensorDict:
    """Return a rollout [N, T+1] in which something happened at each step.

    Where there is padding, that is one row [1, M + 1] of all M steps, for statistics of steps; it
    says nothing of time.
    """
    if "padding" not in rollout.keys():
        return rollout
    kept = rollout.flatten()[(~rollout["padding"]).flatten()]
    return torch.cat([kept, kept[-1:]])[None]  # type: ignore[return-value]  # a TensorDict


def discount_of(rollout: TensorDict, gamma: float) -> float | Tensor:
    """Return gamma, or gamma^k [N, T] where each action took k env steps."""
    steps = env_steps(rollout)
    return gamma if steps is None else gamma**steps


def discounted_reward(rollout: TensorDict, gamma: float) -> Tensor:
    """Return the reward of each action [N, T]; of a chunk the sum of gamma^i times its rewards."""
    if "step_reward" not in rollout.keys():
        reward: Tensor = rollout["reward"][:, :-1]
        return reward
    step_reward: Tensor = rollout["step_reward"][:, :-1]
    weights = gamma ** torch.arange(step_reward.shape[-1], device=step_reward.device)
    return (step_reward * weights).sum(-1)  # no product of matrices: autocast would round it
