"""Rewards, normalizers and the loss of random network distillation are those of a float64 reference."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict

from lightning_rl import (
    CuriousPPO,
    CuriousSAC,
    HindsightReplay,
    MixedReplay,
    RandomNetworkDistillation,
    ReplayBuffer,
)
from lightning_rl.rollout.allocation import allocate_rollout
from lightning_rl.rollout.contract import FinalObservationWriter
from tests.core.numerics.test_sac import actor_layers
from tests.helpers import train
from tests.messages import refused
from tests.q_references import forward
from tests.references import numeric_gradient

SPACE = Dict({"arm": Box(-9, 9, (3,)), "eye": Box(0, 255, (8, 8, 3), np.uint8)})
GAMMA = 0.8


def curiosity(**settings):
    torch.manual_seed(4)
    own = {"keys": ["arm"], "hidden_sizes": [8], "activation": "relu", "gamma": GAMMA}
    return RandomNetworkDistillation(SPACE, **own | settings)


def rollout():
    """A rollout with an episode that ends in the middle, whose final observation differs."""
    result = allocate_rollout(SPACE, Box(-1, 1, (1,)), 3, 5)
    result["observation", "arm"].normal_()
    result["terminated"][1, 2] = result["done"][1, 2] = True
    final = {"arm": torch.full((3, 3), 2.0), "eye": torch.zeros(3, 8, 8, 3, dtype=torch.uint8)}
    FinalObservationWriter(result).write(2, TensorDict(final, [3]))
    return result


def test_rewards_of_two_rollouts_are_those_of_the_reference():
    module = curiosity(weight=[[0, 2.0], [100, 1.0]])
    layers = [actor_layers(network) for network in (module.predictor, module.target)]
    seen, sums, carry = np.zeros((0, 3)), np.zeros(0), np.zeros(3)
    for env_steps in (0, 60):
        fresh = rollout()
        reward, normalized = module.reward(fresh, env_steps)
        states = fresh["observation", "arm"][:, 1:].double().numpy()
        states[1, 2] = 2.0
        seen = np.concatenate((seen, states.reshape(-1, 3)))
        states = np.clip((states - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8), -5, 5)
        outputs = [forward(weights, states.reshape(-1, 3))[0] for weights in layers]
        error = np.square(outputs[0] - outputs[1]).mean(1).reshape(3, 5)
        for t in range(5):
            carry = GAMMA * carry + error[:, t]
            sums = np.append(sums, carry)
        expected = (2.0 if env_steps == 0 else 1.4) * error / np.sqrt(sums.var() + 1e-8)
        np.testing.assert_allclose(reward.numpy(), expected, rtol=1e-5)
        np.testing.assert_allclose(normalized.numpy(), states.reshape(-1, 3), rtol=1e-5, atol=1e-6)


def test_the_loss_moves_the_predictor_alone_by_its_gradient():
    module = curiosity().double()
    states = torch.randn(6, 3, dtype=torch.float64)
    module.loss(TensorDict({"state": states}, [6]))[0].backward()
    assert all(p.grad is None for p in module.target.parameters())
    predictor, target = (actor_layers(network) for network in (module.predictor, module.target))
    goal = forward(target, states.numpy())[0]

    def loss():
        return np.square(forward(predictor, states.numpy())[0] - goal).mean()

    gradients = numeric_gradient(loss, [array for layer in predictor for array in layer])
    for gradient, parameter in zip(gradients, module.predictor.parameters(), strict=True):
        np.testing.assert_allclose(gradient.T, parameter.grad.numpy(), atol=1e-8)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"keys": None}, ("keys", "8, 8, 3")),
        ({"keys": ["leg"]}, ("leg", "arm", "eye")),
        ({"weight": []}, ("weight", "[env steps, weight]", "1", "0")),
    ],
)
def test_what_is_no_state_is_refused(settings, names):
    with refused(names=names):
        curiosity(**settings)


@pytest.mark.parametrize("replay", [HindsightReplay, MixedReplay])
def test_a_replay_with_rewards_that_lack_its_part_is_refused(replay, tmp_path):
    small = partial(ReplayBuffer, capacity=500)
    rooms = {"online": small, "offline": small} if replay is MixedReplay else {"capacity": 500}
    data = {"buffer_size": 40, "replay": partial(replay, **rooms)}
    with refused(names=("CuriousSAC", replay.__name__, "data.replay: ReplayBuffer")):
        train(
            tmp_path,
            env="tests.goal_envs:tests/Point-v0",
            data=data,
            model={"algorithm": CuriousSAC},
        )


def test_with_another_number_of_envs_a_resumed_run_begins_new_sums(tmp_path):
    run = {"env": "Pendulum-v1", "model": {"algorithm": CuriousPPO}}
    train(tmp_path / "first", **run, data={"buffer_size": 8, "total_env_steps": 32})
    data = {"num_envs": 2, "buffer_size": 16, "total_env_steps": 128}
    path = tmp_path / "first" / "checkpoints" / "last.ckpt"
    module, *_ = train(tmp_path / "second", **run, data=data, ckpt_path=str(path))
    assert (module.env_steps, module.curiosity.carry.shape) == (128, (2,))
