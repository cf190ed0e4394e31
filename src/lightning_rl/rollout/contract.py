"""Define the rollout: the one container that flows from the collector to the loss.

A rollout is a TensorDict of batch shape [N, T+1]: N envs, T steps, and one bootstrap slot at index
T, where only `observation`, `value` and `state` are valid. It is stored time-major, as [T+1, N],
and handed out transposed: each env step then writes contiguous memory, and the first T slots
flatten to [T*N] without a copy.

| key                           | shape [N, T+1, ...] | dtype   | written by                    |
|-------------------------------|---------------------|---------|-------------------------------|
| observation (tensor or tree)  | env's               | env's   | collector                     |
| final_index, at episode ends  | -                   | int64   | collector: see below          |
| action                        | env's               | env's   | policy                        |
| sample_log_prob               | -                   | float32 | policy (the behaviour policy) |
| value                         | -                   | float32 | algorithm, one batched pass   |
| final_value, where time ran out | -                 | float32 | the same pass                 |
| reward                        | -                   | float32 | env                           |
| terminated, truncated, done   | -                   | bool    | env (done is their or)        |
| policy_version                | -                   | int64   | collector                     |
| continues, of slot 0          | -                   | bool    | collector: see below          |
| padding, where rows differ in length | -            | bool    | collector: nothing happened   |
| success, where the env says so | -                  | bool    | collector                     |
| state, where the policy has one | policy's    | float32 | policy: that before the step  |
| executed_action, where a person or a script may take over | env's | env's | env: what it did |
| intervened, likewise          | -                   | bool    | env: whether they took over   |
| penalty, where the env says it | -                  | float32 | env: of a part of the action  |
| executed, where an action is a chunk | K            | bool    | env: which of its K actions   |
| step_reward, likewise         | K                   | float32 | env: what each of them earned |

`sample_log_prob` may be [N, T+1, L], of the parts of an action in their order: L is a multiple of
the K actions of a chunk. `reward` is the plain sum over a chunk; see `env_steps`.

`continues` says of the first step whether it goes on where the rollout before this one, as the
learner got it, has ended; it does not after a reset, nor where a rollout in between was dropped.

`state` is zero where an episode begins, and what the policy returned as `next_state` elsewhere.
`executed_action` is `action`, within its bounds where the env clips, unless the env named another.

The true final observations are rows of their own, one per episode that ended, in
`FinalObservations`: it lies in the rollout as `final_observation`, one object for all its slices.
`final_index` says which row is of which step, from 1; 0 is none. `FinalObservationWriter` writes
them, `successors` and `final_observations` read them.

An algorithm adds fields of its own (`advantage`, `return`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.rollout.structured_actions import categories_of, choices_of
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError

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
"""The fields with one number per env and step."""

LOOK_EVERY = 16
"""Steps between two looks at something that lies on a device other than the CPU.

