"""One optimizer step per minibatch: zero, backward, clip, step, statistics."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lightning_rl.optim import objective_checks as checks
from lightning_rl.optim.gradients import FlatGradient
from lightning_rl.optim.lightning_hooks import LightningHooks
from lightning_rl.rollout.sequences import split_sequences
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.phases import PhaseTimer, no_phases

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer from parameters; in YAML `{class_path: AdamW, init_args: {...}}`."""

Loss = Callable[[TensorDict], tuple[Tensor, Mapping[str, Tensor | float]]]
"""Returns the loss of samples [B], and scalars to log; all of them are means over the samples."""

ScheduleKind = Literal["constant", "linear", "adaptive"]
"""The setting `lr_schedule`."""

CPU_MICRO_BATCH = 2048
"""Samples per forward pass on a CPU, whose activations fit into the cache."""


class Update:
    """Take one optimizer step per minibatch, unless the loss or gradient is not finite.

    A large minibatch on a CPU is split into micro-batches whose gradients add up. With several
    processes each has a part of the minibatch.

    Args:
        objective: the loss.
        optimizer: the optimizer of its parameters.
        hooks: calls Lightning's minibatch hooks, if a callback or the module overrides one; else
            None.
        phase: times the parts of the update.

    Attributes:
        names: names of the scalars of a minibatch: the loss, its logged scalars, the gradient norm.
        scalars: the scalars of the last minibatch.
    """

    def __init__(
        self,
        objective: "Objective",
        optimizer: Optimizer,
        hooks: LightningHooks | None = None,
        phase: PhaseTimer = no_phases,
    ) -> None:
        self.objective = objective
        self.optimizer = optimizer
        self.phase = phase
        self.parameters = objective.parameters
        self.gradient = FlatGradient(self.parameters)
        self.names: list[str] = []
        self.scalars: Tensor
        self._what = objective.name, objective.owner, self.parameters
        self._labels = [objective.label("loss"), objective.label("grad_norm")]
        self._hooks = hooks
        trained = sum(parameter.requires_grad for parameter in objective.owner.parameters())
        self._others = trained > len(self.parameters)
        # A fused optimizer on an accelerator checks finiteness without synchronizing.
        fused = all(group.get("fused") for group in optimizer.param_groups)
        self._gated = fused and self.parameters[0].device.type != "cpu"
        self._several = ranks.world_size() > 1
        self._agreed = self._checked = False  # names; first backward pass

    def __call__(self, minibatch: TensorDict) -> None:
        """Take a step for a minibatch [B]; with several processes, for this rank's part of it."""
        if self._several:
            self.step_together(minibatch)
        else:
            self.step(minibatch)

    def step(self, minibatch: TensorDict) -> None:
        """Take a step for a minibatch [B]."""
        minibatch = self.objective.prepare(minibatch)
        # None, not zero: the first micro-batch then writes its gradient instead of adding it.
        for parameter in self.parameters:
            parameter.grad = None
        row = self.backward(minibatch)
        # With a limit of infinity this only measures the norm.
        norm = clip_grad_norm_(self.parameters, self.objective.max_grad_norm)
        self.note(torch.cat([row, norm[None]]))
        self.optimizer_step()

    def backward(self, minibatch: TensorDict) -> Tensor:
        """Add the gradients of a prepared minibatch [B]; return its scalars without the norm."""
        rows = []
        for samples, share in self.parts(minibatch):
            with self.phase("loss"):
                loss, scalars = self.objective.loss(samples)
            with self.phase("backward"):
                self._differentiate(loss if share == 1 else loss * share)
            self.names = [*self._labels[:1], *scalars, *self._labels[1:]]
            row = row_of(loss, scalars)
            rows.append(row if share == 1 else row * share)
        self._checked = self._checked or checks.check_first_backward(*self._what, self.names)
        return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)

    def parts(self, minibatch: TensorDict) -> list[tuple[TensorDict, float]]:
        """Return the micro-batches of a minibatch [B], and their shares of the samples."""
        return micro_batches(minibatch, self.objective.micro_batch_size)

    def _differentiate(self, loss: Tensor) -> None:
        # Name the inputs: an actor's loss would otherwise add gradients to the critics.
        if not loss.requires_grad:
            raise checks.unreached(*self._what)
        inputs = self.parameters if self._others else None
        if self._hooks is None:
            loss.backward(inputs=inputs)
        else:
            self._hooks.backward(loss, inputs)

    def note(self, scalars: Tensor) -> None:
        """Store the scalars [len(names)] of a minibatch, in the order of `names`."""
        self.scalars = scalars
        self.objective.statistics.add(self.names, scalars)

    def optimizer_step(self) -> None:
        """Step the optimizer, unless the last stored scalars are not finite."""
        finite = is_finite(self.scalars)
        if self._gated:
            cast(Any, self.optimizer).found_inf = 1.0 - finite.float()
        elif not finite:  # waits for an accelerator, if the optimizer is not fused
            return
        with self.phase("optimizer"):
            if self._hooks is None:
                self.optimizer.step()
            else:
                self._hooks.step(self.optimizer)

    # --- with several processes ---

    def step_together(self, minibatch: TensorDict) -> None:
        """Take the same step on all ranks, for a minibatch of which this rank has the part [B].

        Each rank is weighted by its number of samples, which may be zero. A value that is not
        finite on one rank skips the step on all ranks.
        """
        # Add up gradients and scalars of all ranks as one flat tensor, without DDP's reducer, which
        # needs one backward pass per step, and hooks that a compiled graph does not call.
        sums = self.local_sums(minibatch) if len(minibatch) else None
        if not self._agreed:  # a rank without samples needs the names
            self.names = next(filter(None, ranks.gather_over_ranks(self.names)))
            self._agreed = True
        if sums is None:
            sums = self.gradient.no_sums(len(self.names) - 1)
        with self.phase("reduction"):  # includes waiting for the slowest rank
            total = ranks.sum_over_ranks(sums)
        self.step_by(total)

    def local_sums(self, minibatch: TensorDict) -> Tensor:
        """Return scalars and gradients of this rank's part [B], as `flattened` does."""
        self.gradient.clear()
        row = self.backward(minibatch)
        return self.gradient.with_scalars(row, len(minibatch))

    def step_by(self, total: Tensor) -> None:
        """Clip and step by the sum [L + P + n + 1] of `local_sums` over all ranks."""
        self.note(self.gradient.set_clipped(total, self.objective.max_grad_norm))
        self.optimizer_step()

    def first_iteration_done(self) -> None:
        """React to the end of the first iteration; only `CompiledUpdate` does."""


