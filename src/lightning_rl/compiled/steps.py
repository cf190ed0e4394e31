"""Compile the steps of a batched torch env: policy, env, resets, and writing to the rollout.

A step of a few envs has about two hundred small operations; Inductor compiles them to a few
kernels. A step that cannot be traced runs uncompiled, and a message gives the reason.
"""

import copy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from lightning_rl.compiled.attributes import Snapshot
from lightning_rl.compiled.choice import StepsCompileDecision
from lightning_rl.compiled.graphs import Function, Graphs, NoGraphError, layout
from lightning_rl.compiled.writes import Contents
from lightning_rl.envs import TorchEnv
from lightning_rl.envs.steppers import (
    RESULTS,
    RolloutStepper,
    StepReports,
    check_results,
    named_reports,
)
from lightning_rl.envs.torch.torch_env import ResetMode
from lightning_rl.envs.vector_env import VectorEnv
from lightning_rl.policies import Policy
from lightning_rl.policies.acting import NumpyActor
from lightning_rl.policies.actors import RolloutActor
from lightning_rl.policies.base import NOISE
from lightning_rl.policies.precision import autocast
from lightning_rl.rollout.contract import (
    FinalObservationWriter,
    leaves_by_path,
    time_major,
    tree_of_leaves,
)
from lightning_rl.system.machine import settings
from lightning_rl.system.torch_private import copy_all, trace, version_of

MOST_AHEAD, MOST_BYTES = 32, 2**25
"""Most steps before the results are read, and most bytes of final observations in these steps."""

LARGEST_START = 64
"""Largest tensor of a reset, in numbers per env, for a reset of all envs in each step.

Larger resets run outside the graph, for the envs that need one.
"""

DRIVEN = ("state", "final_state", "episode", "elapsed", "stream_key", "reset_mode")
"""The attributes of a `TorchEnv` that a step writes: inputs and outputs of the graph."""

COUNTERS = ("episode", "elapsed", "stream_key")
"""The counters of a `TorchEnv`, inputs and outputs of each step."""

Keys = tuple[str, ...]
"""The path of a tensor in a tree."""

SEEN, FINAL = "observation", "final"
"""The first keys of the paths of observations, and of true final observations."""

MEMORY, SUCCESS = ("memory",), ("success",)
"""The paths of the policy's state and of the env's successes."""

TOTAL, COUNT = SUMS = ("total",), ("count",)
"""The paths of the sums of the env's reported numbers, and of their counts."""

CURE_OF_DRAWS = (
    "draw by self.uniform(count) in an env, by env.uniform(count) in a term, and by draw_noise in "
    "a policy"
)
"""Advice for env or policy code that draws random numbers in a graph."""


