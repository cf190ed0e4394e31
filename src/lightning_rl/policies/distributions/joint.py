"""Combine the distributions of an action's parts."""

from collections.abc import Sequence
from typing import Any, cast

import gymnasium
import torch
from torch import Tensor, nn

from lightning_rl.policies.distributions.base import ActionDistribution, Fields
from lightning_rl.rollout.structured_actions import ActionPart


class JointDistribution(ActionDistribution):
    """Independent distributions of an action's parts.

    Log-prob and entropy are the sums over the parts. The network's output is split between the
    parts in order. Extra fields of part i get its number as a suffix: `unit_action_0`.

    Args:
        places: places of the parts in a flat action [A], see `StructuredActions`.
        parts: a distribution for each part, of choices as [B, D] and of a Box in its shape.
    """

    def __init__(self, places: Sequence[ActionPart], parts: Sequence[ActionDistribution]) -> None:
        super().__init__()
        self.places = list(places)
        self.parts = nn.ModuleList(parts)
        self.sizes = [part.num_outputs for part in parts]
        self.num_outputs = sum(self.sizes)
        self.noise_sizes = [part.noise_size for part in parts]
        self.noise_size = sum(self.noise_sizes)
        self.state_sizes = [part.state_size for part in parts]
        self.state_size = sum(self.state_sizes)
        self.state_dependent = any(part.state_dependent for part in parts)
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
            # Parts without choices have no columns in the mask.
            if part.num_choices:
                outputs[i] = part.masked(outputs[i], masks[i])
        return torch.cat(outputs, -1)

    def fill_noise(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        for part, out in zip(self._parts(), noise.split(self.noise_sizes, -1), strict=True):
            # Some parts fill noise in place, which needs contiguous memory; a column block is not.
            out.copy_(part.fill_noise(out.clone(memory_format=torch.contiguous_format), generator))
        return noise

    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        states: Sequence[Tensor | None] = [None] * len(self.sizes)
        noises = states if noise is None else noise.split(self.noise_sizes, -1)
        if state is not None and self.state_size:
            states = state.split(self.state_sizes, -1)
        outputs = output.split(self.sizes, -1)
        samples = [
            part.sample(*inputs)
            for part, *inputs in zip(self._parts(), outputs, noises, states, strict=True)
        ]
        # Choices become floats in the flat action.
        flat = [sample["action"].reshape(*output.shape[:-1], -1).float() for sample in samples]
        log_probs = [sample["sample_log_prob"] for sample in samples]
        # Independent parts: their log-probs add up.
        fields = {"action": torch.cat(flat, -1), "sample_log_prob": torch.stack(log_probs).sum(0)}
        if self.state_size:
            next_states = [sample["next_state"] for sample in samples if "next_state" in sample]
            fields["next_state"] = torch.cat(next_states, -1)
        for i, (part, sample) in enumerate(zip(self._parts(), samples, strict=True)):
            fields |= {f"{key}_{i}": sample[key] for key in part.extra_fields}
        return fields

    def log_prob_and_entropy(
        self, output: Tensor, fields: Fields, executed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert executed is None  # ActionChunk refuses actions of several parts
        outputs, actions = output.split(self.sizes, -1), self._actions(fields["action"])
        pairs = []
        for i, part in enumerate(self._parts()):
            extra: Any = {key: fields.get(f"{key}_{i}") for key in part.extra_fields}
            pairs.append(part.log_prob_and_entropy(outputs[i], {"action": actions[i], **extra}))
        log_probs, entropies = zip(*pairs, strict=True)
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)

    def fields_of(self, action: Tensor) -> dict[str, Tensor] | None:
        fields: dict[str, Tensor] = {}
        for i, (part, piece) in enumerate(zip(self._parts(), self._actions(action), strict=True)):
            extra = part.fields_of(piece)
            if extra is None:
                return None
            fields |= {f"{key}_{i}": value for key, value in extra.items()}
        return fields

    def _parts(self) -> list[ActionDistribution]:
        return cast(list[ActionDistribution], list(self.parts))

    def _actions(self, flat: Tensor) -> list[Tensor]:
        actions = []
        for _, space, start, stop in self.places:
            value = flat[..., start:stop]
            choice = not isinstance(space, gymnasium.spaces.Box)
            shape = (*flat.shape[:-1], *(space.shape or ()))
            # The cast alone would truncate.
            actions.append(value.round().long() if choice else value.reshape(shape))
        return actions
