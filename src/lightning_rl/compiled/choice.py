"""Choose whether the update of a run is compiled, by its config alone, and say so."""

import platform
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

Setting = bool | Literal["auto"]
"""Of `compile`."""

PAYS_FROM = 20_000
"""Minibatches of a run from which on `auto` compiles.

On two cores of an AMD EPYC a compiled update of small networks saves some 1 ms per minibatch of 64
to 256 samples, and more of larger ones; its graphs take 10 to 20 s the first time, and 2 to 3 s
where Inductor finds them in its cache. So a run of 20,000 minibatches gains even the first time,
whichever of these it is. A shorter one would gain seconds at most, and begin later.
"""

STEPS_PAY_FROM = 20_000
"""Steps of all envs of a process from which on `auto` compiles them.

A step of a batched torch env and of a small policy takes .3 to .6 ms less compiled, on a core of an
AMD EPYC; its graph takes 5 to 10 s the first time, and 2 to 3 s where Inductor finds it.
"""

DIFFERS = "the last digits of its numbers differ from those of an uninterrupted run"
"""How messages say what another machine, or another way of computing, comes to."""


class Choice:
    """Whether the update of a run is compiled, and why; a run that is resumed keeps to it.

    What it says depends on the config and the checkpoint alone: no clock decides, and the same run
    is the same to the last bit each time.

    Args:
        setting: `compile` of the algorithm.
        count: of minibatches in the whole budget, all ranks taken together as one; None where
            unknown.
        before: what `Algorithm` has saved of the run that is resumed; None for a new run.

    Attributes:
        compiled: whether it is.
        why: in words.
    """

    subject = "the update runs"
    traced = "a loss"
    counted, pays_from = "minibatches", PAYS_FROM

    def __init__(
        self, setting: Setting, count: int | None, before: dict[str, Any] | None = None
    ) -> None:
        self._setting = setting
        self._before = before
        self._said = False
        if setting != "auto":
            self.compiled, self.why = setting, f"compile: {str(setting).lower()}"
        elif before is not None:
            self.compiled, self.why = before["compiled"], "as in the checkpoint"
        elif count is None:
            self.compiled = False
            self.why = f"the algorithm does not say how many {self.counted} it has"
        else:
            self.compiled = count >= self.pays_from
            self.why = f"{count:,} {self.counted}, and it pays from {self.pays_from:,}"
        self._compare_machines()

    def give_up(self, why: str, warning: str) -> None:
        """Run uncompiled from here on.

        That is worth a warning where compiling was asked for, or has made the checkpoint; `auto`
        just says so.

        Args:
            why: in words.
            warning: for `compile: true`.
        """
        self.compiled, self.why = False, why
        if self._setting is True:
            rank_zero_warn(warning)
        elif self._before is not None:
            rank_zero_warn(
                f"The run was compiled up to the checkpoint, and now is not: {why}. It goes on, "
                f"but {DIFFERS}."
            )
        self.say()

    def does_not_apply(self, why: str) -> None:
        """Take note, without a word, that there is nothing to compile."""
        self.compiled, self.why, self._said = False, why, True

    def say(self) -> None:
        """Print, once, what `auto` came to."""
        if self._setting == "auto" and not self._said:
            self._said = True
            rank_zero_only(print)(f"{self._now} (compile: auto): {self.why}.", flush=True)

    @property
    def _now(self) -> str:
        return f"The update {'is compiled' if self.compiled else 'runs uncompiled'}"

    def state(self) -> dict[str, Any]:
        """Return what a run that is resumed keeps to, and compares."""
        return {"compiled": self.compiled, "cpu": cpu()}

    def _compare_machines(self) -> None:
        """Say what is not as it was up to the checkpoint."""
        if self._before is None:
            return
        was, now = self._before["compiled"], self.compiled
        if was != now:
            rank_zero_warn(
                f"The run was {'' if was else 'not '}compiled up to the checkpoint, and now is"
                f"{'' if now else ' not'}, by {self.why}: {DIFFERS}. With compile: auto it would "
                "go on as it began."
            )
        if self._before["cpu"] != cpu():
            rank_zero_warn(
                f"The checkpoint was written on another CPU ({self._before['cpu']}; this is "
                f"{cpu()}). The run goes on {'compiled' if now else 'uncompiled'}, as it began, "
                f"but {DIFFERS}."
            )


class StepsChoice(Choice):
    """Whether the steps of a batched torch env are compiled, with the policy that acts.

    Counted are the steps of all envs of a process in the whole budget.
    """

    subject = "the env is stepped"
    traced = "a step of env and policy"
    counted, pays_from = "steps of all envs", STEPS_PAY_FROM

    @property
    def _now(self) -> str:
        return f"The env is stepped {'compiled' if self.compiled else 'uncompiled'}"

    def _compare_machines(self) -> None:
        """Leave it to the choice for the update."""


def cpu() -> str:
    """Return what the last digits of float32 results depend on of the CPU."""
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
