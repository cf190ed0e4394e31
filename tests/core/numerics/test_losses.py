import math

import numpy as np
import pytest
import torch

from lightning_rl.functional import (
    approx_kl,
    clip_fraction,
    clipped_surrogate_loss,
    clipped_value_loss,
    decoupled_surrogate_loss,
    effective_sample_size,
    explained_variance,
    loglinear_proximal,
    normalize_advantage,
    value_loss,
)
from tests.messages import refused
from tests.references import decoupled_policy_loss, ppo_policy_loss


def test_surrogate_loss_matches_the_paper():
    rng = np.random.default_rng(0)
    new, old, advantage = rng.normal(-1, 0.3, 200), rng.normal(-1, 0.3, 200), rng.normal(size=200)
    args = [torch.from_numpy(a) for a in (new, old, advantage)]
    loss = clipped_surrogate_loss(*args, clip_low=0.2, clip_high=0.28)
    assert float(loss) == pytest.approx(ppo_policy_loss(new, old, advantage, 0.2, 0.28), abs=1e-9)


def test_clipped_value_loss_takes_the_larger_error():
    old, target = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])
    new = torch.tensor(
        [0.1, 0.9, 0.9]
    )  # inside; outside, towards the target; outside, away from it
    loss = clipped_value_loss(new, target, old, clip_coef=0.2)
    assert float(loss) == pytest.approx((0.9**2 + 0.8**2 + 0.9**2) / 3)
    assert float(value_loss(new, target)) == pytest.approx((0.9**2 + 0.1**2 + 0.9**2) / 3)


def test_kl_estimators_agree_with_the_exact_divergence():
    generator = torch.Generator().manual_seed(0)
    mean, n = 0.3, 400_000
    samples = torch.randn(n, generator=generator, dtype=torch.float64)
    old = -0.5 * samples.square()
    new = -0.5 * (samples - mean).square()
    exact = 0.5 * mean**2  # KL(N(0,1) || N(mean,1))
    assert float(approx_kl(new, old)) == pytest.approx(exact, rel=0.02)
    assert float(approx_kl(old, old)) == 0.0
    assert (torch.expm1(new - old) - (new - old)).min() >= 0


def test_clip_fraction_counts_the_parts_that_count():
    log_prob = torch.log(torch.tensor([[0.5, 1.0], [1.5, 1.0]]))
    of = {"clip_low": 0.2, "clip_high": 0.2}
    mask = torch.tensor([[True, False], [True, True]])
    assert float(clip_fraction(log_prob, torch.zeros(2, 2), **of, mask=mask)) == pytest.approx(
        2 / 3
    )
    none = torch.zeros(2, 2, dtype=torch.bool)
    assert float(clip_fraction(log_prob, torch.zeros(2, 2), **of, mask=none)) == 0.0


def test_explained_variance_has_its_three_landmarks():
    target = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert float(explained_variance(target, target)) == 1.0
    assert float(explained_variance(torch.full((4,), 7.0), target)) == pytest.approx(0.0)
    assert float(explained_variance(-target, target)) == pytest.approx(-3.0)
    assert explained_variance(target, torch.ones(4)).isnan()


@pytest.mark.parametrize("value", [0.1, 1 / 3, -7e-4, 123.456])
@pytest.mark.parametrize("count", [1, 3, 7, 100, 999])
def test_equal_advantages_are_normalized_to_zero_whichever_count(value, count):
    """Rounding would leave something between them, which the small deviation scales up to 1."""
    assert normalize_advantage(torch.full((count,), value)).eq(0).all()


CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def three_policies(seed, size=300):
    """Log-probs of pi, prox and mu, and advantages: of the weights a quarter or so exceeds 2."""
    rng = np.random.default_rng(seed)
    behavior = rng.normal(-1, 0.5, size)
    proximal = behavior + rng.normal(0.3, 0.6, size)
    return proximal + rng.normal(0, 0.3, size), proximal, behavior, rng.normal(size=size)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cap", [0.8, 2.0, math.inf])
