"""SAC on the initial noise of a frozen flow policy, with critics of actions (DSRL-NA)."""

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import SAC, QActorCritic
from lightning_rl.extend.algorithms import Objective
from lightning_rl.extensions.algorithms.steering import SteeredActorCritic
from lightning_rl.kwargs import NoiseSACKwargs, Unpack


class NoiseSAC(SAC):
    """SAC that chooses the initial noise of a frozen flow policy, and learns from given actions.

    The critics learn the values of executed actions, a person's included. For random noise, the
    critics of noise learn the value of the action that the flow makes of it: Q_w(s, w) follows
    Q(s, flow(s, w)). The actor maximizes the critics of noise.

    Source: Wagenmaker et al. 2025, "Steering Your Diffusion Policy with Latent Space Reinforcement
    Learning", the noise-aliased algorithm (DSRL-NA).

    Args:
        policy: steers a flow, with critics of actions and of noise.
        kwargs: see `SAC`; `target_entropy` is for the noise.

    Raises:
        ConfigurationError: for a policy of another kind.
    """

    policy: SteeredActorCritic
    policy_kind: type[QActorCritic] = SteeredActorCritic
    undelayed_objectives = ("critic", "noise_critic")

    def __init__(self, policy: SteeredActorCritic, **kwargs: Unpack[NoiseSACKwargs]) -> None:
        super().__init__(policy, **kwargs)

    def configure_objectives(self) -> list[Objective]:
        critic, *other_objectives = super().configure_objectives()
        noise_critic = self.objective(
            self.noise_critic_loss,
            self.policy.noise_critic,
            name="noise_critic",
            learning_rate=self.critic_learning_rate,
        )
        return [critic, noise_critic, *other_objectives]

    def noise_fields(self, count: int) -> dict[str, Tensor]:
        size = count, self.policy.distribution.size
        # Drawn before the loss, because a compiled loss cannot use a generator.
        noise = torch.randn(size, generator=self.generator, device=self.device)
        return {"tried_noise": noise} | super().noise_fields(count)

    def critic_outputs(
        self, minibatch: TensorDict, next_features: Tensor, next_action: Tensor
    ) -> tuple[Tensor, Tensor]:
        next_td = TensorDict({"observation": minibatch["next_observation"]}, minibatch.batch_size)
        # The actor chose noise, but the critics of the targets read actions.
        with torch.no_grad():
            next_action = self.policy.decoded(next_td, next_action)
        return super().critic_outputs(minibatch, next_features, next_action)

    def noise_critic_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the critics of noise on samples [B], and scalars to log.

        Each follows one critic of actions, at standard normal noise within the bound.
        """
        policy = self.policy
        noise = (minibatch["tried_noise"] / policy.bound).clamp(-1.0, 1.0)
        features = policy.critic_features(minibatch)
        with torch.no_grad():
            action = policy.decoded(minibatch, noise)
            target_q = policy.critic.mean(policy.critic.outputs(features, action))
        q = policy.noise_critic.mean(policy.noise_critic.outputs(features, noise))
        return 0.5 * (q - target_q).square().mean(-1).sum(), {"noise_q": q.mean()}
