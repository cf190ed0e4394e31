"""Act, and value, with perceptrons over flat observations and simple action spaces."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.errors import ConfigurationError, closest, require
from lightning_rl.machine import settings
from lightning_rl.policies.base import Policy, RolloutActor
from lightning_rl.policies.distributions import ActionDistribution, widened
from lightning_rl.policies.gaussians import distribution_for
from lightning_rl.policies.normalization import ObservationNormalizer
from lightning_rl.policies.numpy_acting import NumpyActor, acts_in_numpy
from lightning_rl.rollout import FieldSpec

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
"""By the names that settings give them."""


Normalization = Literal["none", "layer", "rms"]
"""Of hidden units, before the activation: LayerNorm (Ba et al. 2016), RMSNorm, or none."""


class PerceptronPolicy(Policy):
    """What policies of perceptrons over a flattened observation have in common.

    Args:
        observation_space, action_space: of one env.
        distribution: of the actions, by what the actor gives.
        hidden_sizes: units of the actor's hidden layers.
        activation: one of `ACTIVATIONS`.
        normalize_observation: scale observations by their running mean and variance, clipped to
            ±10.
        normalization: of the actor's hidden units.
    """

    has_critic = False

    @abstractmethod  # a subclass names its settings; this one no config can name
    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        distribution: ActionDistribution,
        hidden_sizes: Sequence[int],
        activation: str,
        normalize_observation: bool,
        normalization: Normalization = "none",
    ) -> None:
        super().__init__(observation_space, action_space)
        size = flat_observation_size(observation_space)
        self.distribution = distribution
        make = partial(mlp, activation=activation, normalization=normalization, output_gain=0.01)
        self.actor = make(size, hidden_sizes, distribution.num_outputs)
        self.normalizer = ObservationNormalizer(size) if normalize_observation else None

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        size = self.distribution.state_size
        state: dict[str, FieldSpec] = {"state": ((size,), torch.float32)} if size else {}
        return self.distribution.extra_fields | state

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> TensorDict:
        output = widened(self.actor(self.features(td)))  # no critic: values come per rollout
        state = td.get("state", None)
        drawn = self.distribution.sample(output, deterministic, generator, state)
        for key, value in drawn.items():
            td.set(key, value, inplace=True)  # where it lies, in the rollout's storage
        return td

    def rollout_actor(self, rollout: TensorDict) -> RolloutActor:
        # In bfloat16 NumPy has no way; and of a subclass only what it says itself counts, since
        # one that overrides `forward` inherits the mark.
        quick = self.autocast_dtype is None and vars(type(self)).get("acts_as_perceptron")
        if quick and settings().numpy_acting and acts_in_numpy(self, rollout):
            return NumpyActor(self, rollout)
        return super().rollout_actor(rollout)

    def get_value(self, td: TensorDict) -> TensorDict:
        return td.set("value", self.value_of(self.features(td)))

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        features = self.features(td)
        fields = {key: td.get(key) for key in ("action", *self.distribution.extra_fields)}
        value = self.value_of(features)
        output = widened(self.actor(features))
        log_prob, entropy = self.distribution.log_prob_and_entropy(output, fields)
        return TensorDict(
            {"sample_log_prob": log_prob, "entropy": entropy, "value": value}, td.batch_size
        )

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        fields = self.distribution.fields_of(action)
        return super().fields_of(action) if fields is None else fields

    def value_of(self, features: Tensor) -> Tensor:
        """Return the value [B] of features [B, D]: zero, as there is no critic."""
        return features.new_zeros(features.shape[:-1])

    def features(self, td: TensorDict) -> Tensor:
        """Return the flattened, normalised observation [B, D]."""
        flat = flatten_observation(td.get("observation"), len(td.batch_size))
        return flat if self.normalizer is None else self.normalizer(flat)

    def update_normalization(self, rollout: TensorDict) -> None:
        if self.normalizer is not None:
            transitions = rollout.select("observation")[:, :-1]
            observation = flatten_observation(transitions.get("observation"), 2)
            self.normalizer.update(observation.flatten(0, 1))


class ActorOnly(PerceptronPolicy):
    """An actor perceptron over a flattened observation, for algorithms without a critic (GRPO).

    Args:
        observation_space: of one env: Box (flat or matrix), MultiBinary, or a Dict of them.
        action_space: of one env: floating-point Box, Discrete or MultiDiscrete.
        hidden_sizes: units of the hidden layers.
        activation: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        squash: squash continuous actions to the bounds of the space by tanh, instead of leaving the
            clipping to the env.
        log_std_init: initial log standard deviation of continuous actions (of the unsquashed ones
            with `squash`).
        log_std_bounds: least and greatest log standard deviation.
        normalize_observation: scale observations by their running mean and variance, clipped to
            ±10.
        rescale_action: where a Box has bounds other than -1 and 1, learn its actions in [-1, 1],
            and scale them to the bounds; `log_std_init` and `log_std_bounds` are in these units
            then. It changes nothing where the bounds are -1 and 1, where there are none (or some
            beyond ±1e6, which are taken for none), with `squash`, which scales anyway, and for
            discrete actions; where only some entries of a Box are bounded, a warning says that
            none is scaled. False takes the output of the network for the action as it is.

    Raises:
        ConfigurationError: for an unknown activation, or a space that the policy cannot take.
    """

    acts_as_perceptron = True
    """Looked for in the class itself: a subclass may act in another way."""

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        squash: bool = False,
        log_std_init: float = 0.0,
        log_std_bounds: tuple[float, float] = (-5.0, 2.0),
        normalize_observation: bool = False,
        rescale_action: bool = True,
    ) -> None:
        flat_observation_size(observation_space)  # refused first where both spaces are amiss
        distribution = distribution_for(
            action_space,
            squash=squash,
            rescale=rescale_action,
            log_std_init=log_std_init,
            log_std_bounds=log_std_bounds,
        )
        super().__init__(
            observation_space,
            action_space,
            distribution,
            hidden_sizes,
            activation,
            normalize_observation,
        )


class ActorCritic(ActorOnly):
    """Separate actor and critic perceptrons over a flattened observation.

    Args:
        observation_space, action_space, hidden_sizes: see `ActorOnly`.
        critic_hidden_sizes: units of the critic's hidden layers; as the actor's where not given.
        kwargs: see `ActorOnly`.

    Raises:
        ConfigurationError: for an unknown activation, or a space that the policy cannot take.
    """

    has_critic = True
    acts_as_perceptron = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        critic_hidden_sizes: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(observation_space, action_space, hidden_sizes, **kwargs)
        size = flat_observation_size(observation_space)
        sizes = hidden_sizes if critic_hidden_sizes is None else critic_hidden_sizes
        self.critic = mlp(size, sizes, 1, activation=kwargs.get("activation", "tanh"))

    def value_of(self, features: Tensor) -> Tensor:
        """Return the value [B] of features [B, D]."""
        return widened(self.critic(features)).squeeze(-1)


def mlp(
    input_size: int,
    hidden_sizes: Sequence[int],
    output_size: int,
    *,
    activation: str = "tanh",
    output_gain: float = 1.0,
    normalization: Normalization = "none",
) -> nn.Sequential:
    """Build a perceptron with orthogonal weights and zero biases.

    The gain is sqrt(2), and `output_gain` for the last layer.

    Source: Andrychowicz et al. 2021, "What Matters in On-Policy Reinforcement Learning", section
    3.2.

    Raises:
        ConfigurationError: for an unknown activation or a layer size below 1.
    """
    require(
        activation in ACTIVATIONS,
        f"Unknown activation '{activation}'; allowed: "
        f"{', '.join(ACTIVATIONS)}{closest(activation, ACTIVATIONS)}.",
    )
    sizes = [input_size, *hidden_sizes, output_size]
    require(
        all(size >= 1 for size in sizes),
        f"Layer sizes must be at least 1, got hidden_sizes={list(hidden_sizes)}.",
    )
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes[:-1]):
        layers.append(_linear(before, after, math.sqrt(2)))
        if normalization != "none":
            layers.append(nn.LayerNorm(after) if normalization == "layer" else nn.RMSNorm(after))
        layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers, _linear(sizes[-2], sizes[-1], output_gain))


def _linear(input_size: int, output_size: int, gain: float) -> nn.Linear:
    layer = nn.Linear(input_size, output_size)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def flat_observation_size(space: gymnasium.Space[Any]) -> int:
    """Return how many numbers `flatten_observation` makes of one observation.

    Raises:
        ConfigurationError: for a space that a perceptron cannot take.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        require(len(space) > 0, "The observation space is an empty Dict.")
        return sum(flat_observation_size(child) for child in space.values())
    if isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.MultiBinary):
        require(
            len(space.shape) < 3,
            f"Observation space {space} looks like an image: a perceptron cannot take it. Use a "
            "policy of your own with "
            "a vision network (a subclass of lightning_rl.Policy), or a state observation.",
        )
        return math.prod(space.shape)
    raise ConfigurationError(
        f"Observation space {space} is not supported: use Box, MultiBinary, or a Dict of them. For "
        "a Discrete or "
        "Tuple space add `wrappers: [gymnasium.wrappers.FlattenObservation]` to the env."
    )


def flatten_observation(observation: Tensor | TensorDict, batch_dims: int = 1) -> Tensor:
    """Concatenate a tensor or a tree of tensors, keys in sorted order, to float32 [..., D]."""
    if isinstance(observation, Tensor):
        if observation.dim() == batch_dims + 1 and observation.dtype == torch.float32:
            return observation  # as it is: this is called at each env step
        return observation.reshape(*observation.shape[:batch_dims], -1).to(torch.float32)
    return torch.cat(
        [flatten_observation(observation[key], batch_dims) for key in sorted(observation.keys())],
        dim=-1,
    )
