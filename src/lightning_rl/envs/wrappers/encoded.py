"""Replace pictures in observations by the features of a frozen encoder."""

from collections.abc import Callable
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.vector_env import Observation, Seed, VectorEnv, VectorEnvWrapper
from lightning_rl.policies.networks.encoders import Encoder
from lightning_rl.system.errors import ConfigurationError, closest, require


class EncodedObservations(VectorEnvWrapper):
    """An env that encodes pictures by an encoder without trainable weights.

    Each picture is encoded once, and rollouts and replays store D features instead: less memory,
    and no convolution in the update. Videos show the env itself.

    Args:
        num_envs: N.
        env: makes the env from `num_envs`.
        encoder: makes the encoder for the space of its input, usually a `FrozenEncoder`.
        key: key of a Dict observation to encode; default: the whole observation.

    Raises:
        ConfigurationError: the key does not exist, or the encoder is trainable.
    """

    def __init__(
        self,
        num_envs: int,
        env: Callable[[int], VectorEnv],
        encoder: Callable[[gymnasium.Space[Any]], Encoder],
        key: str | None = None,
    ) -> None:
        super().__init__(env(num_envs))
        self.key = key
        space = self.env.single_observation_space
        if key is not None:
            known = sorted(space.keys()) if isinstance(space, gymnasium.spaces.Dict) else []
            require(
                key in known,
                f"EncodedObservations: key='{key}' is not in the observation, which has "
                f"{', '.join(known) or 'no keys'}{closest(key, known)}.",
            )
            space = cast(gymnasium.spaces.Dict, space)[key]
        self.encoder = encoder(space).to(self.env.device).eval()
        if any(parameter.requires_grad for parameter in self.encoder.parameters()):
            self.env.close()
            raise ConfigurationError(
                f"EncodedObservations: {type(self.encoder).__name__} has trainable weights, but a "
                "replay would hold features of older weights. Use a FrozenEncoder, or give the "
                "encoder to the policy (policy.init_args.encoder)."
            )
        features = gymnasium.spaces.Box(-np.inf, np.inf, (self.encoder.size,), np.float32)
        self.single_observation_space = features
        if key is not None:
            whole = cast(gymnasium.spaces.Dict, self.env.single_observation_space)
            self.single_observation_space = gymnasium.spaces.Dict({**whole.spaces, key: features})

    def reset(
        self, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
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
        if self.key is None:
            return self.encoder(observation)  # type: ignore[no-any-return]  # nn.Module
        tree = cast(TensorDict, observation).copy()
        return tree.set(self.key, self.encoder(tree.get(self.key)))
