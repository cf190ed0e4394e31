"""Compare an export with the policy in torch, on drawn observations."""

from collections.abc import Callable
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import batch_space

from lightning_rl import Policy
from lightning_rl.extend.checkpoints import TrainedPolicy
from lightning_rl.extend.rollout import leaves_by_path, leaves_of_tree
from lightning_rl.extend.spaces import MASK, choices_of
from lightning_rl.extensions.export.graph import (
    ACTION,
    NEXT_STATE,
    OBSERVATION,
    STATE,
    Port,
    Ports,
    is_large,
    ports_of,
    why_not_traced,
)
from lightning_rl.extensions.vla.policy import ChunkPolicy

Arrays = dict[str, np.ndarray]
"""Arrays [N, ...] by the names of inputs or outputs."""

Acts = Callable[[Any], Arrays]
"""Maps an observation of N envs to the parts of the action, and keeps its own state."""

STEPS = 20
"""Number of consecutive observations, over which a memory carries its state."""

ROWS = (1, 49)
"""Batch sizes: 1,000 observations in all."""

Dtype = Literal["float32", "float16"]
"""Types of numbers of the weights in an ONNX file."""

TOLERANCES = {"float32": 1e-5, "float16": 1e-2}
"""Allowed difference of an action, in units of half the distance of its bounds, or of 1."""

TOLERANCE_WITH_MEMORY = 5e-5
"""The tolerance for a policy with a memory, which accumulates rounding errors.

A correct GRU differs by 2e-6 after the first step, and by up to 1.3e-5 later (AVX-512 kernels).
"""

DIFFERING_CHOICES = 1e-3
"""Allowed share of different choices, because two choices may have almost equal values."""


def parity(
    policy: Policy,
    make: Callable[[], Acts],
    dtype: Dtype = "float32",
    batches: tuple[int, tuple[int, ...]] | None = None,
) -> dict[str, Any]:
    """Compare an exported policy with the policy of `load_policy`; both act by the mode.

    Return `observations` (their number), `tolerance`, `passed`, and in `actions` for each part of
    the action `largest_difference`, `equal` (share of bit-equal entries) and `passed`.

    Args:
        policy: the policy in torch. A large model is compared on 1 observation.
        make: returns the exported policy at the start of episodes.
        dtype: of the weights in the export.
        batches: number of batches of each size, and the sizes.
    """
    large = is_large(policy) or why_not_traced(policy)
    steps, sizes = batches or ((1, (1,)) if large else (STEPS, ROWS))
    # A fixed seed: whether an export passes must not depend on luck.
    generator = np.random.default_rng(0)
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for rows in sizes:
        # Both start their episodes here, so a memory begins at zero.
        reference, exported = TrainedPolicy(policy), make()
        for _ in range(steps):
            observation = drawn(policy, rows, generator)
            expected, actual = flat(reference.act(observation)), exported(observation)
            for name in expected:
                parts.setdefault(name, []).append((expected[name], actual[name]))
    spaces = {port.name: port.space for port in ports_of(policy).outputs}
    tolerance = TOLERANCES[dtype]
    if policy.is_recurrent:
        tolerance = max(tolerance, TOLERANCE_WITH_MEMORY)
    scale: Any = 1.0
    if isinstance(policy, ChunkPolicy):  # a policy of others may call a layer `head`, too
        scale = policy.head.scale.numpy().reshape(policy.head.shape)
    actions = {
        name: _compared(pairs, spaces[name], tolerance, scale) for name, pairs in parts.items()
    }
    return {
        "observations": steps * sum(sizes),
        "tolerance": tolerance,
        "actions": actions,
        "passed": all(part["passed"] for part in actions.values()),
    }


def flat(tree: Any, name: str = ACTION) -> dict[str, Any]:
    """Return the arrays of a Dict or Tuple by the names of ports: `action`, `action.gripper`."""
    return {path: np.asarray(leaf) for path, leaf in leaves_of_tree(name, tree)}