A look waits for the device.
"""


def allocate_rollout(
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    num_envs: int,
    num_steps: int,
    *,
    extra_fields: Mapping[str, FieldSpec] | None = None,
    device: torch.device | str = "cpu",
) -> TensorDict:
    """Allocate a zeroed rollout, batch shape [N, T+1], for the spaces of one env.

    `extra_fields` are what a policy stores beside `action` so that the update can recompute its
    log-prob.
    """
    size = (num_steps + 1, num_envs)

    def field(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros((*size, *shape), dtype=dtype, device=device)

    fields: dict[str, Tensor | TensorDict] = {
        "observation": _zeros(observation_space, size, device),
        "action": field(*space_spec(action_space)),
    }
    fields |= {key: field((), dtype) for key, dtype in STEP_FIELDS.items()}
    fields |= {key: field(shape, dtype) for key, (shape, dtype) in (extra_fields or {}).items()}
    rollout = time_major(TensorDict(fields, size, device=device))
    allocate_final_storage(rollout, observation_space)
    return rollout


def _zeros(
    space: gymnasium.Space[Any], size: tuple[int, ...], device: torch.device | str
) -> Tensor | TensorDict:
    """Return zeros for elements of a space, [*size, ...]."""
    if isinstance(space, gymnasium.spaces.Dict):
        fields = {key: _zeros(child, size, device) for key, child in space.items()}
        return TensorDict(fields, size, device=device)
    shape, dtype = space_spec(space)
    return torch.zeros((*size, *shape), dtype=dtype, device=device)


def space_spec(space: gymnasium.Space[Any]) -> FieldSpec:
    """Return the shape and dtype with which one element of a space is stored.

    Floats are stored as float32.

    Raises:
        ConfigurationError: for a space that is not one array (Dict spaces are trees of arrays: see
            `allocate_rollout`).
    """
    if isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.MultiBinary):
        dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
        return tuple(space.shape or ()), torch.float32 if dtype.is_floating_point else dtype
    if isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete):
        return tuple(space.shape or ()), torch.int64
    raise ConfigurationError(
        f"Space {space} cannot be stored in a rollout: use Box, Discrete, MultiDiscrete or "
        "MultiBinary, or a Dict of "
        "them for observations (gymnasium.wrappers.FlattenObservation turns most others into a "
        "Box)."
    )


MASK = "action_mask"
"""The key of an observation that says which categories of its action are allowed, 1 or true."""


def has_mask(observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> bool:
    """Tell whether observations say what is allowed, and check that they say it of the actions.

    Raises:
        ConfigurationError: where the mask is of another shape than the choices, or of no choices.
    """
    if not isinstance(observation_space, gymnasium.spaces.Dict):
        return False
    if MASK not in observation_space.spaces:
        return False
    space, sizes = observation_space[MASK], choices_of(action_space)
    drop = "Leave it out of the observation, or give it another name."
    if not sizes:
        raise ConfigurationError(
            f"The observation has '{MASK}', which says what is allowed of several choices, and the "
            f"action space {action_space} has none: it is continuous. {drop}"
        )
    binary = isinstance(space, gymnasium.spaces.MultiBinary | gymnasium.spaces.Box) and (
        space.dtype is not None and space.dtype.kind in "biu"
    )
    if not binary or space.shape != (sum(sizes),):
        raise ConfigurationError(
            f"The observation's '{MASK}' is {space}, and the action space {action_space} has "
            f"choices of {' + '.join(map(str, sizes))} categories: the mask must be a MultiBinary, "
            f"or a Box of bool or integers 0 and 1, of shape ({sum(sizes)},), in their order."
        )
    return True


def refuse_empty_masks(
    name: str, mask: Tensor, action_space: gymnasium.Space[Any], step: int = 0
) -> None:
    """Refuse masks that leave nothing to choose; where they lie on a device, it is waited for.

    Args:
        name: of the env's class.
        mask: [T, N, C], of T steps.
        action_space: of one env, with C categories in all its choices.
        step: of the first of them.

    Raises:
        ConfigurationError: naming the first env and step, and the choice.
    """
    sizes = choices_of(action_space)
    left = torch.stack([choice.any(-1) for choice in (mask != 0).split(sizes, -1)], -1)
    if left.all():
        return
    at, row, choice = (~left).nonzero()[0].tolist()
    which = f" in choice {choice} of {len(sizes)}" if len(sizes) > 1 else ""
    raise ConfigurationError(
        f"{name} allows nothing{which}: the '{MASK}' of env {row} at step {step + at} is 0 for all "
        f"of {sizes[choice]} categories. Allow at least one, such as to do nothing, or end the "
        "episode before."
    )


def intervention_fields(action_space: gymnasium.Space[Any]) -> dict[str, FieldSpec]:
    """Return what a rollout holds of an env in which a person or a script may take over."""
    return {"executed_action": space_spec(action_space), "intervened": ((), torch.bool)}


def time_major(data: TensorDict) -> TensorDict:
    """Swap the first two batch dimensions of every field, as views.

    [N, T] becomes [T, N] and back.
    """

    def swap(value: Any) -> Any:
        return time_major(value) if isinstance(value, TensorDict) else value.transpose(0, 1)

    size = (data.batch_size[1], data.batch_size[0], *data.batch_size[2:])
    return TensorDict({key: swap(value) for key, value in data.items()}, size, device=data.device)


def step_views(rollout: TensorDict) -> list[TensorDict]:
    """Return, for each of the T+1 slots, a TensorDict [N] of views that write into the rollout.

    Make them once per allocation: slicing a TensorDict costs several times what the write itself
    does. Final observations are no part of a slot.
    """
    return list(time_major(rollout.exclude("final_observation")).unbind(0))


def map_tree(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to the tensors or arrays of a tree, and of others of the same structure.

    Returns:
        what it returned; where the tree is a dict or a TensorDict, a dict of that.
    """
    if isinstance(tree, Tensor | np.ndarray):
        return function(tree, *others)
    return {
        key: map_tree(function, child, *(other[key] for other in others))
        for key, child in tree.items()
    }


