"""Features meet: all of those of `features.py` at once, in each way in which a run can be made.

tests/README.md has the table of pairs that this covers.
"""

import pytest
import torch

from tests.core.equivalence.test_resume import stop_and_resume
from tests.equivalence.features import ALL, WARM_UP, OwnAlgorithm
from tests.equivalence.test_async import assert_same_training, background
from tests.helpers import assert_same, assert_same_run, scalars, train


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("features") / "plain"
    return train(directory, **ALL)[0], directory


def changed(**model):
    return ALL | {"model": ALL["model"] | model}


def test_all_of_them_do_their_part(plain):
    module, directory = plain
    curves = scalars(directory)
    assert module.env_steps >= ALL["data"]["total_env_steps"]
    assert int(module.policy.normalizer.count) > 0
    assert float(module.reward_normalizer.var) != 1.0
    assert module.bonus < 0.05
    assert {"metrics/steps", "train/bonus"} <= curves.keys()
    # Said of some episodes only: those of which it is not said have failed.
    assert 0 < module.evaluation["success_rate"] < 1


def test_the_actor_stands_still_until_its_warm_up_is_over(plain, tmp_path):
    start = OwnAlgorithm(plain[0].policy).policy.actor.state_dict()
    data = ALL["data"] | {"total_env_steps": 2 * 4 * 16 * WARM_UP - 64}
    warm, _, trainer = train(tmp_path, **ALL | {"data": data})
    assert_same(warm.policy.actor.state_dict(), start)
    assert trainer.optimizers[0].param_groups[0]["lr"] == ALL["model"]["learning_rate"]
    moved = plain[0].policy.actor.state_dict()
    assert any(not torch.equal(moved[key], start[key]) for key in start)


def test_in_the_background_they_are_what_they_are_in_the_foreground(plain, tmp_path):
    data = ALL["data"] | {"collector": background(0)}
    train(tmp_path, **ALL | {"data": data})
    assert_same_training(plain[1], tmp_path)


@pytest.mark.parametrize("iteration", [1, 3])
def test_stopped_within_warm_up_or_after_it_they_resume_exactly(iteration, plain, tmp_path):
    stop_and_resume(tmp_path, iteration, **ALL)
    assert_same_run(plain[1], tmp_path)


def test_compiled_they_follow_the_eager_run(plain, tmp_path, traced_only):
    module, *_ = train(tmp_path, **changed(compile=True))
    graphs = module.learner.graphs._compiled
    assert any(key[1] == "loss" for key in graphs), "it was compiled"
    torch.testing.assert_close(
        module.policy.state_dict(), plain[0].policy.state_dict(), rtol=1e-3, atol=1e-4
    )
    rates = [
        [rate for _, rate in scalars(directory)["train/learning_rate"]]
        for directory in (plain[1], tmp_path)
    ]
    assert rates[0] == pytest.approx(rates[1])
    assert rates[0][:WARM_UP] == pytest.approx([1e-3] * WARM_UP), "the actor stood still"


def test_compiled_in_the_background_and_resumed_they_end_as_uninterrupted(tmp_path, traced_only):
    run = changed(compile=True)
    run["data"] = ALL["data"] | {"collector": background(0), "total_env_steps": 2 * 4 * 16 * 3}
    train(tmp_path / "whole", **run)
    stop_and_resume(tmp_path / "stopped", 1, **run)
    assert_same_training(tmp_path / "whole", tmp_path / "stopped")
