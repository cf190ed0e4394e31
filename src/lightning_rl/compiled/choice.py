"""Decide whether to compile the update or the env steps of a run, and report the decision."""

import platform
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lightning_rl.system.output import tell

Setting = bool | Literal["auto"]
"""The setting `compile`."""

PAYS_FROM = 20_000
"""Fewest minibatches of a run for which `auto` compiles the update.

Compiling takes 10 to 20 s the first time (2 to 3 s if cached), and saves about 1 ms per minibatch
of 64 to 256 samples on two cores of an AMD EPYC.
"""

STEPS_PAY_FROM = 20_000
"""Fewest steps of all envs of a process for which `auto` compiles them.

Compiling takes 5 to 10 s the first time (2 to 3 s if cached), and saves 0.3 to 0.6 ms per step on a
core of an AMD EPYC.
"""

PAYS_FROM_ON_GPU = 5_000
"""Fewest minibatches or steps for which `auto` compiles on a GPU.

Compiling takes 10 to 20 s the first time, and saves 3.6 ms per minibatch and 1.7 ms per step on an
H200.
"""

DIFFERS = "the last digits of the results may differ from an uninterrupted run"
"""The effect of another machine or of a changed decision, for messages."""


class CompileDecision:
    """Whether to compile the update of a run, and why; a resumed run keeps its decision.

    The decision depends only on the config, the device and the checkpoint, not on timings, so that
    runs are reproducible to the bit.

    Args:
        setting: `compile` of the algorithm.
        count: minibatches in the whole budget (shared by all ranks); None if unknown.
        saved: the state saved by the resumed run; None for a new run.
        on_gpu: whether the run computes on a GPU.

    Attributes:
        compiled: the decision.
        why: its reason, in words.
    """

    subject = "the update runs"
    traced = "a loss"
    counted, pays_from = "minibatches", PAYS_FROM

    def __init__(
        self,
        setting: Setting,
        count: int | None,
        saved: dict[str, Any] | None = None,
        on_gpu: bool = False,
    ) -> None:
        self._setting = setting
        self._saved = saved
        self._printed = False
        if setting != "auto":
            self.compiled, self.why = setting, f"compile: {str(setting).lower()}"
        elif saved is not None:
            self.compiled, self.why = saved["compiled"], "as in the checkpoint"
        elif count is None:
            self.compiled = False
            self.why = f"the algorithm does not say how many {self.counted} it has"
        else:
            # Uncompiled, a GPU waits for the launch of each kernel: graphs pay earlier.
            threshold = min(self.pays_from, PAYS_FROM_ON_GPU) if on_gpu else self.pays_from
            self.compiled = count >= threshold
            self.why = f"{count:,} {self.counted}, and compiling pays from {threshold:,}"
        self._compare_machines()

    def give_up(self, reason: str, warning: str) -> None:
        """Run uncompiled from now on; warn if the user or the resumed run wanted graphs."""
        self.compiled, self.why = False, reason
        if self._setting is True:
            rank_zero_warn(warning)
        # A new run with `auto` only gets the printed decision: its user did not ask for graphs.
        elif self._saved is not None:
            rank_zero_warn(
                f"The run was compiled until the checkpoint, and is uncompiled now: {reason}. It "
                f"continues, but {DIFFERS}."
            )
        self.print_decision()

    def does_not_apply(self, reason: str) -> None:
        """Record that there is nothing to compile, without a message."""
        self.compiled, self.why, self._printed = False, reason, True

    def print_decision(self) -> None:
        """Print the decision of `auto`, once."""
        if self._setting == "auto" and not self._printed:
            self._printed = True
            rank_zero_only(tell)(f"{self._decision} (compile: auto): {self.why}.")

    @property
    def _decision(self) -> str:
        return f"The update {'is compiled' if self.compiled else 'runs uncompiled'}"

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {"compiled": self.compiled, "cpu": cpu()}  # what a resumed run compares

    def _compare_machines(self) -> None:
        if self._saved is None:
            return
        saved_choice, now = self._saved["compiled"], self.compiled
        # Only a typed `true` or `false` gets here, because `auto` keeps the saved choice.
        if saved_choice != now:
            rank_zero_warn(
                f"The run was {'' if saved_choice else 'not '}compiled up to the checkpoint, and "
                f"is {'' if now else 'not '}compiled now, by {self.why}: {DIFFERS}. "
                "compile: auto keeps the choice of the checkpoint."
            )
        # Inductor compiles for the CPU's vector instructions, so sums round in another order.
        if self._saved["cpu"] != cpu():
            rank_zero_warn(
                f"The checkpoint was written on another CPU ({self._saved['cpu']}; this is "
                f"{cpu()}). The run continues {'compiled' if now else 'uncompiled'}, as it began, "
                f"but {DIFFERS}."
            )


class StepsCompileDecision(CompileDecision):
    """Whether to compile the steps of a batched torch env, with the acting policy.

    It counts the steps of all envs of a process in the whole budget.
    """

    subject = "the env is stepped"
    traced = "a step of env and policy"
    counted, pays_from = "steps of all envs", STEPS_PAY_FROM

    @property
    def _decision(self) -> str:
        return f"The env is stepped {'compiled' if self.compiled else 'uncompiled'}"

    def _compare_machines(self) -> None: ...  # the message of the update covers both


def cpu() -> str:
    """Return the CPU's name and capability, which affect the last digits of float32 results."""
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