def tree_of_leaves(leaves: Mapping[tuple[str, ...], Any]) -> Any:
    """Return leaves, by the keys that lead to them, as nested dicts; one without keys unchanged."""
    if () in leaves:
        return leaves[()]
    tree: dict[str, Any] = {}
    for (*above, last), leaf in leaves.items():
        here = tree
        for key in above:
            here = here.setdefault(key, {})
        here[last] = leaf
    return tree


def copy_tree(target: Any, source: Any) -> None:
    """Copy a tensor or a tree of tensors into storage of the same structure."""
    if isinstance(target, Tensor):
        target.copy_(source)
        return
    for key, value in target.items():
        copy_tree(value, source[key])


BOOTSTRAP_FIELDS = ("observation", "value", "state")
"""What is valid in the last slot of a rollout; everything else there is zero."""


def clear_bootstrap_slot(slot: TensorDict) -> None:
    """Zero what has no meaning in a bootstrap slot [N], where an earlier rollout has left it."""
    for key, value in slot.items():
        if key not in BOOTSTRAP_FIELDS:
            value.zero_()


def first_steps(rollout: TensorDict, num_steps: int) -> TensorDict:
    """Return T' steps and the slot behind them as a view [N, T'+1], in a container of its own.

    What an algorithm adds to it, or replaces in it, stays its own.

    Args:
        rollout: [N, T+1].
        num_steps: T'.
    """
    slots = num_steps + 1
    if slots == rollout.batch_size[1]:
        return rollout.copy()  # a slice is the same, and takes seven times as long
    return rollout[:, :slots]


def transition_view(rollout: TensorDict) -> TensorDict:
    """Return the [N, T] part of a rollout as a view, with `next_value`, one slot later."""
    validate(rollout)
    transitions = rollout[:, :-1]
    transitions["next_value"] = rollout["value"][:, 1:]
    return transitions


