"""Turn network outputs into actions, log-probs and entropies, without torch.distributions.

Discrete ones here; those of continuous actions are in `gaussians.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import gymnasium
import torch
from torch import Tensor, nn

from lightning_rl.rollout import FieldSpec
from lightning_rl.structured_actions import ActionPart

NEVER = -1e30
"""The logit of what cannot be chosen; finite, as 0 * -inf in an entropy would be NaN."""


class ActionDistribution(nn.Module, ABC):
    """A family of distributions over one action space; B stands for any batch shape."""

    num_outputs: int
    """How many numbers the network gives per sample."""

    extra_fields: dict[str, FieldSpec] = {}  # noqa: RUF012  # overridden per instance, never mutated
    """What `sample` gives beside the action, and `log_prob_and_entropy` wants back."""

    state_size: int = 0
    """S, how many numbers a draw hands to the next one of its episode; 0 where draws are apart."""

    num_choices: int = 0
    """C, how many categories all choices have together: the size of a mask of what is allowed."""

    def masked(self, output: Tensor, mask: Tensor) -> Tensor:
        """Return an output [B, num_outputs] after which only what is allowed has a probability.

        The others have exactly 0, and no gradient; log-probs and entropies are those of the
        distribution over what is left. A choice of which nothing is left has no meaning.

        Args:
            output: [B, num_outputs].
            mask: [B, C], true or 1 for what is allowed, of the choices in their order.
        """
        raise NotImplementedError(f"{type(self).__name__} has no choices to mask")

    @abstractmethod
    def sample(
        self,
        output: Tensor,
        deterministic: bool,
        generator: torch.Generator | None,
        state: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return `action` [B, *A], `sample_log_prob` [B] and `extra_fields`.

        And `next_state` [B, S], where `state_size` is above zero.

        Args:
            output: [B, num_outputs].
            deterministic: take the mode.
            generator: of the draw.
            state: [B, S], what the draw before returned, zeros where an episode begins.
        """

    @abstractmethod
    def log_prob_and_entropy(
        self, output: Tensor, fields: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the log-prob [B] of the stored action and the entropy [B], with gradients.

        Args:
            output: [B, num_outputs].
            fields: `action` and `extra_fields`; one that is not there is None.
        """

    def fields_of(self, action: Tensor) -> dict[str, Tensor] | None:
        """Return `extra_fields` of given actions [B, *A]; None where they cannot be derived."""
        return None if self.extra_fields else {}


class Categorical(ActionDistribution):
    """One or several independent categorical distributions: Discrete and MultiDiscrete actions.

    The network gives the logits of all of them in a row; they are laid out as [B, D, max(n)], short
    rows filled up with logits of no probability.
    """

    columns: Tensor

    def __init__(self, sizes: Sequence[int], shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.num_outputs = self.num_choices = sum(sizes)
        self.padded = len(set(sizes)) > 1
        self.rows, self.width = len(sizes), max(sizes)
        columns = torch.full((self.rows, self.width), self.num_outputs)
        start = 0
        for row, size in enumerate(sizes):
            columns[row, :size] = torch.arange(start, start + size)
            start += size
        self.register_buffer("columns", columns.flatten(), persistent=False)

    def masked(self, output: Tensor, mask: Tensor) -> Tensor:
        return output.masked_fill(mask == 0, NEVER)

    def sample(
        self,
        output: Tensor,
        deterministic: bool,
        generator: torch.Generator | None,
        state: Tensor | None = None,
    ) -> dict[str, Tensor]:
        log_probs = self._log_probs(output)
        index = draw_category(log_probs, deterministic, generator)
        return {
            "action": index if self.shape else index.squeeze(-1),
            "sample_log_prob": self._gather(log_probs, index),
        }

    def log_prob_and_entropy(
        self, output: Tensor, fields: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        action = fields["action"]
        log_probs = self._log_probs(output)
        entropy = -(log_probs.exp() * log_probs).sum((-2, -1))
        return self._gather(log_probs, action if self.shape else action.unsqueeze(-1)), entropy

    def _log_probs(self, output: Tensor) -> Tensor:
        if self.padded:
            output = nn.functional.pad(output, (0, 1), value=NEVER)[..., self.columns]
        logits: Tensor = output.unflatten(-1, (self.rows, self.width))
        return logits.log_softmax(-1)

    def _gather(self, log_probs: Tensor, index: Tensor) -> Tensor:
        return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1).sum(-1)


class JointDistribution(ActionDistribution):
    """The distributions of an action's parts, chosen independently of each other.

    log p(a) is the sum of those of the parts, and so is the entropy. The network's output is split
    between them in their order; what a part stores beside its action has its number behind the
    name: `unit_action_0`.

    Args:
        places: of the parts in a flat action [A], see `StructuredActions`.
        parts: a distribution for each, of choices as [B, D] and of a Box in its shape.
    """

    def __init__(self, places: Sequence[ActionPart], parts: Sequence[ActionDistribution]) -> None:
        super().__init__()
        self.places = list(places)
        self.parts = nn.ModuleList(parts)
        self.sizes = [part.num_outputs for part in parts]
        self.num_outputs = sum(self.sizes)
        self.state_sizes = [part.state_size for part in parts]
        self.state_size = sum(self.state_sizes)
        self.choices = [part.num_choices for part in parts]
        self.num_choices = sum(self.choices)
        self.extra_fields = {
            f"{key}_{i}": spec
            for i, part in enumerate(parts)
            for key, spec in part.extra_fields.items()
        }

    def masked(self, output: Tensor, mask: Tensor) -> Tensor:
        masks = mask.split(self.choices, -1)
        outputs = list(output.split(self.sizes, -1))
        for i, part in enumerate(self._parts()):
            if part.num_choices:
                outputs[i] = part.masked(outputs[i], masks[i])
        return torch.cat(outputs, -1)

    def sample(
        self,
        output: Tensor,
        deterministic: bool,
        generator: torch.Generator | None,
        state: Tensor | None = None,
    ) -> dict[str, Tensor]:
        states: Sequence[Tensor | None] = [None] * len(self.sizes)
        if state is not None and self.state_size:
            states = state.split(self.state_sizes, -1)
        outputs = output.split(self.sizes, -1)
        drawn = [
            part.sample(one, deterministic, generator, before)
            for part, one, before in zip(self._parts(), outputs, states, strict=True)
        ]
        flat = [one["action"].reshape(*output.shape[:-1], -1).float() for one in drawn]
        log_probs = [one["sample_log_prob"] for one in drawn]
        fields = {"action": torch.cat(flat, -1), "sample_log_prob": torch.stack(log_probs).sum(0)}
        if self.state_size:
            following = [one["next_state"] for one in drawn if "next_state" in one]
            fields["next_state"] = torch.cat(following, -1)
        for i, (part, one) in enumerate(zip(self._parts(), drawn, strict=True)):
            fields |= {f"{key}_{i}": one[key] for key in part.extra_fields}
        return fields

    def log_prob_and_entropy(
        self, output: Tensor, fields: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        outputs, actions = output.split(self.sizes, -1), self._actions(fields["action"])
        found = []
        for i, part in enumerate(self._parts()):
            own: Any = {key: fields.get(f"{key}_{i}") for key in part.extra_fields}
            found.append(part.log_prob_and_entropy(outputs[i], {"action": actions[i], **own}))
        log_probs, entropies = zip(*found, strict=True)
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)

    def fields_of(self, action: Tensor) -> dict[str, Tensor] | None:
        fields: dict[str, Tensor] = {}
        for i, (part, one) in enumerate(zip(self._parts(), self._actions(action), strict=True)):
            own = part.fields_of(one)
            if own is None:
                return None
            fields |= {f"{key}_{i}": value for key, value in own.items()}
        return fields

    def _parts(self) -> list[ActionDistribution]:
        return cast(list[ActionDistribution], list(self.parts))

    def _actions(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of flat actions [B, A] as their distributions have them."""
        actions = []
        for _, space, start, stop in self.places:
            value = flat[..., start:stop]
            choice = not isinstance(space, gymnasium.spaces.Box)
            shape = (*flat.shape[:-1], *(space.shape or ()))
            actions.append(value.round().long() if choice else value.reshape(shape))
        return actions


def draw_category(
    log_probs: Tensor, deterministic: bool, generator: torch.Generator | None
) -> Tensor:
    """Return the index [B] of one of n categories, or of the likeliest where `deterministic`.

    By the Gumbel-max trick, argmax(log p + g): one pass, where `multinomial` needs the sums of the
    probabilities, and looks at them, which an accelerator waits for.

    Source: Maddison, Tarlow and Minka 2014, "A* Sampling", section 2.

    Args:
        log_probs: [B, n], up to a constant for each of B.
        deterministic: take the likeliest.
        generator: of the draw.
    """
    if deterministic:
        return log_probs.argmax(-1)
    return (log_probs + gumbel_(torch.empty_like(log_probs), generator)).argmax(-1)


def gumbel_(noise: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill `noise` [...] with draws of Gumbel's distribution, -log(E), E ~ Exp(1); return it."""
    return noise.exponential_(generator=generator).log_().neg_()


def widened(output: Tensor) -> Tensor:
    """Return a network's output [...] in float32, where it is in less."""
    return output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
