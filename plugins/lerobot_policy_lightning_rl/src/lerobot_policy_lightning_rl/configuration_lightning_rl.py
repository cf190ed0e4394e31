"""The settings of a directory, in the file and by the names that LeRobot expects."""

from dataclasses import dataclass
from typing import Any

from lerobot.configs.policies import PreTrainedConfig

NAME = "lightning_rl"


@PreTrainedConfig.register_subclass(NAME)
@dataclass
class LightningRLConfig(PreTrainedConfig):
    """Settings of a policy directory.

    Attributes:
        file: checkpoint or export in the directory.
        execute: actions to execute of a chunk; null: all.
        tokenizer: local directory of a tokenizer, for a policy that reads instructions.
        instruction: the policy's observation key of the tokens.
    """

    file: str = ""
    execute: int | None = None
    tokenizer: str | None = None
    instruction: str = "instruction"

    # LeRobot asks for these when it trains.
    observation_delta_indices = action_delta_indices = reward_delta_indices = None

    def get_optimizer_preset(self) -> Any:
        raise NotImplementedError("A policy of lightning_rl is trained by `rl-cli fit`.")

    def get_scheduler_preset(self) -> Any:
        return None

    def validate_features(self) -> None:
        """Accept all features: the policy names what it misses when it acts."""