class FinalObservations:
    """The true final observations of a rollout: a row for each episode that ended, no other.

    A rollout holds it as `final_observation`, as data that is no tensor: slices and views of the
    rollout share it, and their `final_index`, a field as any other, says which rows are theirs. A
    clone of a rollout has a copy. Rollouts that are joined had several, which is refused where one
    asks for them.

    Memory is taken when a row wants it, twice as much as before each time, and kept.

    Args:
        rows: [1 + M, *observation], a tensor or a tree, of M episodes; the first row is zeros, and
            stands for all that ended without a word.
        least: rows to take memory for at first.
        most: M at most; no limit where not given.

    Attributes:
        rows: [C, *observation], of which the first 1 + `count` are in use.
        count: M, how many episodes have ended.
        aside: the steps whose final observations a writer has yet to write.
    """

    def __init__(self, rows: Any, least: int = 1, most: int | None = None) -> None:
        self.rows = map_tree(lambda leaf: leaf, rows)  # dicts of tensors: quicker than TensorDicts
        self._capacity = len(next(leaf for _, leaf in leaves_of_tree("", rows)))
        self.count = self._capacity - 1
        self.aside: list[int] = []
        self._least, self._most = least, most

    @property
    def nbytes(self) -> int:
        """The memory that was taken."""
        return sum(leaf.nbytes for _, leaf in leaves_of_tree("", self.rows))

    def clear(self) -> None:
        """Forget the rows, those of a rollout that was broken off included; keep their memory."""
        self.count = 0
        self.aside.clear()

    def add(self, number: int) -> slice:
        """Take so many rows into use, and return which, for the caller to write.

        Raises:
            RuntimeError: where there are more than a rollout has steps.
        """
        new = slice(self.count + 1, self.count + 1 + number)
        if new.stop > self._capacity:
            self._grow(new.stop)
        self.count += number
        return new

    def layout(self) -> dict[str, tuple[list[int], torch.dtype]]:
        """Return shape of a row, and dtype, of every leaf."""
        leaves = leaves_of_tree("final_observation", self.rows)
        return {name: (list(leaf.shape[1:]), leaf.dtype) for name, leaf in leaves}

    def in_use(self) -> Any:
        """Return the zeros and the rows that were written, [1 + M, ...], as views."""
        return map_tree(lambda leaf: leaf[: self.count + 1], self.rows)

    def _grow(self, needed: int) -> None:
        capacity = max(needed, 2 * self._capacity, 1 + self._least)
        if self._most is not None:
            capacity = min(capacity, 1 + self._most)
            if needed > capacity:
                raise RuntimeError(
                    f"More than {self._most} episodes have ended in a rollout of as many steps: "
                    "call clear_final_observations(rollout) when a rollout is begun anew."
                )

        def grown(leaf: Tensor) -> Tensor:
            larger = leaf.new_empty((capacity, *leaf.shape[1:]))
            larger[: self.count + 1] = leaf[: self.count + 1]
            return larger

        self.rows, self._capacity = map_tree(grown, self.rows), capacity


