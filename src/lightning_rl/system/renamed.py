"""Refuse hooks of a user's class under names of earlier versions: nothing would read them."""

from typing import Any

from lightning_rl.system.errors import ConfigurationError

RENAMED = {
    "OnPolicyAlgorithm": {"drawn_fields": "prepared_fields"},
    "OffPolicyAlgorithm": {"drawn_fields": "noise_fields", "store": "add_to_replay"},
    "SoftActorCritic": {
        "actor_passes": "actor_forwarded_scalars",
        "fitted_always": "undelayed_objectives",
        "reduce_q": "aggregate_q",
    },
    "Policy": {"replayed": "rollout_for_replay", "replayed_space": "replay_action_space"},
    "VectorEnv": {"keep_info": "record_info", "keeps": "persistent_state"},
    "TorchEnv": {
        "moved": "full_transition",
        "observed": "observation_of",
        "started": "full_initial_state",
        "starts_of": "draw_starts",
    },
    "ManagedEnv": {"refreshed": "with_derived_entries"},
}
"""Hooks by base class: earlier name and present name."""


class RefusesEarlierNames:
    """Base class of classes with hooks: a subclass may not define a hook by its earlier name."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            refuse_earlier_names(cls, cls, base.__name__)


def refuse_earlier_names(owner: Any, cls: type, base: str) -> None:
    """Refuse attributes of a class, or of an instance `owner` of it, that a base class renamed.

    Raises:
        ConfigurationError: naming the class, the hook and its present name.
    """
    for earlier, present in RENAMED.get(base, {}).items():
        if hasattr(owner, earlier):
            raise ConfigurationError(
                f"{cls.__name__} has '{earlier}', which {base} calls '{present}' now, so that "
                f"nothing would read it: rename it in {cls.__module__}."
            )