def row_of(loss: Tensor, scalars: Mapping[str, Tensor | float]) -> Tensor:
    """Return a loss and its scalars to log as one detached row [L].

    Raises:
        ConfigurationError: for a scalar that is not one number.
    """
    row = [loss]
    for name, value in scalars.items():
        if isinstance(value, int | float | np.number):
            value = loss.new_full((), float(value))
        if not (isinstance(value, Tensor) and value.numel() == 1):
            raise ConfigurationError(
                f"A loss reports '{name}', {_kind(value)}, but a chart takes one number: report "
                "its mean, or leave it out."
            )
        # Stay on the device: reading a number here would wait for it at each minibatch.
        row.append(value.reshape(()).to(loss.device))
    return torch.stack(row).detach()


def micro_batches(minibatch: TensorDict, size: int | None = None) -> list[tuple[TensorDict, float]]:
    """Split a minibatch [B] into parts of `size` (None: by cache); return their shares too."""
    if size is None and _is_large(minibatch):
        size = CPU_MICRO_BATCH
    if size is None or size >= len(minibatch):
        return [(minibatch, 1.0)]
    is_recurrent = "sequences" in minibatch.keys()
    parts = split_sequences(minibatch, size) if is_recurrent else minibatch.split(size)
    # Shares of the samples: the last part may be smaller.
    return [(samples, len(samples) / len(minibatch)) for samples in parts]


