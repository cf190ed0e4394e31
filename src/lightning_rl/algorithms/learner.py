"""The part of an algorithm that changes its weights: objectives, optimizers, compiled graphs."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.compiled.choice import CompileDecision
from lightning_rl.compiled.graphs import Graphs
from lightning_rl.compiled.update import CompiledSequence, CompiledUpdate, hindrance
from lightning_rl.optim.lightning_hooks import LightningHooks
from lightning_rl.optim.objective_checks import quoted
from lightning_rl.optim.update import LearningRateSchedule, Objective, Update
from lightning_rl.optim.update_sequence import UpdateSequence
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.lightning_private import Counter
from lightning_rl.system.phases import PhaseTimer, no_phases
from lightning_rl.system.sharded import PolicySharding

LIGHTNINGS_OWN = frozenset(vars(LightningModule())) - {"training"}
"""Attributes of every LightningModule."""

HIDDEN = (
    *("evaluation", "generator", "metrics", "objectives", "statistics", "step_compilation"),
    *("update", "updates", "_evaluation", "_learner", "_run_state", "_sequence_of"),
    *("_last_drawn", "_trainer", "_updates_before"),
)
"""Attributes of an algorithm that change constantly: a compiled loss must not read them."""


class Learner:
    """The updates of an algorithm in one `fit`: one per objective, eager or compiled.

    Args:
        owner: the algorithm, which holds the losses and all parameters.
        objectives: the losses, by name.
        optimizers: one per objective, in the same order.
        compilation: whether to compile; records why graphs are unavailable.
        hooks: calls Lightning's hooks of each minibatch; None without such hooks.
        phase: times the phases of an iteration.
        iterations: Lightning's counter of iterations.
        sharding: sharding of the policy over processes.

    Attributes:
        updates: `updates[name](minibatch)` takes an optimizer step on one objective.
        graphs: the compiled graphs; None if the updates are not compiled.
    """

    def __init__(
        self,
        owner: LightningModule,
        objectives: Mapping[str, Objective],
        optimizers: Sequence[Optimizer],
        compilation: CompileDecision,
        hooks: LightningHooks | None = None,
        phase: PhaseTimer = no_phases,
        iterations: Counter | None = None,
        sharding: PolicySharding | None = None,
    ) -> None:
        self.compilation = compilation
        self.phase = phase
        self.iterations = iterations
        self._objectives = objectives
        if compilation.compiled and (reason := hindrance(owner, hooks)):
            compilation.give_up(reason, f"compile: true has no effect: {reason}.")
        self.graphs: Graphs | None = None
        if compilation.compiled:
            # Lightning changes its own attributes during a run; a loss does not read them.
            left_out = {(id(owner), name) for name in LIGHTNINGS_OWN}
            losses = [f for each in objectives.values() for f in (each.loss, each.prepare)]
            self.graphs = Graphs(owner, owner.device, compilation, left_out, HIDDEN, "", losses)
        self.updates: dict[str, Update] = {
            name: CompiledUpdate(objective, optimizer, self.graphs, phase)
            if self.graphs is not None
            else Update(objective, optimizer, hooks, phase)
            if sharding is None
            else sharding.update(objective, optimizer, hooks, phase)
            for (name, objective), optimizer in zip(objectives.items(), optimizers, strict=True)
        }
        self._sequences: dict[tuple[str, ...], UpdateSequence] = {}
        # Listed once: to walk through the modules of a VLA takes a millisecond.
        self._parameters = dict(owner.named_parameters())
        self._trained = self._trained_now()
        self._note_rates()
        for update in self.updates.values():
            # A resumed run continues with the checkpoint's rates, or with a new setting.
            update.optimizer.register_load_state_dict_post_hook(lambda _: self._note_rates())

    def sequence(
        self,
        names: tuple[str, ...],
        follow_up: Callable[[], None],
        moved: Callable[[], Sequence[Tensor]],
    ) -> UpdateSequence:
        """Return the update that takes a step on several objectives, then runs `follow_up`.

        Args:
            names: names of the objectives.
            follow_up: tensor operations after the steps, such as moving target networks.
            moved: returns the owner's tensors that `follow_up` writes.
        """
        # One sequence per set of objectives: each is a graph of its own if compiled.
        sequence = self._sequences.get(names)
        if sequence is None:
            sequence = self._sequences[names] = self._new_sequence(names, follow_up, moved())
        return sequence

    def _new_sequence(
        self, names: tuple[str, ...], follow_up: Callable[[], None], moved: Sequence[Tensor]
    ) -> UpdateSequence:
        updates = [self.updates[name] for name in names]
        if self.graphs is None:
            return UpdateSequence(updates, follow_up, moved)
        compiled = cast(list[CompiledUpdate], updates)
        return CompiledSequence(
            ", ".join(names), compiled, follow_up, moved, self.graphs, self.phase
        )

    def check_trained(self) -> None:
        """Refuse other trained parameters than when the run began.

        Updates know no others: they clear, clip and add up the gradients of these alone, and a
        compiled one would move a parameter that was frozen since.

        Raises:
            ConfigurationError: names what was frozen, unfrozen or given to an optimizer since then.
        """
        trained = self._trained_now()
        if trained == self._trained:
            return
        changed = trained[0] ^ self._trained[0] | trained[1] ^ self._trained[1]
        names = [name for name, p in self._parameters.items() if id(p) in changed]
        raise ConfigurationError(
            "A run trains the same parameters from its beginning to its end, but a callback or the "
            f"algorithm has changed this for {quoted(names) or 'parameters of other modules'}: by "
            "requires_grad, or by the parameter groups of an optimizer. Freeze and unfreeze before "
            "the run; to train others later, begin another run with the weights of this one "
            "(--trainer.init_from)."
        )

    def _trained_now(self) -> tuple[set[int], set[int]]:
        """Return the ids of the trainable parameters, and of those in optimizers."""
        groups = (g for update in self.updates.values() for g in update.optimizer.param_groups)
        trainable = {id(p) for p in self._parameters.values() if p.requires_grad}
        return trainable, {id(p) for group in groups for p in group["params"]}

    def set_learning_rates(self, env_steps: int, horizon: int) -> None:
        """Set the rates of the iteration after `env_steps` of `horizon` env steps.

        Raises:
            ConfigurationError: if that overwrites a rate that was set since the last iteration.
        """
        for name, objective in self._objectives.items():
            schedule, optimizer = objective.schedule, self.updates[name].optimizer
            rates = _rates_of(optimizer)
            schedule.apply(optimizer, env_steps, horizon)
            if type(schedule) is not LearningRateSchedule:
                continue  # a user's schedule may read rates that a callback has set
            if rates not in (self._rates[name], _rates_of(optimizer)):
                raise ConfigurationError(
                    f"Between two iterations {objective.label('learning_rate')} was set to {rates},"
                    f" which lr_schedule: {schedule.kind} overwrites by {_rates_of(optimizer)}. Set"
                    " model.learning_rate and model.lr_schedule, not the optimizer; for a schedule "
                    "of your own override schedule_from of the algorithm."
                )

    def _note_rates(self) -> None:
        self._rates = {name: _rates_of(update.optimizer) for name, update in self.updates.items()}

    def learning_rates(self) -> dict[str, float]:
        """Return the current learning rates, by their log names."""
        return {
            objective.label("learning_rate"): self.updates[name].optimizer.param_groups[0]["lr"]
            for name, objective in self._objectives.items()
        }

    def finish_iteration(self, sources: Callable[[], dict[str, Tensor]]) -> list[dict[str, float]]:
        """End an iteration; return the scalars of each objective, averaged over its steps.

        `sources` returns the inputs of the losses by name, for the message of an error.

        Raises:
            FloatingPointError: after `max_nonfinite_steps` consecutive skipped steps.
        """
        self._note_rates()  # an adaptive schedule, or the algorithm, has set them in the iteration
        reported = [objective.statistics.close() for objective in self._objectives.values()]
        for objective in self._objectives.values():
            if objective.statistics.exhausted:
                raise FloatingPointError(objective.statistics.message(sources()))
        for update in self.updates.values():
            update.first_iteration_done()
        if self.graphs is not None:
            self.graphs.recheck()
            if self.graphs.have_served:
                self.compilation.print_decision()
        return reported


def _rates_of(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]
