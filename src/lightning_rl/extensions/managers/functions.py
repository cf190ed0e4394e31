"""Terms with short names in configs."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import closest, require
from lightning_rl.extensions.managers.view import EnvView, names_of

Bound = float | list[float] | dict[str, float]
"""One number, one for each in order, or some by name."""


def is_success(env: EnvView) -> Tensor:
    """Return 1 at a success, [M]."""
    return env.success.float()


def is_failure(env: EnvView) -> Tensor:
    """Return 1 at a failure, [M]."""
    return env.fail.float()


def is_terminated(env: EnvView) -> Tensor:
    """Return 1 if the episode is terminated, [M]."""
    return env.terminated.float()


def constant(env: EnvView) -> Tensor:
    """Return 1 for every step, [M]."""
    return torch.ones_like(env.episode, dtype=torch.float32)


def action_size(env: EnvView) -> Tensor:
    """Return the sum of the squared numbers of the action, [M]."""
    return env.action.square().sum(1)


def entry(env: EnvView, name: str) -> Tensor:
    """Return an entry of the state, [M, ...].

    Raises:
        ConfigurationError: the state has no such entry.
    """
    try:
        value: Tensor = env.state[name]
    except KeyError:
        # Names with a slash are memories of terms: do not offer them.
        names = [key for key in names_of(env.state) if "/" not in key]
        names += list(env.env.parameters())
        raise ConfigurationError(
            f"{type(env.env).__name__} has no state entry '{name}'; it has {', '.join(names)}"
            f"{closest(name, names)}."
        ) from None
    return value


def measurement(env: EnvView, name: str) -> Tensor:
    """Return a quantity of the task, [M, ...]; see `ManagedEnv.measure`.

    Raises:
        ConfigurationError: the task has no such quantity.
    """
    try:
        return env.measurements[name]
    except KeyError:
        raise ConfigurationError(
            f"{type(env.env).__name__} measures no '{name}'; it measures "
            f"{', '.join(env.measurements) or 'nothing'}{closest(name, env.measurements)}."
        ) from None


def task_observation(env: EnvView) -> Tensor:
    """Return the task's own observation, [M, ...]."""
    observation: Tensor = env.env.observe(env.state)
    return observation


def out_of_range(
    env: EnvView, name: str, low: float = -torch.inf, high: float = torch.inf
) -> Tensor:
    """Return whether a number of an entry of the state lies outside [low, high], [M] bool."""
    value = entry(env, name).reshape(env.num_envs, -1)
    return ((value < low) | (value > high)).any(1)


def randomize(
    env: EnvView,
    name: str,
    low: Bound,
    high: Bound,
    operation: Literal["set", "add", "scale"] = "set",
    shared: bool = False,
) -> dict[str, Tensor]:
    """Set, shift or scale an entry of the state or a physical parameter by uniform numbers.

    What depends on a parameter changes with it, such as a body's inertia with its mass.

    Args:
        env: the view.
        name: name of the entry or of the parameter; of a MuJoCo model also `mass` [bodies],
            `stiffness` and `damping` [actuators] of servos.
        low: least number, of the whole entry, or {name: number} of bodies, joints or actuators;
            the others do not change. Or a list, in the order of the entry's numbers.
        high: greatest number.
        operation: `set`, `add` or `scale`.
        shared: use one random number for all numbers of an entry.

    Raises:
        ConfigurationError: the bounds name other parts, or have another number of numbers.
    """
    nominal = env.nominal(name)
    # Start from the nominal value of a parameter, so that repeated events do not add up.
    value = entry(env, name) if nominal is None else nominal.expand(env.num_envs, *nominal.shape)
    flat = value.reshape(env.num_envs, -1)
    size = flat.shape[1]
    bounds = _bounds(low, high, env.number_names(name, size), size, name)
    lowest, highest = (torch.as_tensor(bound, device=env.device) for bound in bounds)
    numbers = lowest + env.uniform(1 if shared else size) * (highest - lowest)
    if operation == "add":
        numbers = flat + numbers
    elif operation == "scale":
        numbers = flat * numbers
    # Parts without a bound keep their numbers; a shared number changes the whole entry.
    numbers = torch.where(numbers.isnan(), flat, numbers)
    return env.entries_for(name, numbers.reshape(value.shape).to(value.dtype))


