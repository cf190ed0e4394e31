"""Analytic policy gradients: maximize returns by gradients through the env's steps."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl import ActorOnly, Algorithm, SyncCollector, TorchEnv
from lightning_rl.extend.algorithms import Objective
from lightning_rl.extend.collectors import EpisodeSettings
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.rollout import flat_transitions
from lightning_rl.extensions.algorithms.differentiable import check_differentiable, gain_of


class APG(Algorithm):
    """Analytic policy gradient: the reward of a rollout's steps, differentiated through the env.

        J = 1 / (N T) sum_i sum_t gamma^k r_t

    with k steps since the rollout or the episode began. The env is a `TorchEnv` whose class sets
    `differentiable`. The collector collects a rollout of T = `data.buffer_size` steps as for other
    algorithms; the update steps the same env through the same rollout, with gradients. Gradients
    stop where the rollout begins, and where an episode ends. Nothing is compiled.

    Source: Freeman et al. 2021, "Brax - A Differentiable Physics Engine for Large Scale Rigid Body
    Simulation", section 4. Differs from it: the discount.

    Args:
        policy: an actor alone, with squashed actions.
        learning_rate, lr_schedule, max_grad_norm, optimizer, max_nonfinite_steps: see `Algorithm`.
        gamma: discount per env step.

    Raises:
        ConfigurationError: for a policy of another kind; in `fit`, for
            an env without gradients, and a collector other than `SyncCollector`.
    """

    policy: ActorOnly
    policy_kind = "ActorOnly"
    """The class of policies that the algorithm trains, for messages."""

    uses_replay = False
    episode_settings = EpisodeSettings(keep_start=True)

    def __init__(
        self,
        policy: ActorOnly,
        *,
        learning_rate: float = 3e-3,
        lr_schedule: Literal["constant", "linear"] = "constant",
        max_grad_norm: float | None = 1.0,
        optimizer: Callable[[Iterable[Any]], Optimizer] | None = None,
        max_nonfinite_steps: int = 10,
        gamma: float = 0.99,
    ) -> None:
        super().__init__(
            policy,
            learning_rate=learning_rate,
            lr_schedule=lr_schedule,
            max_grad_norm=max_grad_norm,
            optimizer=optimizer,
            max_nonfinite_steps=max_nonfinite_steps,
            # The update steps the env, which no compiled graph contains.
            compile=False,
        )
        check_range("gamma", gamma, minimum=0, maximum=1)
        name, policy_name = type(self).__name__, type(policy).__name__
        require(
            isinstance(policy, ActorOnly)
            and hasattr(policy.distribution, "squashed")
            and policy.has_critic == (self.policy_kind == "ActorCritic"),
            f"{name} trains an {self.policy_kind} with squashed actions, because clipped actions "
            f"have no gradient, but the policy is {policy_name}: set model.policy: "
            f"{{class_path: {self.policy_kind}, init_args: {{squash: true}}}}.",
        )
        require(
            not policy.distribution.state_dependent,
            f"{name} does not train log_std: state_dependent: set it to parameter, or use PPO.",
        )
        require(
            not policy.is_recurrent,
            f"{name} trains no memory: remove policy.init_args.memory, or use PPO.",
        )
        self.gamma = gamma
        self._start: dict[str, Any] = {}  # the env's state where the rollout begins

    def configure_objectives(self) -> list[Objective]:
        return [self.objective(self.actor_loss, name="actor")]

    def checks(self, data: Any) -> list[Any]:
        # Imported here, because only `rl-cli check` needs it.
        from lightning_rl.extensions.algorithms.gradients import check_gradients

        return [*check_gradients(self, data)]

    def on_train_start(self) -> None:
        super().on_train_start()
        name, collector = type(self).__name__, self.data.collector
        require(
            isinstance(collector, SyncCollector),
            f"{name} steps the env itself, through the rollouts that it has collected, but "
            f"{type(collector).__name__} steps another env, or none: set data.collector: "
            "SyncCollector.",
        )
        require(
            self.policy.sharding is None,
            f"{name} does not train a policy sharded by trainer.strategy fsdp: use ddp.",
        )
        assert collector is not None
        check_differentiable(name, collector.env)

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        self.improve_actor(rollout)
        self.finish_iteration(rollout)

    def improve_actor(self, rollout: TensorDict) -> None:
        """Take an optimizer step on the actor, by a fresh rollout [N, T+1]."""
        collector = self.data.collector
        assert isinstance(collector, SyncCollector)
        env = collector.env
        assert isinstance(env, TorchEnv)
        # Step the same env again from the start of the rollout, then set it back.
        now, self._start = env.state_dict(), collector.start
        # All envs are one sample: they step together, so no micro-batch may have some of them.
        self.updates["actor"](TensorDict({"noise": self.noise_of(rollout)[None]}, [1]))
        env.load_state_dict(now)

    @torch.no_grad()
    def noise_of(self, rollout: TensorDict) -> Tensor:
        """Return the standard normal noise [N, T, A] of the actions of a rollout [N, T+1]."""
        steps = flat_transitions(rollout, ["observation", "unsquashed_action"])
        mean = self.policy.action_output(steps, self.policy.actor_features(steps))
        # The inverse of sampling: the update then repeats the collected actions, with gradients.
        noise: Tensor = (steps["unsquashed_action"] - mean) / self._std()
        return noise.view(-1, len(rollout), noise.shape[-1]).transpose(0, 1)

    def actor_loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss -J of N envs, whose `noise` is [1, N, T, A], and scalars to log."""
        assert self.data.collector is not None
        env, noise = self.data.collector.env, minibatch["noise"][0]
        gain = gain_of(env, self._start, self.act, noise, self.gamma, self.end_value)
        per_step = gain.mean() / noise.shape[1]
        return -per_step, {"gain": per_step, "std": self._std().mean()}

    def act(self, observation: Any, noise: Tensor) -> Tensor:
        """Return actions [N, *A], with gradients, for observations [N, ...] and noise [N, A]."""
        policy, distribution = self.policy, cast(Any, self.policy.distribution)
        td = TensorDict({"observation": observation}, noise.shape[:1])
        mean = policy.action_output(td, policy.actor_features(td))
        action: Tensor = distribution.squashed(torch.addcmul(mean, noise, self._std()))
        return action.view(-1, *distribution.shape)

    def end_value(self, observation: Any) -> Tensor | None:
        """Return the value [N] at ends of rollouts and time limits, with gradients; or None."""
        return None

    def _std(self) -> Tensor:
        log_std: Tensor = cast(Any, self.policy.distribution).clamped_log_std()
        return log_std.exp()
