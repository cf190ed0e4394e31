"""Check the hooks that a user's class defines, where the class is defined."""

from inspect import signature, unwrap
from types import CodeType, FunctionType
from typing import Any

from lightning_rl.system.errors import require
from lightning_rl.system.renamed import refuse_earlier_names

NEEDS_SUPER = {
    "Algorithm": "setup configure_model on_fit_start on_train_start on_train_end "
    "on_train_batch_start on_save_checkpoint on_load_checkpoint on_validation_epoch_end "
    "on_test_epoch_end",
    "RLDataModule": "setup state_dict load_state_dict teardown on_exception",
}
"""Hooks of Lightning, by base class: an override must call the base class.

Most hooks of Lightning are empty, so that users omit the call.
"""

REPLACED_WITH = {"on_validation_epoch_end": "validation_step", "on_test_epoch_end": "test_step"}
"""Hooks that summarize a step: a class that replaces the step may omit `super` in them."""


UNUSED = {
    "Algorithm": {
        "configure_optimizers": "set optimizer, learning_rate and lr_schedule, and give each loss "
        "its own in configure_objectives; other schedules come from schedule_from",
        "lr_scheduler_step": "set lr_schedule, or override schedule_from",
        "configure_gradient_clipping": "set max_grad_norm",
        "optimizer_step": "override on_before_optimizer_step, or set optimizer",
        "optimizer_zero_grad": "override on_before_backward",
        "on_before_zero_grad": "override on_before_backward",
    },
}
"""Hooks of Lightning by base class that would have no effect in a subclass, and their cures."""


class ChecksHooks:
    """Base class of classes with hooks: a subclass may not define hooks that go wrong in silence.

    Hooks of `RENAMED`, `UNUSED`, and of `NEEDS_SUPER` without a call of the base class.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for place, base in enumerate(cls.__mro__):
            refuse_earlier_names(cls, cls, base.__name__)
            # Also mixins, which come before the base class.
            for owner in cls.__mro__[:place]:
                _refuse_unused(owner, UNUSED.get(base.__name__, {}))
                for hook in NEEDS_SUPER.get(base.__name__, "").split():
                    step = REPLACED_WITH.get(hook)
                    if step is None or getattr(cls, step) is getattr(base, step):
                        _require_super(owner, base, hook)


def _refuse_unused(owner: type, unused: dict[str, str]) -> None:
    for hook, cure in unused.items():
        require(
            hook not in vars(owner),
            f"{owner.__name__}.{hook} would have no effect, because a training step takes its "
            f"optimizer steps itself: {cure}.",
        )


def _require_super(owner: type, base: type, hook: str) -> None:
    arguments = ", ".join([*signature(getattr(base, hook)).parameters][1:])
    require(
        _may_call(vars(owner).get(hook), hook),
        f"{owner.__name__}.{hook} replaces {base.__name__}.{hook}, which has work to do: call "
        f"super().{hook}({arguments}) in it.",
    )


def _may_call(method: Any, name: str) -> bool:
    """Return whether a method may call a method of another class; false only if it cannot."""
    function = unwrap(method)
    if not isinstance(function, FunctionType):
        return True
    # A closure may call what its variables hold, such as the method that it decorates.
    variables = set(function.__code__.co_freevars) - {"__class__"}
    return bool(variables) or name in _names_in(function.__code__)


def _names_in(code: CodeType) -> set[str]:
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))
