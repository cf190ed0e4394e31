"""What is normalised over a minibatch sees all of it, though large minibatches reach other losses in parts."""

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import SAC, TD3, DeterministicActorCritic, SquashedActorCritic
from lightning_rl.optim import update as updates
from lightning_rl.optim.update import Update
from tests.helpers import make_update, uncompiled_traces
from tests.messages import refused
from tests.variants import variant

OBSERVATION = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
ACTION = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
SIZE = 32


@pytest.fixture(autouse=True)
def _small_micro_batches(monkeypatch):
    monkeypatch.setattr(updates, "CPU_MICRO_BATCH", SIZE // 4)


def build(algorithm, policy, **settings):
    torch.manual_seed(0)
    made = policy(OBSERVATION, ACTION, (8,), critic_normalization="batch", **settings)
    return algorithm(made, tau=None, batch_size=SIZE)


def two_halves():
    observation = torch.randn(SIZE, 3)
    observation[SIZE // 2 :] += 3
    fields = {"observation": observation, "next_observation": observation + 0.1}
    fields |= {"action": torch.rand(SIZE, 1), "reward": torch.randn(SIZE)}
    fields |= {"discount": torch.full((SIZE,), 0.99)}
    fields |= {name: torch.randn(SIZE, 1) for name in ("noise", "next_noise")}
    return TensorDict(fields, [SIZE])


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize(
    ("algorithm", "policy", "settings"),
    [
        (SAC, SquashedActorCritic, {}),
        (SAC, SquashedActorCritic, {"network": "residual"}),
        (TD3, DeterministicActorCritic, {}),
    ],
    ids=["SAC", "residual", "TD3"],
)
def test_batch_statistics_are_those_of_the_whole_minibatch(algorithm, policy, settings, compile):
    module, minibatch = build(algorithm, policy, **settings), two_halves()
    objective = module.objectives["critic"]
    loss, _ = objective.loss(minibatch.clone())
    expected = torch.autograd.grad(loss, objective.parameters)
    statistics = {name: b.clone() for name, b in module.policy.critic.named_buffers()}

    module = build(algorithm, policy, **settings)
    objective = module.objectives["critic"]
    with uncompiled_traces():
        make_update(module, compile=compile, name="critic")(minibatch.clone())
    assert float(module.policy.critic.seen) == 1
    for name, buffer in module.policy.critic.named_buffers():
        torch.testing.assert_close(buffer, statistics[name])
    for parameter, gradient in zip(objective.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_a_policy_that_asks_for_parts_does_not_go_with_it():
    with refused(names=("critic", "SAC", "policy.micro_batch_size=8", "batch_size")):
        build(
            SAC, variant(SquashedActorCritic, "InParts", micro_batch_size=8)
        ).configure_optimizers()


def test_a_loss_of_ones_own_may_ask_for_whole_minibatches():
    module, sizes = build(SAC, SquashedActorCritic), {}

    def counted(name):
        def loss(minibatch):
            sizes.setdefault(name, []).append(len(minibatch))
            return module.policy.actor(minibatch["observation"]).square().mean(), {}

        return loss

    for name, whole in (("whole", True), ("parts", False)):
        settings = {"name": name, "whole_minibatches": whole}
        objective = module.objective(counted(name), module.policy.actor, **settings)
        Update(objective, torch.optim.SGD(objective.parameters, lr=0.0))(two_halves())
    assert sizes == {"whole": [SIZE], "parts": [SIZE // 4] * 4}
