"""Base class of policies around another policy."""

from abc import abstractmethod
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.policies.actors import RolloutActor, StepwiseActor
from lightning_rl.policies.base import RNG, Policy
from lightning_rl.system.delegation import delegated


def _of_inner(name: str) -> Any:

    def read(wrapper: "PolicyWrapper") -> Any:
        return getattr(wrapper.inner, name)

    def write(wrapper: "PolicyWrapper", value: Any) -> None:
        setattr(wrapper.inner, name, value)

    return property(read, write)


class PolicyWrapper(Policy):
    """A policy that forwards all members to an inner policy, unless a subclass overrides them.

    The constructor of a subclass takes the spaces first and creates the inner policy. A subclass
    with its own parameters adds their groups to `parameter_groups`.
    """

    # A test compares these members with `Policy`, because a missing member falls back to a default.
    version = _of_inner("version")
    has_critic = _of_inner("has_critic")
    critic_is_optional = _of_inner("critic_is_optional")
    has_entropy = _of_inner("has_entropy")
    evaluates_sequences = _of_inner("evaluates_sequences")
    is_recurrent = _of_inner("is_recurrent")
    joint_ratio = _of_inner("joint_ratio")
    state_is_plan = _of_inner("state_is_plan")
    takes_guidance = _of_inner("takes_guidance")
    counts_executed = _of_inner("counts_executed")
    ignore_keys = _of_inner("ignore_keys")
    masks_actions = _of_inner("masks_actions")
    autocast_dtype = _of_inner("autocast_dtype")
    blocks = _of_inner("blocks")
    sharding = _of_inner("sharding")
    micro_batch_size = _of_inner("micro_batch_size")
    observation_space = _of_inner("observation_space")
    action_space = _of_inner("action_space")
    acting_space = _of_inner("acting_space")
    replay_action_space = _of_inner("replay_action_space")
    extra_fields = _of_inner("extra_fields")
    draw_noise = delegated(Policy.draw_noise, "inner")
    first_state = delegated(Policy.first_state, "inner")
    get_value = delegated(Policy.get_value, "inner")
    evaluate_actions = delegated(Policy.evaluate_actions, "inner")
    draw_clone_noise = delegated(Policy.draw_clone_noise, "inner")
    clone_loss = delegated(Policy.clone_loss, "inner")
    parameter_groups = delegated(Policy.parameter_groups, "inner")
    adapt_state_dict = delegated(Policy.adapt_state_dict, "inner")
    fields_of = delegated(Policy.fields_of, "inner")
    rollout_for_replay = delegated(Policy.rollout_for_replay, "inner")
    set_precision = delegated(Policy.set_precision, "inner")
    update_normalization = delegated(Policy.update_normalization, "inner")

    @abstractmethod
    def __init__(self, inner: Policy) -> None:
        # Skip Policy's constructor: its attributes belong to the inner policy.
        nn.Module.__init__(self)
        self.inner = inner

    @property
    def critic_modules(self) -> tuple[str, ...]:  # type: ignore[override]  # derived, so read-only
        return tuple(f"inner.{name}" for name in self.inner.critic_modules)

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        return self.inner(td, deterministic=deterministic, generator=generator)  # type: ignore[no-any-return]  # nn.Module

    def rollout_actor(self, rollout: TensorDict) -> RolloutActor:
        # Do not use the inner policy's actor, which would skip a subclass's own `forward`.
        if type(self).forward is PolicyWrapper.forward:
            return self.inner.rollout_actor(rollout)
        return StepwiseActor(self, rollout)

    def acting_state(self) -> dict[str, Tensor]:
        entries = super().acting_state().items()
        inner = {f"inner.{name}": value for name, value in self.inner.acting_state().items()}
        return {name: value for name, value in entries if not name.startswith("inner.")} | inner

    def put_in_eval_mode(self) -> None:
        self.inner.put_in_eval_mode()
        super().put_in_eval_mode()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        version = self.version
        destination[f"{prefix}version"] = version if keep_vars else version.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Use the outer version: in old state dicts the inner version may be 0.
        if f"{prefix}version" in state_dict:
            state_dict[f"{prefix}inner.version"] = state_dict.pop(f"{prefix}version")
        super()._load_from_state_dict(state_dict, prefix, *args)
