"""Compare weights with a model's, and check their values."""

import warnings
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.sharded import local


class KeyReport(NamedTuple):
    """Differences between the names in a file of weights and a model."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    def __str__(self) -> str:
        kinds = zip(("missing", "unexpected", "of another shape"), self, strict=True)
        return "; ".join(f"{len(k)} {name}: {', '.join(k[:5])}" for name, k in kinds if k)

    def check(self, source: str, strict: bool | None) -> None:
        """Refuse weights that do not fit, or warn; see `fitting`.

        Raises:
            ConfigurationError: unless `strict` is False, if there are differences.
        """
        if not any(self):
            return
        text = f"The weights in {source} do not fit the model: {self}."
        cure = ", or set strict: false" if strict else ""
        # None, unlike False, means that the caller has no setting `strict`.
        require(strict is False, f"{text} Load the model they were saved from{cure}.")
        warnings.warn(f"{text} Missing weights keep random values.", stacklevel=3)


def fitting(
    state: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    source: str,
    strict: bool | None = None,
) -> dict[str, Tensor]:
    """Return the weights whose names and shapes are in a model's state dict `state`.

    Raises:
        ConfigurationError: unless `strict` is False, if names or shapes differ. None stands for a
            caller without this setting.
    """
    report = compared(state, weights)
    report.check(source, strict)
    return {k: v for k, v in weights.items() if k in state and k not in report.mismatched}


def compared(state: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> KeyReport:
    """Compare the names and shapes of weights with a model's state dict `state`."""
    pairs = (state, weights), (weights, state)
    missing, surplus = ([k for k in a if k not in b] for a, b in pairs)
    mismatched = [k for k in state if k in weights and weights[k].shape != state[k].shape]
    return KeyReport(missing, surplus, mismatched)


def check_weights_are_numbers(policy: nn.Module, origin: str = "") -> None:
    """Refuse a policy with NaN in weights or running statistics, or with infinite weights.

    Raises:
        ConfigurationError: with the names of the tensors.
    """
    # A policy with NaN still acts: a NaN becomes a bound of the action space, or the first choice.
    parameters = policy.named_parameters()
    broken = [name for name, p in parameters if not local(p).isfinite().all()]
    # A buffer may be infinite on purpose, such as a mask.
    broken += [name for name, buffer in policy.named_buffers() if buffer.isnan().any()]
    if broken:
        names = f"{', '.join(broken[:4])}{', ...' if len(broken) > 4 else ''}"
        raise ConfigurationError(
            f"The weights of {type(policy).__name__}{f' of {origin}' if origin else ''} are not "
            f"all finite numbers: {names} ({len(broken)} tensors). Training has diverged, or the "
            "file is damaged. Use an earlier checkpoint."
        )
