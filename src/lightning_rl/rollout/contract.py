"""The rollout: the container that goes from the collector to the loss.

A rollout is a TensorDict of batch shape [N, T+1]: N envs, T steps, and a bootstrap slot at index T,
in which only `observation`, `value` and `state` are valid. Storage is time-major, [T+1, N], and
transposed for the user: each env step writes contiguous memory, and the first T slots flatten to
[T*N] without a copy.

| key                          | shape [N, T+1, ...] | dtype   | written by                        |
|------------------------------|---------------------|---------|-----------------------------------|
| observation (tensor or tree) | env's               | env's   | collector                         |
| final_index                  | -                   | int64   | collector, at episode ends        |
| action                       | env's               | env's   | policy                            |
| sample_log_prob              | - or L              | float32 | policy (the behaviour policy)     |
| value                        | -                   | float32 | algorithm, in one batched pass    |
| final_value                  | -                   | float32 | algorithm, at truncations         |
| reward                       | -                   | float32 | env                               |
| terminated, truncated, done  | -                   | bool    | env (done: either of them)        |
| policy_version               | -                   | int64   | collector                         |
| continues                    | -                   | bool    | collector, for slot 0             |
| padding (optional)           | -                   | bool    | collector: the env took no step   |
| success                      | -                   | bool    | collector, if the env reports it  |
| state (optional)             | policy's            | float32 | policy: state before the step     |
| executed_action (optional)   | env's               | env's   | env: the action it executed       |
| intervened (optional)        | -                   | bool    | env: true at interventions        |
| penalty (optional)           | -                   | float32 | env: for a part of the action     |
| executed (optional)          | K                   | bool    | env: executed actions of a chunk  |
| step_reward (optional)       | K                   | float32 | env: rewards of a chunk's actions |
| info/<name> (optional)       | data.extra_fields   | float32 | env: an entry of the step's info  |

`sample_log_prob` may be [N, T+1, L], one per part of an action; L is a multiple of the K actions of
a chunk. `reward` is the undiscounted sum over a chunk; see `env_steps`.

`continues` is true if the first step continues the learner's last rollout, and false after a reset
or a dropped rollout.

`state` is zero at the beginning of an episode (a plan: also after an intervention), otherwise the
policy's last `next_state`.
`executed_action` is `action` (clipped, if the env clips), unless the env reports another action.

True final observations are separate rows, one per ended episode, in `FinalObservations`. All slices
of a rollout share this object as `final_observation`. `final_index` is the row of a step, from 1; 0
means none. `FinalObservationWriter` writes the rows, `next_observations` and `final_observations`
read them.

Algorithms add their own fields (`advantage`, `return`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.system import ranks

FieldSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape of one step of one env, and dtype."""

STEP_FIELDS: dict[str, torch.dtype] = {
    "sample_log_prob": torch.float32,
    "value": torch.float32,
    "final_value": torch.float32,
    "reward": torch.float32,
    "terminated": torch.bool,
    "truncated": torch.bool,
    "done": torch.bool,
    "success": torch.bool,
    "policy_version": torch.int64,
    "final_index": torch.int64,
}
"""Fields with one number per env and step."""

INFO = "info/"
"""Prefix of fields that hold an entry of the env's info."""

LOOK_EVERY = 16
"""Steps between two reads of values on a device, because each read synchronizes."""


def time_major(data: TensorDict) -> TensorDict:
    """Swap the first two batch dimensions of every field, as views: [N, T] <-> [T, N]."""

    def swap(value: Any) -> Any:
        return time_major(value) if isinstance(value, TensorDict) else value.transpose(0, 1)

    size = (data.batch_size[1], data.batch_size[0], *data.batch_size[2:])
    return TensorDict({key: swap(value) for key, value in data.items()}, size, device=data.device)


def step_views(rollout: TensorDict) -> list[TensorDict]:
    """Return for each of the T+1 slots a TensorDict [N] of views, without final observations."""
    return list(time_major(rollout.exclude("final_observation")).unbind(0))


