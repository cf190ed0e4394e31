"""Load a trained policy that another policy builds on, without training it."""

from pathlib import Path
from typing import Any

import gymnasium

from lightning_rl import ConfigurationError, Policy
from lightning_rl.extend.checkpoints import load_trained
from lightning_rl.extend.errors import require
from lightning_rl.extend.policies import PolicyFactory
from lightning_rl.extend.spaces import names_of


def frozen_policy(
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    checkpoint: str | None,
    make: PolicyFactory | None,
    trust_code: bool,
) -> Policy:
    """Return the policy of a checkpoint, or from `make`, in eval mode and without gradients.

    Raises:
        ConfigurationError: if both or none are given, if the checkpoint cannot be read, or if the
            policy has other spaces.
    """
    if make is None and checkpoint is not None:
        require(
            # A resumed run builds the policy again.
            checkpoint not in ("last", "best"),
            f"checkpoint: {checkpoint} changes with each run, but the new policy reads it again "
            "whenever it is created: give the path of a run directory or a file.",
        )
        base = load_trained(checkpoint, trust_code=trust_code, output_dir=Path()).policy
        base.set_precision("")  # the run of the new policy decides the precision
    elif make is not None and checkpoint is None:
        base = make(observation_space, action_space)
    else:
        raise ConfigurationError(
            "A base policy is needed: give either checkpoint, a file or a run directory, or base, "
            "{class_path: ..., init_args: ...}."
        )
    # What only the base's critic reads may be missing: the base does not train.
    require(
        fits(base.acting_space, observation_space) and base.action_space == action_space,
        f"The base policy reads observations {base.acting_space} and acts in "
        f"{base.action_space}; data.env has {observation_space} and {action_space}: give it the "
        "env that the base policy was trained in, chunks included.",
    )
    return base.eval().requires_grad_(False)


def fits(inner: gymnasium.Space[Any], outer: gymnasium.Space[Any]) -> bool:
    """Return whether observations of `outer` contain everything in `inner`, except bounds.

    Numbers that have names in both must have the same: joints in another order do not fit.
    """
    if isinstance(inner, gymnasium.spaces.Dict):
        children = outer.spaces if isinstance(outer, gymnasium.spaces.Dict) else {}
        return all(key in children and fits(child, children[key]) for key, child in inner.items())
    # Numbers without names, (), fit any names.
    names = [{names_of(inner, axis), names_of(outer, axis), ()} for axis in (0, -1)]
    same_names = all(len(different) < 3 for different in names)
    return same_names and (inner.shape, inner.dtype) == (outer.shape, outer.dtype)
