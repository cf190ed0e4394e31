"""Twin delayed deep deterministic policy gradients (TD3)."""

import copy

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.algorithms.off_policy import QAlgorithm, make_target_network
from lightning_rl.kwargs import TD3Kwargs, Unpack
from lightning_rl.optim.update import Objective
from lightning_rl.policies import DeterministicActorCritic, QActorCritic
from lightning_rl.system.errors import check_range


class TD3(QAlgorithm):
    """TD3: a deterministic actor that explores with noise, and Q critics.

    Source: Fujimoto et al. 2018, "Addressing Function Approximation Error in Actor-Critic Methods",
    algorithm 1.

    Args:
        policy: actor and critics.
        policy_delay: updates of the critics per update of actor and targets.
        target_noise: standard deviation of the noise on target actions, in units of their bounds.
        target_noise_clip: bound on that noise.
        kwargs: see `QAlgorithm`.

    Raises:
        ConfigurationError: for a policy without Q critics.
    """

    policy: DeterministicActorCritic
    policy_kind: type[QActorCritic] = DeterministicActorCritic

    def __init__(
        self,
        policy: DeterministicActorCritic,
        *,
        policy_delay: int = 2,
        target_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        **kwargs: Unpack[TD3Kwargs],
    ) -> None:
        super().__init__(policy, policy_delay=policy_delay, **kwargs)
        check_range("target_noise", target_noise, minimum=0)
        check_range("target_noise_clip", target_noise_clip, minimum=0)
        self.target_noise = target_noise
        self.target_noise_clip = target_noise_clip
        self.target_actor = self.target_actor_encoder = self.target_actor_memory = None
        if self.tau is not None:
            self.target_actor = copy.deepcopy(policy.actor).requires_grad_(False)
            if policy.critic_reads_apart:
                self.target_actor_encoder = make_target_network(policy.encoder)
                self.target_actor_memory = make_target_network(policy.memory)

    def configure_objectives(self) -> list[Objective]:
        return [
            self.critic_objective(),
            self.objective(self.actor_loss, *self.policy.actor_modules(), name="actor"),
        ]

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        self.add_to_replay(rollout)
        for minibatch in self.minibatches(rollout):
            # Actor and targets move together, every `policy_delay`-th update of the critics.
            if (self.updates_done + 1) % self.policy_delay == 0:
                self.update_in_turn(minibatch, "critic", "actor")
            else:
                self.updates["critic"](minibatch)
        self.finish_iteration(rollout)

    def noise_fields(self, count: int) -> dict[str, Tensor]:
        shape = count, self.policy.distribution.size
        noise = torch.randn(shape, generator=self.generator, device=self.device)
        limit = self.target_noise_clip
        # Clipped here, once for all minibatches: the loss only adds it.
        return {"next_noise": (noise * self.target_noise).clamp(-limit, limit)}

    def critic_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        policy, critic = self.policy, self.policy.critic
        # The target actor reads the features of a target encoder.
        encoders = self.target_encoder, self.target_memory
        of_actor = self.target_actor_encoder, self.target_actor_memory
        next_td = TensorDict({"observation": minibatch.get("next_observation")}, [len(minibatch)])
        with torch.no_grad():
            features, for_critics = policy.features_for_target(
                minibatch, next_td, encoders, of_actor if policy.critic_reads_apart else encoders
            )
            best = policy.best_unit(next_td, self.target_actor, features)
            action = (best + minibatch["next_noise"]).clamp(-1.0, 1.0)
        outputs, next_outputs = self.critic_outputs(minibatch, for_critics, action)
        next_q, probs = critic.min_value(next_outputs)
        # Fujimoto et al. 2018, equation 10.
        target = self.normalized_reward(minibatch["reward"]) + minibatch["discount"] * next_q
        return critic.loss(outputs, target, probs)

    def actor_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the actor's loss on samples [B], and scalars to log."""
        features, for_critics = self.policy.features_for_actor(minibatch)
        action = self.policy.best_unit(minibatch, features=features)
        # TD3 maximizes the first critic, not the minimum.
        return -self.policy.q_values(minibatch, action, features=for_critics)[0].mean(), {}

    def target_networks(self) -> list[tuple[nn.Module, nn.Module]]:
        policy = self.policy
        pairs = [
            (self.target_actor, policy.actor),
            (self.target_actor_encoder, policy.encoder),
            (self.target_actor_memory, policy.memory),
        ]
        used = [(slow, fast) for slow, fast in pairs if slow is not None and fast is not None]
        return super().target_networks() + used
