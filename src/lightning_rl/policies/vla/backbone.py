"""Say what a backbone is: it turns pictures, an instruction and the state into features."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.system.construction import Constructed
from lightning_rl.system.errors import require


class Features(NamedTuple):
    """What a backbone makes of an observation.

    Attributes:
        slots: [B, L, D], one vector per number of an action chunk (L = K * A), all in one pass.
        summary: [B, E], of the whole observation: what the value head sees.
    """

    slots: Tensor
    summary: Tensor


class Backbone(nn.Module, ABC, Constructed):
    """The body of a `VLAPolicy`.

    Subclass it for a model of your own, and pass `class_path: my_module.MyBackbone`. It gets
    observations as the rollout stores them, so nothing is tokenised twice, and what it does to a
    picture it does in `forward`. It must treat each sample by itself (no batch norm).

    Attributes:
        slot_size: D.
        summary_size: E.
        reads: the keys of an observation that `forward` can read. The policy refuses other keys,
            unless it is to ignore them; then `forward` does not get them.
        vocabulary: tokens of an instruction are below this; None where the backbone does not say.
    """

    slot_size: int
    summary_size: int
    reads: Sequence[str] = ("rgb", "depth", "language", "proprio")
    vocabulary: int | None = None

    @abstractmethod
    def build(self, observation: TensorDict, num_slots: int) -> None:
        """Make the parameters whose shapes depend on the env.

        Args:
            observation: one observation, zeros of its shapes and dtypes, batch shape [1].
            num_slots: L.
        """

    @abstractmethod
    def forward(self, observation: TensorDict) -> Features:
        """Return the features of observations [B].

        Args:
            observation: `rgb` uint8 [B, H, W, 3] or [B, cameras, H, W, 3], and where the env has
                them `depth` float32 [B, H, W] or [B, cameras, H, W] in metres, `language` int64
                [B, S], `proprio` [B, P] and, where `reads` names it, `condition` [B, 1], 1 for a
                good action (see `Conditioned`).
        """

    def token_head(self, num_bins: int) -> nn.Module | None:
        """Return what turns slots [B, L, D] into logits [B, L, num_bins].

        None for a linear layer of the policy's own. A language model gives the last `num_bins`
        entries of its vocabulary.
        """
        return None


def refuse_unknown_tokens(tokens: Tensor, vocabulary: int) -> None:
    """Refuse tokens beyond a vocabulary; waits for the device that they are on.

    Args:
        tokens: [B, S].
        vocabulary: how many there are.

    Raises:
        ConfigurationError: naming the first one.
    """
    unknown = tokens[(tokens < 0) | (tokens >= vocabulary)].tolist()
    require(
        not unknown,
        f"An instruction has the token {(unknown or [0])[0]}, and the model knows 0 to "
        f"{vocabulary - 1}: tokenise instructions by the model's own tokenizer, or give the model "
        "a larger vocabulary (of TinyVLA the setting vocabulary).",
    )
