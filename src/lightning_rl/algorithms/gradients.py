"""Put the gradient of a minibatch's loss into the parameters: eagerly, or as a compiled graph."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lightning_rl import ranks
from lightning_rl.algorithms.compiled import CompiledGradients, EverChangingError
from lightning_rl.algorithms.flat import FlatGradient
from lightning_rl.algorithms.objective import Objective, piece_size, trained_parameters
from lightning_rl.algorithms.pieces import chunks
from lightning_rl.algorithms.reduction import GradientReduction

T = TypeVar("T")


class Gradients:
    """Differentiate a loss that is an average over samples, and clip the gradient.

    A large minibatch on a CPU goes through in chunks whose gradients add up to the same. With
    several processes a minibatch is that of all ranks together; each has a part.

    Args:
        objective: the loss, and the policy whose parameters get the gradient.
        max_norm: bound on the norm of the whole gradient; None for none.
        compile: run one compiled graph; where that cannot be made, warn and run eagerly.
        optimizer: whose step a compiled graph may include.

    Attributes:
        stepped: whether the last call has taken the optimizer's step too, if all was finite.
    """

    def __init__(
        self,
        objective: Objective,
        max_norm: float | None,
        *,
        compile: bool,
        optimizer: Optimizer | None = None,
    ) -> None:
        self._limit = math.inf if max_norm is None else max_norm
        self._objective = objective
        self._flat = FlatGradient(trained_parameters(objective.policy))
        self._eager = EagerGradients(objective, self._flat, self._limit)
        self._compiled = None
        if compile:
            self._compiled = CompiledGradients(objective, self._flat, self._limit, optimizer)
        self._reduce = GradientReduction(self._eager.parameters)
        self._stepper: CompiledGradients | None = None  # where all ranks step by a graph
        self._steppers_agreed = False
        self.stepped = False

    def __call__(
        self, minibatch: TensorDict, backward: Callable[[Tensor], None]
    ) -> tuple[list[str], Tensor]:
        """Set the gradients; return names and values of the scalars.

        They are `loss`, what the loss reports, and `grad_norm`.

        Args:
            minibatch: [B].
            backward: what stands for `Tensor.backward`.
        """
        if ranks.world_size() > 1:
            return self._over_ranks(minibatch, backward)
        if self._compiled is not None and self._compiled.serves(minibatch):
            scalars = self._tried(lambda compiled: compiled(minibatch))
            if scalars is not None and self._compiled is not None:
                self.stepped = self._compiled.stepped
                return self._compiled.names, scalars
        self.stepped = False
        scalars = self._eager(minibatch, backward)
        return self._eager.names, scalars

    def _over_ranks(
        self, minibatch: TensorDict, backward: Callable[[Tensor], None]
    ) -> tuple[list[str], Tensor]:
        """Reduce before clipping: a graph ends with the gradients of this rank, another one steps.

        All ranks step in the same way, to the same bits.
        """
        minibatch = self._objective.prepare(minibatch)

        def local() -> tuple[list[str], Tensor]:
            flat = None
            if self._compiled is not None and self._compiled.serves(minibatch):
                flat = self._tried(lambda compiled: compiled.add_up(minibatch))
            if flat is not None and self._compiled is not None:
                return self._compiled.names[:-1], flat
            flat = self._eager.add_up(minibatch, backward)
            return self._eager.names[:-1], flat

        names, flat = self._reduce(len(minibatch), local, self._objective.phase)
        if not self._steppers_agreed:
            # By compiling it: a rank may have had no sample yet, and not know what it can do.
            able = bool(self._tried(lambda compiled: compiled.can_step(flat)))
            self._stepper = None if ranks.agree(not able) else self._compiled
            self._steppers_agreed = True
        row = None if self._stepper is None else self._stepper.step(flat)
        self.stepped = row is not None
        if row is None:
            row = self._flat.set_clipped(flat, self._limit)
        return [*names, "grad_norm"], row

    def _tried(self, call: Callable[[CompiledGradients], T]) -> T | None:
        """Return what the compiled update gives, or None where it is not wanted, or not to be had.

        In the latter case a warning says why, and it is not tried again.
        """
        if self._compiled is None:
            return None
        try:
            return call(self._compiled)
        except EverChangingError as error:
            rank_zero_warn(f"From here on the update runs uncompiled, since the loss, {error}.")
        except Exception as error:
            if self._compiled.succeeded:
                raise
            rank_zero_warn(
                "compile: true has no effect, the update runs uncompiled: "
                f"{str(error).strip().splitlines()[0]} ({type(error).__name__}). On a CPU it "
                "needs a C++ compiler (g++, or the variable CXX), on a GPU Triton; and a loss "
                "in which no Python decision depends on the values of tensors.",
            )
        self._compiled = None
        return None

    @torch.no_grad()
    def values(self, observations: TensorDict) -> Tensor:
        """Return the values [B] of observations [B], without gradients, by a graph if there is one.

        The policy must have a critic.
        """
        values = self._tried(lambda compiled: compiled.values(observations))
        if values is None:
            values = self._objective.policy.get_value(observations)["value"]
        return values

    def settle(self) -> None:
        """Compile for no other sizes of minibatches than have come so far.

        Called after the first update: where samples are left out, the last minibatch of a pass has
        another size each time, and each graph takes seconds.
        """
        if self._compiled is not None:
            self._compiled.settled = True


class EagerGradients:
    """Set gradients operation by operation.

    Args:
        objective, max_norm: see `Gradients`.
        flat: the gradient that `add_up` uses.

    Attributes:
        names: of the scalars that a call returns.
    """

    def __init__(self, objective: Objective, flat: FlatGradient, max_norm: float) -> None:
        self.objective = objective
        self.max_norm = max_norm
        self.names: list[str] = []
        self.parameters = trained_parameters(objective.policy)
        self._flat = flat

    def __call__(self, minibatch: TensorDict, backward: Callable[[Tensor], None]) -> Tensor:
        """Set the gradients; return the scalars [len(names)]."""
        for parameter in self.parameters:
            parameter.grad = None
        row = self._differentiate(self.objective.prepare(minibatch), backward)
        norm = clip_grad_norm_(self.parameters, self.max_norm)
        return torch.cat([row, norm[None]])

    def add_up(self, minibatch: TensorDict, backward: Callable[[Tensor], None]) -> Tensor:
        """Return scalars and gradients of a prepared minibatch, as `flattened` does."""
        self._flat.clear()
        row = self._differentiate(minibatch, backward)
        return self._flat.with_scalars(row, len(minibatch))

    def _differentiate(self, minibatch: TensorDict, backward: Callable[[Tensor], None]) -> Tensor:
        """Add to the gradients; return the scalars but their norm."""
        rows = []
        size = piece_size(self.objective)
        for chunk, weight in chunks(minibatch, size):
            with self.objective.phase("loss"):
                loss, scalars = self.objective.loss(chunk)
            with self.objective.phase("backward"):
                backward(loss if weight == 1 else loss * weight)
            self.names = ["loss", *scalars, "grad_norm"]
            row = torch.stack([loss, *scalars.values()]).detach()
            rows.append(row if weight == 1 else row * weight)
        return rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)
