"""Critics and an actor from a dataset alone, for SAC to continue from: IQL and AWAC."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import Algorithm, SquashedActorCritic
from lightning_rl.extend import ranks
from lightning_rl.extend.algorithms import Objective
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import mlp, widened
from lightning_rl.extend.rollout import add_transition_field, next_observations
from lightning_rl.extensions.algorithms.passes import passes
from lightning_rl.extensions.datasets.demonstrations import DatasetCollector, prepare_for_critics
from lightning_rl.functional import advantage_weight, ensemble_loss, expectile_loss, gae
from lightning_rl.kwargs import DatasetActorCriticKwargs, IQLKwargs, Unpack


class DatasetActorCritic(Algorithm):
    """Base class: Q critics of the data, and an actor that clones actions by their advantage.

        L_Q  = mean of (r + gamma V(s') - Q_i(s, a))^2, with V(s') = 0 after a termination
        L_pi = -mean of min(exp(beta A), w_max) log pi(a | s),  A = min_i Q'_i(s, a) - V(s)

    With `gae_lambda`, A is the generalized advantage estimate of the recorded steps by V, computed
    once per iteration: the errors of Q and V in one step can exceed what an action changes.

    A subclass defines the value V. The algorithm needs `data.collector: DatasetCollector`, with a
    dataset that has rewards. An iteration is `n_epochs` passes over it; each of its steps counts as
    an env step of the budget. The env is only stepped in evaluations; with `data.offline` there
    may be none. SAC continues from the checkpoint (`trainer.init_from`), with actor and critics.

    Args:
        policy: actor and critics, as for SAC.
        batch_size: transitions per minibatch and process.
        gamma: discount per env step.
        n_epochs: passes over the dataset per iteration.
        advantage_scale: beta, per unit of return; with 0 all actions have the same weight.
        max_weight: w_max, bound on the weight of an action.
        gae_lambda: trace decay of A per step, in [0, 1]; null for A of a single step by Q.
        tau: step size of the target critics Q' after each update, in (0, 1].
        actions_within: actions of the data are clamped to this share of their bounds, where the
            density of a squashed Gaussian would be infinite.
        max_grad_norm: bound on the norm of the gradient of each objective; null for none.
        kwargs: see `Algorithm`.

    Raises:
        ConfigurationError: for a policy without Q critics or with a memory,
            and in `fit` for another collector, or data without rewards.
    """

    policy: SquashedActorCritic
    uses_replay = False
    adam_eps = 1e-8

    FIELDS = ("observation", "action", "reward", "next_observation", "continuing")
    """The fields of a rollout that the losses read."""

    def __init__(
        self,
        policy: SquashedActorCritic,
        *,
        batch_size: int = 256,
        gamma: float = 0.99,
        n_epochs: int = 1,
        advantage_scale: float = 3.0,
        max_weight: float = 100.0,
        gae_lambda: float | None = None,
        tau: float = 0.005,
        actions_within: float = 0.99,
        max_grad_norm: float | None = None,
        **kwargs: Unpack[DatasetActorCriticKwargs],
    ) -> None:
        name = type(self).__name__
        require(
            isinstance(policy, SquashedActorCritic),
            f"{name} trains an actor and Q critics, but the policy is a {type(policy).__name__}: "
            "set model.policy: {class_path: SquashedActorCritic}, or a subclass of it.",
        )
        super().__init__(policy, batch_size=batch_size, max_grad_norm=max_grad_norm, **kwargs)
        check_range("gamma", gamma, minimum=0, maximum=1)
        check_range("n_epochs", n_epochs, minimum=1)
        check_range("advantage_scale", advantage_scale, minimum=0)
        check_range("max_weight", max_weight, above=0)
        if gae_lambda is not None:
            check_range("gae_lambda", gae_lambda, minimum=0, maximum=1)
        check_range("tau", tau, above=0, maximum=1)
        check_range("actions_within", actions_within, above=0, below=1)
        critic = policy.critic
        require(
            not policy.is_recurrent and critic.atoms is None and critic.normalization != "batch",
            f"{name} trains on single steps, by critics that output a value: remove memory, "
            "value_atoms and critic_normalization: batch from model.policy.",
        )
        self.gamma = gamma
        self.n_epochs = n_epochs
        self.advantage_scale = advantage_scale
        self.max_weight = max_weight
        self.gae_lambda = gae_lambda
        self.tau = tau
        self.actions_within = actions_within
        self.target_critic = copy.deepcopy(critic).requires_grad_(False)

    def configure_objectives(self) -> list[Objective]:
        policy = self.policy
        return [
            # This loss also trains an encoder that actor and critics share.
            self.objective(self.critic_loss, *policy.critic_modules_to_train(), name="critic"),
            self.objective(self.actor_loss, *policy.actor_modules(), name="actor"),
        ]

    def minibatches_per_iteration(self) -> int:
        return self.n_epochs * -(-self.data.num_envs * self.data.buffer_size // self.batch_size)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        name, processes = type(self).__name__, ranks.world_size()
        require(
            stage != "fit" or processes == 1,
            f"{name} trains in one process, and there are {processes}: each process would draw "
            "from the whole dataset. Set trainer.devices: 1.",
        )

    def on_train_start(self) -> None:
        super().on_train_start()
        name, collector = type(self).__name__, type(self.data.collector)
        require(
            issubclass(collector, DatasetCollector),
            f"{name} learns from a dataset, but {collector.__name__} collects the policy's own "
            "actions: set data.collector: {class_path: DatasetCollector, init_args: {path: ...}}, "
            "or learn online with SAC.",
        )

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        name = type(self).__name__
        require(
            "executed" not in rollout.keys(),
            f"{name} trains on single actions, but the env takes chunks: remove ActionChunk.",
        )
        # Checked in on_train_start.
        prepare_for_critics(rollout, cast(DatasetCollector, self.data.collector), name)
        # At a time limit this is the true final observation; after a termination it has no
        # effect.
        add_transition_field(rollout, "next_observation", next_observations(rollout))
        add_transition_field(rollout, "continuing", (~rollout["terminated"][:, :-1]).float())
        fields = list(self.FIELDS)
        # Once per iteration, as V moves little in one pass; it needs whole episodes, in order.
        if self.gae_lambda is not None:
            self.write_advantages(rollout, self.gae_lambda)
            fields.append("advantage")
        mask = ~rollout["padding"][:, :-1]
        # In the order of configure_objectives: V, then the critics, then the actor.
        names = tuple(self.objectives)
        update = self.learner.sequence(names, self.update_target, self._moved)
        settings = self.n_epochs, self.batch_size, self.generator
        for minibatch in passes(rollout, fields, *settings, mask):
            # Drawn here, because a compiled update cannot use a generator.
            update(minibatch.update(self.noise_fields(len(minibatch))))
        self.finish_iteration(rollout)

    def noise_fields(self, count: int) -> dict[str, Tensor]:
        """Draw the random numbers of a minibatch [B] of `count` samples, by field."""
        return {}

    def write_advantages(self, rollout: TensorDict, gae_lambda: float) -> None:
        """Write the `advantage` of each step of a rollout [N, T+1], estimated by V."""

        # AWAC's V draws an action per observation, and needs noise for it.
        def value_of(td: TensorDict) -> Tensor:
            return self.state_value(td.update(self.noise_fields(len(td))))

        self.evaluate_values(rollout, value_of)
        steps = ("reward", "terminated", "truncated", "final_value")
        of_steps = {key: rollout[key][:, :-1] for key in steps}
        value = rollout["value"]
        # Of a step that is left out it is 0: the step before bootstraps from its value.
        left_out = rollout.get("padding", torch.zeros_like(rollout["done"]))[:, :-1]
        of_steps["reward"] = torch.where(left_out, value[:, :-1], of_steps["reward"])
        advantage, _ = gae(value=value, gamma=self.gamma, gae_lambda=gae_lambda, **of_steps)
        add_transition_field(rollout, "advantage", advantage)

    @abstractmethod
    def state_value(self, minibatch: TensorDict) -> Tensor:
        """Return V [B] of the observations of samples [B]."""

    @abstractmethod
    def next_state_value(self, minibatch: TensorDict) -> Tensor:
        """Return V [B] of the next observations of samples [B]."""

    def critic_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the temporal-difference loss of the critics on samples [B], and scalars."""
        with torch.no_grad():
            value = self.next_state_value(minibatch)
            target = minibatch["reward"] + self.gamma * minibatch["continuing"] * value
        # The critics read actions in units of their bounds.
        q = self.policy.q_values(minibatch, self.policy.unit(minibatch["action"]))
        return ensemble_loss(q, target), {"q": q.mean(), "q_target": target.mean()}

    def actor_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted negative log-prob of samples [B], and scalars to log."""
        policy = self.policy
        with torch.no_grad():
            if self.gae_lambda is None:
                advantage = self.target_q(minibatch) - self.state_value(minibatch)
            else:
                advantage = minibatch["advantage"]
            weight = advantage_weight(advantage, self.advantage_scale, self.max_weight)
            # At a bound the inverse of tanh is infinite, and the log-prob with it.
            bound = self.actions_within
            action = policy.distribution.from_unit(
                policy.unit(minibatch["action"]).clamp(-bound, bound)
            )
        features, _ = policy.features_for_actor(minibatch)
        # The data do not have the number before tanh: the distribution computes it from the
        # action.
        fields: dict[str, Any] = {"action": action, "unsquashed_action": None}
        log_prob, entropy = policy.distribution.log_prob_and_entropy(
            policy.action_output(minibatch, features), fields
        )
        scalars = {"weight": weight.mean(), "entropy": entropy.mean()}
        return -(weight * log_prob).mean(), scalars | {"negative_log_prob": -log_prob.mean()}

    @torch.no_grad()
    def target_q(self, minibatch: TensorDict) -> Tensor:
        """Return the least value [B] of the target critics for the actions of samples [B]."""
        action = self.policy.unit(minibatch["action"])
        return self.policy.q_values(minibatch, action, self.target_critic).amin(0)

    def target_networks(self) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
        return [(self.target_critic, self.policy.critic)]

    @torch.no_grad()
    def update_target(self) -> None:
        """Move the target critics towards the critics by `tau`."""
        pairs = zip(self._moved(), self.policy.critic.parameters(), strict=True)
        for slow, fast in pairs:
            slow.lerp_(fast, self.tau)

    def _moved(self) -> list[Tensor]:
        return list(self.target_critic.parameters())


class IQL(DatasetActorCritic):
    """Implicit Q-learning: V is an expectile of the values of the data's actions.

        L_V  = mean of |e - 1(u < 0)| u^2,  u = min_i Q'_i(s, a) - V(s)

    The losses never evaluate an action outside of the data. The other losses, and `SAC` afterwards:
    see `DatasetActorCritic`.

    Source: Kostrikov, Nair and Levine 2022, "Offline Reinforcement Learning with Implicit
    Q-Learning", equations 5 to 7, algorithm 1. Differs from the paper: the actor is SAC's, with a
    squashed Gaussian.

    Args:
        policy: actor and critics, as for SAC.
        expectile: e, in [0.5, 1): .5 values the data's actions, near 1 the best of them.
        value_hidden_sizes: units of the hidden layers of V.
        kwargs: see `DatasetActorCritic`.

    Raises:
        ConfigurationError: see `DatasetActorCritic`.
    """

    def __init__(
        self,
        policy: SquashedActorCritic,
        *,
        expectile: float = 0.7,
        value_hidden_sizes: Sequence[int] = (256, 256),
        **kwargs: Unpack[IQLKwargs],
    ) -> None:
        super().__init__(policy, **kwargs)
        check_range("expectile", expectile, minimum=0.5, below=1)
        self.expectile = expectile
        # The critics' first layer reads features and action; V reads the features.
        features = policy.critic.weights[0].shape[-2] - policy.distribution.size
        self.value = mlp(
            features, value_hidden_sizes, 1, activation="relu", initialization="fan_in"
        )

    def configure_objectives(self) -> list[Objective]:
        value = self.objective(self.value_loss, self.value, name="value")
        return [value, *super().configure_objectives()]

    def value_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the expectile loss of V on samples [B], and scalars to log."""
        value = self.value_of(minibatch)
        loss = expectile_loss(self.target_q(minibatch) - value, self.expectile)
        return loss, {"value": value.mean()}

    def state_value(self, minibatch: TensorDict) -> Tensor:
        return self.value_of(minibatch)

    def next_state_value(self, minibatch: TensorDict) -> Tensor:
        return self.value_of(_following(minibatch))

    def value_of(self, td: TensorDict) -> Tensor:
        """Return V [B] of the observations of `td` [B]."""
        with torch.no_grad():  # the critics' loss trains an encoder
            features = self.policy.critic_features(td)
        return widened(self.value(features)).squeeze(-1)


class AWAC(DatasetActorCritic):
    """Advantage-weighted actor-critic: V is the value of an action of the policy.

        V(s) = min_i Q'_i(s, a), with a drawn from pi(. | s)

    The losses, and `SAC` afterwards: see `DatasetActorCritic`.

    Source: Nair et al. 2020, "AWAC: Accelerating Online Reinforcement Learning with Offline
    Datasets", algorithm 1, with beta = 1 / lambda. Differs from the paper: bounded weights, and
    advantages of the target critics.

    Args:
        policy: actor and critics, as for SAC.
        kwargs: see `DatasetActorCritic`.

    Raises:
        ConfigurationError: see `DatasetActorCritic`.
    """

    def noise_fields(self, count: int) -> dict[str, Tensor]:
        shape = 2, count, self.policy.distribution.size
        noise = torch.randn(shape, generator=self.generator, device=self.device)
        return {"noise": noise[0], "next_noise": noise[1]}

    def state_value(self, minibatch: TensorDict) -> Tensor:
        return self._drawn_value(minibatch, minibatch["noise"])

    def next_state_value(self, minibatch: TensorDict) -> Tensor:
        return self._drawn_value(_following(minibatch), minibatch["next_noise"])

    def _drawn_value(self, td: TensorDict, noise: Tensor) -> Tensor:
        action, _ = self.policy.draw_unit(td, noise)
        return self.policy.q_values(td, action, self.target_critic).amin(0)


def _following(minibatch: TensorDict) -> TensorDict:
    """Return the next observations of samples [B], as observations."""
    return TensorDict({"observation": minibatch.get("next_observation")}, minibatch.batch_size)
