import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import nn

from lightning_rl import ActorCritic
from lightning_rl.policies.networks.perceptron import flat_observation_size, mlp
from lightning_rl.policies.networks.q_networks import QEnsemble
from tests.messages import refused

STATE = Box(-1.0, 1.0, (3,))


def linears(module):
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize("output_gain", [1.0, 0.01])
def test_weights_are_orthogonal_with_their_gains(output_gain):
    layers = linears(mlp(4, (32, 6), 3, output_gain=output_gain))
    for layer, gain in zip(layers, (2**0.5, 2**0.5, output_gain), strict=True):
        weight = layer.weight.detach().double()
        short = weight if weight.shape[0] <= weight.shape[1] else weight.t()
        torch.testing.assert_close(
            short @ short.t(), gain**2 * torch.eye(len(short)).double(), rtol=1e-4, atol=1e-5
        )
        assert not layer.bias.any()


def test_weights_by_fan_in_are_uniform_and_so_are_biases():
    layers = linears(mlp(400, (100,), 30, initialization="fan_in", network="residual"))
    layers += linears(mlp(400, (100, 100), 30, initialization="fan_in", output_gain=0.01))
    assert len(layers) == 7
    for layer in layers:
        most = layer.in_features**-0.5
        for numbers in (layer.weight.detach(), layer.bias.detach()):
            assert numbers.abs().max() <= most
            assert numbers.std().item() == pytest.approx(most / 3**0.5, rel=0.3)


def test_the_critics_of_an_ensemble_begin_apart():
    critic = QEnsemble(5, (6,), 3, initialization="fan_in")
    for layer in (*critic.weights, *critic.biases):
        assert layer.is_contiguous()
        assert not torch.equal(layer[0], layer[1])
        assert not torch.equal(layer[1], layer[2])


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Box(0, 255, (8, 8, 3), np.uint8), ("(8, 8, 3), uint8", "NatureCNN")),
        (Dict({"camera": Box(0, 255, (8, 8, 3), np.uint8), "state": STATE}), "NatureCNN"),
        (Discrete(5), "gymnasium.wrappers.FlattenObservation"),
        (Dict({}), "empty Dict"),
    ],
)
def test_observations_that_a_perceptron_cannot_take(space, message):
    with refused(names=message):
        flat_observation_size(space)


@pytest.mark.parametrize(
    ("action_space", "settings", "message"),
    [
        (Discrete(2), {"activation": "tahn"}, "close matches: tanh"),
        (Discrete(2), {"hidden_sizes": (0,)}, ("at least 1", "hidden_sizes=[0]")),
        (Box(0, 9, (2,), np.int64), {}, ("Action space", "int64", "Box, Discrete")),
        (Discrete(2), {"squash": True}, ("squash", "Discrete(2)")),
        (Box(-np.inf, np.inf, (2,)), {"squash": True}, ("squash", "inf", "squash: false")),
        (STATE, {"log_std_init": 3.0}, ("log_std_init=3.0", "log_std_bounds=[-5.0, 2.0]")),
    ],
)
def test_a_policy_that_cannot_be_is_refused_at_construction(action_space, settings, message):
    with refused(names=message):
        ActorCritic(STATE, action_space, **settings)
