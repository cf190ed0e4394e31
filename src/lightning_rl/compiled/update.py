"""Run forward pass, backward pass, clipping and Adam as one compiled graph."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_rl.compiled.adam import TracedAdam
from lightning_rl.compiled.graphs import Function, Graphs, computed_once, layout
from lightning_rl.optim.gradients import averages, clip_factor, flattened
from lightning_rl.optim.lightning_hooks import MINIBATCH_HOOKS, LightningHooks
from lightning_rl.optim.objective_checks import check_names, quoted, unreached
from lightning_rl.optim.update import Objective, Update, is_finite, micro_batches, row_of
from lightning_rl.optim.update_sequence import UpdateSequence, select_forwarded
from lightning_rl.rollout.sequences import sequences_of, tensors_of, with_tensors
from lightning_rl.system import ranks
from lightning_rl.system.phases import PhaseTimer, no_phases
from lightning_rl.system.torch_private import call_with, flatten, has_gradient_hooks


def hindrance(owner: nn.Module, hooks: LightningHooks | None) -> str | None:
    """Return what a compiled update of a module would not call, in words; None if it can run."""
    if hooks is not None:
        return (
            "a callback or the module overrides one of "
            f"{', '.join(MINIBATCH_HOOKS)}, which a compiled update does not call"
        )
    hooked = [n for n, p in owner.named_parameters() if p.requires_grad and has_gradient_hooks(p)]
    if not hooked:
        return None
    return (
        f"{quoted(hooked[:3])} {'has' if len(hooked) == 1 else 'have'} hooks on the gradient "
        "(register_hook), which a compiled update does not call"
    )


class CompiledUpdate(Update):
    """An `Update` by graphs that Inductor has compiled; uncompiled if graphs are unavailable.

    With Adam, a minibatch is one graph, including the optimizer step; with micro-batches or several
    ranks, it is one graph per micro-batch, and one for clipping and stepping. With another
    optimizer, graphs compute the gradients only. The loss is traced once per minibatch size: no
    Python decision may depend on the values of tensors.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        graphs: Graphs,
        phase: PhaseTimer = no_phases,
    ) -> None:
        super().__init__(objective, optimizer, phase=phase)
        self.graphs = graphs
        # By identity: a parameter may have several names.
        names = {id(p): n for n, p in objective.owner.named_parameters()}
        self.names_of_parameters = [names[id(parameter)] for parameter in self.parameters]
        self.adam = None
        if TracedAdam.fits(optimizer, self.parameters):
            self.adam = TracedAdam(optimizer, self.parameters)
        self._sizes: set[int] = set()
        self._sizes_known = False
        self._all_ranks_step_by_graph: bool | None = None  # set at the first step

    def step(self, minibatch: TensorDict) -> None:
        scalars = None
        if self.has_graph_for(minibatch):
            with self.phase("minibatch, compiled"):
                scalars = self.graphs.attempt(lambda: self._step_by_graph(minibatch))
        # No graph for this size, or graphs have failed: the same step uncompiled.
        if scalars is None:
            super().step(minibatch)
        else:
            self.note(scalars)
            if self.adam is None:  # otherwise the graph has stepped
                self.optimizer_step()

    @torch.no_grad()
    def _step_by_graph(self, minibatch: TensorDict) -> Tensor:
        if self.adam is not None and len(self._micro_batches(minibatch)) == 1:
            return self._run(minibatch, self.adam)
        # Prepare the whole minibatch: advantages are normalized over it, not over micro-batches.
        # The copy is shallow, for the fields that `prepare` replaces.
        sums = self._add_up(self.objective.prepare(minibatch.copy()))
        if self.adam is None:
            return self.gradient.set_clipped(sums, self.objective.max_grad_norm)
        return self.graphs.call(*self._stepping(sums, self.adam))[0]

    def local_sums(self, minibatch: TensorDict) -> Tensor:
        sums = None
        if self.has_graph_for(minibatch):
            sums = self.graphs.attempt(lambda: self._add_up(minibatch))
        return super().local_sums(minibatch) if sums is None else sums

    def step_by(self, total: Tensor) -> None:
        if self._all_ranks_step_by_graph is None:
            # All ranks must step by a graph, or none. Compile now: a rank without samples does not
            # know yet whether it has a graph.
            able = self.graphs.attempt(lambda: self._can_step(total))
            self._all_ranks_step_by_graph = not ranks.agree(not able)
        if not self._all_ranks_step_by_graph or self.adam is None:
            super().step_by(total)
            return
        with torch.no_grad():
            self.note(self.graphs.call(*self._stepping(total, self.adam))[0])

    def first_iteration_done(self) -> None:
        self._sizes_known = bool(self._sizes)  # empty before learning starts

    def has_graph_for(self, minibatch: TensorDict) -> bool:
        """Return whether a minibatch of this size has a graph, or may get one."""
        sequences = sequences_of(minibatch)
        if sequences is not None and sequences.counted is not None:
            # The number of samples varies, but a graph has a fixed number.
            self.graphs.give_up(
                "the number of counted steps changes between minibatches (because of "
                "interventions, first episodes only, or a sequence_length that does not divide "
                "data.buffer_size)"
            )
        # Sizes that first occur after the first iteration are not worth a graph.
        if not self._sizes_known:
            self._sizes.add(len(minibatch))
        return self.graphs.available and len(minibatch) in self._sizes

    def fits_one_graph(self, minibatch: TensorDict) -> bool:
        return self.has_graph_for(minibatch) and len(self._micro_batches(minibatch)) == 1

    def _micro_batches(self, minibatch: TensorDict) -> list[tuple[TensorDict, float]]:
        return micro_batches(minibatch, self.objective.micro_batch_size)

    @torch.no_grad()
    def _add_up(self, minibatch: TensorDict) -> Tensor:
        batches = self._micro_batches(minibatch)
        total = self._run(batches[0][0])
        for samples, _ in batches[1:]:
            total += self._run(samples)
        return total

    def _run(self, samples: TensorDict, adam: TracedAdam | None = None) -> Tensor:
        """Take a step with `adam` and return the scalars; otherwise scalars and gradients."""
        fields = tensors_of(samples)
        key = (self.objective.name, "loss", layout(fields), adam and adam.settings)
        # Parameters and Adam's state keep their addresses; the fields of each minibatch are new.
        inputs = [*self.parameters, *fields]
        moving = slice(len(self.parameters), len(inputs))
        if adam is not None:
            inputs += adam.tensors()
        result, reported = self.graphs.call(
            key, lambda: self._loss_function(samples, adam), inputs, moving
        )
        self.set_scalar_names(reported)
        self.graphs.have_served = True  # later errors are no compile errors
        return result

    def set_scalar_names(self, reported: Iterable[str]) -> None:
        # The order of the row: loss, reported scalars, norm of the gradient.
        self.names = [*self._labels[:1], *reported, *self._labels[1:]]

    def _can_step(self, total: Tensor) -> bool:
        if self.adam is None:
            return False
        self.graphs.prepare(*self._stepping(total, self.adam))
        return True

    def _stepping(self, total: Tensor, adam: TracedAdam) -> tuple[Any, ...]:
        first = len(self.parameters)
        return (
            (self.objective.name, "step", len(total), adam.settings[:-1]),
            lambda: self._step_function(adam),
            [*self.parameters, total, *adam.tensors()],
            slice(first, first + 1),
        )

    # --- traced code ---

    def _loss_function(
        self, samples: TensorDict, adam: TracedAdam | None
    ) -> tuple[Function, dict[str, None]]:
        first = len(self.parameters)
        last = first + len(tensors_of(samples))
        reported: dict[str, None] = {}

        def differentiate(*inputs: Tensor) -> list[Tensor]:
            minibatch = with_tensors(samples, inputs[first:last])
            state = dict(zip(self.names_of_parameters, inputs[:first], strict=True))
            if adam is not None:
                return [self.traced_step(state, minibatch, adam, inputs[last:], reported)]
            row, gradients, reached = self._differentiated(state, minibatch, True, reported)
            return [flattened(row, gradients, reached, len(samples))]

        return differentiate, reported

    def traced_step(
        self,
        state: Mapping[str, Tensor],
        minibatch: TensorDict,
        adam: TracedAdam,
        adam_tensors: Sequence[Tensor],
        reported: dict[str, None],
    ) -> Tensor:
        """Take an optimizer step for a minibatch [B] in place; return its scalars. To be traced.

        `state` replaces the owner's parameters and buffers; `reported` gets the names of the
        scalars.
        """
        row, gradients, reached = self._differentiated(state, minibatch, False, reported)
        parameters = [state[name] for name in self.names_of_parameters]
        gradient = flatten(gradients)
        return self._clip_and_step(parameters, row, gradient, adam, adam_tensors, reached)

    def _loss(
        self, minibatch: TensorDict, prepared: bool
    ) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        objective = self.objective
        return objective.loss(minibatch if prepared else objective.prepare(minibatch))

    def _differentiated(
        self,
        state: Mapping[str, Tensor],
        minibatch: TensorDict,
        prepared: bool,
        reported: dict[str, None],
    ) -> tuple[Tensor, list[Tensor], list[bool]]:
        """Return scalars [L], the gradient of each parameter, and whether the loss reaches it."""
        # The graph's inputs carry no gradients; these leaves do, while tracing.
        leaves = [state[name].detach().requires_grad_() for name in self.names_of_parameters]
        with torch.enable_grad():
            tensors = {**state, **dict(zip(self.names_of_parameters, leaves, strict=True))}
            loss, scalars = call_with(
                self.objective.owner, tensors, self._loss, minibatch, prepared
            )
            if not loss.requires_grad:
                raise unreached(*self._what)
            leaf_gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            if all(gradient is None for gradient in leaf_gradients):
                raise unreached(*self._what)
        # Zeros keep the flat gradient complete; `reached` keeps Adam from stepping these
        # parameters.
        gradients = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for gradient, leaf in zip(leaf_gradients, leaves, strict=True)
        ]
        check_names([*self._labels, *scalars])
        reported.update(dict.fromkeys(scalars))
        row = row_of(loss, scalars)
        return row, gradients, [gradient is not None for gradient in leaf_gradients]

    def _step_function(self, adam: TracedAdam) -> tuple[Function, dict[str, None]]:
        first = len(self.parameters)

        def update(*inputs: Tensor) -> list[Tensor]:
            parameters = inputs[:first]
            row, gradient, reached = averages(inputs[first], parameters)
            state = inputs[first + 1 :]
            return [self._clip_and_step(parameters, row, gradient, adam, state, reached)]

        return update, {}

    def _clip_and_step(
        self,
        parameters: Sequence[Tensor],
        row: Tensor,
        gradient: Tensor,
        adam: TracedAdam,
        state: Sequence[Tensor],
        reached: Sequence[bool] | Tensor,
    ) -> Tensor:
        norm = gradient.square().sum().sqrt()
        row = torch.cat([row, norm[None]])
        clipped = gradient * computed_once(clip_factor(norm, self.objective.max_grad_norm))
        # The guard against non-finite steps stays on the device: no wait per minibatch.
        accept = computed_once(is_finite(row))
        adam.update(parameters, clipped, state, accept, reached)
        return row


