"""The interface of backbones, which turn pictures, instruction and state into features."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import gymnasium
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.extend.errors import Configurable, require
from lightning_rl.functional import guide


class Features(NamedTuple):
    """Output of a backbone.

    Attributes:
        slots: [B, L, D], one vector per number of an action chunk (L = K * A), from one pass.
        summary: [B, E], of the whole observation, for the value head.
        prefix: tensors [B, ...] that only the expert of a `FlowHead` reads, such as keys and values
            of each layer.
        absent: features of the same observations without condition; None without guidance.
        guidance: [B], factor of the guidance; None without guidance.
        old_chunk: the old chunk, which the new one continues in real time; None without one.
    """

    slots: Tensor
    summary: Tensor
    prefix: tuple[Tensor, ...] = ()
    absent: Optional["Features"] = None
    guidance: Tensor | None = None
    old_chunk: Any = None

    def guided(self, output: "Callable[[Features], Tensor]") -> Tensor:
        """Return an output [B, ...] of the features, guided if `guidance` is set; see `guide`."""
        conditioned = output(self)
        # Without guidance a single pass of the head.
        if self.absent is None or self.guidance is None:
            return conditioned
        return guide(conditioned, output(self.absent), self.guidance)


class Backbone(nn.Module, ABC, Configurable):
    """The body of a `VLAPolicy`.

    Subclass it for your own model, and pass `class_path: my_module.MyBackbone`. Observations arrive
    as the rollout stores them: instructions are tokens, and `forward` preprocesses pictures.
    Samples must not affect each other (no batch norm).

    Attributes:
        slot_size: D.
        summary_size: E.
        reads: keys of an observation that `forward` can read. The policy refuses other keys, or
            removes the keys in `ignore_keys`.
        vocabulary: upper bound (exclusive) of instruction tokens; None if unknown.
        needs_pictures: whether an observation without `rgb` is refused.
    """

    slot_size: int
    summary_size: int
    reads: Sequence[str] = ("rgb", "depth", "language", "proprio")
    vocabulary: int | None = None
    needs_pictures: bool = True

    @property
    def blocks(self) -> Sequence[str]:
        """Patterns as in `Policy.blocks`. Default: the modules in each `nn.ModuleList`."""
        return members_of_lists(self)

    @abstractmethod
    def build(self, observation: TensorDict, num_slots: int) -> None:
        """Create the parameters whose shapes depend on the env, for L = `num_slots`.

        `observation` is one observation of zeros, batch shape [1].
        """

    @abstractmethod
    def forward(self, observation: TensorDict) -> Features:
        """Return the features of observations [B].

        Args:
            observation: `rgb` uint8 [B, H, W, 3] or [B, cameras, H, W, 3]; optional: `depth`
                float32 [B, H, W] or [B, cameras, H, W] in metres, `language` int64 [B, S],
                `proprio` [B, P], and, if in `reads`, `condition` [B, 2]: (1, 0) for good, (0, 1)
                for bad, (0, 0) for absent (see `ConditionedPolicy`).
        """

    def token_head(self, num_bins: int) -> nn.Module | None:
        """Return a module that maps slots [B, L, D] to logits [B, L, num_bins]; None: linear."""
        return None

    def velocity_expert(self, space: gymnasium.spaces.Box) -> nn.Module | None:
        """Return the expert of a `FlowHead` for chunks of `space` [K, *A]; None: a `SlotExpert`.

        `forward` of the backbone runs once for an observation, the expert once for each step of the
        flow.
        """
        return None


def refuse_unknown_tokens(tokens: Tensor, vocabulary: int) -> None:
    """Refuse tokens [B, S] beyond a vocabulary; synchronizes with the device.

    Raises:
        ConfigurationError: with the first unknown token.
    """
    # `tolist` waits for the device: call this only after a lookup failed.
    unknown = tokens[(tokens < 0) | (tokens >= vocabulary)].tolist()
    require(
        not unknown,
        f"An instruction has the token {(unknown or [0])[0]}, but the model's tokens are 0 to "
        f"{vocabulary - 1}: tokenise instructions by the model's own tokenizer, or give the model "
        "a larger vocabulary (TinyVLA: vocabulary).",
    )


def members_of_lists(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules in each `nn.ModuleList` of a module, such as its layers."""
    lists = [(name, m) for name, m in module.named_modules() if isinstance(m, nn.ModuleList)]
    return tuple(f"{name}.{i}" for name, members in lists for i in range(len(members)))
