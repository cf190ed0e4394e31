"""Log-probs, entropies and samples against torch.distributions and quadrature in float64."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import distributions as reference

from lightning_rl.functional import bounded
from lightning_rl.policies.distributions.gaussians import distribution_for
from tests.helpers import draw_from


def named(name):
    space, squash = SPACES[name]
    return space, make(space, squash)


SAMPLES = 100_000
LOW, HIGH = np.array([-2.0, -1.0, 0.5], np.float32), np.array([2.0, 3.0, 0.75], np.float32)
LOG_STD = [-0.9, 0.1, 0.6]

SPACES = {
    "gaussian": (Box(-1.0, 1.0, (3,)), False),
    "gaussian matrix": (Box(-1.0, 1.0, (2, 3)), False),
    "rescaled": (Box(LOW, HIGH), False),
    "rescaled matrix": (Box(-2.0, 1.0, (2, 3)), False),
    "tanh": (Box(LOW, HIGH), True),
    "tanh matrix": (Box(-2.0, 1.0, (2, 3)), True),
    "discrete": (Discrete(4), False),
    "equal sizes": (MultiDiscrete([3, 3]), False),
    "unequal sizes": (MultiDiscrete([2, 5, 3]), False),
}


def make(space, squash=False, bounds=(-5.0, 2.0)):
    distribution = distribution_for(space, squash=squash, log_std_init=0.0, log_std_bounds=bounds)
    if isinstance(space, Box):
        with torch.no_grad():
            distribution.log_std.copy_(torch.tensor(LOG_STD).repeat(distribution.num_outputs // 3))
    return distribution


def random_output(distribution, *batch):
    return 1.5 * torch.randn(*batch, distribution.num_outputs)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(mean, log_std=LOG_STD):
    std = torch.tensor(log_std, dtype=torch.float64).exp().repeat(mean.shape[-1] // 3)
    return reference.Normal(mean.double(), std)


def categoricals(output, sizes):
    rows = output.double().split(list(sizes), dim=-1)
    return [reference.Categorical(logits=logits) for logits in rows]


def squashed(mean, low, high):
    low, high = torch.as_tensor(low).double().flatten(), torch.as_tensor(high).double().flatten()
    to_bounds = reference.AffineTransform((high + low) / 2, (high - low) / 2)
    return reference.TransformedDistribution(normal(mean), [reference.TanhTransform(), to_bounds])


def log_slope(u):
    """log d tanh(u) / du = -2 log cosh(u), without overflow."""
    return -2.0 * (np.logaddexp(u, -u) - np.log(2.0))


def squashed_entropy(mean, log_std):
    """The entropy of center + scale * tanh(u), u normal, by quadrature on a fine grid, summed over dimensions."""
    z = np.linspace(-12.0, 12.0, 20_001)
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    total = 0.0
    for m, s, low, high in zip(mean, log_std, LOW.astype(float), HIGH.astype(float), strict=True):
        slope = (density * log_slope(m + np.exp(s) * z)).sum() * (z[1] - z[0])
        total += s + 0.5 * np.log(2 * np.pi * np.e) + slope + np.log((high - low) / 2)
    return total


def assert_equal(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["gaussian", "gaussian matrix"])
@pytest.mark.parametrize("batch", [(50,), (5, 7)])
def test_gaussian_log_prob_and_entropy(name, batch):
    space, distribution = named(name)
    mean = random_output(distribution, *batch)
    action = mean + 2 * random_output(distribution, *batch)
    log_prob, entropy = distribution.log_prob_and_entropy(
        mean, {"action": action.unflatten(-1, space.shape)}
    )
    assert log_prob.shape == entropy.shape == batch
    assert_equal(log_prob, normal(mean).log_prob(action.double()).sum(-1))
    assert_equal(entropy, normal(mean).entropy().sum(-1))


def test_rescaled_log_prob_and_entropy_are_those_of_the_action():
    distribution = make(Box(LOW, HIGH))
    mean, unit = random_output(distribution, 50), random_output(distribution, 50)
    center, scale = (torch.as_tensor(x).double() for x in ((HIGH + LOW) / 2, (HIGH - LOW) / 2))
    expected = reference.Normal(center + scale * mean, scale * torch.tensor(LOG_STD).exp())
    action = center + scale * unit
    log_prob, entropy = distribution.log_prob_and_entropy(
        mean, {"action": action.float(), "unit_action": unit}
    )
    assert log_prob.shape == entropy.shape == (50,)
    assert_equal(log_prob, expected.log_prob(action).sum(-1))
    assert_equal(entropy, expected.entropy().sum(-1))
    assert_equal(distribution.fields_of(action)["unit_action"], unit)


def test_tanh_log_prob():
    distribution = make(Box(LOW, HIGH), squash=True)
    mean, u = random_output(distribution, 50), random_output(distribution, 50)
    expected = squashed(mean, LOW, HIGH)
    action = expected.transforms[1](u.double().tanh())
    log_prob, entropy = distribution.log_prob_and_entropy(
        mean, {"action": action.float(), "unsquashed_action": u}
    )
    assert log_prob.shape == entropy.shape == (50,)
    assert_equal(log_prob, expected.log_prob(action).sum(-1))


@pytest.mark.parametrize(("beyond", "inward"), [(1.006, 1), (-2.1, -1)])
def test_a_deviation_beyond_a_bound_comes_back_if_the_loss_asks_for_it(beyond, inward):
    """The gradient of a clamp is 0 there: one step too far and the noise stayed for ever (rlevo #1041)."""
    distribution = make(SPACES["gaussian"][0], bounds=(-2.0, 1.0))
    limit = sum(normal(torch.zeros(3), [np.clip(beyond, -2.0, 1.0)] * 3).entropy())
    for sign, moves in ((inward, True), (-inward, False)):
        distribution.log_std = torch.nn.Parameter(torch.full((3,), beyond))
        entropy = distribution.log_prob_and_entropy(
            torch.zeros(1, 3), {"action": torch.ones(1, 3)}
        )[1]
        assert entropy.item() == pytest.approx(limit.item())
        (sign * entropy).backward()
        assert distribution.log_std.grad.tolist() == [float(sign) if moves else 0.0] * 3


def test_bounded_is_a_clamp_whose_outward_gradient_is_0():
    value = torch.tensor([-3.0, -3.0, -1.0, 0.5, 1.0, 2.0, 2.0], requires_grad=True)
    gradient = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0])
    for function in (bounded, torch.compile(bounded, backend="aot_eager", fullgraph=True)):
        (found,) = torch.autograd.grad(function(value, -1.0, 1.0), value, gradient)
        assert found.tolist() == [0.0, -1.0, 1.0, -1.0, -1.0, 1.0, 0.0]
        assert torch.equal(function(value, -1.0, 1.0), value.clamp(-1.0, 1.0))


