"""Act with a small perceptron in NumPy, whose overhead per operation is below torch's."""

import math
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

from lightning_rl.policies.actors import RolloutActor
from lightning_rl.policies.distributions.base import ActionDistribution, Categorical
from lightning_rl.policies.distributions.exploring import ExploringCategorical
from lightning_rl.policies.distributions.gaussians import (
    DiagonalGaussian,
    RescaledGaussian,
    TanhGaussian,
)
from lightning_rl.policies.distributions.unit_actions import (
    NoisyTanh,
    Squashing,
    StateStdTanhGaussian,
)
from lightning_rl.policies.networks.encoders import Encoder
from lightning_rl.policies.networks.memory import Memory
from lightning_rl.policies.normalization import ObservationNormalizer
from lightning_rl.rollout.contract import FieldSpec, flat_transitions, time_major
from lightning_rl.system.torch_private import has_forward_hooks

MAX_ENVS = 64
"""With more envs torch is faster."""

Array = np.ndarray[Any, np.dtype[Any]]


def _elu(x: Array) -> None:
    # `expm1` of the negative part alone: large numbers would overflow.
    np.maximum(x, np.expm1(np.minimum(x, 0.0)), out=x)


ACTIVATIONS: dict[type[nn.Module], Callable[[Array], Any]] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0.0, out=x),
    nn.ELU: _elu,
}
"""In place, with torch's default settings (`_is_default`)."""


class Perceptron(Protocol):
    """The members of `ActorOnly` and its subclasses that this module uses."""

    actor: nn.Sequential
    distribution: ActionDistribution
    normalizer: ObservationNormalizer | None
    encoder: Encoder | None
    memory: Memory | None

    @property
    def extra_fields(self) -> dict[str, FieldSpec]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def draw_noise(
        self, batch: Sequence[int], generator: torch.Generator | None = None
    ) -> torch.Tensor: ...

    def put_in_eval_mode(self) -> None: ...


def acts_in_numpy(policy: Perceptron, rollout: TensorDict) -> bool:
    """Return whether `NumpyActor` supports a policy on a rollout [N, T+1]."""
    if type(policy.actor) is not nn.Sequential:
        return False
    observation = rollout["observation"]
    layers = list(policy.actor)
    distribution = policy.distribution
    return (
        type(distribution) in NumpyActor.DRAWS
        and not distribution.state_size
        and policy.encoder is None
        and policy.memory is None
        and rollout.batch_size[0] <= MAX_ENVS
        and isinstance(observation, torch.Tensor)
        and observation.dtype == torch.float32
        and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in policy.parameters())
        and all(type(layer) is nn.Linear and layer.bias is not None for layer in layers[::2])
        and all(type(layer) in ACTIVATIONS and _is_default(layer) for layer in layers[1::2])
        and not (isinstance(distribution, Categorical) and distribution.padded)
        and not any(map(has_forward_hooks, (policy, policy.actor, *layers)))
    )


def _rows(vector: torch.Tensor, like: Array) -> Array:
    """Repeat a vector [D] to [N, D], because NumPy is twice as slow with broadcasting."""
    return np.broadcast_to(vector.numpy(), like.shape).copy()


def _weights(linear: nn.Linear, like: Array) -> tuple[Array, Array]:
    """Return the weights [in, out], as a view, and the biases [N, out] of a layer."""
    return linear.weight.detach().numpy().T, _rows(linear.bias.detach(), like)


def _is_default(activation: nn.Module) -> bool:
    return not isinstance(activation, nn.ELU) or activation.alpha == 1.0