def drawn(policy: Policy, rows: int, generator: np.random.Generator) -> Any:
    """Draw an observation [N, ...]: by the normaliser's moments, else by Gymnasium's sampler."""
    space = batch_space(policy.acting_space, rows)
    space.seed(int(generator.integers(2**31)))
    observation = space.sample()
    arrays = flat(observation, OBSERVATION)
    normalizer, keys = (getattr(policy, name, None) for name in ("normalizer", "actor_keys"))
    start = 0
    # Use the normaliser's order: by key, level by level.
    for path, leaf in sorted(leaves_by_path(policy.acting_space).items()):
        array = arrays[".".join((OBSERVATION, *path))]
        # It has moments of all that the actor reads, also of bits and of a mask.
        is_read = keys is None or not path or path[0] in keys
        place = slice(start, start := start + array[0].size * is_read)
        if path == (MASK,) and policy.masks_actions:
            ends = np.cumsum(choices_of(policy.action_space))
            for part in np.split(array, ends[:-1], -1):  # each choice needs an allowed category
                np.maximum(part, part.max(-1, keepdims=True) == 0, out=part, casting="unsafe")
        elif isinstance(leaf, gymnasium.spaces.Box):
            mean, std = np.zeros(()), np.ones(())
            if normalizer is not None and is_read:
                moments = normalizer.mean[place], normalizer.var[place].sqrt()
                mean, std = (moment.cpu().numpy().reshape(leaf.shape) for moment in moments)
            elif array.dtype.kind != "f" or np.abs(array).max(initial=0) < 1e3:
                # Gymnasium draws between the bounds: only huge ones give numbers that no env
                # reports.
                continue
            values = mean + 2.0 * std * generator.standard_normal(array.shape)
            array[...] = values.clip(leaf.low, leaf.high)
    return observation


def _compared(
    pairs: list[tuple[np.ndarray, np.ndarray]],
    space: gymnasium.Space[Any] | None,
    tolerance: float,
    scale: Any,
) -> dict[str, Any]:
    expected, actual = (np.concatenate(side) for side in zip(*pairs, strict=True))
    equal_share = float((expected == actual).mean())
    if not isinstance(space, gymnasium.spaces.Box):
        limit = max(DIFFERING_CHOICES, tolerance)
        return {"equal": equal_share, "passed": 1.0 - equal_share <= limit}
    # The range of an unbounded action overflows: the policy's statistics give its unit.
    with np.errstate(over="ignore", invalid="ignore"):
        half = (space.high.astype(np.float64) - space.low.astype(np.float64)) / 2
    unit = np.maximum(np.where(half < 1e6, half, scale), 1.0)
    largest = float((np.abs(expected.astype(np.float64) - actual) / unit).max())
    return {"largest_difference": largest, "equal": equal_share, "passed": largest <= tolerance}


def graph_acts(ports: Ports, run: Callable[[Arrays], Arrays]) -> Callable[[], Acts]:
    """Return a function that makes an `Acts` from an exported graph, computed by `run`."""

    def make() -> Acts:
        state: Arrays = {}

        def act(observation: Any) -> Arrays:
            arrays = flat(observation, OBSERVATION) | state
            rows = len(next(iter(arrays.values())))
            # Inputs that the observation does not fill, such as the first state, are zeros.
            inputs = {port.name: port_array(port, rows) for port in ports.inputs}
            for name in arrays.keys() & inputs.keys():
                inputs[name][...] = arrays[name]
            outputs = run(inputs)
            if NEXT_STATE in outputs:
                state[STATE] = outputs.pop(NEXT_STATE)
            return outputs

        return act

    return make


def port_array(port: Port, rows: int) -> np.ndarray:
    """Return zeros [N, ...] for an input."""
    zeros: np.ndarray = torch.zeros((rows, *port.shape), dtype=port.dtype).numpy()
    return zeros
