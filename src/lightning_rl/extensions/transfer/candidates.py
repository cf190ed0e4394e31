"""List what may differ between a policy's training and an env: each candidate changes one thing."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from lightning_rl.extensions.algorithms.symmetry import proposed_joints
from lightning_rl.extensions.transfer.layout import PER_JOINT, LayoutTerm, PolicyLayout, equal

FACTORS = (0.05, 0.1, 0.25, 0.5, 2.0, 4.0, 10.0, 20.0, -1.0)
"""Tried factors of the scale of a term."""

SHIFTS = (-0.3, -0.15, 0.15, 0.3)
"""rad: tried shifts of default positions."""

FRICTIONS = (0.3, 1.0)
"""Tried coefficients of sliding friction."""

MOST_DELAY = 5
"""Most control steps of a tried delay."""

LEGGED_GYM = "base_lin_vel base_ang_vel projected_gravity command_lin_vel command_ang_vel dof_pos"
"""Order of terms in legged_gym and Isaac Lab; the others follow."""


@dataclass(frozen=True)
class Setup:
    """What the numbers of a policy mean in an env, and the physics of the env.

    Attributes:
        layout: the policy's terms and joints, with the positions, gains and period of the env.
        delay: control steps from an action to its effect.
        mass: factor of all masses and inertias.
        friction: sliding friction of all contacts. Default: the model's.
        frames: by term, the frame into which its vectors are rotated: `base` or `world`.
    """

    layout: PolicyLayout
    delay: int = 0
    mass: float = 1.0
    friction: float | None = None
    frames: Mapping[str, str] = field(default_factory=dict)


Candidates = Iterator[tuple[str, Setup]]
"""Setups with one change, and its name. Candidates that differ by a number share a name."""


def candidates(
    base: Setup, policy: PolicyLayout, orders: Mapping[str, Sequence[str]]
) -> Candidates:
    """Yield all changes of `base` but those of `physics`, with known `orders` of the joints."""
    yield from contradictions(base, policy)
    yield from orders_of_joints(base, orders)
    yield from orders_of_terms(base)
    yield from meanings_of_terms(base)
    yield from positions_and_signs(base)


def with_layout(base: Setup, **changes: Any) -> Setup:
    """Return a setup with other settings of the layout."""
    return replace(base, layout=replace(base.layout, **changes))


def contradictions(base: Setup, policy: PolicyLayout) -> Candidates:
    """Yield the settings of the policy's layout that the env contradicts."""
    for name in (*PER_JOINT, "control_period"):
        value = getattr(policy, name)
        if not equal(value, getattr(base.layout, name)):
            yield f"{name} as in the policy's layout", with_layout(base, **{name: value})


def orders_of_joints(base: Setup, orders: Mapping[str, Sequence[str]]) -> Candidates:
    """Yield known orders of the joints, left for right, and each two joints exchanged."""
    positions = base.layout.default_position
    joints = list(positions)
    variants = {f"order of joints as {name}": list(order) for name, order in orders.items()}
    variants["joints sorted by name"] = sorted(joints)
    variants["left and right exchanged"] = list(partners(joints).values())
    for pair in combinations(joints, 2):
        variants[" and ".join(pair) + " exchanged"] = _exchanged(joints, *pair)
    for name, order in variants.items():
        if order != joints:
            yield name, with_layout(base, default_position={j: positions[j] for j in order})


def orders_of_terms(base: Setup) -> Candidates:
    """Yield known orders of the terms, each two exchanged, and each one moved."""
    terms = list(base.layout.observation)
    of_legged_gym = [term for term in LEGGED_GYM.split() if term in terms]
    later = [term for term in terms if term not in of_legged_gym]
    variants = {
        "terms sorted by name": sorted(terms),
        "terms in the order of legged_gym": of_legged_gym + later,
    }
    for pair in combinations(terms, 2):
        variants[" and ".join(pair) + " exchanged"] = _exchanged(terms, *pair)
    for term in terms:
        remaining = [name for name in terms if name != term]
        for place in range(len(terms)):
            variants[f"{term} at place {place}"] = [*remaining[:place], term, *remaining[place:]]
    for name, order in variants.items():
        if order != terms:
            yield (
                name,
                with_layout(base, observation={t: base.layout.observation[t] for t in order}),
            )