class NumpyActor(RolloutActor):
    """Acts in NumPy, on views of the weights; torch computes the log-probs of all steps together.

    NumPy and torch outputs differ in the last digits: the first ratio differs from 1 by about 1e-6.
    """

    def __init__(self, policy: Perceptron, rollout: TensorDict) -> None:
        self._policy = policy
        self._rollout = rollout
        # Make the views of each step once: indexing a tensor is slower than adding two rows.
        storage = time_major(rollout)
        slots, num_envs = storage.batch_size
        observation = storage["observation"].view(slots, num_envs, -1)
        # Views: the steps write into the storage of the rollout.
        self._observations = list(observation.numpy())
        self._actions = list(storage["action"].view(slots, num_envs, -1).numpy())
        if isinstance(policy.distribution, TanhGaussian | StateStdTanhGaussian):
            self._unsquashed = list(storage["unsquashed_action"].numpy())
        if isinstance(policy.distribution, RescaledGaussian):
            self._units = list(storage["unit_action"].numpy())
        distribution = policy.distribution
        # Outputs of the whole rollout, for the log-probs in `finish`.
        self._outputs = torch.empty(slots - 1, num_envs, distribution.num_outputs)
        self._output_steps = list(self._outputs.numpy())
        hidden = [layer for layer in policy.actor if isinstance(layer, nn.Linear)][:-1]
        # Buffers, so that steps do not allocate.
        self._hidden = [np.empty((num_envs, layer.out_features), np.float32) for layer in hidden]
        self._input = np.empty_like(self._observations[0])
        self._normalization: tuple[Array, Array, Array, Array] | None = None
        self._log_std: list[Any] | None = None  # bounds, if it is among the outputs
        self._draw = MethodType(self.DRAWS[type(distribution)], self)

    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        policy = self._policy
        policy.put_in_eval_mode()
        distribution: Any = policy.distribution
        layers: Any = list(policy.actor)
        activations = [ACTIVATIONS[type(layer)] for layer in layers[1::2]]
        # Rebuild for each rollout: the biases are copies (`_rows`), which updates do not change.
        self._layers = [
            (*_weights(linear, x), x, activate)
            for linear, x, activate in zip(layers[:-1:2], self._hidden, activations, strict=True)
        ]
        self._head = _weights(layers[-1], self._output_steps[0])
        normalizer = policy.normalizer
        if normalizer is not None:
            self._normalization = (
                _rows(normalizer.mean, self._input),
                _rows(normalizer.factor(), self._input),
                np.array(-normalizer.limit, np.float32),
                np.array(normalizer.limit, np.float32),
            )
        # In a resumed rollout, draw only the noise of the remaining steps.
        slots, num_envs, _ = self._outputs.shape
        noise = policy.draw_noise((slots - start, num_envs), generator)
        # Scale by the deviation here, if it is equal in all steps.
        if distribution.state_dependent:
            is_plain = isinstance(distribution, DiagonalGaussian)
            bounds = distribution.bounds if is_plain else distribution.log_std_bounds
            self._log_std = [np.float32(bound) for bound in bounds]
        elif isinstance(distribution, DiagonalGaussian):
            noise *= distribution.clamped_log_std().detach().exp()
        elif isinstance(distribution, NoisyTanh):
            noise *= distribution.exploration_std
        elif isinstance(distribution, ExploringCategorical):
            self._amount = float(distribution.amount)
        self._noise = [*[None] * start, *noise.numpy()]
        if isinstance(distribution, Squashing):
            bounds = ("scale", "center", "low", "high")
            self._bounds = [getattr(distribution, name).numpy() for name in bounds]
        if isinstance(distribution, RescaledGaussian):
            like = self._units[0]
            self._bounds = [_rows(distribution.scale, like), _rows(distribution.center, like)]

    def act(self, t: int) -> None:
        x = self._observations[t]
        if self._normalization is not None:
            shift, factor, low, high = self._normalization
            x = np.subtract(x, shift, out=self._input)
            x *= factor
            np.maximum(x, low, out=x)  # np.clip has twice the overhead
            np.minimum(x, high, out=x)
        for weight, bias, units, activate in self._layers:
            x.dot(weight, units)
            units += bias
            activate(units)
            x = units
        weight, bias = self._head
        output = self._output_steps[t]
        x.dot(weight, output)
        output += bias
        noise = self._noise[t]
        if self._log_std is not None:
            size, (low, high) = noise.shape[-1], self._log_std
            std = np.maximum(output[:, size:], low)
            np.minimum(std, high, out=std)
            np.exp(std, out=std)
            noise *= std  # in place: this noise belongs to one step
            output = output[:, :size]
        self._draw(t, output, noise)

    @torch.no_grad()
    def finish(self, start: int, stop: int) -> None:
        policy = self._policy
        # Use the function of the update, so that the first ratio is 1.
        keys = ["action", *policy.extra_fields]
        # Slice only these keys: slicing the whole rollout takes longer than the log-probs.
        transitions = flat_transitions(self._rollout.select(*keys)[:, start : stop + 1], keys)
        fields = {key: transitions.get(key) for key in keys}
        output = self._outputs[start:stop].flatten(0, 1)
        log_prob, _ = policy.distribution.log_prob_and_entropy(output, fields)
        time_major(self._rollout)["sample_log_prob"][start:stop].view(-1).copy_(log_prob)

    def _draw_category(self, t: int, logits: Array, noise: Array) -> None:
        noise += logits  # not log-probs: a constant does not change the argmax
        action = self._actions[t]
        noise.reshape(*action.shape, -1).argmax(-1, action)

    def _draw_exploring(self, t: int, values: Array, noise: Array) -> None:
        amount = self._amount
        if self._policy.distribution.rule == "boltzmann":  # by DRAWS
            self._draw_category(t, values / amount, noise)
            return
        # Differences of log-probs: a constant does not change the argmax.
        share = amount / values.shape[-1]
        above = math.log(1 - amount + share) - math.log(max(share, 1e-30))
        noise[np.arange(len(values)), values.argmax(-1)] += above
        noise.argmax(-1, self._actions[t][:, 0])

    def _draw_gaussian(self, t: int, mean: Array, noise: Array) -> None:
        np.add(mean, noise, out=self._actions[t])

    def _draw_rescaled(self, t: int, mean: Array, noise: Array) -> None:
        scale, center = self._bounds
        unit, action = self._units[t], self._actions[t]
        np.add(mean, noise, out=unit)
        np.multiply(unit, scale, out=action)
        action += center

    def _draw_squashed(self, t: int, mean: Array, noise: Array) -> None:
        unsquashed, action = self._unsquashed[t], self._actions[t]
        np.add(mean, noise, out=unsquashed)
        np.tanh(unsquashed, out=action)
        self._scale_to_bounds(action)

    def _scale_to_bounds(self, action: Array) -> None:
        scale, center, low, high = self._bounds
        action *= scale
        action += center
        np.maximum(action, low, out=action)
        np.minimum(action, high, out=action)

    def _draw_noisy(self, t: int, output: Array, noise: Array) -> None:
        action = self._actions[t]
        np.tanh(output, out=action)
        action += noise
        np.maximum(action, -1.0, out=action)
        np.minimum(action, 1.0, out=action)
        self._scale_to_bounds(action)

    DRAWS: ClassVar[dict[type[ActionDistribution], Callable[..., None]]] = {
        Categorical: _draw_category,
        ExploringCategorical: _draw_exploring,
        DiagonalGaussian: _draw_gaussian,
        RescaledGaussian: _draw_rescaled,
        TanhGaussian: _draw_squashed,
        StateStdTanhGaussian: _draw_squashed,
        NoisyTanh: _draw_noisy,
    }
    """Samplers by exact class, because a subclass may sample differently."""
