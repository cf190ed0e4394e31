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

    def fill_noise(self, noise: Tensor, generator: torch.Generator | None) -> Tensor:
        for part, one in zip(self._parts(), noise.split(self.noise_sizes, -1), strict=True):
            one.copy_(part.fill_noise(one.clone(memory_format=torch.contiguous_format), generator))
        return noise

    def sample(self, output: Tensor, noise: Tensor | None, state: Tensor | None = None) -> Fields:
        states: Sequence[Tensor | None] = [None] * len(self.sizes)
        noises = states if noise is None else noise.split(self.noise_sizes, -1)
        if state is not None and self.state_size:
            states = state.split(self.state_sizes, -1)
        outputs = output.split(self.sizes, -1)
        drawn = [
            part.sample(*inputs)
            for part, *inputs in zip(self._parts(), outputs, noises, states, strict=True)
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
        self, output: Tensor, fields: Fields, executed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert executed is None  # ActionChunk refuses actions of several parts
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
        actions = []
        for _, space, start, stop in self.places:
            value = flat[..., start:stop]
            choice = not isinstance(space, gymnasium.spaces.Box)
            shape = (*flat.shape[:-1], *(space.shape or ()))
            actions.append(value.round().long() if choice else value.reshape(shape))
        return actions
