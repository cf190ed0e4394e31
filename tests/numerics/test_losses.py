import math

import numpy as np
import pytest
import torch

from lightning_rl.functional import (
    approx_kl,
    clip_fraction,
    clipped_surrogate_loss,
    clipped_value_loss,
    explained_variance,
    masked_mean,
    normalize_advantage,
    simple_kl,
    value_loss,
)
from tests.references import ppo_policy_loss


@pytest.mark.parametrize("masked", [False, True])
def test_surrogate_loss_matches_the_paper(masked):
    rng = np.random.default_rng(0)
    new, old, advantage = rng.normal(-1, 0.3, 200), rng.normal(-1, 0.3, 200), rng.normal(size=200)
    mask = rng.random(200) < 0.5 if masked else None
    args = [torch.from_numpy(a) for a in (new, old, advantage)]
    loss = clipped_surrogate_loss(
        *args, clip_low=0.2, clip_high=0.28, mask=None if mask is None else torch.from_numpy(mask)
    )
    assert float(loss) == pytest.approx(
        ppo_policy_loss(new, old, advantage, 0.2, 0.28, mask), abs=1e-9
    )


def test_a_clipped_sample_has_no_gradient():
    log_prob = torch.tensor([math.log(1.5), math.log(0.5), 0.0], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0])
    clipped_surrogate_loss(
        log_prob, torch.zeros(3), advantage, clip_low=0.2, clip_high=0.2
    ).backward()
    assert log_prob.grad.tolist() == pytest.approx([0.0, 0.0, -1 / 3])


def test_a_collapsed_probability_stays_finite():
    loss = clipped_surrogate_loss(
        torch.tensor([0.0]), torch.tensor([-1e4]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2
    )
    assert loss.isfinite()


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
    assert float(simple_kl(new, old)) == pytest.approx(exact, rel=0.03)
    assert float(approx_kl(old, old)) == 0.0
    assert (torch.expm1(new - old) - (new - old)).min() >= 0


def test_clip_fraction_counts_the_ratios_outside():
    log_prob = torch.log(torch.tensor([0.5, 0.85, 1.0, 1.15, 1.25]))
    assert float(
        clip_fraction(log_prob, torch.zeros(5), clip_low=0.2, clip_high=0.2)
    ) == pytest.approx(0.4)
    assert float(
        clip_fraction(log_prob, torch.zeros(5), clip_low=0.2, clip_high=0.3)
    ) == pytest.approx(0.2)


def test_masked_mean_ignores_what_does_not_count():
    value = torch.tensor([1.0, math.nan, 3.0])
    assert float(masked_mean(value, torch.tensor([True, False, True]))) == 2.0
    assert float(masked_mean(value, torch.zeros(3, dtype=torch.bool))) == 0.0


def test_explained_variance_has_its_three_landmarks():
    target = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert float(explained_variance(target, target)) == 1.0
    assert float(explained_variance(torch.full((4,), 7.0), target)) == pytest.approx(0.0)
    assert float(explained_variance(-target, target)) == pytest.approx(-3.0)
    assert explained_variance(target, torch.ones(4)).isnan()


def test_normalized_advantages_have_mean_zero_and_unit_std():
    advantage = (
        torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5 + 3
    )
    result = normalize_advantage(advantage)
    assert float(result.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(result.std()) == pytest.approx(1.0, abs=1e-6)
    assert normalize_advantage(torch.tensor([5.0])).tolist() == [0.0]
    mask = torch.arange(1000) < 400
    part = normalize_advantage(advantage, mask)[mask]
    assert float(part.std()) == pytest.approx(1.0, abs=1e-6)
