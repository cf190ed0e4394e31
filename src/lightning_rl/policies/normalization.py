"""Running statistics of observations and rewards, in buffers that only the learner writes."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.functional import discounted_return
from lightning_rl.rollout.contract import discount_of, discounted_reward
from lightning_rl.system import ranks
from lightning_rl.system.rank_moments import moments_over_ranks


class RunningMoments(nn.Module):
    """Mean and variance of all samples so far, merged batch by batch.

    Source: Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance", equation
    2.1.

    Attributes:
        mean, var: [D] float32; 0 and 1 before the first update.
        count: int64, number of samples.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, batch: Tensor) -> None:
        """Merge a batch [M, D], or the batches of all ranks; skip it if a value is not finite."""
        number: int | Tensor = batch.shape[0]
        if number == 0 and ranks.world_size() == 1:
            return
        var, mean = (
            torch.var_mean(batch, dim=0, correction=0)
            if number
            else batch.new_zeros(2, batch.shape[1])
        )
        if ranks.world_size() > 1:
            # All ranks merge the same moments, so that their statistics stay equal.
            count, mean, var = moments_over_ranks(
                torch.tensor(len(batch), device=batch.device), mean, var * len(batch)
            )
            number, mean, var = count[0].long(), mean.float(), (var / count).float()
        # `where` instead of `if`, which would synchronize with the device.
        usable = (mean + var).isfinite().all()
        total = self.count + number
        weight = (number / total).to(mean.dtype)
        shift = mean - self.mean
        # Update incrementally: differences of large sums would lose float32's digits.
        merged = self.var + (var - self.var) * weight + shift.square() * weight * (1 - weight)
        self.var.copy_(torch.where(usable, merged, self.var))
        self.mean.copy_(torch.where(usable, self.mean + shift * weight, self.mean))
        self.count.copy_(torch.where(usable, total, self.count))


def lacks_statistics(policy: Any) -> bool:
    """Return whether a policy without updates has no statistics of its inputs yet.

    A policy of a user may have statistics of another kind, which nothing is known of.
    """
    moments = [layer for layer in policy.modules() if isinstance(layer, RunningMoments)]
    has_statistics = len(moments) > 0 and all(int(layer.count) > 0 for layer in moments)
    return int(policy.version) == 0 and not has_statistics


class ObservationNormalizer(RunningMoments):
    """Scale observations: clip((x - mean) / sqrt(var + eps), ±limit)."""

    def __init__(self, size: int, *, limit: float = 10.0, eps: float = 1e-8) -> None:
        super().__init__(size)
        self.limit = limit
        self.eps = eps

    def forward(self, observation: Tensor) -> Tensor:
        # Multiply as in `NumpyActor`: a division would give other last digits.
        return ((observation - self.mean) * self.factor()).clamp(-self.limit, self.limit)

    def factor(self) -> Tensor:
        """Return the factors [D] of deviations from the mean."""
        return (self.var + self.eps).rsqrt()


