"""Check the values of weights."""

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.sharded import local


def check_weights_are_numbers(policy: nn.Module, origin: str = "") -> None:
    """Refuse a policy with NaN in weights or running statistics, or with infinite or no weights.

    Raises:
        ConfigurationError: with the names of the tensors.
    """
    lazy = [name for name, p in policy.named_parameters() if is_lazy(p)]
    require(
        not lazy,
        f"{type(policy).__name__} has layers whose sizes are unknown before the first call: "
        f"{', '.join(lazy[:4])}. Replace lazy layers, such as nn.LazyLinear by nn.Linear.",
    )
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