def map_tree(function: Callable[..., Any], tree: Any, *aligned_trees: Any) -> Any:
    """Apply a function to the tensors or arrays of trees of the same structure; return dicts."""
    if isinstance(tree, Tensor | np.ndarray):
        return function(tree, *aligned_trees)
    return {
        key: map_tree(function, child, *(other[key] for other in aligned_trees))
        for key, child in tree.items()
    }


def tree_of_leaves(leaves: Mapping[tuple[str, ...], Any]) -> Any:
    """Turn leaves, keyed by their path, into nested dicts; an empty path returns its leaf."""
    if () in leaves:  # a single tensor, not a tree
        return leaves[()]
    tree: dict[str, Any] = {}
    for (*above, last), leaf in leaves.items():
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def leaves_by_path(tree: Any, *above: str) -> dict[tuple[str, ...], Any]:
    """Return the leaves of a tree of tensors, arrays or spaces by `above` and their key path."""
    if isinstance(tree, tuple):  # its keys are the indices
        tree = {str(i): child for i, child in enumerate(tree)}
    if not hasattr(tree, "items"):
        return {above: tree}
    leaves: dict[tuple[str, ...], Any] = {}
    for key, child in tree.items():
        leaves |= leaves_by_path(child, *above, key)
    return leaves


def copy_tree(target: Any, source: Any) -> None:
    """Copy a tensor or a tree of tensors into storage of the same structure."""
    if isinstance(target, Tensor):
        target.copy_(source)
        return
    for key, value in target.items():
        copy_tree(value, source[key])


BOOTSTRAP_FIELDS = ("observation", "value", "state")
"""Fields that are valid in the last slot of a rollout; other fields are zero."""


def clear_bootstrap_slot(slot: TensorDict) -> None:
    """Zero the invalid fields of a bootstrap slot [N], which an earlier rollout may have set."""
    for key, value in slot.items():
        if key not in BOOTSTRAP_FIELDS:
            value.zero_()


def first_steps(rollout: TensorDict, num_steps: int) -> TensorDict:
    """Return T' steps of [N, T+1] and the next slot as a view [N, T'+1] in a new TensorDict."""
    slots = num_steps + 1
    if slots == rollout.batch_size[1]:
        return rollout.copy()  # like a slice, but seven times as fast
    return rollout[:, :slots]


class FinalObservations:
    """The true final observations of a rollout: one row per ended episode.

    A rollout holds this object as `final_observation`, as non-tensor data: all slices and views
    share it, and their `final_index` selects rows. A clone has a copy. Concatenated rollouts would
    have several objects, so reading from them is an error.

    Args:
        rows: [1 + M, *observation], a tensor or a tree, of M episodes; row 0 is zeros, for steps
            without a final observation.
        initial_rows: rows of the first allocation; each further allocation doubles the capacity.
        max_rows: maximum of M. Default: no limit.

    Attributes:
        rows: [C, *observation], of which the first 1 + `count` are in use.
        count: M, number of ended episodes.
        aside: steps whose final observations are not yet written.
    """

    def __init__(self, rows: Any, initial_rows: int = 1, max_rows: int | None = None) -> None:
        self.rows = map_tree(lambda leaf: leaf, rows)  # dicts are faster than TensorDicts
        self._capacity = len(next(leaf for _, leaf in leaves_of_tree("", rows)))
        self.count = self._capacity - 1  # row 0 is no episode
        self.aside: list[int] = []
        self._initial_rows, self._max_rows = initial_rows, max_rows

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(leaf.nbytes for _, leaf in leaves_of_tree("", self.rows))

    def clear(self) -> None:
        """Drop all rows, also after an interrupted rollout, but keep the memory."""
        self.count = 0
        self.aside.clear()

    def add(self, number: int) -> slice:
        """Reserve `number` rows for the caller to write, and return their slice.

        Raises:
            RuntimeError: if there are more rows than the rollout has steps.
        """
        new = slice(self.count + 1, self.count + 1 + number)
        if new.stop > self._capacity:
            self._grow(new.stop)
        self.count += number
        return new

    def layout(self) -> dict[str, tuple[list[int], torch.dtype]]:
        """Return row shape and dtype of every leaf."""
        leaves = leaves_of_tree("final_observation", self.rows)
        return {name: (list(leaf.shape[1:]), leaf.dtype) for name, leaf in leaves}

    def in_use(self) -> Any:
        """Return the rows in use, [1 + M, ...], as views."""
        return map_tree(lambda leaf: leaf[: self.count + 1], self.rows)

    def _grow(self, needed: int) -> None:
        # The number of episodes is unknown before the rollout ends, hence doubling.
        capacity = max(needed, 2 * self._capacity, 1 + self._initial_rows)
        if self._max_rows is not None:
            capacity = min(capacity, 1 + self._max_rows)
            if needed > capacity:  # rows of the last use were not cleared
                raise RuntimeError(
                    f"More than {self._max_rows} episodes have ended in a rollout of as many "
                    "steps: call clear_final_observations(rollout) before refilling a rollout."
                )

        def grown(leaf: Tensor) -> Tensor:
            larger = leaf.new_empty((capacity, *leaf.shape[1:]))
            # Later rows stay uninitialized: a row is written before `final_index` names it.
            larger[: self.count + 1] = leaf[: self.count + 1]
            return larger

        self.rows, self._capacity = map_tree(grown, self.rows), capacity


