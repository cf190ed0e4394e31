"""Check the gradients through an env's steps, for `APG` and `SHAC`."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lightning_rl import RLDataModule, TorchEnv
from lightning_rl.extend.rollout import leaves_of_tree
from lightning_rl.extensions.algorithms.differentiable import check_differentiable, gain_of

DIFFERENCE = 0.02
"""Change of an action for finite differences, in units of half the width of its bounds."""

TOLERANCE = 1e-2
"""Largest relative error of a gradient; float32 differences have errors of about 1e-3."""

GROWS, MOSTLY = 1e4, 0.5
"""Growth of the gradient over a rollout, and share of zeros in it, at which to warn."""


class Finding(NamedTuple):
    """A finding of `rl-cli check`; see `Algorithm.checks`."""

    topic: str
    level: str
    text: str
    cure: str = ""


CURE = "Compute rewards and observations by torch operations, without detach or item."
"""Cure for a missing gradient."""


def check_gradients(algorithm: Any, data: RLDataModule) -> list[Finding]:
    """Compare the gradient of a step with finite differences; measure the gradient of a rollout.

    Raises:
        ConfigurationError: if the env has no gradients.
    """
    # The caller may have switched gradients off.
    with torch.enable_grad():
        env = data.new_env()
        try:
            check_differentiable(type(algorithm).__name__, env)
            env.reset(seed=data.seed_for("check"))
            generator = torch.Generator().manual_seed(0)
            shape = data.num_envs, data.buffer_size, algorithm.policy.distribution.noise_size
            noise = torch.randn(shape, generator=generator).to(algorithm.device)
            step_finding = _of_a_step(algorithm, cast(TorchEnv, env), noise[:, 0])
            if step_finding is None:
                text = (
                    "neither reward nor observation of a step has a gradient with respect to the "
                    "action"
                )
                return [Finding("gradient", "error", text, CURE)]
            return [step_finding, *_of_a_rollout(algorithm, cast(TorchEnv, env), noise)]
        finally:
            env.close()


def _of_a_step(algorithm: Any, env: TorchEnv, noise: Tensor) -> Finding | None:
    start = env.state_dict()
    action = algorithm.act(env.observation_of(env.state), noise).detach()

    def outcome(action: Tensor) -> Tensor:
        env.load_state_dict(start)
        _, reward, _, _, info = env.step(action)
        leaves = [x.flatten(1) for _, x in leaves_of_tree("", info["final_obs"])]
        # Random weights, because with equal ones the errors of two elements might cancel.
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape[1], generator=generator).to(x.device) for x in leaves]
        parts = [(x * weight).sum(1) for x, weight in zip(leaves, weights, strict=True)]
        return reward + torch.stack(parts).sum(0)

    sums = outcome(action.requires_grad_())
    if not sums.requires_grad:
        return None
    (gradient,) = torch.autograd.grad(sums.sum(), action)
    columns = []
    scale = cast(Any, algorithm.policy.distribution).scale.view(action.shape[1:])
    # Central differences: the error is of second order in the change.
    with torch.no_grad():
        for place in torch.eye(scale.numel(), device=scale.device):
            change = DIFFERENCE * scale * place.view(scale.shape)
            change_of_outcome = outcome(action + change) - outcome(action - change)
            columns.append(change_of_outcome / (2 * change.sum()))
    differences = torch.stack(columns, 1)
    error = (gradient.flatten(1) - differences).norm(dim=1) / differences.norm(dim=1)
    # An action without effect gives 0 / 0, which counts as no error.
    median = float(error.nan_to_num(0.0).median())
    text = f"the gradient of a step differs from finite differences by {median:.2g} (relative)"
    if median < TOLERANCE:
        return Finding("gradient", "ok", text)
    return Finding("gradient", "error", text, CURE)


def _of_a_rollout(algorithm: Any, env: TorchEnv, noise: Tensor) -> list[Finding]:
    actions: list[Tensor] = []

    def act(observation: Any, noise: Tensor) -> Tensor:
        actions.append(algorithm.act(observation, noise))
        return actions[-1]

    gain = gain_of(env, env.state_dict(), act, noise, algorithm.gamma, lambda _: None)
    # A reward may not depend on the last actions: their gradient is None, and counts as 0.
    gradients = torch.autograd.grad(gain.sum(), actions, allow_unused=True)
    by_action = torch.stack(
        [torch.zeros_like(a) if g is None else g for a, g in zip(actions, gradients, strict=True)]
    ).flatten(2)
    zeros = float((by_action == 0).float().mean())
    text = f"{zeros:.0%} of the gradients with respect to an action are zero"
    if zeros > MOSTLY:
        cure = (
            "A clamp has no gradient beyond its bounds: keep the action space within these bounds."
        )
        return [Finding("gradient", "warning", text, cure)]
    # Divergence shows in the gradient's growth from the last action back to the first.
    first, last = (by_action[t].norm(dim=1).median() for t in (0, -1))
    growth = float(first / last)
    grows = f"over the {len(actions)} steps of a rollout the gradient grows {growth:.2g}-fold"
    if growth > GROWS:
        last_finding = Finding("gradient", "warning", grows, "Lower data.buffer_size.")
    else:
        last_finding = Finding("gradient", "ok", grows)
    return [Finding("gradient", "ok", text), last_finding]
