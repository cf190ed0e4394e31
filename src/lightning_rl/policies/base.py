"""Say what a policy is: the module that acts, values and re-evaluates, by TensorDict."""

from abc import ABC, abstractmethod
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.construction import Constructed
from lightning_rl.errors import ConfigurationError
from lightning_rl.policies.acting import RolloutActor, StepwiseActor
from lightning_rl.rollout import FieldSpec


class Policy(nn.Module, ABC, Constructed):
    """A policy over batched observations.

    Subclass it and pass `class_path: my_module.MyPolicy` in the config.

    The first two arguments of a subclass's constructor are `observation_space` and `action_space`,
    of one env; the command line fills them in. A policy acts and is evaluated in eval mode, so that
    a dropout layer cannot make the log-prob of the update differ from that of the rollout. It holds
    no recurrent or chunk state: such state is data.

    Attributes:
        observation_space, action_space: of one env.
        version: int64 buffer, the number of updates behind these weights. Written by the learner
            alone; it travels with the weights into checkpoints and copies.
        has_critic: whether `value` means anything; an algorithm that needs it refuses others.
        joint_ratio: where `sample_log_prob` is that of the parts of an action, [N, L], whether the
            update takes the ratio of the whole action instead of one per part.
        autocast_dtype: in which its network computes when it acts, under `trainer.precision:
            bf16-mixed`; None for that of its weights. Log-probs, entropies and values are float32
            in any case.
        micro_batch_size: samples that go through the network at once when it is trained or
            evaluated; the gradients of a minibatch add up. None for as many as are fast.
        critic_modules: names of the modules that `value` alone depends on. `trainer.init_from` may
            leave these out, or begin them anew; all others are what the policy does.
        training_settings: names of attributes that say how the policy is trained, not what it does:
            they may differ from those of a checkpoint, and nothing is said of it.
    """

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    version: Tensor
    has_critic: bool = True
    joint_ratio: bool = False
    autocast_dtype: torch.dtype | None = None
    micro_batch_size: int | None = None
    critic_modules: tuple[str, ...] = ("critic", "value_head")
    training_settings: tuple[str, ...] = ()

    def __init__(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
    ) -> None:
        super().__init__()
        self.observation_space = observation_space
        self.action_space = action_space
        self.register_buffer("version", torch.zeros((), dtype=torch.int64))

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        """What `forward` stores beside `action` and `sample_log_prob`.

        `evaluate_actions` needs it to recompute the log-prob.
        """
        return {}

    @abstractmethod
    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> TensorDict:
        """Act.

        Write `action` [N, *A] and `sample_log_prob` [N] (and `extra_fields`) into `td`, and return
        it. A log-prob in parts, [N, L], is one that `extra_fields` gives its shape.

        Args:
            td: batch shape [N], with `observation`. What is returned counts, in it or in another;
                of the fields' dtypes and shapes, or the run ends and says which.
            deterministic: take the mode of the distribution instead of a sample.
            generator: draws the sample, on the device of the observation; None takes torch's global
                one.
        """

    @abstractmethod
    def get_value(self, td: TensorDict) -> TensorDict:
        """Write `value` [B] of `observation` into `td`, and return it."""

    @abstractmethod
    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        """Re-evaluate stored actions, with gradients.

        Returns a new TensorDict [B] with `sample_log_prob`, `entropy` and `value`.

        Args:
            td: batch shape [B], with `observation`, `action` and `extra_fields`.
        """

    @torch.no_grad()
    def get_action(
        self, td: TensorDict, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> TensorDict:
        """Act without gradients; see `forward`."""
        return self(td, deterministic=deterministic, generator=generator)  # type: ignore[no-any-return]  # nn.Module

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return what is trained, in groups as an optimizer takes them.

        A group may have `lr_scale`: what the learning rate is multiplied by for it.
        """
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        """Return `extra_fields` as they would be had the policy chosen the actions [B, *A].

        For learning from demonstrations.
        """
        if set(self.extra_fields) <= {"sample_log_prob"}:
            return {}
        raise ConfigurationError(
            f"{type(self).__name__} cannot learn from demonstrations: it stores "
            f"{', '.join(self.extra_fields)} with an action, and has no fields_of(action) that "
            "derives them from one."
        )

    def compute_in(self, precision: str) -> None:
        """Take up a `trainer.precision` for acting, in policies inside this one as well."""
        for module in self.modules():
            if isinstance(module, Policy):
                module.autocast_dtype = torch.bfloat16 if precision == "bf16-mixed" else None

    def put_in_eval_mode(self) -> None:
        """Do what `eval` does, which sets every module anew whatever mode it is in."""
        if any(module.training for module in self.modules()):
            self.eval()

    def rollout_actor(self, rollout: TensorDict) -> RolloutActor:
        """Return what acts with this policy on the storage of a rollout [N, T+1].

        Called once by the collector. A policy with a faster way than a call per step gives it.
        """
        return StepwiseActor(self, rollout)

    def update_normalization(self, rollout: TensorDict) -> None:
        """Move the running statistics of the inputs, if there are any.

        By a rollout [N, T+1] that has been trained on.

        Called once per update, after it: the statistics under which a rollout was collected hold
            until it is used up,
        and the first ratio of an update stays 1.
        """
