"""Calls that mypy judges, never run: a wrong setting is an error, so that the `ignore` is needed.

An `ignore` without an error, and an error without an `ignore`, fail `mypy`.
"""

from gymnasium.spaces import Box

from lightning_rl import GRPO, IQL, PPO, SAC, ActorCritic, NatureCNN, SquashedActorCritic, VLAPolicy


def of_algorithms(policy: ActorCritic, critics: SquashedActorCritic) -> None:
    """Settings of the class itself, of its base class, and of the base class of that."""
    PPO(policy, gae_lambda=0.9, gamma=0.99, learning_rate=1e-3)
    PPO(policy, gama=0.9)  # type: ignore[call-arg]
    PPO(policy, gamma="0.9")  # type: ignore[arg-type]
    PPO(policy, tau=0.1)  # type: ignore[call-arg]  # of SAC
    PPO(policy, lr_schedule="cosine")  # type: ignore[arg-type]
    GRPO(policy, group_size=8, n_epochs=2, max_nonfinite_steps=3)
    GRPO(policy, gae_lambda=0.9)  # type: ignore[call-arg]  # of PPO
    SAC(critics, target_entropy=-1.0, num_target_critics=2, policy_delay=2, tau=None, compile=True)
    SAC(critics, 1e-3)  # type: ignore[call-arg]  # by position
    SAC(critics, gradient_steps=1)  # type: ignore[call-arg]
    IQL(critics, expectile=0.8, advantage_scale=1.0, learning_rate=1e-3)
    IQL(critics, temperature=1.0)  # type: ignore[call-arg]


def of_policies(space: Box, actions: Box) -> None:
    """Policies and encoders."""
    ActorCritic(space, actions, (64,), critic_hidden_sizes=(64,), squash=True, activation="elu")
    ActorCritic(space, actions, net_arch=(64,))  # type: ignore[call-arg]
    SquashedActorCritic(space, actions, num_critics=4, ignore_keys=("touch",))
    SquashedActorCritic(space, actions, num_critics="4")  # type: ignore[arg-type]
    VLAPolicy(space, actions, micro_batch=4)  # type: ignore[call-arg]
    NatureCNN(space, resize=(84, 84))
    NatureCNN(space, size="84")  # type: ignore[arg-type]
