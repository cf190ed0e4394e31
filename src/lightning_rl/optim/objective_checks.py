"""Checks of objectives: parameters without training, and scalars without a unique name."""

import sys
from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from lightning_rl.system.errors import ConfigurationError, require

WHOLE = sys.maxsize
"""The `micro_batch_size` of a loss that needs whole minibatches."""


def with_lists(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups whose `params` are lists: a generator can be read only once."""
    return [{**group, "params": _listed(group["params"])} for group in groups]


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def check_owned(name: str, owner: nn.Module, groups: Iterable[dict[str, Any]]) -> None:
    """Refuse parameters that the owner of a loss does not hold.

    Raises:
        ConfigurationError: if the owner does not hold a parameter.
    """
    owned = {id(parameter) for parameter in owner.parameters()}
    strangers = [p for group in groups for p in group["params"] if id(p) not in owned]
    kind = type(owner).__name__
    require(
        not strangers,
        f"The objective{_called(name)} of {kind} has {len(strangers)} parameters that {kind} does "
        "not hold: no checkpoint would contain them, and their gradients would not be cleared or "
        "clipped. Make them attributes of the module: nn.Parameter, nn.Module or nn.ModuleList.",
    )


def check_rates(name: str, groups: Iterable[dict[str, Any]]) -> None:
    """Refuse a learning rate of a parameter group, which the schedule would overwrite.

    Raises:
        ConfigurationError: if a group has `lr`.
    """
    rates = [group["lr"] for group in groups if "lr" in group]
    require(
        not rates,
        f"A parameter group of the objective{_called(name)} sets lr={rates and rates[0]}, which "
        "the schedule of model.learning_rate overwrites. Set lr_scale instead, a factor of "
        "model.learning_rate.",
    )


def check_optimizer(optimizer: Optimizer, rate: float) -> None:
    """Refuse an optimizer that cannot step here, or whose learning rate would be ignored.

    Raises:
        ConfigurationError: for a step that needs a closure or sparse gradients, and a learning rate
            other than `rate` and the default of its class.
    """
    closure = signature(optimizer.step).parameters.get("closure")
    needed = "a closure" if closure and closure.default is closure.empty else ""
    needed = "sparse gradients" if isinstance(optimizer, SparseAdam) else needed
    require(
        not needed,
        f"The optimizer {type(optimizer).__name__} needs {needed} in each step, which an update "
        "does not have: set model.optimizer to another one, such as torch.optim.Adam.",
    )
    parameter = signature(type(optimizer)).parameters.get("lr")
    default, lr = parameter and parameter.default, optimizer.defaults.get("lr")
    # A class without a default needs a value, whichever it is.
    require(
        not isinstance(default, int | float) or lr in (default, rate),
        f"The optimizer {type(optimizer).__name__} sets lr={lr}, which the schedule of "
        f"model.learning_rate ({rate}) overwrites. Set model.learning_rate instead.",
    )


def check_first_backward(
    name: str, owner: nn.Module, parameters: Sequence[nn.Parameter], names: Sequence[str]
) -> bool:
    """Check the first backward pass of a loss; return true.

    Raises:
        ConfigurationError: if no parameter has a gradient, or two scalars have the same name.
    """
    if all(parameter.grad is None for parameter in parameters):
        raise unreached(name, owner, parameters)
    check_names(names)
    return True


def check_names(names: Sequence[str]) -> None:
    """Refuse a loss that returns a scalar with a reserved name.

    Raises:
        ConfigurationError: if a name appears twice.
    """
    twice = {name for name in names if names.count(name) > 1}
    require(
        not twice,
        f"A loss reports {quoted(sorted(twice))}, a name that every objective uses for its own "
        "loss and gradient: choose another name.",
    )


def unreached(
    name: str, owner: nn.Module, parameters: Sequence[nn.Parameter]
) -> ConfigurationError:
    """Return the error for a loss that depends on no parameter of its objective."""
    mine = {id(parameter) for parameter in parameters}
    names = [path for path, p in owner.named_parameters() if id(p) in mine]
    return ConfigurationError(
        f"The loss{f' of {name!r}' if name else ''} does not depend on any of the parameters that "
        f"it should train: {quoted(names)}. The usual causes: detach(), item() or torch.no_grad() "
        "between them and the loss, or the wrong modules in configure_objectives."
    )


def quoted(names: Iterable[str], limit: int = 6) -> str:
    """Return the first `limit` names in quotes, for a message."""
    names = list(names)
    return ", ".join(f"'{name}'" for name in names[:limit]) + ", ..." * (len(names) > limit)


def _called(name: str) -> str:
    return f" '{name}'" if name else ""
