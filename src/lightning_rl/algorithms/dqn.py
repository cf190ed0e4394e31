"""Deep Q-learning for discrete actions."""

import copy

import torch
from lightning.pytorch.utilities import rank_zero_info
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from lightning_rl.algorithms.off_policy import OffPolicyAlgorithm, make_target_network
from lightning_rl.functional import double_q_target
from lightning_rl.kwargs import DQNKwargs, Unpack
from lightning_rl.optim.update import Objective
from lightning_rl.policies import QPolicy
from lightning_rl.policies.distributions.base import widened
from lightning_rl.system import ranks
from lightning_rl.system.errors import check_range, require


class DQN(OffPolicyAlgorithm):
    """Deep Q-learning: a Q network, a target network, and a Huber loss.

    With a `dueling` policy, `double_q` and `n_steps` it is the double, dueling, n-step DQN.

    Source: Mnih et al. 2015, "Human-level Control through Deep Reinforcement Learning", algorithm
    1; van Hasselt et al. 2016, "Deep Reinforcement Learning with Double Q-learning", equation 4;
    Wang et al. 2016, "Dueling Network Architectures for Deep Reinforcement Learning". Differs from
    the papers: the target network moves by `tau` after every update by default.

    Args:
        policy: the Q network and its exploration rule.
        double_q: the Q network chooses the next action, and the target network values it; if not,
            the target network does both.
        target_update_interval: updates between moves of the target network by `tau`. For copies,
            as in the papers, set `tau: 1` and a large interval.
        exploration_initial: epsilon, or temperature of the Boltzmann rule, at the start.
        exploration_final: the same after `exploration_fraction` of the budget.
        exploration_fraction: share of the env steps of the run during which the exploration changes
            linearly; 0 for the final value from the start.
        kwargs: see `OffPolicyAlgorithm`.

    Raises:
        ConfigurationError: for a number out of range, `tau: null`, and a policy of another kind.
    """

    policy: QPolicy
    policy_kind = QPolicy
    """The class of policies that the algorithm trains."""

    def __init__(
        self,
        policy: QPolicy,
        *,
        double_q: bool = True,
        target_update_interval: int = 1,
        exploration_initial: float = 1.0,
        exploration_final: float = 0.05,
        exploration_fraction: float = 0.1,
        **kwargs: Unpack[DQNKwargs],
    ) -> None:
        name = type(self).__name__
        require(
            isinstance(policy, QPolicy),
            f"{name} trains a Q network, but {type(policy).__name__} is not a QPolicy: set "
            "model.policy: {class_path: QPolicy}, or a subclass of it with a network of your own.",
        )
        super().__init__(policy, **kwargs)
        require(
            self.tau is not None,
            f"{name} needs a target network: set model.tau to a number such as 0.005, not null.",
        )
        check_range("target_update_interval", target_update_interval, minimum=1)
        check_range("exploration_fraction", exploration_fraction, minimum=0, maximum=1)
        self.double_q = double_q
        self.target_update_interval = target_update_interval
        self.exploration_initial = exploration_initial
        self.exploration_final = exploration_final
        self.exploration_fraction = exploration_fraction
        for amount in (exploration_final, exploration_initial):  # checks both
            policy.set_exploration(amount)
        policy.set_exploration(self.exploration_at(0.0))
        self.target_q = copy.deepcopy(policy.actor).requires_grad_(False)
        self.target_encoder = make_target_network(policy.encoder)
        self.target_memory = make_target_network(policy.memory)

    def configure_objectives(self) -> list[Objective]:
        return [self.objective(self.q_loss, *self.policy.modules_to_train(), name="q")]

    def target_networks(self) -> list[tuple[nn.Module, nn.Module]]:
        pairs = [
            (self.target_q, self.policy.actor),
            (self.target_encoder, self.policy.encoder),
            (self.target_memory, self.policy.memory),
        ]
        return [(slow, fast) for slow, fast in pairs if slow is not None and fast is not None]

    def exploration_at(self, progress: float) -> float:
        """Return epsilon or the temperature after a share `progress` of the env steps."""
        fraction = self.exploration_fraction
        done = 1.0 if fraction == 0 else min(1.0, progress / fraction)
        return self.exploration_initial + done * (self.exploration_final - self.exploration_initial)

    def after_warm_start(self) -> None:
        super().after_warm_start()
        if self.exploration_initial > self.exploration_final:
            rank_zero_info(
                f"Exploration starts at {self.exploration_initial:g} all the same. For less, set "
                f"model.exploration_initial, such as {self.exploration_final:g}."
            )

    def on_train_batch_start(self, batch: TensorDict, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        budget = self.data.total_iterations * self.data.env_steps_per_iteration * ranks.world_size()
        self.policy.set_exploration(self.exploration_at(self.env_steps / budget))
        self.statistics.set("exploration", self.policy.distribution.amount.clone())

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        self.add_to_replay(rollout)
        for minibatch in self.minibatches(rollout):
            # `update_in_turn` also moves the target network; a plain update does not.
            if (self.updates_done + 1) % self.target_update_interval == 0:
                self.update_in_turn(minibatch, "q")
            else:
                self.updates["q"](minibatch)
        self.finish_iteration(rollout)

    def q_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the Huber loss of the temporal-difference errors of samples [B], and scalars."""
        target = self.target(minibatch)
        values = widened(self.policy.actor(self.policy.actor_features(minibatch)))
        q = values.gather(-1, minibatch["action"][:, None]).squeeze(-1)
        return smooth_l1_loss(q, target), {"q": q.mean(), "q_target": target.mean()}

    @torch.no_grad()
    def target(self, minibatch: TensorDict) -> Tensor:
        """Return the target [B] for samples [B]."""
        policy = self.policy
        next_td = TensorDict({"observation": minibatch.get("next_observation")}, [len(minibatch)])
        x = policy.next_features(minibatch, next_td, self.target_encoder, self.target_memory)
        # Without `double_q` the target network chooses the action that it values.
        target_q = chosen_by = widened(self.target_q(x))
        if self.double_q:
            chosen_by = widened(policy.actor(policy.next_features(minibatch, next_td)))
        # Only the choice is masked: the value of the chosen action is gathered from `target_q`.
        next_q = policy.masked_values(next_td, chosen_by)
        return double_q_target(minibatch["reward"], minibatch["discount"], next_q, target_q)