def meanings_of_terms(base: Setup) -> Candidates:
    """Yield other scales, histories and frames of each term."""
    for name, term in base.layout.observation.items():
        variants = [replace(term, scale=term.scale * factor) for factor in FACTORS]
        variants += [replace(term, newest_first=not term.newest_first)] * (term.history > 1)
        for variant in variants:
            kind = f"{'scale' if variant.scale != term.scale else 'history'} of {name}"
            yield kind, with_layout(base, observation=base.layout.observation | {name: variant})
        for frame in () if term.joints else ("base", "world"):
            yield f"frame of {name}", replace(base, frames={name: frame})


def positions_and_signs(base: Setup) -> Candidates:
    """Yield a shift or another direction of each joint, and of each pair of left and right."""
    positions, joints, signs = base.layout.default_position, base.layout.joints, base.layout.signs
    pairs = [(joint, other) for joint, other in partners(joints).items() if joint < other]
    for group in (*((joint,) for joint in joints), *pairs):
        names = " and ".join(group)
        turned = {joint: -base.layout.sign(joint) for joint in group}
        yield f"direction of {names}", with_layout(base, signs=(signs or {}) | turned)
        for shift in SHIFTS:
            shifted = positions | {joint: positions[joint] + shift for joint in group}
            yield f"default_position of {names}", with_layout(base, default_position=shifted)


def physics(base: Setup) -> Candidates:
    """Yield other gains, action scales, periods, masses, frictions and delays."""
    for factor in (0.5, 2.0):
        scaled = {
            name: {joint: factor * value for joint, value in getattr(base.layout, name).items()}
            for name in ("stiffness", "damping", "action_scale")
        }
        for name, value in scaled.items():
            yield name, with_layout(base, **{name: value})
        del scaled["action_scale"]
        yield "gains", with_layout(base, **scaled)
        period = factor * base.layout.control_period
        yield "control_period", with_layout(base, control_period=period)
        yield "mass", replace(base, mass=factor)
    for friction in FRICTIONS:
        yield "friction", replace(base, friction=friction)
    for delay in range(MOST_DELAY + 1):
        if delay != base.delay:
            yield "delay", replace(base, delay=delay)


def partners(joints: Sequence[str]) -> dict[str, str]:
    """Return the joint on the other side of each joint, or the joint itself if there is none."""
    pairs = {name: other.removeprefix("-") for name, other in proposed_joints(joints).items()}
    return {joint: joint for joint in joints} | pairs | {b: a for a, b in pairs.items()}


def _exchanged(names: Sequence[str], first: str, second: str) -> list[str]:
    swap = {first: second, second: first}
    return [swap.get(name, name) for name in names]


def cure(base: Setup, setup: Setup) -> str:
    """Return YAML of the settings by which a setup differs from `base`."""
    base_settings, settings = ({**vars(s), **vars(s.layout)} for s in (base, setup))
    changes = {}
    for name in settings.keys() - {"layout"}:
        base_value, value = base_settings[name], settings[name]
        same_order = not isinstance(value, dict) or list(value) == list(base_value or {})
        if base_value == value and same_order:
            continue
        # An order needs all entries.
        if isinstance(value, dict) and (same_order or {*value} != {*(base_value or {})}):
            value = {k: v for k, v in value.items() if v != (base_value or {}).get(k)}
        changes[name] = value
    text = json.dumps(changes, default=_settings)[1:-1].replace('"', "")
    return re.sub(r"\d+\.\d{5,}", lambda number: f"{float(number[0]):.4g}", text)


def _settings(term: LayoutTerm) -> dict[str, Any]:
    return {key: value for key, value in vars(term).items() if value != getattr(LayoutTerm, key)}