def leaves_of_tree(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and leaf of a tree of tensors, arrays or spaces; names are dotted: `name.key`."""
    for path, leaf in leaves_by_path(tree, name).items():
        yield ".".join(path), leaf


def final_storage(rollout: TensorDict) -> FinalObservations:
    """Return the final observations of a rollout [N, T+1].

    Raises:
        ValueError: if it has none, or was concatenated from several rollouts.
    """
    storage = rollout["final_observation"] if "final_observation" in rollout.keys() else None
    if isinstance(storage, FinalObservations):
        return storage
    raise ValueError(
        "The rollout does not have its own final observations: it was concatenated from several "
        "rollouts, or not made by allocate_rollout. Call next_observations(rollout) for each part, "
        "and concatenate the results."
    )


def clear_final_observations(rollout: TensorDict) -> None:
    """Drop the final observations of a rollout [N, T+1], to reuse its storage."""
    final_storage(rollout).clear()
    rollout["final_index"].zero_()


class FinalObservationWriter:
    """Writes the true final observations of ended episodes into a rollout.

    On a device other than the CPU, the writer buffers the observations of all envs for up to
    `LOOK_EVERY` steps, because finding the ended episodes synchronizes. So call `finish` after the
    last step.

    Args:
        rollout: [N, T+1]; create one writer per allocation.
    """

    def __init__(self, rollout: TensorDict) -> None:
        self._storage = final_storage(rollout)
        # Time-major views [T+1, N], made once: `self._index[step]` is contiguous.
        self._index: Tensor = rollout["final_index"].transpose(0, 1)
        self._ends = [rollout[key].transpose(0, 1) for key in ("terminated", "truncated")]
        self._on_cpu = self._index.device.type == "cpu"
        if self._on_cpu:  # NumPy copies a few numbers much faster than torch
            columns = (list(field.numpy()) for field in (self._index, *self._ends))
            self._numbers, self._terminated, self._truncated = columns
        self._aside: Any = None  # buffer: "ended" [W, N], "observation" [W, N, ...]

    def write(self, step: int, observation: Any, done: Tensor | None = None) -> None:
        """Write the rows of `observation` [N, ...] whose episode ended with this step.

        Write `terminated` and `truncated` of the step first. `done` [N] bool are the ended envs,
        if known on the CPU while the rollout is on another device.
        """
        if self._on_cpu:
            self._write_now(step, observation)
        elif done is None:
            self._put_aside(step, observation)
        elif len(rows := done.nonzero().squeeze(1)):  # `done` is on the CPU: no wait
            self._append(observation, (rows,), torch.full_like(rows, step))

    def write_all(self, first: int, count: int, observation: Any) -> None:
        """Write S consecutive steps with observations [S, N, ...], as `write` does."""
        if not self._on_cpu:
            for i in range(count):
                self._put_aside(first + i, map_tree(lambda leaf: leaf[i], observation))  # noqa: B023  # called immediately
            return
        steps = slice(first, first + count)
        ends = [np.stack(column[steps]) for column in (self._terminated, self._truncated)]
        step_indices, rows = (ends[0] | ends[1]).nonzero()
        self._write_at(step_indices, rows, first, observation)

    def finish(self) -> None:
        """Write the buffered observations; waits for the device."""
        if pending := self._storage.aside:
            # The only wait for the device in up to LOOK_EVERY steps.
            slots, rows = self._aside["ended"][: len(pending)].nonzero(as_tuple=True)
            steps = torch.tensor(pending, device=slots.device)[slots]
            self._append(self._aside["observation"], (slots, rows), steps)
            pending.clear()

    def _write_now(self, step: int, observation: Any) -> None:
        (rows,) = (self._terminated[step] | self._truncated[step]).nonzero()
        if not rows.size:
            return
        new = self._storage.add(rows.size)

        def put(target: Tensor, source: Tensor) -> None:
            target.numpy()[new] = source.to(target).numpy()[rows]  # `to` converts the dtype

        map_tree(put, self._storage.rows, observation)
        self._numbers[step][rows] = np.arange(new.start, new.stop)

    def _write_at(self, steps: Any, rows: Any, first: int, observation: Any) -> None:
        if not rows.size:
            return
        new = self._storage.add(rows.size)

        def put(target: Tensor, source: Tensor) -> None:
            target.numpy()[new] = source.to(target).numpy()[steps, rows]

        map_tree(put, self._storage.rows, observation)
        self._index[first + steps, rows] = torch.arange(new.start, new.stop)

    def _put_aside(self, step: int, observation: Any) -> None:
        slots, envs = self._index.shape
        size = (min(LOOK_EVERY, slots - 1), envs)
        terminated, truncated = self._ends
        if self._aside is None:
            # Allocated at the first use: with `done` from the CPU, no buffer is needed.
            fields = {"observation": self._storage.rows}
            self._aside = map_tree(lambda leaf: leaf.new_empty((*size, *leaf.shape[1:])), fields)
            self._aside["ended"] = terminated.new_empty(size)
        step_aside = {"ended": terminated[step] | truncated[step], "observation": observation}
        position = len(self._storage.aside)
        map_tree(lambda target, source: target[position].copy_(source), self._aside, step_aside)
        self._storage.aside.append(step)  # in the storage, so that `clear` drops it too
        if position + 1 == size[0]:  # the buffer is full
            self.finish()

    def _append(self, observation: Any, index: tuple[Tensor, ...], steps: Tensor) -> None:
        rows = index[-1]
        new = self._storage.add(len(rows))
        map_tree(
            lambda target, source: target[new].copy_(source[index]), self._storage.rows, observation
        )
        self._index[steps, rows] = torch.arange(new.start, new.stop, device=self._index.device)


def final_observations(rollout: TensorDict, rows: Tensor, steps: Tensor) -> Any:
    """Return the final observations [M, ...] at the ends of episodes, a tensor or a dict.

    The episodes ended in the envs `rows` [M] at `steps` [M] of a rollout [N, T+1]. Zeros for a
    terminated step without a final observation.

    Raises:
        ValueError: if the final observation of a truncated episode is missing.
    """
    index = rollout["final_index"][rows, steps]
    # After a termination nothing is bootstrapped, so zeros do.
    missing = (index == 0) & ~rollout["terminated"][rows, steps]
    if missing.any():
        first = int(missing.nonzero()[0])
        raise ValueError(
            f"The rollout has no final observation of env {int(rows[first])} at step "
            f"{int(steps[first])}, where its episode was truncated: its return needs the value of "
            "that observation. Write it with FinalObservationWriter(rollout), then call finish()."
        )

    def chosen(leaf: Tensor) -> Tensor:
        # Final observations stay on their device if the rollout is copied to another device.
        return leaf[index.to(leaf.device)].to(index.device)

    return map_tree(chosen, final_storage(rollout).rows)


def next_observations(rollout: TensorDict) -> Any:
    """Return the next observation of each step of [N, T+1], [N, T, ...], a tensor or a tree.

    At the end of an episode it is the true final observation, not the next episode's first.

    Raises:
        ValueError: if the final observation of a truncated episode is missing.
    """
    validate(rollout)
    rows, steps = rollout["done"][:, :-1].nonzero(as_tuple=True)
    size = rollout["done"][:, :-1].shape

    def after(observation: Any, final: Any) -> Any:
        if isinstance(observation, Tensor):
            next_observation = observation[:, 1:].clone()  # the slice is a view of the rollout
            next_observation[rows, steps] = final
            return next_observation
        fields = {key: after(child, final[key]) for key, child in observation.items()}
        return TensorDict(fields, size, device=observation.device)

    return after(rollout.get("observation"), final_observations(rollout, rows, steps))


def check_time(rollout: TensorDict) -> None:
    """Check for the batch shape [N, T+1], which a flattened rollout lacks.

    Raises:
        ValueError: naming the shape, and what to pass.
    """
    if len(rollout.batch_size) != 2 or rollout.batch_size[1] < 2:
        raise ValueError(
            "Expected a rollout of batch shape [num_envs, steps + 1], got "
            f"{list(rollout.batch_size)}. Returns and advantages need the time structure: pass the "
            "rollout of the buffer, not flattened minibatches."
        )


def validate(rollout: TensorDict) -> None:
    """Check the batch shape [N, T+1] and the fields of a rollout.

    Raises:
        ValueError: naming the field, its type and shape, the expected ones, and the cure.
    """
    check_time(rollout)
    for key in ("observation", "action", *STEP_FIELDS):
        if key not in rollout.keys():
            raise ValueError(f"The rollout has no field '{key}'; it has {sorted(rollout.keys())}.")
    for key, dtype in STEP_FIELDS.items():
        value = rollout[key]
        # One part alone would be a trailing dimension of one, except in a chunk.
        in_parts = key == "sample_log_prob" and (
            value.shape[2:] > (1,) or "executed" in rollout.keys()
        )
        shape = value.shape[:2] if in_parts else value.shape
        if shape != rollout.batch_size or value.dtype != dtype:
            raise ValueError(
                f"Rollout field '{key}' is {value.dtype} of shape {list(value.shape)}; expected "
                f"{dtype} of shape "
                f"{list(rollout.batch_size)}, without a trailing dimension of one."
            )


def check_finite(rollout: TensorDict) -> None:
    """Raise if the env returned non-finite values in a rollout [N, T+1]; all ranks raise together.

    Raises:
        FloatingPointError: naming the field, and the first env and step.
    """
    fault = _first_fault(rollout)
    # One rank alone would leave the others waiting for it.
    if ranks.agree(fault is not None):
        raise FloatingPointError(next(filter(None, ranks.gather_over_ranks(fault))))


def _first_fault(rollout: TensorDict) -> str | None:
    for name, field in _returned(rollout):
        # Quick: a non-finite entry makes the sum non-finite. A sum that overflows is examined
        # below.
        if field.sum().isfinite():
            continue
        faulty, values = ~field.isfinite(), field
        if name.startswith("final_observation"):  # only the steps of this rollout
            index = rollout["final_index"].to(field.device)
            faulty, values = faulty[index], field[index]
        if not faulty.any():
            continue
        row, step, *entry = place = faulty.nonzero()[0].tolist()
        suffix = f", entry {entry}" if entry else ""
        return (
            f"The env returned a {name} that is not finite: {values[tuple(place)].item()} in env "
            f"{row}, at step {step} of the rollout{suffix}. Training stops. Correct the env, or "
            "clip its values in a wrapper. Resume from last.ckpt, which holds the end of the last "
            "epoch."
        )
    return None


def _returned(rollout: TensorDict) -> Iterator[tuple[str, Tensor]]:
    trees = {
        "observation": rollout.get("observation"),
        "final_observation": final_storage(rollout).in_use(),
        "reward": rollout["reward"],
    }
    for key, tree in trees.items():
        for name, field in leaves_of_tree(key, tree):
            if field.is_floating_point():
                yield name, field


def flat_transitions(
    rollout: TensorDict, keys: Sequence[str], *, bootstrap: bool = False
) -> TensorDict:
    """Return the named fields with batch shape [T*N], time-major, as views if storage allows.

    With `bootstrap` the slot at index T is included: [(T+1)*N].

    Raises:
        ValueError: if the rollout is already flat.
    """
    check_time(rollout)
    slots = rollout.batch_size[1] - (0 if bootstrap else 1)

    def flat(value: Any) -> Any:  # a view, because storage is time-major
        """Swap, cut and flatten in one step instead of TensorDict's four."""
        if isinstance(value, TensorDict):
            fields = {key: flat(child) for key, child in value.items()}
            return TensorDict(fields, [slots * rollout.batch_size[0]], device=value.device)
        return value.transpose(0, 1)[:slots].flatten(0, 1)

    return flat(rollout.select(*keys))  # type: ignore[no-any-return]  # a TensorDict gives one


def loss_fields(rollout: TensorDict, *names: Iterable[str]) -> list[str]:
    """Return the named fields, and `executed` if it masks log-probs in a rollout [N, T+1]."""
    fields = {name for group in names for name in group}
    if rollout["sample_log_prob"].dim() == 3 and "executed" in rollout.keys():
        fields.add("executed")
    return sorted(fields)


def add_transition_field(rollout: TensorDict, key: str, value: Tensor) -> None:
    """Add a field to a rollout [N, T+1] from values [N, T, ...]; the bootstrap slot is zero."""
    envs, slots = rollout.batch_size
    # Time-major like the other fields, so that flattening it stays a view.
    storage = value.new_zeros((slots, envs, *value.shape[2:]))
    storage[:-1].copy_(value.transpose(0, 1))
    rollout[key] = storage.transpose(0, 1)


def env_steps(rollout: TensorDict) -> Tensor | None:
    """Return the env steps of each action, [N, T]; None if each action is one step."""
    if "executed" not in rollout.keys():
        return None
    steps: Tensor = rollout["executed"][:, :-1].sum(-1)  # the rest of a chunk was cut off
    return steps


def env_steps_in(rollout: TensorDict) -> int:
    """Return the number of env steps in a rollout [N, T+1], without padding."""
    steps = env_steps(rollout)
    if steps is not None:
        return int(steps.sum())
    if "padding" in rollout.keys():
        return int((~rollout["padding"][:, :-1]).sum())
    reward: Tensor = rollout["reward"]
    return reward[:, :-1].numel()


def without_padding(rollout: TensorDict) -> TensorDict:
    """Return a rollout [N, T+1] without padding; with padding, one row [1, M + 1] of M steps."""
    if "padding" not in rollout.keys():
        return rollout
    steps = rollout[:, :-1]
    real_steps = steps.flatten()[(~steps["padding"]).flatten()]
    # The last slot of a rollout is the bootstrap slot; a copy fills it.
    return torch.cat([real_steps, real_steps[-1:]])[None]  # type: ignore[return-value]  # a TensorDict


def discount_of(rollout: TensorDict, gamma: float) -> float | Tensor:
    """Return gamma, or gamma^k [N, T] if actions take k env steps."""
    steps = env_steps(rollout)
    return gamma if steps is None else gamma**steps


def discounted_reward(rollout: TensorDict, gamma: float) -> Tensor:
    """Return the reward of each action [N, T]; for a chunk, the sum of gamma^i times its rewards.

    Raises:
        ValueError: if the rollout is flattened.
    """
    check_time(rollout)
    if "step_reward" not in rollout.keys():
        reward: Tensor = rollout["reward"][:, :-1]
        return reward
    step_reward: Tensor = rollout["step_reward"][:, :-1]
    # Rewards of unexecuted actions are 0.
    weights = gamma ** torch.arange(step_reward.shape[-1], device=step_reward.device)
    return (step_reward * weights).sum(-1)  # no matrix product, because autocast would round it
