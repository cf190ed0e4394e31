"""Keep the books of an update: averages over minibatches, and steps that are not finite."""

import math
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.distributed import ranks
from lightning_rl.errors import require


class UpdateStatistics:
    """Averages over the minibatches of an iteration, summed on the device and read once.

    What minibatches report is that of all ranks already.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._rows: list[Tensor] = []

    def add(self, names: list[str], scalars: Tensor) -> None:
        """Add the scalars [len(names)] of one minibatch."""
        self._names = names
        self._rows.append(scalars)

    def mean_since(self, name: str, first: int) -> float:
        """Return the average of a scalar over the minibatches from `first` on; 0 for none.

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
        return float(torch.stack(rows)[:, self._names.index(name)].mean())

    def means(self) -> dict[str, float]:
        """Return the averages, in one transfer from the device, and start anew."""
        rows, self._rows = self._rows, []
        if not rows:
            return {}
        return dict(zip(self._names, torch.stack(rows).mean(0).tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._rows)


class Scalars:
    """What there is one of per iteration, averaged over ranks and read once."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def set(self, name: str, value: Tensor) -> None:
        """Set a scalar."""
        self._values[name] = value

    def means(self) -> dict[str, float]:
        """Return the averages, in one transfer from the device, and start anew."""
        scalars, self._values = self._values, {}
        if not scalars:
            return {}
        values = torch.stack([value.float() for value in scalars.values()])
        values = ranks.sum_over_ranks(values) / ranks.world_size()
        return dict(zip(scalars, values.tolist(), strict=True))


class NonFiniteGuard:
    """Tell which optimizer steps to skip, and when to give up.

    Args:
        limit: steps skipped in a row that are too many.

    Attributes:
        passed: steps taken so far, in the whole run.
        skipped: steps skipped so far, likewise.
        exhausted: whether the limit was reached.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.passed = 0
        self.skipped = 0
        self.in_a_row = 0
        self.exhausted = False
        self._failing: list[str] = []

    def passes(self, names: list[str], scalars: Tensor) -> bool:
        """Tell whether loss and gradient norm, the first and the last scalar, are finite.

        This is the one thing per minibatch that waits for the device.
        """
        if math.isfinite((scalars[0] + scalars[-1]).item()):
            self.in_a_row = 0
            self.passed += 1
            return True
        self.skipped += 1
        self.in_a_row += 1
        self.exhausted |= self.in_a_row >= self.limit
        self._failing = _not_finite(dict(zip(names, scalars, strict=True)))
        return False

    def message(self, sources: dict[str, Tensor]) -> str:
        """Say what was not finite, in the loss and in the named tensors that it was made of."""
        everywhere = ranks.gather_over_ranks(_not_finite(sources))
        blamed = dict.fromkeys(name for names in everywhere for name in names)
        origin = (
            f"Not finite among what they are made of: {', '.join(blamed)}."
            if blamed
            else (
                "What they are made of is finite, so the loss itself overflows: lower "
                "learning_rate or max_grad_norm."
            )
        )
        failing = ", ".join(self._failing)
        return (
            f"{self.limit} optimizer steps in a row were skipped, because {failing} were not "
            f"finite. {origin}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {"passed": self.passed, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up saved counters."""
        self.passed, self.skipped = state["passed"], state["skipped"]
        self.in_a_row = state["in_a_row"]


def named_sources(rollout: TensorDict, policy: nn.Module) -> dict[str, Tensor]:
    """Return what a loss is made of, by name, for the message about what was not finite."""
    names = (
        "observation",
        "action",
        "reward",
        "sample_log_prob",
        "value",
        "final_value",
        "advantage",
        "return",
    )
    flat = rollout[:, :-1].select(*names, strict=False).flatten_keys(".")
    return dict(flat.items()) | {f"parameter {name}": p for name, p in policy.named_parameters()}


def _not_finite(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name, value in tensors.items() if not value.isfinite().all()]
