"""Refuse classes that define hooks by names of earlier versions: nothing would call them."""

from typing import Any

from lightning_rl.system.errors import ConfigurationError

RENAMED = {
    "Algorithm": {"learn_by": "attach_learner"},
    "OnPolicyAlgorithm": {"drawn_fields": "prepared_fields"},
    "OffPolicyAlgorithm": {"drawn_fields": "noise_fields", "store": "add_to_replay"},
    "QAlgorithm": {"scaled": "normalized_reward"},
    "SoftActorCritic": {
        "actor_passes": "actor_forwarded_scalars",
        "fitted_always": "undelayed_objectives",
        "reduce_q": "aggregate_q",
    },
    "Policy": {
        "compute_in": "set_precision",
        "replayed": "rollout_for_replay",
        "replayed_space": "replay_action_space",
    },
}
"""Hooks by base class: earlier name and present name."""


class RefusesEarlierNames:
    """Base class of classes with hooks: a subclass may not define a hook by its earlier name."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_earlier_names(cls, cls)


def refuse_earlier_names(cls: type, owner: Any) -> None:
    """Refuse earlier names among the attributes of a class or of an instance of it, `owner`.

    Raises:
        ConfigurationError: naming the class, the hook and its present name.
    """
    for base in cls.__mro__:
        for earlier, present in RENAMED.get(base.__name__, {}).items():
            if hasattr(owner, earlier):
                raise ConfigurationError(
                    f"{cls.__name__} has '{earlier}', which {base.__name__} calls '{present}' "
                    f"since version 0.1: nothing would read it. Rename it in {cls.__module__}."
                )
