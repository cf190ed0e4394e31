"""Replace pictures in observations by the features of a frozen encoder."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ConfigurationError, Encoder, VectorEnv, VectorEnvWrapper
from lightning_rl.extend.envs import Observation, Seed
from lightning_rl.extend.errors import closest, require

ENCODED_TOGETHER = 256
"""Recorded pictures per pass of an encoder."""


class FeatureSpace(gymnasium.spaces.Box):
    """Space of features [D] that `EncodedObservations` makes; readers of datasets encode by it.

    Args:
        encoder: makes the features.
        source: space of the encoder's input.
        device: device of the encoder.
    """

    def __init__(
        self, encoder: Encoder, source: gymnasium.Space[Any], device: torch.device
    ) -> None:
        super().__init__(-np.inf, np.inf, (encoder.size,), np.float32)
        # eval: normalisation must not depend on the batch.
        self.encoder, self.source, self.device = encoder.to(device).eval(), source, device


def recorded_space(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """Return the space of recordings, with pictures, for the space of an env with features."""
    if isinstance(space, gymnasium.spaces.Dict):
        return gymnasium.spaces.Dict({key: recorded_space(child) for key, child in space.items()})
    return space.source if isinstance(space, FeatureSpace) else space


@torch.no_grad()
def encoded(space: gymnasium.Space[Any], observation: Any) -> Any:
    """Return recorded observations [L, ...] with features [L, D] in place of pictures.

    `space` is the observation space of the env with features. Other entries are unchanged.
    """
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: encoded(child, observation[key]) for key, child in space.items()}
    if not isinstance(space, FeatureSpace):
        return observation
    # In parts, because a whole episode may not fit into the device's memory.
    batches = observation.split(ENCODED_TOGETHER)
    return torch.cat([space.encoder(batch.to(space.device)).cpu() for batch in batches])


class EncodedObservations(VectorEnvWrapper):
    """An env that encodes pictures by an encoder without trainable weights.

    Each picture is encoded once, and rollouts and replays store D features instead: less memory,
    and no convolution in the update. Datasets of demonstrations hold pictures, which are encoded
    when they are read. Videos show the env itself.

    Args:
        num_envs: N.
        env: makes the env from `num_envs`.
        encoder: makes the encoder for the space of its input: a `FrozenEncoder`, or a `ResNet10` or
            `ResNet18` with `frozen: true`. Keys with equal spaces share one.
        key: key, or list of keys, of a Dict observation to encode; default: the whole observation.

    Raises:
        ConfigurationError: a key does not exist, or the encoder is trainable.
    """

    def __init__(
        self,
        num_envs: int,
        env: Callable[[int], VectorEnv],
        encoder: Callable[[gymnasium.Space[Any]], Encoder],
        key: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(env(num_envs))
        source = self.env.single_observation_space
        if key is None:
            self.single_observation_space = self._features(encoder(source), source)
            return
        sources = dict(source.spaces) if isinstance(source, gymnasium.spaces.Dict) else {}
        spaces, encoders = dict(sources), list[tuple[gymnasium.Space[Any], Encoder]]()
        for name in [key] if isinstance(key, str) else key:
            require(
                name in sources,
                f"EncodedObservations: key='{name}' is not in the observation, which has "
                f"{', '.join(sorted(sources)) or 'no keys'}{closest(name, sources)}.",
            )
            # Keys with equal spaces share an encoder, which is in memory once.
            shared = [network for space, network in encoders if space == sources[name]]
            encoders.append((sources[name], shared[0] if shared else encoder(sources[name])))
            spaces[name] = self._features(encoders[-1][1], sources[name])
        self.single_observation_space = gymnasium.spaces.Dict(spaces)

    def _features(self, encoder: Encoder, source: gymnasium.Space[Any]) -> FeatureSpace:
        if any(parameter.requires_grad for parameter in encoder.parameters()):
            # The constructor fails, and nobody else could close the env.
            self.env.close()
            raise ConfigurationError(
                f"EncodedObservations: {type(encoder).__name__} has trainable weights, but a "
                "replay would hold features of older weights. Use a FrozenEncoder, a ResNet with "
                "frozen: true, or give the encoder to the policy (policy.init_args.encoder)."
            )
        return FeatureSpace(encoder, source, self.env.device)

    def reset(self, seed: Seed = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        observation, info = self.env.reset(seed, options)
        return self._encoded(observation), info

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        encoded = self._encoded(observation)
        if "final_obs" in info:
            rows = (terminated.bool() | truncated.bool()).nonzero().flatten()
            # Encode only finished rows: other rows of `final_obs` have no meaning.
            final = encoded.clone()
            if len(rows):
                final[rows] = self._encoded(info["final_obs"][rows])
            info = {**info, "final_obs": final}
        return encoded, reward, terminated, truncated, info

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        return self._encoded(self.env.load_state_dict(state))

    @torch.no_grad()
    def _encoded(self, observation: Observation) -> Observation:
        space = self.single_observation_space
        if isinstance(space, FeatureSpace):
            return space.encoder(observation)  # type: ignore[no-any-return]  # nn.Module
        # A shallow copy: the entries of the env's own observation stay pictures.
        tree = cast(TensorDict, observation).copy()
        for key, child in cast(gymnasium.spaces.Dict, space).items():
            if isinstance(child, FeatureSpace):
                tree.set(key, child.encoder(tree.get(key)))
        return tree