@pytest.mark.parametrize("u", [-60.0, -15.0, 15.0, 60.0])
def test_tanh_log_prob_far_out_where_float32_tanh_is_one(u):
    distribution = make(Box(LOW, HIGH), squash=True)
    unsquashed = torch.full((1, 3), u)
    mean = unsquashed + 0.5
    log_prob, _ = distribution.log_prob_and_entropy(
        mean, {"unsquashed_action": unsquashed, "action": None}
    )
    volume = log_slope(np.full(3, u)) + np.log((HIGH.astype(float) - LOW) / 2)
    assert_equal(log_prob, normal(mean).log_prob(unsquashed.double()).sum(-1) - volume.sum())


def test_tanh_entropy_has_the_gradient_of_the_integral():
    distribution = make(Box(LOW, HIGH), squash=True)
    mean = torch.tensor([0.3, -1.2, 0.8], requires_grad=True)
    output = mean.expand(SAMPLES, 3)
    with torch.no_grad():
        sample = draw_from(distribution, output, generator(0))
    distribution.log_prob_and_entropy(output, sample)[1].mean().backward()
    h = 1e-4
    for i, step in enumerate(np.eye(3) * h):
        m, s = mean.detach().double().numpy(), np.array(LOG_STD)
        slope = (squashed_entropy(m + step, s) - squashed_entropy(m - step, s)) / (2 * h)
        assert float(mean.grad[i]) == pytest.approx(slope, abs=0.01)
        slope = (squashed_entropy(m, s + step) - squashed_entropy(m, s - step)) / (2 * h)
        assert float(distribution.log_std.grad[i]) == pytest.approx(slope, abs=0.015)


@pytest.mark.parametrize(
    ("space", "sizes"), [(MultiDiscrete([2, 5, 3]), (2, 5, 3)), (MultiDiscrete([3, 3]), (3, 3))]
)
def test_multi_discrete_log_prob_and_entropy(space, sizes):
    distribution = make(space)
    assert distribution.num_outputs == sum(sizes)
    output = random_output(distribution, 50)
    rows = categoricals(output, sizes)
    action = torch.stack([row.sample() for row in rows], dim=-1)
    log_prob, entropy = distribution.log_prob_and_entropy(output, {"action": action})
    assert_equal(
        log_prob, sum(row.log_prob(a) for row, a in zip(rows, action.unbind(-1), strict=True))
    )
    assert_equal(entropy, sum(row.entropy() for row in rows))


