"""Load the policy of a checkpoint: `load_policy(path)`."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_rl.algorithms.checkpoint_checks import check_description, check_weights
from lightning_rl.checkpoints.building import SavedRun
from lightning_rl.checkpoints.format import (
    CONFIG_KEY,
    DESCRIPTION_KEY,
    STATE_KEY,
    check_schema,
    read_checkpoint,
)
from lightning_rl.checkpoints.trust import CURE_IN_PYTHON
from lightning_rl.deploy.acting import TrainedPolicy
from lightning_rl.envs import VectorEnv
from lightning_rl.envs.factories import EnvFactory, make_env
from lightning_rl.policies import Policy
from lightning_rl.policies.description import with_statistics
from lightning_rl.policies.weights import check_weights_are_numbers
from lightning_rl.system.errors import require
from lightning_rl.system.extensions import HOOKS, function_at
from lightning_rl.system.files import expanded
from lightning_rl.system.plain_yaml import dump_yaml
from lightning_rl.system.saved_runs import find_checkpoint


class Trained(NamedTuple):
    """A policy with its weights, in eval mode, and its saved run."""

    policy: Policy
    run: SavedRun

    def env(self) -> VectorEnv:
        """Build one of the envs that the policy was trained in.

        Raises:
            ConfigurationError: if the checkpoint names no env, third-party code, or an env that
                cannot be built here.
        """
        factory = self.run.env_factory(EnvFactory)
        with self.run.building():
            return make_env(factory, 1, "data.env")


def load_policy(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    trust_code: bool = False,
    output_dir: str | Path = "outputs",
    policy: Policy | None = None,
) -> TrainedPolicy:
    """Load the policy of a checkpoint, ready to act, without env, trainer or algorithm.

    Args:
        path: a checkpoint, a run directory (its last checkpoint), `last` or `best` of the newest
            run, a `.safetensors` file of `rl-cli export`, or its directory of ONNX graphs.
        device: device of the policy.
        trust_code: import any class that the file names; False: only classes of this package.
        output_dir: directory of runs, for `last` and `best`.
        policy: gets the weights, if the file does not describe its policy.

    Raises:
        ConfigurationError: if the file cannot be read, names other classes, does not describe its
            policy, or holds weights that do not fit the given policy.
    """
    place = expanded(path)
    if (place / "export.json").exists():  # a directory of ONNX graphs
        require(policy is None, f"{path} is an export, which takes no other policy: remove it.")
        return TrainedPolicy(function_at(HOOKS["exported_policy"])(place).to(device))
    trained = load_trained(path, trust_code=trust_code, output_dir=output_dir, policy=policy)
    return TrainedPolicy(trained.policy.to(device))


def load_trained(
    checkpoint: str | Path,
    *,
    trust_code: bool = False,
    output_dir: str | Path = "outputs",
    policy: Policy | None = None,
    cure: str = CURE_IN_PYTHON,
) -> Trained:
    """Load a policy and its run; see `load_policy`. `cure` is the last sentence of a refusal."""
    path = find_checkpoint(str(checkpoint), output_dir)
    exported = path.suffix == ".safetensors"  # of `rl-cli export`
    content = _read_exported(path) if exported else read_checkpoint(path)
    run = SavedRun(path, content, trust_code, cure)
    if policy is None:
        policy = run.policy(Policy)
    state = {f"policy.{name}": value for name, value in policy.state_dict().items()}
    weights = {k: v for k, v in content["state_dict"].items() if k.startswith("policy.")}
    described = content[STATE_KEY].get(DESCRIPTION_KEY, {})
    # Earlier versions saved no statistics: they are read from the file that the policy names.
    weights = with_statistics(nn.ModuleDict({"policy": policy}), weights, described)
    cure = "Pass the policy of the training run, or no policy if the file describes it."
    check_weights(state, weights, cure)
    check_description(policy, content[STATE_KEY], cure)
    policy.load_state_dict({name.removeprefix("policy."): value for name, value in weights.items()})
    check_weights_are_numbers(policy, str(path))
    # Dropout must not act.
    policy.eval()
    trainer = run.settings.get("trainer")
    policy.set_precision(str(trainer.get("precision")) if isinstance(trainer, dict) else "")
    return Trained(policy, run)


def _read_exported(path: Path) -> dict[str, Any]:
    config, state, weights = function_at(HOOKS["read_exported"])(path)
    content = {
        CONFIG_KEY: dump_yaml(config),
        STATE_KEY: state,
        "state_dict": {f"policy.{name}": tensor for name, tensor in weights.items()},
    }
    # As for a checkpoint, so that files of a newer version are refused.
    check_schema(content, f"The export {path}")
    return content
