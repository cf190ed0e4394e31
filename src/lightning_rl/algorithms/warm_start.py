"""Begin training with what another run has learnt."""

import torch
from lightning.pytorch import Trainer

from lightning_rl.algorithms.checks import check_weights
from lightning_rl.errors import ConfigurationError
from lightning_rl.policies import Policy


def begin_with(policy: Policy, path: str | None, trainer: Trainer) -> None:
    """Take up `initial_weights`, unless the run resumes from a checkpoint of its own."""
    if path is not None and trainer.ckpt_path is None:
        load_policy_weights(policy, path)


def load_policy_weights(policy: Policy, path: str) -> None:
    """Take up the weights of the policy in a checkpoint, and nothing else; its version stays.

    Raises:
        ConfigurationError: where the file cannot be read, or is of another policy.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        saved = content["state_dict"]
    except Exception as error:  # a damaged file fails in many ways, all of them meaning the same
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(
            f"model.initial_weights={path} cannot be read as a checkpoint: {reason}"
        ) from error
    prefix = "policy."
    weights = {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
    check_weights(policy.state_dict(), weights)
    policy.load_state_dict(weights | {"version": policy.version})