class CompiledSteps:
    """The compiled steps of a policy in a torch env, for rollout buffers like `rollout` [N, T+1].

    With `defer_reads`, several steps may run before their results are read.

    Raises:
        NoGraphError: if the steps cannot become a graph.
    """

    def __init__(
        self,
        env: TorchEnv,
        policy: Policy,
        rollout: TensorDict,
        choice: StepsCompileDecision,
        defer_reads: bool,
    ) -> None:
        self.env, self.policy = env, policy
        # Time-major, because one slot [N, ...] is the output of one step.
        storage = time_major(rollout)
        self._slots, self._num_envs = len(storage) - 1, env.num_envs
        self._device = policy.version.device
        self._staging: list[Tensor] | None = None
        self.noise = policy.draw_noise((env.num_envs,), torch.Generator(self._device))
        self._precision = autocast(self._device, policy.autocast_dtype)
        self._fields = tuple(
            key
            for key in dict.fromkeys(("action", "sample_log_prob", *policy.extra_fields))
            # The carry holds the state before a step.
            if key != "state"
        )
        self._step_of = storage[0].exclude("final_observation")
        policy.put_in_eval_mode()  # a trace fixes the mode
        self._read_env(env)
        self._root = _Root(policy, env)
        driven = {(id(env), name) for name in DRIVEN}
        self._graphs = Graphs(self._root, self._device, choice, driven, cure_of_draws=CURE_OF_DRAWS)
        size = sum(leaf.nbytes for leaf in leaves_by_path(self._step_of["observation"]).values())
        limit = max(1, min(MOST_AHEAD, MOST_BYTES // max(size, 1))) if defer_reads else 1
        # A divisor of T: a batch of steps must not cross the end of a rollout.
        self.ahead = max(n for n in range(1, limit + 1) if self._slots % n == 0)
        self.finals = {
            path: leaf.new_empty((self.ahead, *leaf.shape))
            for path, leaf in leaves_by_path(self._step_of["observation"]).items()
        }

    def _read_env(self, env: TorchEnv) -> None:
        for name in ("step", "reset"):
            # The graph calls TorchEnv's methods, and would skip an override.
            if getattr(type(env), name) is not getattr(TorchEnv, name):
                raise NoGraphError(f"{type(env).__name__} overrides {name}")
        if env.extra_fields:
            raise NoGraphError(
                f"{type(env).__name__} stores for each step {', '.join(env.extra_fields)}"
            )
        try:
            # One trial step shows shapes, reports and changed attributes. It must not move the
            # user's env. The policy is not copied: a large one fills the memory, and
            # `Contents` restores what the step changes in it.
            trial = copy.deepcopy(env)
        except Exception as error:
            raise NoGraphError(f"{type(env).__name__} cannot be copied ({error})") from error
        TorchEnv.reset(trial, seed=0)  # by the class, as in `_act_and_step`
        # Finding the envs to reset would wait for a GPU: there, each step computes a start of all
        # envs.
        everywhere = self._device.type != "cpu" or _numbers_of_a_start(trial) <= LARGEST_START
        self.reset_mode = ResetMode.WHERE if everywhere else ResetMode.LATER
        carried = leaves_by_path(trial.state, "state") | leaves_by_path(
            self._step_of["observation"], SEEN
        )
        carried |= {(name,): getattr(trial, name) for name in COUNTERS}
        if "state" in self.policy.extra_fields:
            carried[MEMORY] = torch.zeros_like(self._step_of["state"])
        self.carry: dict[Keys, Tensor] = {key: leaf.clone() for key, leaf in carried.items()}
        trial.reset_mode = ResetMode.LATER  # its state must come from the transition
        trial_root = _Root(self.policy, trial)
        driven = {(id(trial), name) for name in DRIVEN}
        contents = Contents(lambda: Snapshot(trial_root, driven).attributes)
        try:
            transition = self._act_and_step(trial_root, dict(self.carry), self.noise)
            changed = _problem_of(contents)
        finally:
            contents.restore()
        if changed is not None:
            raise NoGraphError(changed)
        next_carry = {key: transition.carry[key] for key in self.carry}
        if _shapes(next_carry) != _shapes(self.carry):
            raise NoGraphError(
                f"the state of {type(env).__name__} takes another shape or dtype in each step"
            )
        self.names, self.reports_success = tuple(transition.report), transition.success is not None
        for key in SUMS:
            self.carry[key] = torch.zeros(len(self.names), device=self._device)

    # --- traced code ---

    def _act_and_step(
        self, root: "_Root", carry: dict[Keys, Tensor], noise: Tensor
    ) -> "_StepResults":
        env, observation = root.env, self._tree(carry, SEEN)
        fields = {key: torch.zeros_like(self._step_of[key]) for key in self._fields}
        versions = {key: version_of(value) for key, value in fields.items()}
        td = TensorDict({"observation": observation, NOISE: noise, **fields}, [self._num_envs])
        if MEMORY in carry:
            td["state"] = carry[MEMORY]
        with self._precision:
            output = root.policy(td)
        if not isinstance(output, TensorDictBase):
            raise NoGraphError("the policy does not return a TensorDict")
        required_keys = (*self._fields, "next_state") if MEMORY in carry else self._fields
        for key in required_keys:
            value, like = output.get(key, None), self._step_of["state" if "next" in key else key]
            if value is None or (value.shape, value.dtype) != (like.shape, like.dtype):
                raise NoGraphError(f"the policy does not return '{key}' as announced")
            # The policy has returned the zeros that were put in, unwritten.
            if key in fields and value is fields[key] and version_of(value) == versions[key]:
                raise NoGraphError(f"the policy does not return '{key}' as announced")
        # State and counters enter and leave the graph as tensors; the attributes only lead them to
        # `step`.
        env.state = self._tree(carry, "state")
        for name in COUNTERS:
            setattr(env, name, carry[name,])
        # Call the class's `step`: a wrapper may have replaced the instance's.
        next_observation, reward, terminated, truncated, info = TorchEnv.step(env, output["action"])
        results = (reward, terminated, truncated)
        slots = [self._step_of[key] for key in RESULTS]
        check_results(env, next_observation, self._step_of["observation"], results, slots)
        next_carry = leaves_by_path(env.state, "state") | leaves_by_path(next_observation, SEEN)
        next_carry |= {(name,): getattr(env, name) for name in COUNTERS}
        if MEMORY in carry:
            done = (terminated | truncated).view(-1, *[1] * (carry[MEMORY].dim() - 1))
            # A new episode begins with an empty memory.
            next_carry[MEMORY] = output["next_state"].masked_fill(done, 0)
        return _StepResults(
            {key: output[key] for key in self._fields},
            dict(zip(RESULTS, results, strict=True)),
            next_carry,
            info.get("success"),
            leaves_by_path(info["final_obs"], FINAL),
            named_reports(info),
        )

    def _tree(self, carry: dict[Keys, Tensor], name: str) -> Any:
        tree = tree_of_leaves({key[1:]: leaf for key, leaf in carry.items() if key[0] == name})
        return tree if isinstance(tree, Tensor) else TensorDict(tree, [self._num_envs])

    def _function(self) -> tuple[Function, dict[str, None]]:
        keys = list(self.carry)

        def step(noise: Tensor, *inputs: Tensor) -> list[Tensor]:
            carry = dict(zip(keys, inputs, strict=False))
            slots = dict(zip(self.slot_names, inputs[len(keys) :], strict=True))
            with self._stepping_env():
                transition = self._act_and_step(self._root, carry, noise)
            _, terminated, truncated = transition.results.values()
            fields = transition.fields | transition.results
            outputs: dict[Keys, Tensor] = {(key,): x for key, x in fields.items()}
            outputs |= transition.finals | transition.carry
            if transition.success is not None:
                outputs[SUCCESS] = transition.success
            # The slots of the rollout are inputs of the graph, which writes its results into them.
            for key, slot in slots.items():
                slot.copy_(outputs[key])
            if self.names:
                values = torch.stack([transition.report[name] for name in self.names])
                carry[TOTAL].add_(values.nansum(1))  # NaN: not reported in this step
                carry[COUNT].add_((values == values).sum(1))
            for key, value in transition.carry.items():
                if value is not carry[key]:  # the env has returned another tensor
                    carry[key].copy_(value)
            return [terminated | truncated]  # for `restart`; all else is written in place

        return step, {}

    @contextmanager
    def _stepping_env(self) -> Iterator[None]:
        # Tracing puts traced tensors into these attributes.
        attributes = {name: vars(self.env)[name] for name in DRIVEN}
        self.env.reset_mode = self.reset_mode
        try:
            yield
        finally:
            vars(self.env).update(attributes)

    @property
    def slot_names(self) -> list[Keys]:
        """The paths that a step writes into the rollout, in the order of the graph's inputs."""
        names: list[Keys] = [(key,) for key in (*self._fields, *RESULTS)]
        names += [key for key in self.carry if key[0] == SEEN]
        names += [(FINAL, *path) for path in self.finals]
        names += [SUCCESS] if self.reports_success else []
        return [*names, MEMORY] if MEMORY in self.carry else names

    # --- running code ---

    def slots_of(self, rollout: TensorDict) -> list[list[Tensor]]:
        """Return the tensors that the graph writes, for each step of a rollout [N, T+1]."""
        storage = time_major(rollout.exclude("final_observation"))
        observation, names = leaves_by_path(storage["observation"], SEEN), self.slot_names
        columns: dict[Keys, Sequence[Tensor]] = {
            (key,): storage[key].unbind(0) for key in (*self._fields, *RESULTS, *SUCCESS)
        }
        # Step t returns the observation of slot t + 1.
        columns |= {key: leaf[1:].unbind(0) for key, leaf in observation.items()}
        if MEMORY in self.carry:
            columns[MEMORY] = storage["state"][1:].unbind(0)
        for path, leaf in self.finals.items():
            # The batches of a rollout reuse the slots of final observations.
            columns[FINAL, *path] = leaf.unbind(0) * (self._slots // self.ahead)
        return [[columns[name][t] for name in names] for t in range(self._slots)]

    def staging(self, slots: list[Tensor]) -> list[Tensor] | None:
        """Return tensors like `slots` with fixed addresses for a CUDA graph; None on a CPU."""
        if self._staging is None and self._device.type != "cpu":
            self._staging = [torch.empty_like(slot) for slot in slots]
        return self._staging

    def graph(self, slots: list[Tensor]) -> Callable[..., Any] | None:
        """Return the graph for the current env and policy, and slots of this layout, or None."""
        self._graphs.recheck()  # once per rollout: attributes may have changed since
        inputs = [self.noise, *self.carry.values(), *slots]
        key = ("step", layout(inputs))
        compiled = self._graphs.attempt(
            lambda: self._graphs.prepare(key, self._function, inputs, slice(1)),
            place_of=lambda error: _line_behind(error, type(self.env).__name__),
        )
        return None if compiled is None else compiled.graph

    def load(self, first: TensorDict) -> None:
        """Continue from the env's state and the first slot [N] of a rollout."""
        env, carry = self.env, self.carry
        for key, leaf in (
            leaves_by_path(env.state, "state") | leaves_by_path(first["observation"], SEEN)
        ).items():
            # In place: a CUDA graph is captured again if its inputs move.
            carry[key].copy_(leaf)
        for name in COUNTERS:
            carry[name,].copy_(getattr(env, name))
        if MEMORY in carry:
            carry[MEMORY].copy_(first["state"])
        for key in SUMS:
            carry[key].zero_()  # summed on the device, read once per rollout

    def restart(self, done: Tensor, observation: Any) -> None:
        """Reset finished envs `done` [N] outside the graph, and write `observation` [N, ...]."""
        rows = done.nonzero().squeeze(1)
        if not len(rows):
            return
        carry = self.carry
        episode, key_of_seed = carry["episode",], carry["stream_key",]
        episode.index_add_(0, rows, torch.ones_like(rows))
        persistent_state = {key: carry["state", key][rows] for key in self.env.persistent_state}
        starts = self.env.draw_starts(key_of_seed[:, rows], episode[rows], persistent_state)
        observations, targets = (
            leaves_by_path(self.env.observation_of(starts), SEEN),
            leaves_by_path(observation, SEEN),
        )
        for key, leaf in (leaves_by_path(starts, "state") | observations).items():
            carry[key].index_copy_(0, rows, leaf)
        for key, leaf in observations.items():
            targets[key].index_copy_(0, rows, leaf)

    def store(self) -> None:
        """Write the state after the last step back to the env."""
        env, carry = self.env, self.carry
        # Clone, because the next rollout writes the carry in place.
        env.state = env.final_state = self._tree(carry, "state").clone()
        env.episode, env.elapsed = carry["episode",].clone(), carry["elapsed",].clone()


class _StepResults(NamedTuple):
    fields: dict[str, Tensor]
    results: dict[str, Tensor]
    carry: dict[Keys, Tensor]
    success: Tensor | None
    finals: dict[Keys, Tensor]
    report: dict[str, Tensor]


class _Root(nn.Module):
    """Policy and env as one object, to compare the attributes that a trace reads."""

    def __init__(self, policy: Policy, env: TorchEnv) -> None:
        super().__init__()
        self.policy, self.env = policy, env


class StepWriter:
    """Runs compiled steps on a rollout buffer [N, T+1], several in a batch if possible.

    Without a graph `actor` and `stepper` run the steps.
    """

    def __init__(
        self,
        steps: CompiledSteps,
        rollout: TensorDict,
        actor: RolloutActor,
        stepper: RolloutStepper,
    ) -> None:
        self.steps, self.actor, self.stepper = steps, actor, stepper
        self._slots = steps.slots_of(rollout)
        self._first = time_major(rollout.exclude("final_observation"))[0]
        self._observations = [
            step["observation"] for step in time_major(rollout.select("observation")).unbind(0)
        ]
        self._writer = FinalObservationWriter(rollout)
        # Draw as NumPy acting does, the noise of a whole rollout in one call.
        self._draws_ahead = isinstance(actor, NumpyActor)
        self._staged = steps.staging(self._slots[0])
        self.places = self._staged or self._slots[0]
        self.graph: Callable[..., Any] | None = None

    def begin(self, generator: torch.Generator, start: int) -> None:
        """Load weights and noise for slot `start` and the following slots."""
        steps = self.steps
        self._generator = generator
        if start == 0:
            steps.policy.put_in_eval_mode()
            self._next_step = 0
            self.graph = steps.graph(self.places)
            if self.graph is not None:
                steps.load(self._first)
        if self.graph is None:
            self.actor.begin(generator, start)
        elif self._draws_ahead:
            shape = len(self._slots) - start, len(steps.noise)
            noise = steps.policy.draw_noise(shape, generator)
            self._noise = dict(enumerate(noise.unbind(0), start))

    def act(self, t: int) -> None:
        """Run step t, and following steps if their results may be read later; see `step`."""
        if self.graph is None:
            self.actor.act(t)
        elif t == self._next_step:
            self._run_from(t, self.graph)

    def step(self, t: int) -> dict[str, Any]:
        """Return the info of step t, which `act` has run."""
        return self.stepper.step(t) if self.graph is None else {}

    def _run_from(self, t: int, graph: Callable[..., Any]) -> None:
        steps = self.steps
        resets_later = steps.reset_mode is ResetMode.LATER
        carry = list(steps.carry.values())
        # No step waits for a GPU: `restart`, which would, is for the CPU only.
        for i in range(t, t + steps.ahead):
            if self._draws_ahead:
                noise = self._noise[i]
            else:
                noise = steps.policy.draw_noise((len(steps.noise),), self._generator)
            (done,) = graph(noise, *carry, *(self._staged or self._slots[i]))
            if self._staged is not None:
                # A CUDA graph writes at fixed addresses, and each slot of a rollout has its own.
                copy_all(self._slots[i], self._staged)
            if resets_later:
                steps.restart(done, self._observations[i + 1])
        self._writer.write_all(t, steps.ahead, tree_of_leaves(steps.finals))
        self._next_step = t + steps.ahead

    def finish_acting(self, start: int, stop: int) -> None:
        """Write the fields that an uncompiled actor writes at the end."""
        if self.graph is None:
            self.actor.finish(start, stop)

    def finish(self) -> StepReports | None:
        """Write the state back to the env; return the env's reports of its steps."""
        if self.graph is None:
            return self.stepper.finish()
        self.steps.store()
        self._writer.finish()
        carry = self.steps.carry
        sums = (carry[TOTAL].clone(), carry[COUNT].clone())
        return StepReports(self.steps.names, *sums, self.steps.reports_success)


@torch.no_grad()
def compile_steps(
    env: VectorEnv,
    policy: Policy,
    rollouts: Sequence[TensorDict],
    eager_pairs: Sequence[tuple[RolloutActor, RolloutStepper]],
    choice: StepsCompileDecision,
    defer_reads: bool,
) -> Sequence[tuple[RolloutActor, RolloutStepper]]:
    """Return a compiled actor and stepper per rollout [N, T+1], or `eager_pairs`.

    Graphs are compiled here, before any thread starts. `choice` records why graphs are unavailable.
    `defer_reads` is described in `CompiledSteps`.
    """
    if not isinstance(env, TorchEnv):
        choice.does_not_apply(f"{type(env).__name__} is not a batched env in torch")
    elif not env.in_torch:
        choice.does_not_apply(f"{type(env).__name__} is simulated outside of torch")
    elif not settings().compiled_steps:
        choice.does_not_apply("trainer.machine.compiled_steps: false")
    if not choice.compiled or not isinstance(env, TorchEnv):
        return eager_pairs
    device = policy.version.device
    # Undo draws from torch's global generator; code that needs them is refused.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            steps = CompiledSteps(env, policy, rollouts[0], choice, defer_reads)
            writers = [
                StepWriter(steps, rollout, *pair)
                for rollout, pair in zip(rollouts, eager_pairs, strict=True)
            ]
        except NoGraphError as error:
            choice.give_up(str(error), f"The env is stepped uncompiled: {error}.")
            return eager_pairs
        # Compile here for the slots of each rollout, before a thread needs the graphs.
        if any(steps.graph(writer.places) is None for writer in writers):
            return eager_pairs
    choice.print_decision()
    return [(CompiledActor(writer), CompiledStepper(writer)) for writer in writers]


class CompiledActor(RolloutActor):
    """Acts with a graph that also steps the env; see `StepWriter`."""

    def __init__(self, writer: StepWriter) -> None:
        self._writer = writer

    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        self._writer.begin(generator, start)

    def act(self, t: int) -> None:
        self._writer.act(t)

    def finish(self, start: int, stop: int) -> None:
        self._writer.finish_acting(start, stop)


class CompiledStepper(RolloutStepper):
    """Returns the results of the steps that a `CompiledActor` has run."""

    def __init__(self, writer: StepWriter) -> None:
        self._writer = writer

    def step(self, t: int) -> dict[str, Any]:
        return self._writer.step(t)

    def finish(self) -> StepReports | None:
        return self._writer.finish()


# --- trees and attributes ---


def _numbers_of_a_start(env: TorchEnv) -> int:
    def start(key: Tensor, episode: Tensor) -> list[Tensor]:
        return list(leaves_by_path(env.observation_of(env.draw_starts(key, episode))).values())

    try:
        traced = trace(start, env.stream_key, env.episode)
    except Exception:  # a reset that cannot be traced runs outside the graph
        return sys.maxsize
    # A traced operation has a fake tensor of its result in `meta`.
    values = [node.meta.get("val") for node in traced.graph.nodes]
    return max(x.numel() for x in values if isinstance(x, Tensor)) // env.num_envs


def _shapes(tensors: dict[Keys, Tensor]) -> dict[Keys, Any]:
    return {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}


def _problem_of(contents: Contents) -> str | None:
    """Return in words what a step has changed besides its outputs."""
    for path, label in sorted((contents.changes() | contents.written_tensors()).items()):
        problem = f"a step changes {label}, which is not part of the state: "
        if path.startswith(".env"):
            return (
                f"{problem}put values that change from step to step into the TensorDict that "
                "`transition` returns"
            )
        return f"{problem}store a policy's memory in the rollout, see `extra_fields`"
    return None


def _line_behind(error: BaseException, name: str) -> str:
    package = Path(__file__).parents[1]
    libraries = Path(torch.__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        # The last frame outside the libraries is the user's line; shipped tasks count as user code.
        in_package = package in path.parents and "tasks" not in path.parts
        if not in_package and libraries not in path.parents and "<" not in frame.filename:
            return f"{path.name}, line {frame.lineno}: `{frame.line}`"
    return name