def test_discrete_log_prob_and_entropy():
    distribution = make(Discrete(4))
    output, action = random_output(distribution, 50), torch.arange(50) % 4
    log_prob, entropy = distribution.log_prob_and_entropy(output, {"action": action})
    assert_equal(log_prob, categoricals(output, [4])[0].log_prob(action))
    assert_equal(entropy, categoricals(output, [4])[0].entropy())


@pytest.mark.parametrize("name", SPACES)
def test_gradients_of_the_log_prob(name):
    space, distribution = named(name)
    output = random_output(distribution, 20).requires_grad_()
    sample = draw_from(distribution, output.detach(), generator(3))
    distribution.log_prob_and_entropy(output, {k: v.detach() for k, v in sample.items()})[
        0
    ].sum().backward()
    exact = output.detach().double().requires_grad_()
    if isinstance(space, Box):
        log_std = distribution.log_std.detach().double().requires_grad_()
        (u,) = [sample[key] for key in distribution.extra_fields] or [sample["action"].flatten(1)]
        u = u.detach().double()
        reference.Normal(exact, log_std.exp()).log_prob(u).sum().backward()
        assert_equal(distribution.log_std.grad, log_std.grad, 1e-4)
    else:
        sizes = space.nvec.tolist() if isinstance(space, MultiDiscrete) else [int(space.n)]
        actions = sample["action"].reshape(20, -1).unbind(-1)
        sum(
            row.log_prob(a).sum()
            for row, a in zip(categoricals(exact, sizes), actions, strict=True)
        ).backward()
    assert_equal(output.grad, exact.grad, 1e-4)


def assert_frequency(happened, probability):
    """A share of independent samples lies within five standard errors of its probability."""
    happened = happened.double()
    margin = 5 * (probability * (1 - probability) / len(happened)) ** 0.5
    assert float(happened.mean()) == pytest.approx(float(probability), abs=float(margin))


def test_multi_discrete_frequencies_are_independent():
    distribution = make(MultiDiscrete([2, 5, 3]))
    output = random_output(distribution)
    action = draw_from(distribution, output.expand(SAMPLES, 10), generator(0))["action"]
    assert action.shape == (SAMPLES, 3)
    first, second, third = (row.probs for row in categoricals(output, [2, 5, 3]))
    for a in range(2):
        for b in range(5):
            assert_frequency((action[:, 0] == a) & (action[:, 1] == b), first[a] * second[b])
    for c in range(3):
        assert_frequency(action[:, 2] == c, third[c])


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_sample_has_the_log_prob_of_its_stored_action(name, deterministic):
    distribution = make(*SPACES[name])
    output = random_output(distribution, 500)
    sample = draw_from(distribution, output, None if deterministic else generator(1))
    assert sample["action"].shape == (500, *SPACES[name][0].shape)
    assert sample["sample_log_prob"].shape == (500,)
    assert sample["sample_log_prob"].dtype == torch.float32
    for key, (shape, dtype) in distribution.extra_fields.items():
        assert sample[key].shape == (500, *shape)
        assert sample[key].dtype == dtype
    assert sample.keys() == {"action", "sample_log_prob", *distribution.extra_fields}
    log_prob, _ = distribution.log_prob_and_entropy(output, sample)
    torch.testing.assert_close(sample["sample_log_prob"], log_prob, rtol=0, atol=1e-5)


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize(("value", "bound"), [(-50.0, -1.0), (50.0, 0.5)])
def test_log_std_stays_within_its_bounds(squash, value, bound):
    distribution = make(Box(-1.0, 1.0, (3,)), squash, bounds=(-1.0, 0.5))
    with torch.no_grad():
        distribution.log_std.fill_(value)
    mean = torch.zeros(20_000, 3)
    with torch.no_grad():
        sample = draw_from(distribution, mean, generator(0))
    noise = sample["unsquashed_action"] if squash else sample["action"]
    assert float(noise.std()) == pytest.approx(np.exp(bound), rel=0.02)
    expected = reference.Normal(0.0, float(np.exp(bound))).log_prob(noise.double()).sum(-1)
    if squash:
        expected -= torch.from_numpy(log_slope(noise.double().numpy())).sum(-1)
    assert_equal(sample["sample_log_prob"], expected, 1e-4)
