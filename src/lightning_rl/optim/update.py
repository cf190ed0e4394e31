"""Step down a loss, once for each minibatch: zero, backward, clip, step, statistics."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lightning_rl.optim import objective_checks as checks
from lightning_rl.optim.gradients import FlatGradient
from lightning_rl.optim.learning_rate import LearningRateSchedule
from lightning_rl.optim.lightning_hooks import LightningHooks
from lightning_rl.rollout.sequences import split_sequences
from lightning_rl.system import ranks
from lightning_rl.system.errors import require
from lightning_rl.system.phases import PhaseTimer, no_phases

OptimizerFactory = Callable[[Iterable[Any]], Optimizer]
"""Makes an optimizer from parameters.

In YAML `{class_path: torch.optim.AdamW, init_args: {weight_decay: 0.01}}`.
"""

Loss = Callable[[TensorDict], tuple[Tensor, dict[str, Tensor]]]
"""Returns the loss of samples [B] and scalars to report, all of them averages over the samples."""

CPU_MICRO_BATCH = 2048
"""Samples that go through networks at once on a CPU: activations of more leave the cache."""


class Update:
    """Take one optimizer step by a minibatch, unless its loss or gradient is not finite.

    This is the update operation by operation; `CompiledUpdate` does the same by graphs. A large
    minibatch on a CPU goes through in micro-batches whose gradients add up to the same. With
    several processes a minibatch is that of all ranks together; each has a part.

    Args:
        objective: the loss.
        optimizer: of its parameters.
        hooks: where a callback or the module listens to Lightning's hooks of minibatches; or None.
        phase: times the parts of the update.

    Attributes:
        names: of the scalars of a minibatch: the loss, what it reports, the norm of the gradient.
        scalars: those of the last minibatch.
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
        # On an accelerator a fused optimizer looks itself, and Python need not wait for the answer.
        fused = all(group.get("fused") for group in optimizer.param_groups)
        self._gated = fused and self.parameters[0].device.type != "cpu"
        self._several = ranks.world_size() > 1
        self._agreed = self._checked = False  # the ranks on the names; the first backward pass

    def __call__(self, minibatch: TensorDict) -> None:
        """Step down the loss of a minibatch [B]; with several processes, of their parts of one."""
        if self._several:
            self.step_together(minibatch)
        else:
            self.step(minibatch)

    def step(self, minibatch: TensorDict) -> None:
        """Step down the loss of a minibatch [B]."""
        minibatch = self.objective.prepare(minibatch)
        for parameter in self.parameters:
            parameter.grad = None
        row = self.backward(minibatch)
        norm = clip_grad_norm_(self.parameters, self.objective.max_grad_norm)
        self.note(torch.cat([row, norm[None]]))
        self.optimizer_step()

    def backward(self, minibatch: TensorDict) -> Tensor:
        """Add the gradients of a prepared minibatch [B]; return its scalars but their norm."""
        rows = []
        for samples, share in micro_batches(minibatch, self.objective.micro_batch_size):
            with self.phase("loss"):
                loss, scalars = self.objective.loss(samples)
            with self.phase("backward"):
                self._differentiate(loss if share == 1 else loss * share)
            self.names = [*self._labels[:1], *scalars, *self._labels[1:]]
            row = torch.stack([loss, *scalars.values()]).detach()
            rows.append(row if share == 1 else row * share)
        self._checked = self._checked or checks.check_first_backward(*self._what, self.names)
        return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)

    def _differentiate(self, loss: Tensor) -> None:
        # Named where there are others: an actor's loss goes through the critics, whose own
        # gradients it would take time to compute, and leave lying about.
        if not loss.requires_grad:
            raise checks.unreached(*self._what)
        inputs = self.parameters if self._others else None
        if self._hooks is None:
            loss.backward(inputs=inputs)
        else:
            self._hooks.backward(loss, inputs)

    def note(self, scalars: Tensor) -> None:
        """Keep the scalars [len(names)] of a minibatch, in the order of `names`."""
        self.scalars = scalars
        self.objective.statistics.add(self.names, scalars)

    def optimizer_step(self) -> None:
        """Move the parameters by their gradients, unless the scalars noted last are not finite."""
        finite = is_finite(self.scalars)
        if self._gated:
            cast(Any, self.optimizer).found_inf = 1.0 - finite.float()
        elif not finite:  # waits for an accelerator where the optimizer is not fused
            return
        with self.phase("optimizer"):
            if self._hooks is None:
                self.optimizer.step()
            else:
                self._hooks.step(self.optimizer)

    # --- with several processes ---

    def step_together(self, minibatch: TensorDict) -> None:
        """Step down the loss of a minibatch of which this rank has the part [B], all ranks alike.

        Gradients and scalars of all ranks are added up by one sum of one flat tensor. DDP's own
        reducer wants one backward pass per step, through hooks that a compiled graph does not call.
        A rank weighs as much as its part of the minibatch has samples, none included; and what is
        not finite on one rank is not finite on all.
        """
        sums = self.local_sums(minibatch) if len(minibatch) else None
        if not self._agreed:  # a rank without samples learns what is reported
            self.names = next(filter(None, ranks.gather_over_ranks(self.names)))
            self._agreed = True
        if sums is None:
            sums = self.gradient.no_sums(len(self.names) - 1)
        with self.phase("reduction"):  # waits for the slowest rank
            total = ranks.sum_over_ranks(sums)
        self.step_by(total)

    def local_sums(self, minibatch: TensorDict) -> Tensor:
        """Return scalars and gradients of this rank's part [B], as `flattened` does."""
        self.gradient.clear()
        row = self.backward(minibatch)
        return self.gradient.with_scalars(row, len(minibatch))

    def step_by(self, total: Tensor) -> None:
        """Clip and step by the sum [L + P + n + 1] of what `local_sums` gave on all ranks."""
        self.note(self.gradient.set_clipped(total, self.objective.max_grad_norm))
        self.optimizer_step()

    def first_iteration_done(self) -> None:
        """Take notice that the first iteration is over: nothing depends on it here."""