def _is_large(minibatch: TensorDict) -> bool:
    field = cast(Tensor, next(iter(minibatch.values(True, True))))
    return field.device.type == "cpu" and len(minibatch) >= 2 * CPU_MICRO_BATCH


class LearningRateSchedule:
    """Constant, linear to zero at the end of the budget, or adaptive to the KL of an update.

    The adaptive rule comes from rsl_rl (Rudin et al. 2022, "Learning to Walk in Minutes", section
    3), once per epoch instead of once per minibatch. Differs from it: a KL below rounding noise is
    ignored, and the bounds include the initial rate, so that a high KL never raises the rate and a
    low KL never lowers it.

    Args:
        kind: `constant`, `linear` or `adaptive`.
        initial: learning rate of the first iteration; `BOUNDS` are extended to include it.
        desired_kl: target KL per epoch of the adaptive schedule.
    """

    FACTOR = 1.5
    BOUNDS = (1e-5, 1e-2)
    NOISE = 1e-10
    """Smallest KL above rounding noise: errors of 1e-6 in float32 log-probs give a KL of 1e-12."""

    def __init__(self, kind: ScheduleKind, initial: float, desired_kl: float = 0.01) -> None:
        self.kind = kind
        self.initial = initial
        self.desired_kl = desired_kl

    def apply(self, optimizer: Optimizer, env_steps: int, horizon: int) -> None:
        """Set the rate of the iteration after `env_steps` of `horizon` env steps in the run."""
        if self.kind == "linear":
            _set_rate(optimizer, self.initial * max(0.0, 1.0 - env_steps / horizon))
        elif self.kind == "constant" or env_steps == 0:
            _set_rate(optimizer, self.initial)

    def adapt(self, optimizer: Optimizer, kl: float) -> None:
        """Change the adaptive rate by the KL of an epoch."""
        if self.kind != "adaptive":
            return
        group = optimizer.param_groups[0]
        rate = group["lr"] / group.get("lr_scale", 1.0)
        # Include the current rate in the bounds: a resumed run may have another initial rate.
        lowest = min(self.BOUNDS[0], self.initial, rate)
        highest = max(self.BOUNDS[1], self.initial, rate)
        if kl > 2.0 * self.desired_kl:
            _set_rate(optimizer, max(lowest, rate / self.FACTOR))
        elif self.NOISE < kl < 0.5 * self.desired_kl:
            _set_rate(optimizer, min(highest, rate * self.FACTOR))


def _set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


@dataclass
class Objective:
    """A loss of an algorithm, with the settings of its optimizer steps; see `Algorithm.objective`.

    Attributes:
        name: name of the optimizer, and prefix of `loss`, `grad_norm` and `learning_rate` in the
            logs (`critic_loss`); empty for the only or main objective.
        owner: the module with the loss and the parameters.
        loss: the loss to minimize.
        prepare: prepares a whole minibatch [B] without gradients, such as normalizing; not called
            with several processes.
        groups: parameter groups of the optimizer; a group may have `lr_scale`, but no `lr`.
        max_grad_norm: bound on the norm of the whole gradient; infinity for none.
        schedule: sets the learning rate.
        make_optimizer: makes the optimizer.
        max_nonfinite_steps: the run fails after this many consecutive skipped steps.
        micro_batch_size: samples per forward pass; None for a fast size.
        forwarded_scalars: names of logged scalars that later losses of an `UpdateSequence` read.
    """

    name: str
    owner: nn.Module
    loss: Loss
    prepare: Callable[[TensorDict], TensorDict]
    groups: list[dict[str, Any]]
    max_grad_norm: float
    schedule: LearningRateSchedule
    make_optimizer: OptimizerFactory
    max_nonfinite_steps: int
    micro_batch_size: int | None = None
    forwarded_scalars: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.statistics = UpdateStatistics(self.max_nonfinite_steps)
        self.groups = checks.with_lists(self.groups)
        checks.check_owned(self.name, self.owner, self.groups)
        # Here, because an optimizer adds its rate to the groups that it gets.
        checks.check_rates(self.name, self.groups)
        trained = {id(parameter) for group in self.groups for parameter in group["params"]}
        # Use the owner's order, which is the same on all ranks.
        self.parameters = [
            parameter
            for parameter in self.owner.parameters()
            if id(parameter) in trained and parameter.requires_grad
        ]

    def label(self, scalar: str) -> str:
        """Return the log name of a scalar that every objective has."""
        return f"{self.name}_{scalar}" if self.name else scalar


