"""`log_std: state_dependent`: a Gaussian whose log standard deviation is an output of the actor."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import distributions as reference

from lightning_rl import LSTM, ActorCritic
from lightning_rl.policies.distributions.gaussians import distribution_for
from lightning_rl.policies.distributions.unit_actions import StateStdTanhGaussian
from tests.helpers import draw_from, train

LOW, HIGH = np.array([-2.0, -1.0], np.float32), np.array([2.0, 3.0], np.float32)
FAMILIES = {
    "gaussian": (Box(-1.0, 1.0, (2,)), {}),
    "rescaled": (Box(LOW, HIGH), {}),
    "tanh": (Box(LOW, HIGH), {"squash": True}),
}
RUN = {
    "env": "Pendulum-v1",
    "policy": {"log_std": "state_dependent", "squash": True},
    "data": {"buffer_size": 40, "total_env_steps": 4 * 40 * 6},  # 200 steps are an episode
}


def make(name, log_std="state_dependent"):
    space, settings = FAMILIES[name]
    given = {"squash": False, "log_std_init": -0.5, "log_std_bounds": (-2.0, 0.3)} | settings
    return distribution_for(space, log_std=log_std, **given)


def reference_of(name, output, fields):
    """Log-prob [B] of actions and entropy [B] in float64, by definition; of tanh by quadrature."""
    mean, log_std = output.chunk(2, -1)
    base = reference.Normal(mean, log_std.clamp(-2.0, 0.3).exp())
    log_scale = ((torch.as_tensor(HIGH) - torch.as_tensor(LOW)).double() / 2).log()
    if name == "gaussian":
        return base.log_prob(fields["action"].double()).sum(-1), base.entropy().sum(-1)
    if name == "rescaled":
        log_prob = base.log_prob(fields["unit_action"].double()) - log_scale
        return log_prob.sum(-1), (base.entropy() + log_scale).sum(-1)

    def volume(u):
        return -2 * torch.log(torch.cosh(u)) + log_scale

    u = fields["unsquashed_action"].double()
    z = torch.linspace(-9.0, 9.0, 4_001, dtype=torch.float64)[:, None, None]
    weight = (-0.5 * z**2).exp() / np.sqrt(2 * np.pi) * float(z[1] - z[0])
    mean_volume = (weight * volume(base.mean + base.stddev * z)).sum(0)
    return (base.log_prob(u) - volume(u)).sum(-1), (base.entropy() + mean_volume).sum(-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_prob_entropy_and_their_gradients_are_those_of_the_definition(name):
    distribution, generator = make(name), torch.Generator().manual_seed(3)
    output = torch.randn(40, 4, generator=generator)
    output[:, 2:].clamp_(-1.9, 0.2)  # within the bounds
    fields = draw_from(distribution, output, generator)
    outputs = [output.clone().requires_grad_(), output.double().requires_grad_()]
    results = distribution.log_prob_and_entropy(outputs[0], fields)
    expected = reference_of(name, outputs[1], fields)
    torch.testing.assert_close(fields["sample_log_prob"], results[0])
    for weights in ((1.0, 0.0), (0.0, 1.0)):
        pairs = []
        for place, (log_prob, entropy) in zip(outputs, (results, expected), strict=True):
            total = (weights[0] * log_prob + weights[1] * entropy).sum()
            pairs.append((total, *torch.autograd.grad(total, place, retain_graph=True)))
        for ours, exact in zip(*pairs, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(results[0].double(), expected[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [*FAMILIES, "of SAC"])
def test_beyond_a_bound_it_comes_back_if_the_loss_asks_for_it(name):
    if name == "of SAC":
        distribution = StateStdTanhGaussian(FAMILIES["tanh"][0], (-2.0, 0.3))
    else:
        distribution = make(name)
    for sign, slope in ((1, 1.0), (-1, 0.0)):
        output = torch.tensor([[0.1, -0.2, 0.5, 0.5]]).requires_grad_()
        _, log_std = distribution.split(output)
        assert log_std.tolist() == [[pytest.approx(0.3)] * 2]
        (sign * log_std.sum()).backward()
        assert output.grad.tolist() == [[0.0, 0.0, slope, slope]]


@pytest.mark.parametrize(
    ("space", "settings", "columns"),
    [
        (Box(-1, 1, (2,)), {}, [2, 3]),
        (Box(-1, 1, (2,)), {"initialization": "fan_in"}, [2, 3]),
        (Box(-1, 1, (2,)), {"network": "residual", "memory": lambda n: LSTM(n, size=4)}, [2, 3]),
        (Dict(arm=Box(LOW, HIGH), grip=Discrete(3), speed=Box(-1.0, 1.0, (1,))), {}, [2, 3, 8]),
    ],
)
def test_at_first_it_is_log_std_init_in_every_state(space, settings, columns):
    observation = Box(-np.inf, np.inf, (3,))
    given = {"log_std": "state_dependent", "log_std_init": -0.7, **settings}
    policy = ActorCritic(observation, space, (8, 8), **given)
    output = policy.actor(torch.randn(20, policy.features_size) * 5)
    assert output.shape[1] == policy.distribution.num_outputs == max(columns) + 1
    assert (output[:, columns] == torch.tensor(-0.7)).all()
    others = [i for i in range(output.shape[1]) if i not in columns]
    assert (output[:, others].std(0) > 0).all()


def test_compiled_it_follows_the_eager_run(tmp_path, traced_only):
    eager, compiled = (
        train(tmp_path / str(value), **RUN, model={"compile": value})[0].policy.state_dict()
        for value in (False, True)
    )
    assert any("actor" in name for name in eager)
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-3, atol=1e-4)