class RewardNormalizer(RunningMoments):
    """Scale rewards by the standard deviation of returns: clip(r / sqrt(var(G) + eps), ±limit).

    G is the forward-accumulated return of `discounted_return`; its mean is not subtracted. Source:
    Engstrom et al. 2020, "Implementation Matters in Deep RL", section 3.2, and gymnasium's
    `NormalizeReward`. Differs: statistics include a rollout before scaling it.

    Attributes:
        carry: [N], running return of the unfinished episodes; None before the first rollout.
    """

    def __init__(self, *, limit: float = 10.0, eps: float = 1e-8) -> None:
        super().__init__(1)
        self.limit = limit
        self.eps = eps
        self.carry: Tensor | None = None

    def observe_rollout(self, rollout: TensorDict, gamma: float) -> None:
        """Add the rewards of a rollout [N, T+1] to the statistics; `gamma` is per env step."""
        continues, padding = (rollout.get(key, None) for key in ("continues", "padding"))
        self.observe(
            discounted_reward(rollout, gamma),
            rollout["done"][:, :-1],
            discount=discount_of(rollout, gamma),
            continues=None if continues is None else continues[:, 0],
            counted=None if padding is None else ~padding[:, :-1],
        )

    @torch.no_grad()
    def observe(
        self,
        reward: Tensor,
        done: Tensor,
        *,
        discount: float | Tensor,
        continues: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> None:
        """Add the rewards of a rollout to the statistics; once, before they are scaled.

        Args:
            reward: [N, T].
            done: [N, T] bool.
            discount: gamma, or [N, T]: gamma^k for actions of k env steps.
            continues: [N] bool, whether the rollout continues the last episode; None for all.
            counted: [N, T] bool, the entries that are not padding; None for all.
        """
        returns, self.carry = _running_returns(self.carry, reward, done, discount, continues)
        self.update((returns if counted is None else returns[counted]).reshape(-1, 1))

    @torch.no_grad()
    def forward(self, reward: Tensor) -> Tensor:
        return (reward * (self.var + self.eps).rsqrt()).clamp(-self.limit, self.limit)

    def rank_state(self) -> dict[str, Tensor | None]:
        """Return the running returns, which each process has of its own envs."""
        return {"carry": self.carry}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Restore the running returns; without saved ones they begin at 0."""
        carry = state.get("carry")
        self.carry = None if carry is None else torch.as_tensor(carry)

    def get_extra_state(self) -> dict[str, Any]:
        # Not a buffer: N may differ in a resumed run, and `load_state_dict` compares shapes.
        return self.rank_state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.load_rank_state(state)


def _running_returns(
    carry: Tensor | None,
    reward: Tensor,
    done: Tensor,
    discount: float | Tensor,
    continues: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the running returns [N, T], which restart after `done` [N, T], and the next carry."""
    if carry is None or carry.shape != reward.shape[:1]:
        carry = torch.zeros_like(reward[:, 0])
    # A resumed run reads the state into the memory of the CPU.
    carry = carry.to(reward.device)
    if continues is not None:
        carry = torch.where(continues, carry, 0.0)
    returns = discounted_return(reward, done, carry, gamma=discount)
    # A finished episode carries no return into the next rollout.
    carry = torch.where(done[:, -1], 0.0, returns[:, -1])
    # Skip values that are not finite, which would stay in the return for the rest of the run.
    return returns, torch.where(carry.isfinite(), carry, 0.0)


class ReturnNormalizer(RewardNormalizer):
    """Scale rewards so that returns are between -limit and limit.

    r / max(sqrt(var(G) + eps), max|G| / limit), with the G of `RewardNormalizer` and the largest
    |G| so far, without clipping, so that returns fit categorical critics. Source: Lee et al. 2025
    (SimbaV2), section 4.3. Differs: the largest |G| is also taken of a G that continues through
    time limits, where targets bootstrap. With a `MixedReplay`, the variance covers collected
    samples and demonstrations by their shares, and returns of new goals (`HindsightReplay`) are at
    most `limit`: of a goal that ends no episode, |r| / (1 - gamma). The scale is 1 while the
    variance is 0.

    Args:
        limit: bound on returns; None for no limit.
        eps: added to the variance.

    Attributes:
        largest: [1], the largest |G| so far, of all processes.
        bootstrapped: [N], running return through time limits; None without a limit.
        demonstrations: their share of the minibatches, and mean and variance of their G, or None.
    """

    largest: Tensor
    demonstrations: tuple[float, float, float] | None = None

    def __init__(self, limit: float | None = None, *, eps: float = 1e-8) -> None:
        super().__init__(eps=eps)
        self.return_limit = limit
        self.bootstrapped: Tensor | None = None
        self.register_buffer("largest", torch.zeros(1))

    @torch.no_grad()
    def observe_rollout(self, rollout: TensorDict, gamma: float) -> None:
        super().observe_rollout(rollout, gamma)
        if self.return_limit is None:
            return
        reward, discount = discounted_reward(rollout, gamma), discount_of(rollout, gamma)
        ends, continues = rollout["terminated"][:, :-1], rollout.get("continues", None)
        continues = None if continues is None else continues[:, 0]
        returns, self.bootstrapped = _running_returns(
            self.bootstrapped, reward, ends, discount, continues
        )
        self.raise_largest(returns.abs().amax()[None])

    @torch.no_grad()
    def update(self, batch: Tensor) -> None:
        super().update(batch)
        self.raise_largest(batch.abs().amax(0) if len(batch) else torch.zeros_like(self.largest))

    @torch.no_grad()
    def raise_largest(self, largest: Tensor) -> None:
        """Raise `largest` to a value [1] of any process; all processes call this."""
        if ranks.world_size() > 1:
            maximum = max(ranks.gather_over_ranks(float(largest)))
            largest = torch.full_like(largest, maximum)
        usable = largest.isfinite() & (largest > self.largest)
        self.largest.copy_(torch.where(usable, largest, self.largest))

    @torch.no_grad()
    def observe_offline(
        self, share: float, reward: Tensor, ends: Tensor, terminated: Tensor, gamma: float
    ) -> None:
        """Set the statistics of the demonstrations' rewards.

        Args:
            share: share of demonstrations in each minibatch.
            reward: [M], in the order of steps.
            ends: [M] bool, steps after which the return restarts at zero.
            terminated: [M] bool, steps after which targets do not bootstrap; each is an end, too.
            gamma: discount per step.
        """
        self.demonstrations = None
        if len(reward) == 0:
            return
        zero = torch.zeros(1, device=reward.device)
        returns, bootstrapped = (
            discounted_return(reward[None], restarts[None], zero, gamma=gamma)
            for restarts in (ends, terminated)
        )
        var, mean = torch.var_mean(returns, correction=0)
        self.demonstrations = share, float(mean), float(var)
        largest = returns.abs().amax().maximum(bootstrapped.abs().amax())
        self.largest.copy_(self.largest.maximum(largest.to(self.largest)))

    def variance(self) -> Tensor:
        """Return the variance [1] of G in minibatches."""
        if self.demonstrations is None:
            return self.var
        share, given_mean, given_var = self.demonstrations
        # The variance of a mixture: within its parts, and between their means.
        between = share * (1.0 - share) * (self.mean - given_mean).square()
        return (1.0 - share) * self.var + share * given_var + between

    def rank_state(self) -> dict[str, Tensor | None]:
        return super().rank_state() | {"bootstrapped": self.bootstrapped}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        super().load_rank_state(state)
        returns = state.get("bootstrapped")
        self.bootstrapped = None if returns is None else torch.as_tensor(returns)

    def get_extra_state(self) -> dict[str, Any]:
        return super().get_extra_state() | {"given": self.demonstrations}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        super().set_extra_state(state)
        self.demonstrations = state.get("given")

    @torch.no_grad()
    def forward(self, reward: Tensor) -> Tensor:
        variance = self.variance()
        # While all returns are equal, such as 0 before the first success, the variance is no scale:
        # a replay may hold relabelled rewards of 1 already.
        scale = (variance + self.eps).sqrt().where(variance > 0, 1.0)
        if self.return_limit is not None:
            scale = torch.maximum(scale, self.largest / self.return_limit)
        return reward / scale
