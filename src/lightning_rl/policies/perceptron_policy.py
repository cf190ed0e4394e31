"""Base class of policies with perceptrons on top of encoders."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.functional import guide
from lightning_rl.policies.acting import NumpyActor, acts_in_numpy
from lightning_rl.policies.actors import RolloutActor
from lightning_rl.policies.base import ABSENT, GUIDANCE, RNG, Policy, noise_for
from lightning_rl.policies.distributions.base import ActionDistribution, widened
from lightning_rl.policies.networks.encoders import Encoder, EncoderFactory
from lightning_rl.policies.networks.memory import Memory, MemoryFactory
from lightning_rl.policies.networks.perceptron import (
    Initialization,
    Network,
    Normalization,
    flat_observation_size,
    flatten_observation,
    mlp,
    read_keys,
    read_space,
)
from lightning_rl.policies.normalization import ObservationNormalizer
from lightning_rl.rollout.contract import FieldSpec, time_major
from lightning_rl.rollout.masks import MASK, has_mask
from lightning_rl.rollout.sequences import sequences_of
from lightning_rl.system.errors import require
from lightning_rl.system.machine import settings


class PerceptronPolicy(Policy):
    """Base class of policies whose actor and critic are perceptrons.

    Actor and critic read features [B, D]: the encoder's output, or the flat, normalized
    observation. `action_output(td, actor_features(td))` is the input of the action distribution.
    Actions that `action_mask` of the observation forbids are never chosen.

    Args:
        observation_space: Box (flat or matrix), MultiBinary, or a Dict of them; or the encoder's.
        action_space: action space of one env.
        distribution: the action distribution, parameterized by the actor's output.
        hidden_sizes: units of the actor's hidden layers.
        activation: elu, gelu, leaky_relu, relu, selu, silu or tanh.
        normalize_observation: scale by running mean and variance, clipped to ±10.
        actor_normalization: normalization of the actor's hidden units: `none`, `layer` or `rms`.
        network: `perceptron`, or `residual` with one block per hidden size (all equal).
        initialization: initial weights: `orthogonal`, with a small last layer of the actor, or
            `fan_in`, uniform within ±1/sqrt(n) for n inputs.
        encoder: turns observations into features. Default: flat observations.
        memory: recurrent layer after the encoder: `{class_path: LSTM, init_args: {size: 64}}`.
            Critics use it only if they share the encoder.
        actor_keys: keys of a Dict observation that the actor reads. Default: all but `action_mask`.
        ignore_keys: keys of a Dict observation that neither actor nor critic reads.

    Raises:
        ConfigurationError: for an unknown activation or key, an unsupported observation space, and
            `normalize_observation` with an encoder.
    """

    critic: Any  # a module, or None
    has_critic = False
    keys_read_elsewhere: Sequence[str] = ()
    """Keys that a policy inside this one reads."""
    critic_modules = (*Policy.critic_modules, "critic_encoder", "critic_normalizer")

    @abstractmethod  # configs name subclasses
    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        distribution: ActionDistribution,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        activation: str = "tanh",
        normalize_observation: bool = False,
        actor_normalization: Normalization = "none",
        network: Network = "perceptron",
        initialization: Initialization = "orthogonal",
        encoder: EncoderFactory | None = None,
        memory: MemoryFactory | None = None,
        actor_keys: Sequence[str] | None = None,
        ignore_keys: Sequence[str] = (),
    ) -> None:
        super().__init__(observation_space, action_space, ignore_keys=ignore_keys)
        require(
            encoder is None or not normalize_observation,
            "normalize_observation scales flat observations only, not with an encoder: remove it, "
            "and let the encoder scale its input (normalize: true of a PerceptronEncoder or a "
            "DictEncoder).",
        )
        self.actor_keys = read_keys(observation_space, actor_keys, "actor_keys", ignore_keys)
        self.critic_keys = self.actor_keys
        space = read_space(observation_space, self.actor_keys)
        # The order of construction decides the initial weights: modules share a generator.
        self.encoder = None if encoder is None else encoder(space)
        size = flat_observation_size(space) if self.encoder is None else self.encoder.size
        self.normalizer = ObservationNormalizer(size) if normalize_observation else None
        self.memory = None if memory is None else memory(size)
        self.memory_size = 0 if self.memory is None else self.memory.state_size
        self.evaluates_sequences = self.memory is not None
        size = size if self.memory is None else self.memory.size
        self.distribution = distribution
        masked = MASK not in self.ignore_keys
        self.masks_actions = masked and has_mask(observation_space, self.action_space)
        self._activation = activation
        self._network: Network = network
        self._initialization: Initialization = initialization
        self.actor = mlp(
            size,
            hidden_sizes,
            distribution.num_outputs,
            activation=activation,
            normalization=actor_normalization,
            network=network,
            # A small last layer: at first, the observation hardly changes the distribution.
            output_gain=0.01,
            initialization=initialization,
        )
        self.features_size = size
        self.critic_reads_apart = False
        self.critic_encoder: Encoder | None = None
        self.critic_normalizer: ObservationNormalizer | None = None

    @property
    def counts_executed(self) -> bool:  # type: ignore[override]  # derived, so read-only
        # A subclass with its own `evaluate_actions` may not mask the unexecuted part of a chunk.
        return type(self).evaluate_actions is PerceptronPolicy.evaluate_actions

    @property
    def takes_guidance(self) -> bool:  # type: ignore[override]  # derived, so read-only
        # Exclude deviations among the outputs, and classes with other methods to act.
        names, base = ("action_output", "forward", "evaluate_actions"), PerceptronPolicy
        acts_as_base = all(getattr(type(self), name) is getattr(base, name) for name in names)
        return acts_as_base and not self.distribution.state_dependent

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        size = self.memory_size + self.distribution.state_size
        state: dict[str, FieldSpec] = {"state": ((size,), torch.float32)} if size else {}
        return self.distribution.extra_fields | state

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        state, states = td.get("state", None), []
        if self.memory is None:
            features = self.actor_features(td)
        else:
            # The memory's state comes first, then that of correlated noise.
            memory_state, state = td["state"].tensor_split([self.memory_size], -1)
            features, next_state = self.memory(self._encoded(td), memory_state)
            states.append(next_state)
        output = self.action_output(td, features)  # no critic: values come per rollout
        noise = noise_for(self, td, deterministic, generator)
        fields = self.distribution.sample(output, noise, state)
        if "next_state" in fields:
            states.append(fields.pop("next_state"))
        for key, value in fields.items():
            td.set(key, value, inplace=True)  # writes into the rollout's storage
        if states:
            td.set("next_state", states[0] if len(states) == 1 else torch.cat(states, -1))
        return td

    def draw_noise(self, batch: Sequence[int], generator: RNG = None) -> Tensor:
        size, device = self.distribution.noise_size, self.version.device
        return self.distribution.fill_noise(torch.empty(*batch, size, device=device), generator)

    def rollout_actor(self, rollout: TensorDict) -> RolloutActor:
        # NumPy has no bfloat16. The class itself must set the mark: a subclass that overrides
        # `forward` would inherit it.
        quick = self.autocast_dtype is None and vars(type(self)).get("acts_as_perceptron")
        if quick and settings().numpy_acting and acts_in_numpy(self, rollout):
            return NumpyActor(self, rollout)
        return super().rollout_actor(rollout)

    def get_value(self, td: TensorDict) -> TensorDict:
        return td.set("value", self.value_of(self.critic_features(td)))

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        features = self.actor_features(td)
        fields = {key: td.get(key) for key in ("action", *self.distribution.extra_fields)}
        # A shared encoder runs once, for actor and critic.
        value = self.value_of(self.critic_features(td, features) if self.has_critic else features)
        output = self.action_output(td, features)
        executed = td.get("executed", None)
        log_prob, entropy = self.distribution.log_prob_and_entropy(output, fields, executed)
        return TensorDict(
            {"sample_log_prob": log_prob, "entropy": entropy, "value": value}, td.batch_size
        )

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        fields = self.distribution.fields_of(action)
        return super().fields_of(action) if fields is None else fields

    def value_of(self, features: Tensor) -> Tensor:
        """Return the value [B] of the critic's features [B, D]; zero without a critic."""
        if not self.has_critic:
            return features.new_zeros(features.shape[:-1])
        return widened(self.critic(features)).squeeze(-1)

    def actor_features(self, td: TensorDict) -> Tensor:
        """Return the actor's features [B, D] of `td` [B]; a memory reads `sequences` or `state`."""
        if self.memory is None:
            return self._encoded(td)
        sequences = sequences_of(td)
        if sequences is not None:
            return self.memory.unroll_samples(sequences, self._encoded)
        state = td["state"][..., : self.memory_size]
        output: Tensor = self.memory(self._encoded(td), state)[0]
        return output

    def _encoded(self, td: TensorDict) -> Tensor:
        return self.read(td, self.encoder, self.normalizer, self.actor_keys)

    def next_features(
        self,
        td: TensorDict,
        next_td: TensorDict,
        encoder: nn.Module | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """Return the actor's features [B, D] of the observations `next_td` [B] after `td` [B].

        For a memory, `td` has `sequences`. `encoder` and `memory` are target networks, or None.
        """
        if encoder is None and self.memory is None:
            return self.actor_features(next_td)

        def encode(steps: TensorDict) -> Tensor:
            return self.read(steps, encoder or self.encoder, self.normalizer, self.actor_keys)

        # A target network of the encoder alone still uses the policy's memory.
        memory, features = memory or self.memory, encode(next_td)
        return features if memory is None else memory.unroll_next(td["sequences"], encode, features)

    def critic_features(self, td: TensorDict, actor_features: Tensor | None = None) -> Tensor:
        """Return the critic's features [B, D] of `td` [B], or shared `actor_features` [B, D]."""
        if self.critic_reads_apart:
            return self.read(td, self.critic_encoder, self.critic_normalizer, self.critic_keys)
        return self.actor_features(td) if actor_features is None else actor_features

    @property
    def encoder_of_critic(self) -> Encoder | None:
        """The critic's encoder, which may be the actor's."""
        return self.critic_encoder if self.critic_reads_apart else self.encoder

    def action_output(self, td: TensorDict, features: Tensor) -> Tensor:
        """Return the inputs [B, F] of the action distribution for the actor's features [B, D]."""
        output: Tensor = self.actor(features)
        output = output if output.dtype == torch.float32 else widened(output)
        # A second pass, without the condition: classifier-free guidance.
        if ABSENT in td.keys():
            unconditioned = TensorDict({"observation": td.get(ABSENT)}, td.batch_size)
            output = guide(output, widened(self.actor(self._encoded(unconditioned))), td[GUIDANCE])
        if not self.masks_actions:
            return output
        return self.distribution.masked(output, td["observation"][MASK])

    def update_normalization(self, rollout: TensorDict) -> None:
        for encoder, normalizer, keys in (
            (self.encoder, self.normalizer, self.actor_keys),
            (self.critic_encoder, self.critic_normalizer, self.critic_keys),
        ):
            if encoder is not None:
                # Time-major, like the storage: flattening does not copy pictures.
                steps = time_major(rollout.select("observation"))[:-1].flatten(0, 1)
                encoder.update_normalization(_read(steps.get("observation"), keys))
            elif normalizer is not None:
                # Without the last slot: the next rollout begins with the same observation.
                transitions = rollout.select("observation")[:, :-1]
                observation = flatten_observation(transitions.get("observation"), 2, keys)
                normalizer.update(observation.flatten(0, 1))

    def read(
        self,
        td: TensorDict,
        encoder: nn.Module | None,
        normalizer: ObservationNormalizer | None,
        keys: Sequence[str] | None,
    ) -> Tensor:
        """Return features [B, D] of some keys of the observation.

        Args:
            td: [B], with `observation`.
            encoder: makes the features; None for the flat observation.
            normalizer: scales the flat observation; None for no scaling.
            keys: keys of a Dict observation.
        """
        observation = td.get("observation")
        if encoder is not None:
            return encoder(_read(observation, keys))  # type: ignore[no-any-return]  # nn.Module
        batch_dims = len(td.batch_size)
        if (
            isinstance(observation, Tensor)
            and observation.dim() == batch_dims + 1
            and observation.dtype == torch.float32
        ):
            flat = observation  # fast path: this runs at each env step
        else:
            flat = flatten_observation(observation, batch_dims, keys)
        return flat if normalizer is None else normalizer(flat)


def _read(observation: Tensor | TensorDict, keys: Sequence[str] | None) -> Tensor | TensorDict:
    return observation if isinstance(observation, Tensor) else observation.select(*(keys or ()))
