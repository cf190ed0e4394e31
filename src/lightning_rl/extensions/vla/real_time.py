"""Real-time chunks: a chunk continues the chunk that executes while the policy computes it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import gymnasium
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_rl.extend.errors import check_range, require
from lightning_rl.extensions.vla.heads import ActionHead

Method = Literal["guided", "conditioned", "skip"]
"""How a chunk continues the old one, see `RealTime`."""


@dataclass(frozen=True)
class RealTime:
    """Settings of real-time chunks, equal in acting and training.

    The policy computes a chunk for the observation of now, which takes d env steps. Meanwhile the
    env executes the old chunk, so the first d actions of the new chunk are the old chunk's. After s
    env steps the policy computes the next chunk.

        old chunk  0 ....... s ..... s+d ......... K
        new chunk            0 ....... d ........ K-s ........ K
                             copied      guided        free

    Source: Black, Galliker and Levine 2025, "Real-Time Execution of Action Chunking Flow Policies"
    (`guided`); Black et al. 2025, "Training-Time Action Conditioning for Efficient Real-Time
    Chunking" (`conditioned`); Shukor et al. 2025, "SmolVLA", section 3.3 (`skip`).

    Args:
        execution_horizon: s, env steps from chunk to chunk; `execute` of `ActionChunk`.
        delay_steps: d, or a list from which each chunk's d is drawn, such as the measured delays of
            a robot. Deterministic acting takes the largest. A real-time recording measures d.
        method: `guided` pulls a flow or a diffusion towards the old chunk; `conditioned` gives the
            copied actions to the expert as input, which needs `prefix_steps` of `BehaviorCloning`;
            `skip` only copies, for every head.
        max_guidance_weight: bound of the guidance weight.
        mask: decay of the guidance between d and K - s.
    """

    execution_horizon: int
    delay_steps: int | list[int] = 0
    method: Method = "guided"
    max_guidance_weight: float = 5.0
    mask: Literal["exponential", "linear"] = "exponential"

    @property
    def delays(self) -> list[int]:
        """The possible delays, in env steps."""
        return [self.delay_steps] if isinstance(self.delay_steps, int) else self.delay_steps

    def check(self, head: ActionHead, space: gymnasium.Space[Any]) -> None:
        """Refuse settings that do not fit the head, or the env's action space [K, *A].

        Raises:
            ConfigurationError: with the setting.
        """
        horizon, size = self.execution_horizon, head.chunk_size
        check_range("real_time.execution_horizon", horizon, minimum=1, maximum=size)
        check_range("real_time.max_guidance_weight", self.max_guidance_weight, minimum=0)
        require(len(self.delays) > 0, "real_time.delay_steps is an empty list: give a delay.")
        limit = min(horizon, size - horizon)
        for delay in self.delays:
            require(
                0 <= delay <= limit,
                f"real_time.delay_steps has {delay}, but must lie in [0, {limit}]: the next chunk "
                f"begins after {horizon} of {size} actions (execution_horizon), and the old chunk "
                "must last until the new one is computed.",
            )
        require(
            self.method in head.real_time_methods,
            f"real_time.method: {self.method} does not fit {type(head).__name__}, which has "
            f"{', '.join(head.real_time_methods)}.",
        )
        executed = getattr(space, "executed_actions", horizon)
        require(
            executed == horizon,
            f"real_time.execution_horizon is {horizon}, but the env executes {executed} actions of "
            f"a chunk: set execute: {horizon} of ActionChunk, or execution_horizon: {executed}.",
        )

    def draw(self, uniform: Tensor) -> Tensor:
        """Return the delays [B] int64 for numbers [B] in [0, 1)."""
        delays = torch.tensor(self.delays, device=uniform.device)
        # In float32 the product may round up to the number of delays.
        return delays[(uniform * len(delays)).long().clamp(max=len(delays) - 1)]


class Continuation(NamedTuple):
    """The old chunk, as far as it lies in the time of the new one.

    Attributes:
        actions: [B, K, A], actions of the old chunk from now on; beyond its end the last one.
        target: [B, K, A], the same in units of the bounds.
        mask: [B, K], weights of the guidance: 1, then decaying, then 0.
        copied: [B, K] bool, the actions that are executed from the old chunk.
        settings: settings of real-time chunks.
    """

    actions: Tensor
    target: Tensor
    mask: Tensor
    copied: Tensor
    settings: RealTime


def chunk_state(action: Tensor, age: int, delay: Tensor) -> Tensor:
    """Return the state [B, K * A + 2] after a chunk [B, K, *A]: its numbers, age and next delay.

    Args:
        action: [B, K, *A].
        age: env steps of the chunk that the next chunk does not see; 0 for no old chunk.
        delay: [B], d of the next chunk.
    """
    flat = action.flatten(1)
    return torch.cat((flat, flat.new_full((flat.shape[0], 1), age), delay[:, None].to(flat)), 1)


def continuation(state: Tensor, head: ActionHead, settings: RealTime) -> Continuation:
    """Return what a state [B, K * A + 2] leaves of the old chunk; see `chunk_state`."""
    size = head.chunk_size
    actions = state[:, :-2].unflatten(1, (size, -1))
    age, delay = state[:, -2:].long().unbind(1)
    # At the beginning of an episode the state is zero: there is no old chunk.
    overlap = torch.where(age > 0, size - age, 0).clamp(min=0)
    delay = torch.minimum(delay, overlap)
    steps = torch.arange(size, device=state.device)
    index = (steps + age[:, None]).clamp(max=size - 1)
    remaining = actions.gather(1, index[..., None].expand_as(actions))
    target = head.to_unit(remaining).view_as(remaining)
    mask = soft_mask(size, overlap, delay, settings.mask)
    return Continuation(remaining, target, mask, steps < delay[:, None], settings)


def given_prefix(action: Tensor, steps: Tensor, head: ActionHead, old: RealTime) -> Continuation:
    """Return demonstrated actions [B, K, *A] as old chunks of which `steps` [B] are copied."""
    actions = action.flatten(2) if action.dim() > 2 else action[..., None]
    target = head.to_unit(action).view_as(actions)
    copied = torch.arange(head.chunk_size, device=action.device) < steps[:, None]
    return Continuation(actions, target, copied.to(target), copied, old)


def soft_mask(size: int, overlap: Tensor, delay: Tensor, decay: str) -> Tensor:
    """Return weights [B, K] of the old chunk: 1 for i < d, 0 from the end of the overlap on.

    Between them c (e^c - 1) / (e - 1), or c if `decay` is `linear`, with c = (o - i) / (o - d + 1).

    Source: Black, Galliker and Levine 2025, "Real-Time Execution of Action Chunking Flow Policies",
    equation 5. Differs from the paper: its o is K - s.

    Args:
        size: K.
        overlap: [B], o, the remaining actions of the old chunk.
        delay: [B], d.
        decay: `exponential` or `linear`.
    """
    steps = torch.arange(size, device=overlap.device)
    share = (overlap[:, None] - steps) / (overlap - delay + 1).clamp(min=1)[:, None]
    share = share.clamp(0.0, 1.0)
    if decay == "linear":
        return share
    return (share * share.expm1() / (math.e - 1.0)).masked_fill(share == 1.0, 1.0)


def guidance_weight(t: Tensor, limit: float) -> Tensor:
    """Return min(limit, (t^2 + (1 - t)^2) / (t (1 - t))) for times t [...], 1 for noise.

    At t = 0 and t = 1 it is the limit.

    Source: Black, Galliker and Levine 2025, "Real-Time Execution of Action Chunking Flow Policies",
    equations 2 and 4. Differs from the paper: its time is 1 - t.
    """
    product = (t * (1.0 - t)).clamp(min=torch.finfo(t.dtype).tiny)
    return ((t.square() + (1.0 - t).square()) / product).clamp(max=limit)


def pull(
    predict: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor, target: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return an output at x, and the correction J^T (mask (target - clean)) [B, ...] of x.

    J is the derivative of the clean prediction by x. Gradients flow through the correction, too,
    which needs second derivatives: a log-prob is then the guided chain's at the current weights.

    Args:
        predict: maps x [B, ...] to the output and to the clean prediction, [B, ...] each.
        x: [B, ...], the noisy chunk.
        target: [B, ...], the chunk to which the clean prediction is pulled.
        mask: [B, ...], weights; 0 leaves a number free.
    """
    trains = torch.is_grad_enabled()
    # A copy, because noise that was drawn in inference mode takes no gradients.
    x = x if x.requires_grad else x.detach().clone().requires_grad_()
    # Only the plain attention kernel has a second derivative.
    kernels = sdpa_kernel(SDPBackend.MATH) if trains else nullcontext()
    with kernels, torch.enable_grad():
        output, clean = predict(x)
        error = mask * (target - clean)
        (correction,) = torch.autograd.grad(clean, x, error, create_graph=trains)
    return (output, correction) if trains else (output.detach(), correction)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave `torch.inference_mode`, whose tensors take no gradients; keep the gradient mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    # Off, it would turn gradients on.
    with torch.inference_mode(False), torch.no_grad():
        yield


def of_executed(parts: Tensor, start: Tensor, stop: Tensor, steps: int) -> Tensor:
    """Return numbers [B, K, ...] of a chunk's executed actions in its first `steps` entries.

    Of a chunk the actions d to s + d' - 1 are executed: until the next chunk, and then during its
    delay d'. The env reports that s actions were executed, so entry i gets action d + i. Others
    are left out.

    Args:
        parts: [B, K, P], log-probs or entropies of the parts of each action.
        start: [B], d.
        stop: [B], s + d'.
        steps: s.
    """
    number = torch.arange(parts.shape[1], device=parts.device)
    counted = (number >= start[:, None]) & (number < stop[:, None])
    # Actions of a longer next delay have no step of their own: they join the last one.
    place = (number - start[:, None]).clamp(0, steps - 1)
    moved = parts.masked_fill(~counted[..., None], 0.0)
    return torch.zeros_like(moved).scatter_add(1, place[..., None].expand_as(moved), moved)