def _bounds(low: Bound, high: Bound, names: list[str], size: int, entry: str) -> list[Any]:
    """Return each bound of `randomize` as one number or `size`, NaN for parts without a bound."""
    bounds, parts = (low, high), ", ".join(dict.fromkeys(names)) or "none, as they have no names"
    names_of_bounds = [bound.keys() for bound in bounds if isinstance(bound, Mapping)]
    require(
        all(keys == names_of_bounds[0] and keys <= {*names} for keys in names_of_bounds)
        and all(len(bound) == size for bound in bounds if isinstance(bound, list)),
        f"randomize {entry}: low and high are one number, a list of {size}, or {{name: number}} "
        f"with the same names out of {parts}; got {low} and {high}.",
    )
    if any(isinstance(bound, list) for bound in bounds) and len({*names}) > 1:
        rank_zero_warn(
            f"randomize {entry}: the lists {low} and {high} are read in the order {parts}, which "
            "another model may change: give {name: number}."
        )
    return [
        [bound.get(name, math.nan) for name in names] if isinstance(bound, Mapping) else bound
        for bound in bounds
    ]


def by_success(
    env: EnvView,
    level: Tensor,
    up: float = 0.1,
    down: float = 0.1,
    minimum: float = 0.0,
    maximum: float = 1.0,
) -> Tensor:
    """Return the level [M], higher after a success, otherwise lower."""
    return torch.where(env.success, level + up, level - down).clamp(minimum, maximum)


def over_steps(env: EnvView, level: Tensor, steps: float, maximum: float = 1.0) -> Tensor:
    """Return the level [M], which rises from 0 to `maximum` within a number of steps."""
    # The level counts at the end of an episode, when `elapsed` are all its steps.
    return (level + env.elapsed * (maximum / steps)).clamp(max=maximum)


class ByMean:
    """Return the level [M], promoted or demoted by the mean of a quantity over the episode.

    Args:
        name: a quantity of the task; see `measurement`.
        promote: mean from which the level rises: at least this, or at most if it is below `demote`.
        demote: mean from which the level falls.
        up, down, minimum, maximum: as in `by_success`.

    Raises:
        ConfigurationError: `promote` equals `demote`.
    """

    def __init__(
        self,
        name: str,
        promote: float,
        demote: float,
        up: float = 0.1,
        down: float = 0.1,
        minimum: float = 0.0,
        maximum: float = 1.0,
    ) -> None:
        require(promote != demote, f"ByMean: promote and demote must differ, got {promote}.")
        self._name, self._limits = name, (promote, demote)
        self._steps, self._range = (up, down), (minimum, maximum)

    def start(self, env: EnvView) -> dict[str, Tensor]:
        """Return an empty sum and its number of steps, [M] each."""
        zeros = torch.zeros(env.num_envs, device=env.device)
        # Steps are counted here, because `elapsed` of a first episode may begin at another number.
        return {"sum": zeros, "steps": zeros}

    def __call__(
        self, env: EnvView, memory: dict[str, Tensor], level: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the next level [M] of a level [M], and the memory."""
        total = memory["sum"] + measurement(env, self._name)
        steps = memory["steps"] + 1
        (promote, demote), (up, down), mean = self._limits, self._steps, total / steps
        sign = 1.0 if promote > demote else -1.0
        change = up * (sign * mean >= sign * promote) - down * (sign * mean <= sign * demote)
        return (level + change).clamp(*self._range), {"sum": total, "steps": steps}


SHIPPED = tuple(
    function.__name__
    for function in (
        *(action_size, by_success, constant, entry, is_failure, is_success, is_terminated),
        *(measurement, out_of_range, over_steps, randomize, task_observation, ByMean),
    )
)
"""Names of the terms."""
