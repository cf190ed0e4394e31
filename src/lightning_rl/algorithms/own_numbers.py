"""Save the numbers that a user's algorithm changes, such as an adaptive penalty."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.algorithms.learner import HIDDEN, LIGHTNINGS_OWN
from lightning_rl.buffers import Replay
from lightning_rl.compiled.attributes import MISSING, PLAIN, frozen, same
from lightning_rl.policies import Policy
from lightning_rl.system import ranks
from lightning_rl.system.output import tell
from lightning_rl.system.torch_private import version_of

PACKAGE = "lightning_rl"
"""Its algorithms save their own state; all others are users'."""

SAVED_APART = LIGHTNINGS_OWN.union(
    HIDDEN,
    ("env_steps", "reward_normalizer", "warms_up", "_counted_from", "_errors", "_judged"),
    ("_ratio_checked", "_start", "frame_settings"),
    ("forward",),  # Lightning's DDP replaces it
)
"""Attributes of this package, which other code saves or computes again."""

Numbers = dict[str, tuple[Any, Any]]
"""First and current value of each changed number, by the name of its attribute."""


class OwnNumbers:
    """The numbers among the attributes of a user's algorithm that training changes.

    Args:
        owner: the algorithm when its training starts, with its first values.
    """

    def __init__(self, owner: LightningModule) -> None:
        self._owner = owner
        self._first = self._snapshots()
        self._warned = False

    def state_dict(self) -> Numbers:
        """Return the changed numbers; warn once of changed attributes of other kinds."""
        values = self._attributes()
        changed = {
            name: values[name]
            for name, state in self._snapshots().items()
            if not same(self._first.get(name, MISSING), state)
        }
        unsaved = [name for name, value in changed.items() if not _is_number(value)]
        if unsaved and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"{type(self._owner).__name__} changes {', '.join(unsaved)}, but a checkpoint has "
                "only numbers (int, float, bool) among the attributes: a resumed run starts again "
                "with the first values, unless on_load_checkpoint restores them. Make tensors of "
                "them, by self.register_buffer in __init__; save a replay or a generator in "
                "on_save_checkpoint."
            )
        return {
            name: (self._first_number(name), _plain(value))
            for name, value in changed.items()
            if name not in unsaved
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Sequence[Any]]]) -> None:
        """Restore the numbers of this rank from the numbers of all ranks.

        A number whose first value differs from the saved one stays: this run has set it.
        """
        alike = len(states) == ranks.world_size()
        settings = []
        for name, (first, value) in states[ranks.rank() if alike else 0].items():
            current = self._first_number(name)
            if not (_is_number(value) and _is_number(getattr(self._owner, name, None))):
                continue  # another attribute now, or no number
            is_set = current != first and not same(current, first)
            if is_set or (not alike and value == len(states)):  # perhaps a number of ranks
                settings.append(f"{name}={current} (saved: {value})")
            else:
                setattr(self._owner, name, value)
        if settings:
            line = f"{', '.join(settings)}: set for this run, and not restored from the checkpoint."
            rank_zero_only(tell)(line)

    def _attributes(self) -> dict[str, Any]:
        return {k: value for k, value in vars(self._owner).items() if k not in SAVED_APART}

    def _snapshots(self) -> dict[str, Any]:
        # Other names of what a checkpoint has.
        owner: Any = self._owner
        saved = (*owner.parameters(), *owner.buffers(), owner.generator, owner.data.replay)
        state_of = partial(_state_of, saved={id(part) for part in saved})
        return {name: _snapshot(value, state_of) for name, value in self._attributes().items()}

    def _first_number(self, name: str) -> Any:
        """Return the first value of an attribute, or of the class; None if it is no number."""
        first = self._first.get(name, getattr(type(self._owner), name, None))
        return _plain(first) if _is_number(first) else None


class PolicyNumbers:
    """The numbers among the attributes of a user's policy, which training must not change.

    Args:
        policy: the policy when the training starts.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._first = self._numbers()
        self._warned = False

    def check(self) -> None:
        """Warn once of changed numbers: only parameters and buffers are saved and published."""
        first = self._first
        changed = [n for n, x in self._numbers().items() if not same(first.get(n, MISSING), x)]
        if not changed or self._warned:
            return
        self._warned = True
        names = ", ".join(f"{type(self._policy).__name__}.{key}" for key in changed)
        rank_zero_warn(
            f"Training changes {names}, but checkpoints, and "
            "collectors that act with a copy of the policy, such as AsyncCollector, get only its "
            "parameters and buffers. Make a buffer of it, by self.register_buffer("
            f"'{changed[0]}', torch.tensor(...)) in __init__, and write it in place (fill_)."
        )

    def _numbers(self) -> dict[str, Any]:
        values = vars(self._policy).items()
        return {k: x for k, x in values if k != "training" and type(x) in (bool, int, float)}


def _is_number(value: Any) -> bool:
    # Not subclasses, such as enums, which a checkpoint could not hold; float64 of NumPy is a float.
    return value is None or type(value) in (bool, int) or isinstance(value, float)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, float) else value


def _snapshot(value: Any, state_of: Callable[[Any], Any]) -> Any:
    """Return what differs from a later snapshot if the value, or what it holds, has changed."""
    ours = type(value).__module__.partition(".")[0] in (PACKAGE, "builtins", "torch", "tensordict")
    opaque = ours or isinstance(value, Tensor | Replay | Random) or not hasattr(value, "__dict__")
    return frozen(value if opaque else vars(value), state_of)


def _state_of(value: Any, saved: Collection[int]) -> Any:
    """Return what a change in place changes, of a value that is no container."""
    if isinstance(value, PLAIN) or id(value) in saved:
        return value
    if isinstance(value, Tensor):
        return value, None if value.is_inference() else version_of(value)
    if type(value) is TensorDict:  # one of another type makes its leaves when it is read
        return {key: _state_of(leaf, saved) for key, leaf in value.items()}
    if isinstance(value, torch.Generator):
        return value.get_state().numpy()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, Random):
        return value.getstate()
    if isinstance(value, Replay):  # a full one has no other length
        return len(value), getattr(getattr(value, "ring", None), "end", None)
    return value