def leaves_of_tree(name: str, tree: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree, by the name of the tree and the keys that lead to them."""
    if isinstance(tree, Tensor):
        yield name, tree
        return
    for key, child in tree.items():
        yield from leaves_of_tree(f"{name}.{key}", child)


def allocate_final_storage(rollout: TensorDict, observation_space: gymnasium.Space[Any]) -> None:
    """Give a rollout [N, T+1] room of its own for final observations, as it has for the rest."""
    envs, slots = rollout.batch_size
    none = _zeros(observation_space, (1,), rollout["final_index"].device)
    storage = FinalObservations(none, least=envs, most=envs * (slots - 1))
    rollout.set_non_tensor("final_observation", storage)


def final_storage(rollout: TensorDict) -> FinalObservations:
    """Return what holds the final observations of a rollout [N, T+1].

    Raises:
        ValueError: where it was joined of several, or has none.
    """
    storage = rollout["final_observation"] if "final_observation" in rollout.keys() else None
    if isinstance(storage, FinalObservations):
        return storage
    raise ValueError(
        "The rollout has no final observations of its own: it was joined of several, or made by "
        "hand. Ask each part for its successors(rollout), and join those; or make it by "
        "allocate_rollout."
    )


def clear_final_observations(rollout: TensorDict) -> None:
    """Forget the final observations of a rollout [N, T+1] that is begun anew in its storage."""
    final_storage(rollout).clear()
    rollout["final_index"].zero_()


class FinalObservationWriter:
    """Writes true final observations into a rollout: of the envs whose episode ended, no others.

    On a CPU at once. On another device, where to know who has ended is to wait for it, those of
    all envs are kept aside, for `LOOK_EVERY` steps at most; so call `finish` after the last step.

    Args:
        rollout: [N, T+1]; made once per allocation.
    """

    def __init__(self, rollout: TensorDict) -> None:
        self._storage = final_storage(rollout)
        self._index: Tensor = rollout["final_index"].transpose(0, 1)
        self._ends = [rollout[key].transpose(0, 1) for key in ("terminated", "truncated")]
        self._on_cpu = self._index.device.type == "cpu"
        if self._on_cpu:  # NumPy enters a copy of a few numbers in a fraction of torch's time
            columns = (list(field.numpy()) for field in (self._index, *self._ends))
            self._numbers, self._terminated, self._truncated = columns
        self._aside: Any = None  # "ended" [W, N] and "observation" [W, N, ...], where it is needed

    def write(self, step: int, observation: Any, ended: Tensor | None = None) -> None:
        """Write those of the envs that ended by a step: `terminated` or `truncated` by then.

        Args:
            step: of the rollout, from 0.
            observation: [N, ...], a tensor or a tree; rows of other envs are not read.
            ended: [N] bool, which envs, where a CPU knows it and the rollout is on another device.
        """
        if self._on_cpu:
            self._write_now(step, observation)
        elif ended is None:
            self._put_aside(step, observation)
        elif len(rows := ended.nonzero().squeeze(1)):
            self._append(observation, (rows,), torch.full_like(rows, step))

    def write_all(self, first: int, count: int, observation: Any) -> None:
        """Do what `write` does for some steps that follow each other.

        Args:
            first: step of the rollout, from 0.
            count: S, how many.
            observation: [S, N, ...], a tensor or a tree.
        """
        if not self._on_cpu:
            for i in range(count):
                self._put_aside(first + i, map_tree(lambda leaf: leaf[i], observation))  # noqa: B023  # called at once
            return
        steps = slice(first, first + count)
        ends = [np.stack(column[steps]) for column in (self._terminated, self._truncated)]
        which, rows = (ends[0] | ends[1]).nonzero()
        self._write_at(which, rows, first, observation)

    def finish(self) -> None:
        """Write what was kept aside, which waits for the device."""
        if aside := self._storage.aside:
            slots, rows = self._aside["ended"][: len(aside)].nonzero(as_tuple=True)
            steps = torch.tensor(aside, device=slots.device)[slots]
            self._append(self._aside["observation"], (slots, rows), steps)
            aside.clear()

    def _write_now(self, step: int, observation: Any) -> None:
        (rows,) = (self._terminated[step] | self._truncated[step]).nonzero()
        if not rows.size:
            return
        new = self._storage.add(rows.size)

        def put(kept: Tensor, given: Tensor) -> None:
            kept.numpy()[new] = given.to(kept).numpy()[rows]

        map_tree(put, self._storage.rows, observation)
        self._numbers[step][rows] = np.arange(new.start, new.stop)

    def _write_at(self, steps: Any, rows: Any, first: int, observation: Any) -> None:
        if not rows.size:
            return
        new = self._storage.add(rows.size)

        def put(kept: Tensor, given: Tensor) -> None:
            kept.numpy()[new] = given.to(kept).numpy()[steps, rows]

        map_tree(put, self._storage.rows, observation)
        self._index[first + steps, rows] = torch.arange(new.start, new.stop)

    def _put_aside(self, step: int, observation: Any) -> None:
        slots, envs = self._index.shape
        size = (min(LOOK_EVERY, slots - 1), envs)
        terminated, truncated = self._ends
        if self._aside is None:
            kept = {"observation": self._storage.rows}
            self._aside = map_tree(lambda leaf: leaf.new_empty((*size, *leaf.shape[1:])), kept)
            self._aside["ended"] = terminated.new_empty(size)
        step_aside = {"ended": terminated[step] | truncated[step], "observation": observation}
        at = len(self._storage.aside)
        map_tree(lambda kept, given: kept[at].copy_(given), self._aside, step_aside)
        self._storage.aside.append(step)
        if at + 1 == size[0]:
            self.finish()

    def _append(self, observation: Any, chosen: tuple[Tensor, ...], steps: Tensor) -> None:
        """Write those at an index of `observation`, whose last part says of which env [M]."""
        rows = chosen[-1]
        new = self._storage.add(len(rows))
        map_tree(
            lambda kept, given: kept[new].copy_(given[chosen]), self._storage.rows, observation
        )
        self._index[steps, rows] = torch.arange(new.start, new.stop, device=self._index.device)


def final_observations(rollout: TensorDict, rows: Tensor, steps: Tensor) -> Any:
    """Return the true final observations [M, ...] of M steps, a tensor or a dict of them.

    Zeros of a step that failed or succeeded where its env gave none: nothing goes on from there.

    Args:
        rollout: [N, T+1].
        rows: [M], which envs.
        steps: [M], at which step of theirs an episode ended.

    Raises:
        ValueError: of an episode that time cut, where there is none.
    """
    index = rollout["final_index"][rows, steps]
    missing = (index == 0) & ~rollout["terminated"][rows, steps]
    if missing.any():
        at = int(missing.nonzero()[0])
        raise ValueError(
            f"The rollout has no final observation of env {int(rows[at])} at step "
            f"{int(steps[at])}, where its episode was truncated: its return goes on with the value "
            "of that observation. Write it by FinalObservationWriter(rollout), and then finish()."
        )

    def chosen(leaf: Tensor) -> Tensor:
        # They lie where they were written, wherever the rollout was copied to.
        return leaf[index.to(leaf.device)].to(index.device)

    return map_tree(chosen, final_storage(rollout).rows)


def successors(rollout: TensorDict) -> Any:
    """Return the observation that followed each step [N, T, ...], a tensor or a tree.

    That is the next slot's, or the true final one where an episode ended: never the one that the
    next episode begins with.

    Args:
        rollout: [N, T+1].

    Raises:
        ValueError: where time cut an episode and its final observation is not there.
    """
    validate(rollout)
    rows, steps = rollout["done"][:, :-1].nonzero(as_tuple=True)
    size = rollout["done"][:, :-1].shape

    def after(observation: Any, final: Any) -> Any:
        if isinstance(observation, Tensor):
            following = observation[:, 1:].clone()
            following[rows, steps] = final
            return following
        fields = {key: after(child, final[key]) for key, child in observation.items()}
        return TensorDict(fields, size, device=observation.device)

    return after(rollout.get("observation"), final_observations(rollout, rows, steps))


def rollout_state(rollout: TensorDict) -> dict[str, Any]:
    """Return a copy of a rollout [N, T+1] as dicts of tensors, for a file without pickles."""
    fields: dict[str, Any] = rollout.exclude("final_observation").clone().to_dict()
    device = rollout["final_index"].device
    finals = map_tree(lambda leaf: leaf.to(device, copy=True), final_storage(rollout).in_use())
    return fields | {"final_observation": finals}


def rollout_from(state: Mapping[str, Any]) -> TensorDict:
    """Return the rollout [N, T+1] of a `rollout_state`."""
    fields = {key: value for key, value in state.items() if key != "final_observation"}
    rollout = TensorDict(fields, fields["reward"].shape)
    rollout.set_non_tensor("final_observation", FinalObservations(state["final_observation"]))
    return rollout


def copy_rollout(target: TensorDict, source: TensorDict) -> None:
    """Copy a rollout into the storage of another of the same shape and fields.

    Args:
        target: [N, T+1], written in place.
        source: [N, T+1].
    """
    copy_tree(target.exclude("final_observation"), source)
    storage, given = final_storage(target), final_storage(source)
    storage.clear()
    storage.add(given.count)
    copy_tree(storage.in_use(), given.in_use())


def check_time(rollout: TensorDict) -> None:
    """Check that data has the batch shape [N, T+1]; a flattened rollout has lost its time.

    Raises:
        ValueError: naming the shape, and what to pass.
    """
    if len(rollout.batch_size) != 2 or rollout.batch_size[1] < 2:
        raise ValueError(
            "Expected a rollout of batch shape [num_envs, steps + 1], got "
            f"{list(rollout.batch_size)}. Returns and "
            "advantages need the time structure: pass what the buffer hands out, before "
            "flattening it into minibatches."
        )


def validate(rollout: TensorDict) -> None:
    """Check that data has the batch shape [N, T+1] and the fields of a rollout.

    Raises:
        ValueError: naming the field, what it is, what it should be, and how to get it.
    """
    check_time(rollout)
    for key in ("observation", "action", *STEP_FIELDS):
        if key not in rollout.keys():
            raise ValueError(f"The rollout has no field '{key}'; it has {sorted(rollout.keys())}.")
    for key, dtype in STEP_FIELDS.items():
        value = rollout[key]
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


def check_allowed(rollout: TensorDict, action_space: gymnasium.Space[Any]) -> None:
    """Refuse an action that its observation's mask forbids, before it is learnt from.

    A policy gives it no probability at all; a demonstration may hold one. All ranks end where one
    has to.

    Args:
        rollout: [N, T+1], with a mask in its observations.
        action_space: of one env.

    Raises:
        ConfigurationError: naming the first env and step.
    """
    steps = rollout.select("observation", "action", "padding", strict=False)[:, :-1]
    sizes = choices_of(action_space)
    first = torch.tensor([0, *sizes[:-1]]).cumsum(0).to(rollout["action"].device)
    taken = first + categories_of(action_space, steps["action"])
    forbidden = (steps["observation"][MASK].gather(-1, taken) == 0).any(-1)
    if "padding" in rollout.keys():
        forbidden &= ~steps["padding"]
    fault = None
    if forbidden.any():
        row, step = forbidden.nonzero()[0].tolist()
        fault = (
            f"The action of env {row} at step {step} of the rollout, "
            f"{steps['action'][row, step].tolist()}, is not allowed by the '{MASK}' of its "
            "observation, and has no probability. Where these are demonstrations, record them with "
            "the masks of the env in which the policy is to act."
        )
    if ranks.agree(fault is not None):
        raise ConfigurationError(next(filter(None, ranks.gather_over_ranks(fault))))


def check_finite(rollout: TensorDict) -> None:
    """Refuse what an env returned where it is not finite, before it spoils any statistics.

    Costs one sum per field and rollout [N, T+1], nothing per step. All ranks do so together, and
    all end where one has to.

    Raises:
        FloatingPointError: naming the field, and the first env and step.
    """
    fault = _first_fault(rollout)
    if ranks.agree(fault is not None):
        raise FloatingPointError(next(filter(None, ranks.gather_over_ranks(fault))))


def _first_fault(rollout: TensorDict) -> str | None:
    """Say what is not finite, or return None."""
    for name, field in _returned(rollout):
        if field.sum().isfinite():
            continue
        faulty, found = ~field.isfinite(), field
        if name.startswith("final_observation"):  # of the steps that are in this rollout
            index = rollout["final_index"].to(field.device)
            faulty, found = faulty[index], field[index]
        if not faulty.any():
            continue
        row, step, *entry = place = faulty.nonzero()[0].tolist()
        where = f", entry {entry}" if entry else ""
        return (
            f"The env returned a {name} that is not finite: {found[tuple(place)].item()} in env "
            f"{row}, at step {step} of the rollout{where}. Training cannot go on from it; mend the "
            "env, or bound what it returns by a wrapper. last.ckpt holds the last epoch's end."
        )
    return None


def _returned(rollout: TensorDict) -> Iterator[tuple[str, Tensor]]:
    """Yield what the env wrote into a rollout, as far as it may be NaN.

    [N, T+1, ...], but final observations as the rows that they are.
    """
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
    """Return the named fields as one TensorDict of batch shape [T*N], time-major.

    A view where storage allows.

    With `bootstrap` the slot at index T is kept: [(T+1)*N].

    Raises:
        ValueError: where it is flat already.
    """
    check_time(rollout)
    slots = rollout.batch_size[1] - (0 if bootstrap else 1)

    def flat(value: Any) -> Any:
        """Do in one go what takes TensorDict four: time-major, cut, flattened."""
        if isinstance(value, TensorDict):
            fields = {key: flat(child) for key, child in value.items()}
            return TensorDict(fields, [slots * rollout.batch_size[0]], device=value.device)
        return value.transpose(0, 1)[:slots].flatten(0, 1)

    return flat(rollout.select(*keys))  # type: ignore[no-any-return]  # a TensorDict gives one


def loss_fields(rollout: TensorDict, *names: Iterable[str]) -> list[str]:
    """Return the fields that are named, and `executed` where it says which parts count.

    Args:
        rollout: [N, T+1].
        names: of fields, in one or several collections.
    """
    fields = {name for some in names for name in some}
    if rollout["sample_log_prob"].dim() == 3 and "executed" in rollout.keys():
        fields.add("executed")
    return sorted(fields)


def add_transition_field(rollout: TensorDict, key: str, value: Tensor) -> None:
    """Add a field to a rollout [N, T+1] from its values at the transitions.

    It is zero in the bootstrap slot.

    Args:
        rollout: [N, T+1].
        key: of the field.
        value: [N, T, ...].
    """
    envs, slots = rollout.batch_size
    storage = value.new_zeros((slots, envs, *value.shape[2:]))
    storage[:-1].copy_(value.transpose(0, 1))
    rollout[key] = storage.transpose(0, 1)


def env_steps(rollout: TensorDict) -> Tensor | None:
    """Return how many env steps each action took, [N, T]; None where each took one."""
    if "executed" not in rollout.keys():
        return None
    steps: Tensor = rollout["executed"][:, :-1].sum(-1)
    return steps


def env_steps_in(rollout: TensorDict) -> int:
    """Return how many env steps a rollout [N, T+1] holds, padding left out."""
    steps = env_steps(rollout)
    if steps is not None:
        return int(steps.sum())
    if "padding" in rollout.keys():
        return int((~rollout["padding"][:, :-1]).sum())
    reward: Tensor = rollout["reward"]
    return reward[:, :-1].numel()


def without_padding(rollout: TensorDict) -> TensorDict:
    """Return a rollout [N, T+1] in which something happened at each step.

    Where there is padding, that is one row [1, M + 1] of all M steps, for statistics of steps; it
    says nothing of time.
    """
    if "padding" not in rollout.keys():
        return rollout
    steps = rollout[:, :-1]
    kept = steps.flatten()[(~steps["padding"]).flatten()]
    return torch.cat([kept, kept[-1:]])[None]  # type: ignore[return-value]  # a TensorDict


def discount_of(rollout: TensorDict, gamma: float) -> float | Tensor:
    """Return gamma, or gamma^k [N, T] where each action took k env steps."""
    steps = env_steps(rollout)
    return gamma if steps is None else gamma**steps


def discounted_reward(rollout: TensorDict, gamma: float) -> Tensor:
    """Return the reward of each action [N, T]; of a chunk the sum of gamma^i times its rewards.

    Raises:
        ValueError: of a rollout that has been flattened.
    """
    check_time(rollout)
    if "step_reward" not in rollout.keys():
        reward: Tensor = rollout["reward"][:, :-1]
        return reward
    step_reward: Tensor = rollout["step_reward"][:, :-1]
    weights = gamma ** torch.arange(step_reward.shape[-1], device=step_reward.device)
    return (step_reward * weights).sum(-1)  # no product of matrices: autocast would round it
