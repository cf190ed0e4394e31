"""Make a directory that LeRobot opens.

    python -m lerobot_policy_lightning_rl RUN DIRECTORY

RUN is a run's directory, a checkpoint, or a .safetensors or .onnx file of `rl-cli export`.
"""

import argparse
import shutil
from pathlib import Path

from lerobot.configs.types import FeatureType, PolicyFeature

from lightning_rl.extend.checkpoints import find_checkpoint

from .configuration_lightning_rl import LightningRLConfig
from .modeling_lightning_rl import LightningRLPolicy
from .processor_lightning_rl import make_lightning_rl_pre_post_processors


def main() -> None:
    """Copy a policy into a new directory, next to LeRobot's description of it."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    parser.add_argument("policy", help="run directory, checkpoint or export")
    parser.add_argument("directory", type=Path, help="new directory")
    parser.add_argument("--tokenizer", help="local directory, for a policy that reads instructions")
    parser.add_argument("--execute", type=int, help="actions to execute of a chunk; default: all")
    args = parser.parse_args()
    path = Path(args.policy)
    path = path if path.suffix == ".onnx" else find_checkpoint(args.policy, "outputs")
    args.directory.mkdir(parents=True)
    for part in (path, path.with_name(f"{path.name}.json")):  # weights have a description
        if part.is_file():
            shutil.copy(part, args.directory)
    config = LightningRLConfig(
        file=path.name,
        device="cpu",
        tokenizer=args.tokenizer,
        execute=args.execute,
    )
    policy = LightningRLPolicy(config, args.directory)
    kinds = {
        "observation.state": FeatureType.STATE,
        "observation.environment_state": FeatureType.ENV,
    }
    for leaf in policy.leaves:
        kind, shape = kinds.get(leaf.key, FeatureType.STATE), leaf.kept_shape
        if leaf.picture:
            kind, shape = FeatureType.VISUAL, (shape[-1], *shape[:-1])
        config.input_features[leaf.key] = PolicyFeature(type=kind, shape=shape)
    shape = policy.policy.action_space.shape[-1:]  # without the steps of a chunk
    config.output_features["action"] = PolicyFeature(type=FeatureType.ACTION, shape=shape)
    config.save_pretrained(args.directory)
    for pipeline in make_lightning_rl_pre_post_processors(config):
        pipeline.save_pretrained(args.directory)
    print(f"Made {args.directory}: lerobot-eval --policy.path={args.directory} --env.type=…")


main()
