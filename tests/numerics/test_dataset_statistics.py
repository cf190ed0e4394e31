"""A run begins with a dataset's statistics of observations."""

import json
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict

from lightning_rl import (
    ActorCritic,
    ActorOnly,
    ConditionedPolicy,
    ResidualActorCritic,
    SquashedActorCritic,
)
from lightning_rl.extensions.datasets.dataset_statistics import DatasetStatistics
from lightning_rl.policies import normalization
from lightning_rl.policies.networks.encoders import DictEncoder, NatureCNN
from tests.envs import UNIT, ScriptedEnv, draw
from tests.helpers import last, train
from tests.messages import refused
from tests.variants import after

STATE = {"mean": [1.0, -2.0, 0.5, 30.0], "std": [2.0, 0.1, 1.0, 5.0], "count": [5000]}


def statistics(path, **features):
    path.mkdir(parents=True)
    (path / "stats.json").write_text(json.dumps(features))
    return str(path / "stats.json")


def begin(tmp_path, path, policy=None, env="CartPole-v1", own=None, **more):
    """Return the policy's statistics at the start of a run, and the module after an iteration."""
    seen = {}

    def look(statistics, result, trainer, module):
        seen.update({name: value.clone() for name, value in module.policy.named_buffers()})

    callbacks = [after(DatasetStatistics, on_train_start=look)(path, **own or {})]
    settings = {"num_envs": 2, "buffer_size": 16, "total_env_steps": 32}
    module, *_ = train(
        tmp_path, env=env, data=settings, trainer={"callbacks": callbacks}, policy=policy, **more
    )
    return seen, module


def test_flat_observations_begin_with_mean_variance_and_count(tmp_path):
    path = statistics(tmp_path / "meta", **{"observation.state": STATE})
    seen, module = begin(tmp_path, path, {"normalize_observation": True})
    torch.testing.assert_close(seen["normalizer.mean"], torch.tensor(STATE["mean"]))
    torch.testing.assert_close(seen["normalizer.var"], torch.tensor(STATE["std"]).square())
    assert int(seen["normalizer.count"]) == 5000
    assert int(module.policy.normalizer.count) == 5000 + 32, "the run's observations are added"
    with torch.no_grad():
        module.policy.normalizer.mean.fill_(7.0)
    again, _ = begin(tmp_path, path, {"normalize_observation": True}, ckpt_path=last(tmp_path))
    assert (again["normalizer.mean"] - torch.tensor(STATE["mean"])).abs().max() < 0.5, "resumed"
    assert int(again["normalizer.count"]) == 5000 + 32


ARM_AND_CAMERA = Dict(arm=Box(-9, 9, (4,), np.float32), top=Box(0, 255, (36, 36, 3), np.uint8))


def test_encoders_of_a_dict_and_of_pictures_begin_with_theirs(tmp_path):
    camera = {"mean": [[[0.2]], [[0.5]], [[0.7]]], "std": [[[0.1]], [[0.2]], [[0.3]]]}
    path = statistics(
        tmp_path / "meta", **{"observation.joints": STATE, "observation.images.top": camera}
    )
    policy = {"encoder": lambda space: DictEncoder(space, normalize=True)}
    own = {"keys": {"arm": "observation.joints"}}
    arm = partial(ScriptedEnv, ARM_AND_CAMERA, UNIT, observe=draw, length=8)
    gymnasium.register("StatisticsArm-v0", arm)
    seen, module = begin(tmp_path, path, policy, env="StatisticsArm-v0", own=own)
    picture = next(n for n, m in module.policy.named_modules() if isinstance(m, NatureCNN))
    expected = torch.tensor([0.2, 0.5, 0.7])
    torch.testing.assert_close(seen[f"{picture}.normalizer.mean"], expected)
    (arm,) = (n for n in seen if n.endswith("normalizer.mean") and picture not in n)
    torch.testing.assert_close(seen[arm], torch.tensor(STATE["mean"]))
    scale = seen[f"{picture}.scale"][:, 0, 0] * 255.0
    torch.testing.assert_close(scale, 1 / torch.tensor([0.1, 0.2, 0.3]), rtol=0.1, atol=0)


NORMAL = {"normalize_observation": True}
FLAT = Box(-np.inf, np.inf, (4,), np.float32)
MORE = Dict(state=FLAT, secret=FLAT)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ConditionedPolicy(FLAT, UNIT, partial(ActorCritic, **NORMAL)),
        lambda: ResidualActorCritic(FLAT, UNIT, base=SquashedActorCritic, **NORMAL),
        lambda: ActorOnly(MORE, UNIT, ignore_keys=["secret"], **NORMAL),
    ],
    ids=["condition", "correction", "ignored key"],
)
def test_policies_that_read_more_or_less_begin_with_them_on_each_rank(make, tmp_path, monkeypatch):
    def both(count, mean, total):
        return 2 * count[None], mean, 2 * total

    monkeypatch.setattr(normalization.ranks, "world_size", lambda: 2)
    monkeypatch.setattr(normalization, "moments_over_ranks", both)
    path = statistics(tmp_path / "meta", **{"observation.state": STATE})
    callback, policy = DatasetStatistics(path), make()
    run = SimpleNamespace(ckpt_path=None), SimpleNamespace(policy=policy)
    callback.setup(*run, "fit")
    callback.on_train_start(*run)
    (moments,) = (one for one in policy.modules() if getattr(one, "count", 0) > 0)
    assert int(moments.count) == 5000
    expected = torch.tensor(STATE["mean"]), torch.tensor(STATE["std"]).square()
    torch.testing.assert_close((moments.mean[:4], moments.var[:4]), expected)
    assert (moments.var > 0).all(), "of a condition too"


@pytest.mark.parametrize(
    ("features", "policy", "message"),
    [
        ({"observation.state": STATE}, {}, "normalize_observation: true"),
        ({"action": STATE}, {"normalize_observation": True}, ("statistics", "'observation.state'")),
        (
            {"observation.state": {"mean": [1.0], "std": [1.0]}},
            {"normalize_observation": True},
            ("1 numbers", "[4]"),
        ),
    ],
)
def test_what_does_not_fit_is_refused(features, policy, message, tmp_path):
    path = statistics(tmp_path / "meta", **features)
    with refused(names=message):
        begin(tmp_path, path, policy)


def test_statistics_of_init_from_and_of_a_dataset_are_one_too_many(tmp_path):
    path = statistics(tmp_path / "meta", **{"observation.state": STATE})
    normal = {"normalize_observation": True}
    begin(tmp_path / "first", path, normal)
    start = {"init_from": str(last(tmp_path / "first"))}
    with refused(names=("DatasetStatistics", "trainer.init_from")):
        train(
            tmp_path / "second",
            env="CartPole-v1",
            policy=normal,
            trainer={**start, "callbacks": [DatasetStatistics(path)]},
        )
