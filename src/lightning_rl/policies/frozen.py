"""Load a trained policy that another policy builds on, without training it."""

from pathlib import Path
from typing import Any

import gymnasium

from lightning_rl.checkpoints.building import SavedRun
from lightning_rl.checkpoints.format import DESCRIPTION_KEY, STATE_KEY, read_checkpoint
from lightning_rl.policies.base import Policy
from lightning_rl.policies.description import with_statistics
from lightning_rl.policies.slow import PolicyFactory
from lightning_rl.policies.spaces import fits
from lightning_rl.policies.weights import fitting
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.saved_runs import ALIASES, find_checkpoint


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
            checkpoint not in ALIASES,
            f"checkpoint: {checkpoint} changes with each run, but the new policy reads it again "
            "whenever it is created: give the path of a run directory or a file.",
        )
        base = _trained(checkpoint, trust_code)
    elif make is not None and checkpoint is None:
        base = make(observation_space, action_space)
    else:
        raise ConfigurationError(
            "A base policy is needed: give either checkpoint, a file or a run directory, or base, "
            "{class_path: ..., init_args: ...}."
        )
    require(
        fits(base.observation_space, observation_space) and base.action_space == action_space,
        f"The base policy reads observations {base.observation_space} and acts in "
        f"{base.action_space}; data.env has {observation_space} and {action_space}: give it the "
        "env that the base policy was trained in, chunks included.",
    )
    return base.eval().requires_grad_(False)


def _trained(checkpoint: str, trust_code: bool) -> Policy:
    path = find_checkpoint(checkpoint, Path())
    content = read_checkpoint(path)
    policy: Policy = SavedRun(path, content, trust_code).policy(Policy)
    # The state dict also holds the algorithm's own entries.
    weights = {
        name.removeprefix("policy."): value
        for name, value in content["state_dict"].items()
        if name.startswith("policy.")
    }
    weights = with_statistics(policy, weights, content[STATE_KEY].get(DESCRIPTION_KEY, {}))
    policy.load_state_dict(fitting(policy.state_dict(), weights, str(path)))
    return policy
