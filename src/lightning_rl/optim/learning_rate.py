"""Learning rate schedules."""

from typing import Literal

from torch.optim import Optimizer

ScheduleKind = Literal["constant", "linear", "adaptive"]
"""The setting `lr_schedule`."""


class LearningRateSchedule:
    """Constant, linear to zero at the end of the budget, or adaptive to the KL of an update.

    The adaptive rule comes from rsl_rl (Rudin et al. 2022, "Learning to Walk in Minutes", section
    3), once per epoch instead of once per minibatch; its state is the optimizer's own learning
    rate. Differs from it: a KL below rounding noise is ignored, and the bounds include the initial
    rate, so that a high KL never raises the rate and a low KL never lowers it.

    Args:
        kind: `constant`, `linear` or `adaptive`.
        initial: learning rate of the first iteration; `BOUNDS` are extended to include it.
        desired_kl: target KL per epoch of the adaptive schedule.
    """

    FACTOR = 1.5
    BOUNDS = (1e-5, 1e-2)
    NOISE = 1e-10
    """A KL below it is rounding noise: float32 log-probs are off by about 1e-6, which gives a KL of
    1e-12.
    """

    def __init__(self, kind: ScheduleKind, initial: float, desired_kl: float = 0.01) -> None:
        self.kind = kind
        self.initial = initial
        self.desired_kl = desired_kl

    def apply(self, optimizer: Optimizer, env_steps: int, horizon: int) -> None:
        """Set the rate of the iteration after `env_steps` of `horizon` env steps in the whole run.

        The adaptive rate is set only in the first iteration.
        """
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
        # The bounds include the current rate too: a resumed run may have another initial rate.
        lowest = min(self.BOUNDS[0], self.initial, rate)
        highest = max(self.BOUNDS[1], self.initial, rate)
        if kl > 2.0 * self.desired_kl:
            _set_rate(optimizer, max(lowest, rate / self.FACTOR))
        elif self.NOISE < kl < 0.5 * self.desired_kl:
            _set_rate(optimizer, min(highest, rate * self.FACTOR))


def _set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
