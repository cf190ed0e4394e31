"""Short-horizon actor-critic: gradients through the env's steps, and a value where they stop."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from lightning_rl import ActorCritic
from lightning_rl.extend.algorithms import Objective
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import widened
from lightning_rl.extend.rollout import add_transition_field
from lightning_rl.extensions.algorithms.apg import APG
from lightning_rl.extensions.algorithms.passes import passes
from lightning_rl.functional import gae
from lightning_rl.kwargs import SHACKwargs, Unpack


class SHAC(APG):
    """Short-horizon actor-critic: `APG` with the value of a target critic where a rollout stops.

        J      = 1 / (N T) sum_i (sum_t gamma^t r_t + gamma^T V'(s_T))
        L(phi) = mean of (V(s_t) - y_t)^2, y_t the TD(lambda) return of V'
        V'     = (1 - tau) V' + tau V, once per rollout

    The value also follows where a time limit cuts an episode, of the true final observation.

    Source: Xu et al. 2022, "Accelerated Policy Learning with Parallel Differentiable Simulation",
    equations 5 to 9, algorithm 1. Differs from it: truncated episodes have a value.

    Args:
        policy: actor and critic, with squashed actions and without an encoder.
        critic_learning_rate: default: `learning_rate`.
        optimizer: makes the optimizers. Default: Adam with betas .7 and .95, as in the paper.
        gae_lambda: decay per step of the critic's returns.
        n_epochs: the critic's passes over a rollout.
        batch_size: transitions per minibatch of the critic and process.
        tau: step size of the target critic after each rollout, in (0, 1].
        kwargs: see `APG`.

    Raises:
        ConfigurationError: see `APG`; and for a policy with an encoder.
    """

    policy: ActorCritic
    policy_kind = "ActorCritic"

    def __init__(
        self,
        policy: ActorCritic,
        *,
        critic_learning_rate: float | None = None,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        gae_lambda: float = 0.95,
        n_epochs: int = 16,
        batch_size: int = 512,
        tau: float = 0.8,
        **kwargs: Unpack[SHACKwargs],
    ) -> None:
        # The learning rate is set before each update.
        adam = partial(torch.optim.Adam, lr=1e-3, betas=(0.7, 0.95), fused=True)
        super().__init__(policy, optimizer=optimizer or adam, **kwargs)
        require(
            policy.encoder is None and policy.critic_encoder is None,
            "SHAC trains actor and critic by separate losses, which train no encoder: remove "
            "policy.init_args.encoder and critic_encoder.",
        )
        check_range("critic_learning_rate", critic_learning_rate, above=0)
        check_range("gae_lambda", gae_lambda, minimum=0, maximum=1)
        check_range("n_epochs", n_epochs, minimum=1)
        check_range("batch_size", batch_size, minimum=1)
        check_range("tau", tau, above=0, maximum=1)
        self.critic_learning_rate = critic_learning_rate
        self.gae_lambda = gae_lambda
        self.n_epochs = n_epochs
        self.batch_size = batch_size
        self.tau = tau
        self.target_critic = copy.deepcopy(policy.critic).requires_grad_(False)

    def configure_objectives(self) -> list[Objective]:
        # The deviation of the actions is trained with the actor.
        actor = self.policy.actor, self.policy.distribution
        rate = self.critic_learning_rate
        return [
            self.objective(self.actor_loss, *actor, name="actor"),
            self.objective(self.critic_loss, self.policy.critic, name="critic", learning_rate=rate),
        ]

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            steps = self.data.num_envs * self.data.buffer_size
            require(
                self.batch_size <= steps,
                f"model.batch_size={self.batch_size} is larger than a rollout: data.num_envs * "
                f"data.buffer_size = {steps} steps. Lower batch_size, or raise the others.",
            )

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        # The actor first: its gradient uses the target critic before it moves.
        self.improve_actor(rollout)
        self.fit_critic(rollout)
        self.update_target()
        self.finish_iteration(rollout)

    def end_value(self, observation: Any) -> Tensor:
        return self.target_value(TensorDict({"observation": observation}, [self.data.num_envs]))

    def target_value(self, td: TensorDict) -> Tensor:
        """Return the target critic's value [B] of observations `td` [B]."""
        return widened(self.target_critic(self.policy.critic_features(td))).squeeze(-1)

    def fit_critic(self, rollout: TensorDict) -> None:
        """Fit the critic to the returns of a rollout [N, T+1]."""
        # The targets need V' at each step, and at the true final observations of time limits.
        self.evaluate_values(rollout, self.target_value)
        steps = rollout[:, :-1]
        _, target = gae(
            steps["reward"],
            rollout["value"],
            steps["terminated"],
            steps["truncated"],
            steps["final_value"],
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        add_transition_field(rollout, "return", target)
        settings = self.n_epochs, self.batch_size, self.generator
        # The data of all passes are the same: targets are computed once per rollout.
        for minibatch in passes(rollout, ("observation", "return"), *settings):
            self.updates["critic"](minibatch)

    def critic_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the squared error of the values of samples [B], and scalars to log."""
        value = self.policy.get_value(minibatch)["value"]
        return mse_loss(value, minibatch["return"]), {"value": value.mean()}

    def target_networks(self) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
        return [(self.target_critic, self.policy.critic)]

    @torch.no_grad()
    def update_target(self) -> None:
        """Move the target critic towards the critic by `tau`."""
        pairs = zip(self.target_critic.parameters(), self.policy.critic.parameters(), strict=True)
        for slow, fast in pairs:
            slow.lerp_(fast, self.tau)

    def after_warm_start(self) -> None:
        rank_zero_info("SHAC starts with a copy of the checkpoint's critic as its target critic.")
        # The target critic is still a copy of the random critic of the constructor.
        self.target_critic.load_state_dict(self.policy.critic.state_dict())