def micro_batches(minibatch: TensorDict, size: int | None = None) -> list[tuple[TensorDict, float]]:
    """Split a minibatch [B] into parts of a size; return them and their shares of the samples.

    None is for a size that suits the cache.
    """
    if size is None and _is_large(minibatch):
        size = CPU_MICRO_BATCH
    if size is None or size >= len(minibatch):
        return [(minibatch, 1.0)]
    whole = "sequences" in minibatch.keys()
    parts = split_sequences(minibatch, size) if whole else minibatch.split(size)
    return [(samples, len(samples) / len(minibatch)) for samples in parts]


def _is_large(minibatch: TensorDict) -> bool:
    field = cast(Tensor, next(iter(minibatch.values(True, True))))
    return field.device.type == "cpu" and len(minibatch) >= 2 * CPU_MICRO_BATCH


@dataclass
class Objective:
    """One of the losses of an algorithm, with all that its optimizer steps need.

    An algorithm makes its objectives in `configure_objectives`, by `Algorithm.objective`, which
    knows the settings that most have in common.

    Attributes:
        name: of the optimizer, and before `loss`, `grad_norm` and `learning_rate` in the charts
            (`critic_loss`); empty for the only one, or the main one.
        owner: the module whose method the loss is, and which holds the parameters. A parameter of
            it that is not among `parameters` is left alone, whatever of it the loss reads.
        loss: is minimised.
        prepare: does what needs a whole minibatch [B] at once, such as normalising; without
            gradients. With several processes, of which none has the whole, it is not called.
        groups: the parameters, in groups as an optimizer takes them; a group may have `lr_scale`.
        max_grad_norm: bound on the norm of the gradient of all of them; infinity for none.
        schedule: sets the learning rate.
        make_optimizer: makes the optimizer.
        max_nonfinite_steps: steps skipped in a row that are too many.
        micro_batch_size: samples that go through the network at once; None for as many as are fast.
        passes: names of reported scalars that the losses after it in an `UpdateSequence` read.
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
    passes: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.statistics = UpdateStatistics(self.max_nonfinite_steps)
        self.groups = checks.with_lists(self.groups)
        checks.check_owned(self.name, self.owner, self.groups)
        wanted = {id(parameter) for group in self.groups for parameter in group["params"]}
        # In the owner's order, which is the same on all ranks, however the groups are made.
        self.parameters = [
            parameter
            for parameter in self.owner.parameters()
            if id(parameter) in wanted and parameter.requires_grad
        ]

    def label(self, scalar: str) -> str:
        """Return the name under which a scalar that each objective has is reported."""
        return f"{self.name}_{scalar}" if self.name else scalar


class UpdateStatistics:
    """Keep what minibatches report on the device, read it once an iteration, and count the steps.

    What minibatches report is that of all ranks already.

    Args:
        limit: steps skipped in a row that are too many.

    Attributes:
        passed, skipped: steps taken and skipped in the whole run, before this iteration.
        exhausted: whether the limit was reached.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.passed = self.skipped = self.in_a_row = 0
        self.exhausted = False
        self._names: list[str] = []
        self._rows: list[Tensor] = []
        self._failing: list[str] = []

    def add(self, names: list[str], scalars: Tensor) -> None:
        """Add the scalars [len(names)] of one minibatch."""
        self._names = names
        self._rows.append(scalars)

    def __len__(self) -> int:
        return len(self._rows)

    def mean_since(self, name: str, first: int) -> float:
        """Return the average of a scalar over the steps taken from `first` on; 0 for none.

        Raises:
            ConfigurationError: where the loss reports no such scalar.
        """
        rows = self._rows[first:]
        if not rows:
            return 0.0
        require(
            name in self._names,
            f"target_kl and lr_schedule: adaptive go by '{name}', which this loss does not report; "
            f"it reports {', '.join(self._names)}. Leave them out, or return '{name}' from `loss`.",
        )
        table = torch.stack(rows)
        taken = table[is_finite(table), self._names.index(name)]
        return float(taken.mean()) if len(taken) else 0.0

    def close(self) -> dict[str, float]:
        """Count the steps of an iteration; return averages over those taken, in one transfer."""
        rows, self._rows = self._rows, []
        if not rows:
            return {}
        table = torch.stack(rows).cpu()
        finite = is_finite(table)
        for scalars, taken in zip(table, finite.tolist(), strict=True):
            self.passed += taken
            self.skipped += not taken
            self.in_a_row = 0 if taken else self.in_a_row + 1
            self.exhausted |= self.in_a_row >= self.limit
            if not taken:
                self._failing = _not_finite(dict(zip(self._names, scalars, strict=True)))
        means = table[finite].mean(0).tolist() if finite.any() else []
        return dict(zip(self._names, means, strict=False))

    def message(self, sources: dict[str, Tensor]) -> str:
        """Say what was not finite, in the loss and in the named tensors that it was made of."""
        everywhere = ranks.gather_over_ranks(_not_finite(sources))
        blamed = dict.fromkeys(name for names in everywhere for name in names)
        origin = (
            "What they are made of is finite, so the loss itself overflows: lower learning_rate or "
            "max_grad_norm."
        )
        if blamed:
            origin = f"Not finite among what they are made of: {', '.join(blamed)}."
        return (
            f"{self.limit} optimizer steps in a row were skipped, because "
            f"{', '.join(self._failing)} were not finite. {origin}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {"passed": self.passed, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up saved counters."""
        self.passed, self.skipped = state["passed"], state["skipped"]
        self.in_a_row = state["in_a_row"]


def is_finite(scalars: Tensor) -> Tensor:
    """Tell whether loss and gradient norm, the first and last of scalars [..., L], are finite."""
    return (scalars[..., 0] + scalars[..., -1]).isfinite()


def _not_finite(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name, value in tensors.items() if not value.isfinite().all()]
