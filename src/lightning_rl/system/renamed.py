"""Refuse hooks of a user's class under names of earlier versions: nothing would read them."""

from typing import Any

from lightning_rl.system.errors import require

RENAMED = {
    "OnPolicyAlgorithm": "drawn_fields:prepared_fields",
    "OffPolicyAlgorithm": "drawn_fields:noise_fields store:add_to_replay",
    "QAlgorithm": "scaled:normalized_reward",
    "SoftActorCritic": "actor_passes:actor_forwarded_scalars fitted_always:undelayed_objectives "
    "reduce_q:aggregate_q",
    "DatasetActorCritic": "value_here:state_value value_there:next_state_value",
    "Policy": "replayed:rollout_for_replay replayed_space:replay_action_space",
    "VectorEnv": "keep_info:record_info keeps:persistent_state",
    "TorchEnv": "moved:full_transition observed:observation_of started:full_initial_state "
    "starts_of:draw_starts",
    "ManagedEnv": "refreshed:with_derived_entries",
    "ActionTerm": "bounded:clipped_action scaled:scaled_action",
}
"""Hooks by base class: earlier name and present name."""


def refuse_earlier_names(owner: Any, cls: type, base: str) -> None:
    """Refuse attributes of a class, or of an instance `owner` of it, that a base class renamed.

    Raises:
        ConfigurationError: naming the class, the hook and its present name.
    """
    for names in RENAMED.get(base, "").split():
        earlier, present = names.split(":")
        require(
            not hasattr(owner, earlier),
            f"{cls.__name__} has '{earlier}', which {base} calls '{present}' now, so that nothing "
            f"would read it: rename it in {cls.__module__}.",
        )
