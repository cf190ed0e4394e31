"""Ensembles of Q critics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_rl.functional import (
    categorical_loss,
    categorical_projection,
    ensemble_loss,
    min_of_subset,
    outputs_of_min,
)
from lightning_rl.policies.distributions.base import widened
from lightning_rl.policies.networks.perceptron import (
    ACTIVATIONS,
    EXPANSION,
    Initialization,
    Network,
    Normalization,
    check_residual,
    check_weights_fit,
    layer_sizes,
    linear,
)
from lightning_rl.system.errors import check_range

CriticNormalization = Literal[Normalization, "batch"]
"""`Normalization`, or `batch`: over the minibatch (Ioffe and Szegedy 2015)."""

MOMENTUM, EPS = 0.01, 1e-5
"""Momentum of running statistics, and the term added to a variance, of batch normalization."""

RENORMALIZED_AFTER, LARGEST_RATIO, LARGEST_SHIFT = 100_000, 3.0, 5.0
"""Minibatches before renormalization starts, and bounds of r and d (Ioffe 2017), as in CrossQ."""


@dataclass(frozen=True)
class ValueAtoms:
    """The support of categorical critics: K values from -limit to limit.

    Source: Bellemare et al. 2017, "A Distributional Perspective on Reinforcement Learning".

    Attributes:
        num_atoms: K, at least 2.
        limit: the largest value; larger returns are clamped.
    """

    num_atoms: int = 101
    limit: float = 10.0

    def __post_init__(self) -> None:
        check_range("value_atoms.num_atoms", self.num_atoms, minimum=2)
        check_range("value_atoms.limit", self.limit, above=0)


class QEnsemble(nn.Module):
    """Critics Q_1 ... Q_E of features and actions, evaluated in one batched product per layer.

    Each critic outputs a value, or, with `atoms`, logits over values.

    With batch normalization, `together` normalizes the input of each layer by the statistics of the
    minibatch and updates running statistics; `forward` uses the running statistics: exact means
    over the first 100 minibatches, then exponential averages. After 100,000 minibatches `together`
    renormalizes with the running statistics within bounds (Ioffe 2017, "Batch Renormalization").

    Args:
        num_inputs: D + A, features and actions.
        hidden_sizes: units of the hidden layers; see `mlp` for a residual network.
        num_critics: E.
        activation: one of `ACTIVATIONS`.
        normalization: normalization of hidden units: `layer` and `rms` before the activation, or at
            the start of a residual block; `batch` of the input of each layer.
        network: `perceptron` or `residual`.
        num_outputs: values per critic, such as one per action; 1 with `atoms`.
        atoms: atoms of categorical critics; None for critics that output values.
        initialization: initial weights; the gain of the last layer is 1.

    Attributes:
        atoms: [K], or None.

    Raises:
        ConfigurationError: for a residual network with different layer sizes.
    """

    atoms: Tensor | None
    seen: Tensor

    def __init__(
        self,
        num_inputs: int,
        hidden_sizes: Sequence[int] = (256, 256),
        num_critics: int = 2,
        activation: str = "relu",
        normalization: CriticNormalization = "none",
        network: Network = "perceptron",
        num_outputs: int = 1,
        atoms: ValueAtoms | None = None,
        initialization: Initialization = "fan_in",
    ) -> None:
        super().__init__()
        outputs = num_outputs if atoms is None else atoms.num_atoms
        check_weights_fit(layer_sizes(num_inputs, hidden_sizes, outputs, network), num_critics)
        self.initialization = initialization
        self.num_critics = num_critics
        self.normalization = normalization
        self.residual = network == "residual"
        self.activate = ACTIVATIONS[activation]()
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        self.gains = nn.ParameterList()
        self.shifts = nn.ParameterList()
        atom_values = (
            None if atoms is None else torch.linspace(-1, 1, atoms.num_atoms) * atoms.limit
        )
        # Not saved: the atoms follow from the settings.
        self.register_buffer("atoms", atom_values, persistent=False)
        if self.residual:
            check_residual(hidden_sizes, "critic_hidden_sizes")
            width = hidden_sizes[0]
            inner = EXPANSION * width
            self._add_layer(num_inputs, width, 1.0)
            for _ in hidden_sizes:
                self._add_layer(width, inner, math.sqrt(2.0))
                self._add_layer(inner, width, 1.0)
            self._add_layer(width, outputs, 1.0)
            normalized = [width for _ in (*hidden_sizes, "last")]
        else:
            sizes = [num_inputs, *hidden_sizes, outputs]
            for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
                self._add_layer(fan_in, fan_out, 1.0 if i == len(hidden_sizes) else math.sqrt(2.0))
            normalized = list(sizes[:-1] if normalization == "batch" else hidden_sizes)
        for place, size in enumerate(normalized):
            self._add_normalization(place, size)
        if normalization == "batch":
            self.register_buffer("seen", torch.zeros(()))

    def _add_layer(self, fan_in: int, fan_out: int, gain: float) -> None:
        critics = range(self.num_critics)
        layers = [linear(fan_in, fan_out, gain, self.initialization) for _ in critics]
        # [in, out], the layout of `baddbmm`.
        self.weights.append(torch.stack([layer.weight.detach().t() for layer in layers]))
        self.biases.append(torch.stack([layer.bias.detach()[None] for layer in layers]))

    def _add_normalization(self, place: int, size: int) -> None:
        if self.normalization != "none":
            self.gains.append(torch.ones(self.num_critics, 1, size))
        if self.normalization in ("layer", "batch"):
            self.shifts.append(torch.zeros(self.num_critics, 1, size))
        if self.normalization == "batch":
            self.register_buffer(f"mean_{place}", torch.zeros(self.num_critics, 1, size))
            self.register_buffer(f"var_{place}", torch.ones(self.num_critics, 1, size))

    def forward(self, features: Tensor, unit_action: Tensor) -> Tensor:
        return self.mean(self.outputs(features, unit_action))

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the values [E, B] of `outputs` [E, B, K]."""
        if self.atoms is None:
            return outputs.squeeze(-1)
        return outputs.softmax(-1) @ self.atoms

    def outputs(self, features: Tensor, unit_action: Tensor | None = None) -> Tensor:
        """Return the outputs [E, B, K], values or logits, of features [B, D] and actions [B, A]."""
        return self._pass(_joined(features, unit_action), False)

    def joint_outputs(
        self, features: Tensor, unit_action: Tensor, next_features: Tensor, next_action: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [E, B, K] of two sets of samples, from one pass over both.

        Features are [B, D], actions [B, A], next features [B, D], next actions [B, A]. Batch
        statistics must cover replayed and target actions, whose distributions differ. Source: Bhatt
        et al. 2024, "CrossQ", section 4.
        """
        joined = torch.cat(
            [_joined(features, unit_action), _joined(next_features, next_action)], dim=0
        )
        outputs, next_outputs = self._pass(joined, True).chunk(2, dim=1)
        return outputs, next_outputs

    def min_value(
        self, outputs: Tensor, subset: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the least of the critics' values [B], and None.

        For categorical critics, return the atoms [K, 1], and their probabilities [B, K] by the
        critic with the least value.

        Args:
            outputs: [E, B, K].
            subset: [B, M], indices of critics; None for all.
        """
        q = self.mean(outputs)
        if self.atoms is None:
            return min_of_subset(q, subset), None
        return self.atoms[:, None], outputs_of_min(outputs, q, subset).softmax(-1)

    def loss(
        self, outputs: Tensor, target: Tensor, probs: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of `outputs` [E, B, K], summed over the critics, and scalars to log.

        Args:
            outputs: [E, B, K], with gradients.
            target: [B]; for categorical critics [K, B], computed from the atoms of `min_value`.
            probs: [B, K], of the atoms; None for values.
        """
        q = self.mean(outputs)
        if self.atoms is None or probs is None:
            loss = ensemble_loss(q, target)
        else:
            probs = categorical_projection(target, probs, self.atoms)
            loss, target = categorical_loss(outputs, probs), probs @ self.atoms
        return loss, {"q": q.mean(), "q_target": target.mean()}

    def _pass(self, inputs: Tensor, updates_statistics: bool) -> Tensor:
        # A view: all critics read the same inputs.
        x = inputs.expand(self.num_critics, -1, -1)
        # On the device: the number of minibatches must not be read by Python in a graph.
        if updates_statistics and self.normalization == "batch":
            self.seen.add_(1.0)
        if self.residual:
            x = self._layer(x, 0)
            num_blocks = (len(self.weights) - 2) // 2
            for i in range(num_blocks):
                inner = self._layer(self._normalized(x, i, updates_statistics), 1 + 2 * i)
                x = x + self._layer(self.activate(inner), 2 + 2 * i)
            x = self._layer(
                self._normalized(x, num_blocks, updates_statistics), len(self.weights) - 1
            )
        else:
            normalizes_before_layers = self.normalization == "batch"
            last = len(self.weights) - 1
            for i in range(last):
                x = self._layer(
                    self._normalized(x, i, updates_statistics) if normalizes_before_layers else x, i
                )
                x = self.activate(
                    x if normalizes_before_layers else self._normalized(x, i, updates_statistics)
                )
            x = self._layer(
                self._normalized(x, last, updates_statistics) if normalizes_before_layers else x,
                last,
            )
        # Under autocast the layers compute in bfloat16, too rough for targets.
        return x if x.dtype == torch.float32 else widened(x)

    def _layer(self, x: Tensor, layer: int) -> Tensor:
        # One product for all critics, instead of a loop over E small ones.
        product: Tensor = torch.baddbmm(self.biases[layer], x, self.weights[layer])
        return product

    def _normalized(self, x: Tensor, place: int, updates_statistics: bool) -> Tensor:
        if self.normalization == "none":
            return x
        if self.normalization == "batch":
            mean, scale = self._statistics(x, place, updates_statistics)
            unit = (x - mean) * scale
            return torch.addcmul(self.shifts[place], unit, self.gains[place])
        # Gains and shifts are applied apart, because each critic has its own.
        of_layer = self.normalization == "layer"
        normalize = nn.functional.layer_norm if of_layer else nn.functional.rms_norm
        scaled: Tensor = normalize(x, x.shape[-1:]) * self.gains[place]
        return scaled + self.shifts[place] if of_layer else scaled

    def _statistics(self, x: Tensor, place: int, updates_statistics: bool) -> tuple[Tensor, Tensor]:
        """Return the shift [E, 1, H] and the factor [E, 1, H] that normalize x [E, B, H]."""
        averages = self.get_buffer(f"mean_{place}"), self.get_buffer(f"var_{place}")
        running_mean, running_scale = averages[0], (averages[1] + EPS).rsqrt()
        if not updates_statistics:
            return running_mean, running_scale
        var, mean = torch.var_mean(widened(x), dim=1, correction=0, keepdim=True)
        scale = (var + EPS).rsqrt()
        # Gradients flow through the minibatch's statistics only (Ioffe 2017).
        with torch.no_grad():
            late = self.seen > RENORMALIZED_AFTER
            ratio = (running_scale / scale).clamp(1 / LARGEST_RATIO, LARGEST_RATIO)
            shift = (mean - running_mean) * running_scale
            ratio = torch.where(late, ratio, 1.0)
            shift = torch.where(late, shift.clamp(-LARGEST_SHIFT, LARGEST_SHIFT), 0.0)
            weight = (1.0 / self.seen).clamp(min=MOMENTUM)
            usable = (mean + var).isfinite().all()  # running statistics would stay NaN
            for average, statistic in zip(averages, (mean, var), strict=True):
                average.copy_(torch.where(usable, average.lerp(statistic, weight), average))
        # (x - mean) * scale * ratio + shift, as one mean and one scale.
        scale = scale * ratio
        return mean - shift / scale, scale


def _joined(features: Tensor, unit_action: Tensor | None) -> Tensor:
    return features if unit_action is None else torch.cat([features, unit_action], dim=-1)
