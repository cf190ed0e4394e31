"""The policy, in the file and by the names that LeRobot expects."""

from collections import deque
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from lightning_rl import load_policy
from lightning_rl.extensions.datasets.lerobot_format import Leaf, leaves_of

from .configuration_lightning_rl import NAME, LightningRLConfig


class LightningRLPolicy(PreTrainedPolicy):
    """A trained policy that acts in LeRobot. `from_pretrained` reads a directory."""

    config_class, name = LightningRLConfig, NAME

    def __init__(
        self, config: LightningRLConfig, directory: str | Path = "", **kwargs: Any
    ) -> None:
        super().__init__(config)
        # A directory may be sent: its config names no file elsewhere, and code is never trusted.
        path = Path(directory, Path(config.file).name)
        if not config.file or not path.is_file():
            raise FileNotFoundError(
                f"No policy of lightning_rl at {path}: make a directory by `python -m "
                "lerobot_policy_lightning_rl RUN DIRECTORY`, and give it as --policy.path."
            )
        if path.suffix == ".onnx":
            from .graph import GraphPolicy

            self.policy: Any = GraphPolicy(path)
        else:
            self.policy = load_policy(path, device=config.device)
            self.module = self.policy.module  # LeRobot counts and moves its parameters
        self.leaves = leaves_of(self.policy.observation_space)
        self.tokenizer = None
        if config.tokenizer is not None:
            from lightning_rl.extensions.vla.instructions import InstructionTokenizer

            length = self.policy.observation_space[config.instruction].shape[-1]
            self.tokenizer = InstructionTokenizer(config.tokenizer, length)
        self.reset()

    @classmethod
    def from_pretrained(
        cls, pretrained_name_or_path: str | Path, *, config: Any = None, **kwargs: Any
    ) -> "LightningRLPolicy":
        config = config or LightningRLConfig.from_pretrained(pretrained_name_or_path)
        return cls(config, pretrained_name_or_path).eval()

    def reset(self) -> None:
        """Begin episodes in all rows."""
        self.policy.reset()
        self.queue: deque[Tensor] = deque()

    def select_action(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """Return the next actions [N, A]; a chunk is executed before the next is computed."""
        if not self.queue:
            self.queue.extend(self.predict_action_chunk(batch)[:, : self.config.execute].unbind(1))
        return self.queue.popleft()

    def predict_action_chunk(self, batch: dict[str, Any], **kwargs: Any) -> Tensor:
        """Return the actions [N, K, A]; K is 1 for a policy without chunks."""
        observation: Any = {}
        for leaf in self.leaves:
            place = observation
            for key in leaf.path[:-1]:
                place = place.setdefault(key, {})
            part = self.read(leaf, batch)
            if leaf.path:
                place[leaf.path[-1]] = part
            else:
                observation = part
        action = torch.as_tensor(self.policy.act(observation)).float()
        return action if action.dim() == 3 else action.reshape(len(action), 1, -1)

    def read(self, leaf: Leaf, batch: dict[str, Any]) -> Tensor:
        """Return a part of the observation [N, ...] from a batch of LeRobot's."""
        if self.tokenizer is not None and leaf.path[-1:] == (self.config.instruction,):
            return torch.stack([torch.as_tensor(self.tokenizer(text)) for text in batch["task"]])
        if leaf.key not in batch:
            raise KeyError(
                f"The policy reads {leaf.key}, but LeRobot's batch has "
                f"{', '.join(key for key in batch if key.startswith('observation'))}."
            )
        part = batch[leaf.key]
        if leaf.picture:
            # LeRobot divides by 255 and puts channels first; rounding gives the picture back. A
            # convolution rounds by the order in memory, so that is the env's, too.
            part = (part * 255).round().to(torch.uint8)
            return part if leaf.channels_first else part.movedim(-3, -1).contiguous()
        dtype = getattr(torch, leaf.dtype)
        return part.reshape(len(part), *leaf.shape).to(dtype)

    def forward(self, batch: dict[str, Any]) -> Any:
        raise NotImplementedError("A policy of lightning_rl is trained by `rl-cli fit`.")

    def get_optim_params(self) -> Any:
        return self.forward({})  # LeRobot asks before it trains
