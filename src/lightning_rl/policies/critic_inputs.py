"""Choose the inputs of a critic, and refuse keys of an observation that no network reads."""

from collections.abc import Sequence

import gymnasium

from lightning_rl.policies.networks.encoders import EncoderFactory, of_critic
from lightning_rl.policies.networks.perceptron import (
    flat_observation_size,
    read_keys,
    read_space,
)
from lightning_rl.policies.normalization import ObservationNormalizer
from lightning_rl.policies.perceptron_policy import PerceptronPolicy
from lightning_rl.rollout.masks import MASK
from lightning_rl.system.construction import do_weights_follow
from lightning_rl.system.errors import require


def refuse_unread_keys(policy: PerceptronPolicy) -> None:
    """Refuse keys of the observation that no network reads.

    Raises:
        ConfigurationError: for such keys.
    """
    space = policy.observation_space
    if not isinstance(space, gymnasium.spaces.Dict) or do_weights_follow():
        return  # earlier versions trained such policies
    read = {*(policy.actor_keys or ()), *(policy.critic_keys or ()), *policy.keys_read_elsewhere}
    unread = [key for key in space if key not in {*read, *policy.ignore_keys, MASK}]
    require(
        not unread,
        f"The observation has {', '.join(unread)}, which no network of {type(policy).__name__} "
        f"reads; they read {', '.join(sorted(read))}. Add the keys to actor_keys or critic_keys, "
        f"or ignore them: ignore_keys: [{', '.join(unread)}].",
    )


def add_critic_inputs(
    policy: PerceptronPolicy,
    encoder: EncoderFactory | None,
    critic_encoder: EncoderFactory | None,
    critic_keys: Sequence[str] | None,
    share_encoder: bool,
) -> int:
    """Create the inputs of a policy's critic, and return their number of features.

    With the actor's keys and encoder, the critic reads the actor's features, with memory.
    Otherwise it has its own encoder or normalizer, and no memory. Arguments: see `ActorCritic`.

    Raises:
        ConfigurationError: for an unknown key, or encoder settings that do not fit.
    """
    require(
        share_encoder or encoder is not None,
        "share_encoder: false needs an encoder, but the policy has none: remove share_encoder, or "
        "name an encoder.",
    )
    if critic_keys is not None:
        names = policy.observation_space, critic_keys, "critic_keys", policy.ignore_keys
        policy.critic_keys = read_keys(*names)
    refuse_unread_keys(policy)
    own_encoder = critic_encoder is not None or not share_encoder
    policy.critic_reads_apart = own_encoder or policy.critic_keys != policy.actor_keys
    require(
        policy.memory is None or not own_encoder or policy.critic_keys != policy.actor_keys,
        "A critic with its own encoder has no memory, but this critic reads only the actor's "
        "observations, which need a memory: set critic_keys, or remove share_encoder: false and "
        "critic_encoder.",
    )
    if not policy.critic_reads_apart:
        return policy.features_size
    space = read_space(policy.observation_space, policy.critic_keys)
    make = critic_encoder or encoder
    if make is not None:
        policy.critic_encoder = of_critic(make, space)
        return policy.critic_encoder.size
    size = flat_observation_size(space)
    if policy.normalizer is not None:
        policy.critic_normalizer = ObservationNormalizer(size)
    return size
