"""Advantages by comparison within a group, and the KL to a reference."""

import itertools

import numpy as np
import pytest
import torch

from lightning_rl.functional import group_relative_advantage, kl_penalty
from tests.messages import refused
from tests.references import group_advantage

VARIANTS = [
    variant
    for variant in itertools.product(
        ("step", "trajectory"), (True, False), (True, False), (True, False)
    )
    if variant[0] == "step" or variant[3]  # whole returns need whole episodes
]


def random_rollout(seed, rows=12, steps=15):
    generator = np.random.default_rng(seed)
    reward = generator.normal(size=(rows, steps))
    done = generator.random((rows, steps)) < generator.choice([0.0, 0.05, 0.3])
    done[0] = done[1] = done[2] = False
    done[:3, 2] = [True, True, False]  # with G = 3 a lone survivor
    return reward, done


@pytest.mark.parametrize(("mode", "normalize", "leave_one_out", "first_only"), VARIANTS)
@pytest.mark.parametrize("size", [3, 4])
def test_the_advantage_is_that_of_the_definition(size, mode, normalize, leave_one_out, first_only):
    for seed in range(8):
        reward, done = random_rollout(seed)
        expected, counts = group_advantage(
            reward, done, size, 0.9, mode, 0.5, normalize, leave_one_out, first_only
        )
        advantage, mask = group_relative_advantage(
            torch.tensor(reward),
            torch.tensor(done),
            group_size=size,
            gamma=0.9,
            mode=mode,
            std_floor=0.5,
            normalize=normalize,
            leave_one_out=leave_one_out,
            truncate_at_first_done=first_only,
        )
        assert np.array_equal(mask.numpy(), counts)
        np.testing.assert_allclose(advantage.numpy(), expected, rtol=1e-9, atol=1e-12)
        assert (advantage[~mask] == 0).all()


def test_the_noise_of_a_float32_sum_is_not_blown_up_and_a_real_difference_is_kept():
    reward = torch.rand(4, 500) + 1
    reward[1:] = reward[0, torch.randperm(500)]  # the same sum in another order
    done = torch.zeros(4, 500, dtype=torch.bool)
    advantage, _ = group_relative_advantage(
        reward, done, group_size=4, gamma=1.0, mode="trajectory", std_floor=1e-8
    )
    assert (advantage == 0).all()
    reward[3, 7] += 1.0
    advantage, _ = group_relative_advantage(
        reward, done, group_size=4, gamma=1.0, mode="trajectory", std_floor=1e-8
    )
    assert advantage[3, 0] == pytest.approx(3**0.5, rel=1e-4)  # one of four apart, population std


@pytest.mark.parametrize(
    ("shape", "kwargs", "message"),
    [
        ((4,), {}, ("[N, T]", "[4]")),
        ((5, 3), {}, ("group_size", "at least 2", "5 envs")),
        ((4, 3), {"group_size": 1}, ("group_size", "at least 2", "1")),
        (
            (4, 3),
            {"mode": "trajectory", "truncate_at_first_done": False},
            ("mode='trajectory'", "truncate_at_first_done=True"),
        ),
    ],
)
def test_what_does_not_fit_is_refused(shape, kwargs, message):
    settings = {"group_size": 2, "gamma": 0.9} | kwargs
    with refused(ValueError, names=message):
        group_relative_advantage(torch.zeros(shape), torch.zeros(shape).bool(), **settings)


def test_the_kl_penalty_has_the_value_and_the_gradient_of_the_kl():
    """By full enumeration: samples of mu, weighted with their probability, give the expectation."""
    generator = torch.Generator().manual_seed(2)
    logits, other, behaviour = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_pi, log_ref, log_mu = logits.log_softmax(0), other.log_softmax(0), behaviour.log_softmax(0)
    exact = (log_pi.exp() * (log_pi - log_ref)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    estimate = (log_mu.exp() * kl_penalty(log_pi, log_mu, log_ref)).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-10)
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-10, atol=1e-12)
    assert exact.item() > 0.1