def test_decoupled_loss_matches_its_definition(seed, cap):
    data = three_policies(seed)
    loss = decoupled_surrogate_loss(*map(torch.from_numpy, data), **CLIP, weight_cap=cap)
    expected = decoupled_policy_loss(*data, 0.2, 0.28, cap)
    assert float(loss) == pytest.approx(expected, abs=1e-12)


def test_the_gradient_of_the_decoupled_loss_is_the_one_derived_by_hand():
    """dL / d log pi = -w * rho * A / B where nothing is clipped, and 0 elsewhere; prox and mu get none."""
    cases = [  # rho, w, A, gradient * B
        (1.1, 0.5, 2.0, -0.5 * 1.1 * 2.0),
        (0.9, 1.5, -3.0, 1.5 * 0.9 * 3.0),
        (1.1, 2.5, 2.0, 0.0),  # over the cap
        (1.3, 1.0, 1.0, 0.0),  # clipped above
        (0.7, 1.0, -1.0, 0.0),  # clipped below
        (0.7, 1.2, 1.0, -1.2 * 0.7),  # outside, but on its way back
        (1.9, 0.8, -1.0, 0.8 * 1.9),  # likewise
    ]
    rho, weight, advantage, gradient = torch.tensor(cases, dtype=torch.float64).unbind(1)
    behavior = torch.full_like(rho, -1.7).requires_grad_()
    proximal = (behavior.detach() + weight.log()).requires_grad_()
    log_prob = (proximal.detach() + rho.log()).requires_grad_()
    decoupled_surrogate_loss(
        log_prob, proximal, behavior, advantage, **CLIP, weight_cap=2.0
    ).backward()
    torch.testing.assert_close(log_prob.grad, gradient / len(cases))
    assert proximal.grad is None
    assert behavior.grad is None


def test_a_collapsed_probability_leaves_the_decoupled_loss_finite():
    log_prob = torch.tensor([0.0, -1e4, 0.0, -math.inf], requires_grad=True)
    proximal, behavior = torch.tensor([-1e4, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, -1e4, 0.0])
    loss = decoupled_surrogate_loss(
        log_prob, proximal, behavior, torch.tensor([1.0, -1.0, -1.0, 1.0]), **CLIP, weight_cap=2.0
    )
    loss.backward()
    assert loss.isfinite()
    assert log_prob.grad.isfinite().all()


def test_the_loglinear_proximal_policy_takes_versions_sample_by_sample():
    log_prob = torch.tensor([-1.0, -1.0, -1.0, -math.inf], requires_grad=True)
    behavior = torch.tensor([-2.0, -2.0, -2.0, -2.0])
    versions, learner = torch.tensor([5, 4, 3, 4]), torch.tensor(5)
    result = loglinear_proximal(log_prob, behavior, learner, versions)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx([-2.0, -1.5, -4 / 3, -12.0])
    assert result[0] == behavior[0], "fresh samples: mu itself"
    assert not result.requires_grad


def test_effective_sample_size_is_the_share_that_the_weights_leave():
    weight = np.random.default_rng(0).lognormal(size=500)
    log_weight = torch.from_numpy(np.log(weight))
    exact = weight.sum() ** 2 / (weight**2).sum() / 500
    assert float(effective_sample_size(log_weight)) == pytest.approx(exact, rel=1e-12)
    assert float(effective_sample_size(log_weight + 1e3)) == pytest.approx(exact, rel=1e-9)
    assert float(effective_sample_size(log_weight.view(50, 10))) == pytest.approx(exact, rel=1e-12)


def test_a_trailing_dimension_is_refused_and_not_broadcast():
    """[B, 1] beside [B] is an average over [B, B], which looks like a loss and is none."""
    flat, column = torch.zeros(5), torch.zeros(5, 1)
    for loss in (
        lambda: value_loss(column, flat),
        lambda: clipped_value_loss(column, flat, flat, clip_coef=0.2),
        lambda: clipped_surrogate_loss(column, flat, flat, clip_low=0.2, clip_high=0.2),
    ):
        with refused(ValueError, names=("[5, 1]", "[5]")):
            loss()
