"""Make the policy of a checkpoint again: `load_policy(path)`.

The checkpoint is data here as on the command line, and passes the same checks.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from lightning_rl.algorithms.checks import check_description, check_weights
from lightning_rl.checkpoints.building import SavedRun
from lightning_rl.checkpoints.format import STATE_KEY, read_checkpoint
from lightning_rl.checkpoints.trust import CURE_IN_PYTHON
from lightning_rl.deploy.acting import TrainedPolicy
from lightning_rl.deploy.export.weights import is_exported, read_exported
from lightning_rl.envs import VectorEnv
from lightning_rl.envs.factories import EnvFactory, make_env
from lightning_rl.policies import Policy
from lightning_rl.policies.base import check_weights_are_numbers
from lightning_rl.system.runs import find_checkpoint


class Trained(NamedTuple):
    """A policy with its weights, in eval mode, and what else its checkpoint says."""

    policy: Policy
    run: SavedRun


def load_policy(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    trust_code: bool = False,
    output_dir: str | Path = "outputs",
    policy: Policy | None = None,
) -> TrainedPolicy:
    """Make the policy of a checkpoint again, ready to act, without env, trainer or algorithm.

    Args:
        path: a checkpoint, a run directory (then its last one), `last` or `best` of the newest run,
            or a `.safetensors` file that `rl-cli export` wrote.
        device: where it computes.
        trust_code: import whatever class the file names as the policy's, or in it. Without it only
            those of this package count.
        output_dir: where runs are looked for, for `last` and `best`.
        policy: takes up the weights, where the file cannot say how it is made.

    Raises:
        ConfigurationError: for a file that cannot be read, one that names other classes, one that
            could not say how its policy is made, and weights of another policy than that given.
    """
    found = load_trained(path, trust_code=trust_code, output_dir=output_dir, policy=policy)
    return TrainedPolicy(found.policy.to(device))


def load_trained(
    checkpoint: str | Path,
    *,
    trust_code: bool = False,
    output_dir: str | Path = "outputs",
    policy: Policy | None = None,
    cure: str = CURE_IN_PYTHON,
) -> Trained:
    """Make the policy of a checkpoint, and return what else the file says; see `load_policy`.

    `cure` is what a refusal of code of others ends with.
    """
    path = find_checkpoint(str(checkpoint), output_dir)
    content = read_exported(path) if is_exported(path) else read_checkpoint(path)
    run = SavedRun(path, content, trust_code, cure)
    if policy is None:
        policy = run.policy(Policy)
    own = {f"policy.{name}": value for name, value in policy.state_dict().items()}
    weights = {k: one for k, one in content["state_dict"].items() if k.startswith("policy.")}
    cure = "Give the policy that it was trained with, or none where the file says how it is made."
    check_weights(own, weights, cure)
    check_description(policy, content[STATE_KEY], cure)
    policy.load_state_dict({name.removeprefix("policy."): one for name, one in weights.items()})
    check_weights_are_numbers(policy, str(path))
    policy.eval()
    trainer = run.settings.get("trainer")
    policy.compute_in(str(trainer.get("precision")) if isinstance(trainer, dict) else "")
    return Trained(policy, run)


def env_of(run: SavedRun) -> VectorEnv:
    """Make one env of those that a policy was trained in.

    Raises:
        ConfigurationError: where the checkpoint names none, or one that cannot be made here, or
            that is code of others.
    """
    factory = run.env_factory(EnvFactory)
    with run.making():
        return make_env(factory, 1, "data.env")
