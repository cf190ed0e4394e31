"""Compare what was exported with the policy in torch, on observations that are drawn."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch

from lightning_rl.deploy.acting import TrainedPolicy
from lightning_rl.deploy.export.graph import (
    ACTION,
    NEXT_STATE,
    OBSERVATION,
    STATE,
    Port,
    Ports,
    why_not_traced,
)
from lightning_rl.policies import Policy
from lightning_rl.policies.normalization import ObservationNormalizer

Arrays = dict[str, np.ndarray]
"""[N, ...] each, by the names of inputs or outputs."""

Acts = Callable[[Any], Any]
"""Gives the action of an observation of N envs, as arrays; it keeps its state itself."""

STEPS = 20
"""So many observations follow each other, by which a state is handed on."""

ROWS = (1, 49)
"""In batches of these sizes: 1,000 observations in all."""

TOLERANCE = 1e-5
"""How far an action may be off, in units of half the distance of its bounds, or of 1."""

TOLERANCE_WITH_MEMORY = 5e-5
"""The same of a policy that remembers. It hands rounding on from step to step: 2e-6 after the first
of `STEPS`, and up to 1.3e-5 later, of a GRU that nothing is wrong with (by AVX-512's kernels)."""

DIFFERING_CHOICES = 1e-3
"""Share of the choices that may differ: where two are as good to the last digit."""


def parity(policy: Policy, make: Callable[[], Acts], *, seed: int = 0) -> dict[str, Any]:
    """Return how far an exported policy is from `load_policy`'s, both acting by the mode.

    Args:
        policy: in torch. Where it cannot be traced, it is one that takes its time, and one
            observation has to do.
        make: returns what acts by the export, from the beginning of episodes.
        seed: of the observations.

    Returns:
        `observations`, how many; and of each part of an action `largest_difference`,
        `in_units_of` and `equal`, the share of entries that are the same bit for bit; `passed`.
    """
    steps, batches = (STEPS, ROWS) if why_not_traced(policy) is None else (1, (1,))
    space = policy.acting_space
    generator = np.random.default_rng(seed)
    normalizer = getattr(policy, "normalizer", None)
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for rows in batches:
        reference, exported = TrainedPolicy(policy), make()
        for _ in range(steps):
            observation = drawn(space, rows, generator, normalizer)
            ours, theirs = (flat(act(observation)) for act in (reference.act, exported))
            for name in ours:
                parts.setdefault(name, []).append((ours[name], theirs[name]))
    limits = _half_ranges(TrainedPolicy(policy).action_space, ACTION)
    tolerance = TOLERANCE_WITH_MEMORY if policy.remembers else TOLERANCE
    compared = {name: _compared(pairs, limits[name], tolerance) for name, pairs in parts.items()}
    return {
        "observations": steps * sum(batches),
        "seed": seed,
        "batches": list(batches),
        "steps": steps,
        "tolerance": tolerance,
        "differing_choices_allowed": DIFFERING_CHOICES,
        "actions": compared,
        "passed": all(one["passed"] for one in compared.values()),
    }


def flat(tree: Any, name: str = ACTION) -> Arrays:
    """Return a tree of arrays by the names of ports: `action`, `action.gripper`."""
    if isinstance(tree, Mapping | tuple):
        pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        found: Arrays = {}
        for key, child in pairs:
            found |= flat(child, f"{name}.{key}")
        return found
    return {name: np.asarray(tree)}


def drawn(
    space: gymnasium.Space[Any],
    rows: int,
    generator: np.random.Generator,
    normalizer: ObservationNormalizer | None = None,
) -> Any:
    """Draw observations [N, ...]: uniformly within bounds, else as the policy has seen them.

    Args:
        space: of one.
        rows: N.
        generator: of the draw.
        normalizer: knows mean and deviation of flat observations.
    """
    moments = None
    if normalizer is not None:
        moments = [one.detach().cpu().numpy() for one in (normalizer.mean, normalizer.var.sqrt())]
    return _drawn(space, rows, generator, moments, [0], "")


def _drawn(
    space: gymnasium.Space[Any],
    rows: int,
    generator: np.random.Generator,
    moments: list[np.ndarray] | None,
    offset: list[int],
    key: str,
) -> Any:
    if isinstance(space, gymnasium.spaces.Dict):
        # In the order in which keys are laid out flat.
        return {
            name: _drawn(space[name], rows, generator, moments, offset, name)
            for name in sorted(space.keys())
        }
    shape = (rows, *(space.shape or ()))
    if key == "action_mask":
        mask = generator.integers(2, size=shape)
        return np.maximum(mask, mask.max(-1, keepdims=True) == 0).astype(space.dtype)
    if not isinstance(space, gymnasium.spaces.Box):
        return np.stack([_sample(space, generator) for _ in range(rows)])
    normal = generator.standard_normal(shape)
    size = int(np.prod(shape[1:]))
    if moments is not None:
        mean, std = (one[offset[0] : offset[0] + size].reshape(shape[1:]) for one in moments)
        offset[0] += size
        return (mean + 2.0 * std * normal).clip(space.low, space.high).astype(space.dtype)
    if np.issubdtype(space.dtype, np.integer):
        return generator.integers(space.low, space.high, shape, space.dtype, endpoint=True)
    near = np.abs(np.stack([space.low, space.high])).max() < 1e3
    if near:
        return generator.uniform(space.low, space.high, shape).astype(space.dtype)
    return (2.0 * normal).clip(space.low, space.high).astype(space.dtype)


def _sample(space: gymnasium.Space[Any], generator: np.random.Generator) -> Any:
    space.seed(int(generator.integers(2**31)))
    return space.sample()


def _half_ranges(space: gymnasium.Space[Any], name: str) -> dict[str, np.ndarray | None]:
    """Return in what units the entries of an action's parts differ; None of choices."""
    if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        pairs = space.items() if isinstance(space, gymnasium.spaces.Dict) else enumerate(space)
        found: dict[str, np.ndarray | None] = {}
        for key, child in pairs:
            found |= _half_ranges(child, f"{name}.{key}")
        return found
    if not isinstance(space, gymnasium.spaces.Box):
        return {name: None}
    with np.errstate(over="ignore", invalid="ignore"):
        half = (space.high.astype(np.float64) - space.low.astype(np.float64)) / 2
    return {name: np.where(half < 1e6, np.maximum(half, 1.0), 1.0)}


def _compared(
    pairs: list[tuple[np.ndarray, np.ndarray]], unit: np.ndarray | None, tolerance: float
) -> dict[str, Any]:
    ours, theirs = (np.concatenate(side) for side in zip(*pairs, strict=True))
    same = float((ours == theirs).mean())
    if unit is None:
        return {"equal": same, "passed": 1.0 - same <= DIFFERING_CHOICES}
    difference = np.abs(ours.astype(np.float64) - theirs) / unit
    largest = float(difference.max())
    return {
        "largest_difference": largest,
        "in_units_of": float(unit.max()),
        "equal": same,
        "passed": largest <= tolerance,
    }


def graph_acts(ports: Ports, run: Callable[[Arrays], Arrays]) -> Callable[[], Acts]:
    """Return what makes a function of observations of one that runs an exported graph.

    Args:
        ports: of it, say how inputs and outputs are called.
        run: gives outputs for inputs.
    """
    dtypes = {port.name: port_array(port, 0).dtype for port in ports.inputs}
    states = [port for port in ports.inputs if port.name == STATE]

    def make() -> Acts:
        state: Arrays = {}

        def act(observation: Any) -> Any:
            leaves = flat(observation, OBSERVATION)
            inputs = {name: one.astype(dtypes[name]) for name, one in leaves.items()}
            rows = len(next(iter(inputs.values())))
            for port in states:
                inputs[STATE] = state.get(STATE, port_array(port, rows))
            outputs = run(inputs)
            if states:
                state[STATE] = outputs.pop(NEXT_STATE)
            return _tree(outputs)

        return act

    return make


def _tree(outputs: Arrays) -> Any:
    """Return outputs as an action that `flat` takes apart again into the same names."""
    return (
        outputs[ACTION]
        if ACTION in outputs
        else {name.removeprefix(f"{ACTION}."): one for name, one in outputs.items()}
    )


def port_array(port: Port, rows: int) -> np.ndarray:
    """Return zeros [N, ...] as an input takes them."""
    zeros: np.ndarray = torch.zeros((rows, *port.shape), dtype=port.dtype).numpy()
    return zeros