class CompiledSequence(UpdateSequence):
    """An `UpdateSequence` as one graph: all losses, their optimizers, and the follow-up.

    If one graph is impossible (an optimizer other than Adam, several processes, micro-batches), the
    updates run one by one, each with its own graphs.
    """

    def __init__(
        self,
        name: str,
        updates: Sequence[CompiledUpdate],
        follow_up: Callable[[], None],
        follow_up_outputs: Sequence[Tensor],
        graphs: Graphs,
        phase: PhaseTimer = no_phases,
    ) -> None:
        super().__init__(updates, follow_up, follow_up_outputs)
        self._name = name
        self._compiled = updates
        self._graphs = graphs
        self._phase = phase
        self._owner = updates[0].objective.owner
        trained = [p for update in updates for p in update.parameters]
        self._tensors = [*trained, *follow_up_outputs]
        names = {
            id(tensor): name
            for group in (self._owner.named_parameters(), self._owner.named_buffers())
            for name, tensor in group
        }
        self._names = [names[id(tensor)] for tensor in self._tensors]
        # A parameter of two updates would be two inputs, of which each step would write only one.
        alone = ranks.world_size() == 1 and len(set(self._names)) == len(self._names)
        self._fits = alone and all(update.adam is not None for update in updates)

    def __call__(self, minibatch: TensorDict) -> None:
        self.check_fields(minibatch)
        rows = None
        if self._fits and all(u.fits_one_graph(minibatch) for u in self._compiled):
            with self._phase("minibatch, compiled"):
                rows = self._graphs.attempt(lambda: self._run(minibatch))
        if rows is None:
            super().__call__(minibatch)
            return
        # The graph returns the scalars of all updates as one tensor.
        for update, row in zip(
            self._compiled, rows.split([len(u.names) for u in self._compiled]), strict=True
        ):
            update.note(row)

    @torch.no_grad()
    def _run(self, minibatch: TensorDict) -> Tensor:
        fields = tensors_of(minibatch)
        adams = [cast(TracedAdam, update.adam) for update in self._compiled]
        key = (self._name, "sequence", layout(fields), *(adam.settings for adam in adams))
        moving = slice(len(self._tensors), len(self._tensors) + len(fields))
        states = [tensor for adam in adams for tensor in adam.tensors()]
        rows, reported = self._graphs.call(
            key, lambda: self._function(minibatch), [*self._tensors, *fields, *states], moving
        )
        if not all(update.names for update in self._compiled):
            indexed_names = [name.split(":", 1) for name in reported]
            for i, update in enumerate(self._compiled):
                update.set_scalar_names(name for index, name in indexed_names if int(index) == i)
        self._graphs.have_served = True
        return rows

    def _function(self, minibatch: TensorDict) -> tuple[Function, dict[str, None]]:
        first = len(self._tensors)
        last = first + len(tensors_of(minibatch))
        reported: dict[str, None] = {}

        def step_all(*inputs: Tensor) -> list[Tensor]:
            state = dict(zip(self._names, inputs[:first], strict=True))
            samples = with_tensors(minibatch, inputs[first:last])
            rows, start = [], last
            for i, update in enumerate(self._compiled):
                adam = cast(TracedAdam, update.adam)
                stop = start + len(adam.tensors())
                names: dict[str, None] = {}
                # A copy: fields that one loss adds are not for the next.
                row = update.traced_step(state, samples.copy(), adam, inputs[start:stop], names)
                scalars, objective = dict(zip(names, row[1:-1], strict=True)), update.objective
                for name, scalar in select_forwarded(
                    objective.name, objective.forwarded_scalars, scalars
                ).items():
                    # What an objective passes to the next ones stays in the graph.
                    samples.set(name, scalar.expand(samples.batch_size))
                reported.update(dict.fromkeys(f"{i}:{name}" for name in names))
                rows.append(row)
                start = stop
            # `state` holds the stepped parameters, because Adam has written them in place.
            call_with(self._owner, state, self.follow_up)
            return [torch.cat(rows)]

        return step_all, reported