class UpdateStatistics:
    """Store scalars of minibatches on the device, read them once per iteration, count the steps.

    The scalars are already means over all ranks. `exhausted`: `limit` consecutive steps were
    skipped.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.applied = self.skipped = self.in_a_row = 0
        self.exhausted = False
        self._names: list[str] = []
        self._rows: list[Tensor] = []
        self._failing: list[str] = []

    def begin(self) -> None:
        """Forget the steps of an iteration that an error has ended."""
        self._rows, self.exhausted = [], False

    def add(self, names: list[str], scalars: Tensor) -> None:
        """Add the scalars [len(names)] of one minibatch."""
        self._names = names
        self._rows.append(scalars)

    def __len__(self) -> int:
        return len(self._rows)

    def mean_since(self, name: str, first: int) -> float:
        """Return the mean of a scalar over the steps taken since step `first`; 0 without steps.

        Raises:
            ConfigurationError: if the loss does not return this scalar.
        """
        rows = self._rows[first:]
        if not rows:
            return 0.0
        require(
            name in self._names,
            f"target_kl and lr_schedule: adaptive need '{name}', which this loss does not report; "
            f"it reports {', '.join(self._names)}. Remove these settings, or return '{name}' from "
            "`loss`.",
        )
        table = torch.stack(rows)
        values = table[is_finite(table), self._names.index(name)]
        return float(values.mean()) if len(values) else 0.0

    def close(self) -> dict[str, float]:
        """Count the steps of an iteration; return means over the steps taken, in one transfer."""
        rows, self._rows = self._rows, []
        if not rows:
            return {}
        table = torch.stack(rows).cpu()
        finite = is_finite(table)
        for scalars, is_taken in zip(table, finite.tolist(), strict=True):
            self.applied += is_taken
            self.skipped += not is_taken
            self.in_a_row = 0 if is_taken else self.in_a_row + 1
            self.exhausted |= self.in_a_row >= self.limit
            if not is_taken:
                self._failing = _not_finite(dict(zip(self._names, scalars, strict=True)))
        means = table[finite].mean(0).tolist() if finite.any() else []
        return dict(zip(self._names, means, strict=False))

    def message(self, sources: dict[str, Tensor]) -> str:
        """Return a message that names the scalars and the source tensors that are not finite."""
        everywhere = ranks.gather_over_ranks(_not_finite(sources))
        blamed = dict.fromkeys(name for names in everywhere for name in names)
        origin = (
            "Their inputs are finite, so the loss itself overflows: lower learning_rate or "
            "max_grad_norm."
        )
        if blamed:
            origin = f"Inputs that are not finite: {', '.join(blamed)}."
        return (
            f"{self.limit} optimizer steps in a row were skipped, because "
            f"{', '.join(self._failing)} were not finite. {origin}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {"passed": self.applied, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters."""
        self.begin()
        self.applied, self.skipped = int(state["passed"]), int(state["skipped"])
        self.in_a_row = int(state["in_a_row"])


def is_finite(scalars: Tensor) -> Tensor:
    """Return whether the first (loss) and last (norm) of scalars [..., L] are finite."""
    return (scalars[..., 0] + scalars[..., -1]).isfinite()


def _kind(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"


def _not_finite(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name, value in tensors.items() if not value.isfinite().all()]
