"""Collected by remote collectors: without lag what one process does bit for bit, resumed too; with a lag nothing is lost."""

import copy
from functools import partial

import gymnasium
import pytest
import torch

import lightning_rl as rl
from lightning_rl.collectors.weights import acting_copy, changing_weights
from lightning_rl.extensions.remote import ray
from tests import goal_envs  # noqa: F401  # registers an env
from tests.callbacks import at_iteration, callback, stop
from tests.equivalence import test_async
from tests.equivalence.features import ALL
from tests.helpers import assert_same, last, load, train
from tests.messages import refused
from tests.remote import Threads
from tests.variants import before


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    monkeypatch.setattr(ray, "RayCluster", Threads)
    monkeypatch.setattr(Threads, "made", [])


def remote(num_collectors=1, max_staleness=0, **settings):
    return partial(
        rl.RayCollector,
        num_collectors=num_collectors,
        max_staleness=max_staleness,
        timeout_s=60,
        **settings,
    )


RUNS = {
    "PPO": {"policy": {"normalize_observation": True}, "model": {"normalize_reward": True}},
    "PPO torch": {"env": rl.CartPole},
    "PPO recurrent": {"policy": {"memory": rl.LSTM}, "model": {"sequence_length": 8, "burn_in": 4}},
    "GRPO": {"model": {"algorithm": rl.GRPO, "group_size": 4, "batch_size": 32}},
    "chunks, partial info, warm-up, normalisers, policy and algorithm of one's own": ALL,
    "SAC": {
        "env": "tests/Point-v0",
        "model": {"algorithm": rl.SAC},
        "data": {
            "replay": partial(rl.HindsightReplay, capacity=1000),
            "extra_fields": {"force": [3]},
        },
    },
}


assert_same_training = partial(
    test_async.assert_same_training, keys=("statistics", "env_steps", "loop")
)


@pytest.mark.parametrize("name", RUNS)
def test_one_collector_without_lag_is_the_foreground_bit_for_bit(name, tmp_path):
    run = dict(RUNS[name])
    for kind, collector in {"sync": rl.SyncCollector, "ray": remote()}.items():
        train(tmp_path / kind, **run | {"data": run.get("data", {}) | {"collector": collector}})
    assert_same_training(tmp_path / "sync", tmp_path / "ray")


def test_a_run_that_is_resumed_ends_as_uninterrupted(tmp_path):
    run = dict(RUNS["PPO"])
    data = {"collector": remote(), "iterations_per_epoch": 2}
    train(tmp_path / "whole", data=data, **run)
    train(tmp_path / "parts", data=data, trainer={"callbacks": [at_iteration(2, stop)]}, **run)
    assert load(last(tmp_path / "parts"))["global_step"] == 2
    train(tmp_path / "parts", data=data, ckpt_path=last(tmp_path / "parts"), **run)
    assert_same_training(tmp_path / "whole", tmp_path / "parts")


def test_three_collectors_resume_with_their_streams_and_seeds(tmp_path):
    data = {"collector": remote(3, 3), "iterations_per_epoch": 2, "total_env_steps": 64 * 12}
    train(tmp_path, data=data, trainer={"callbacks": [at_iteration(6, stop)]})
    saved = load(last(tmp_path))["RLDataModule"]["collectors"][0]
    streams = [saved["loop"], *(other["loop"] for other in saved["others"])]
    drawn = {tuple(stream["generator"].tolist()) for stream in streams}
    assert len(drawn) == 3
    assert sum(stream["rollouts"] for stream in streams) == 6
    started = []

    def note(cluster, index, seed, state):
        started.append((index, state))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "RayCluster", before(Threads, start=note))
        *_, trainer = train(tmp_path, data=data, ckpt_path=last(tmp_path))
    assert trainer.global_step == 12
    assert [index for index, _ in started] == [0, 1, 2]
    for (_, state), stream in zip(started, streams, strict=True):
        assert_same(state, stream)


def test_a_checkpoint_of_another_collector_or_of_more_of_them_goes_on(tmp_path):
    data = {"collector": remote(3, 3), "iterations_per_epoch": 2, "total_env_steps": 64 * 2}
    train(tmp_path, data=data)
    data["total_env_steps"] = 64 * 4
    with refused(UserWarning, names=("3 collectors", "2")):
        train(tmp_path, data=data | {"collector": remote(2, 2)}, ckpt_path=last(tmp_path))
    data["total_env_steps"] = 64 * 6
    train(tmp_path, data=data | {"collector": rl.SyncCollector}, ckpt_path=last(tmp_path))
    data["total_env_steps"] = 64 * 8
    train(tmp_path, data=data | {"collector": rl.AsyncCollector}, ckpt_path=last(tmp_path))
    data["total_env_steps"] = 64 * 10
    train(tmp_path, data=data | {"collector": remote()}, ckpt_path=last(tmp_path))
    assert load(last(tmp_path))["global_step"] == 10


@pytest.mark.parametrize("overflow", ["block", "overwrite"])
def test_with_a_lag_steps_say_their_version_and_each_rollout_is_trained_on_once(overflow, tmp_path):
    seen = []

    def look(trainer, module, rollout, *args):
        lag = int(module.policy.version) - rollout["policy_version"][:, :-1]
        seen.append((int(lag.min()), int(lag.max()), rollout["observation"].sum().item()))

    data = {"collector": remote(3, 2, overflow=overflow), "total_env_steps": 64 * 20}
    _, _, trainer = train(
        tmp_path,
        data=data,
        trainer={"callbacks": [callback(on_train_batch_start=look)], "limit_val_batches": 0},
    )
    assert trainer.global_step == len(seen) == 20
    assert all(0 <= least <= most <= 2 for least, most, _ in seen)
    assert len({content for *_, content in seen}) == 20


def test_what_is_sent_is_what_acting_depends_on_and_training_changes(tmp_path):
    module, *_ = train(
        tmp_path, data={"collector": remote()}, policy={"normalize_observation": True}
    )
    (cluster,) = Threads.made
    assert len(cluster.sent) == 1 + 6  # the first, and after each update
    names = {name for sent in cluster.sent for name in sent}
    assert names == set(module.policy.acting_state())
    assert not any(name.startswith("critic") for name in names)


class SlowQ(rl.QPolicy):
    """Holds a slow copy of its network, frozen for the optimizer."""

    def __init__(self, *spaces, **settings):
        super().__init__(*spaces, **settings)
        self.slow = copy.deepcopy(self.actor).requires_grad_(False)


class MovesSlowQ(rl.DQN):
    def target_networks(self):
        return [*super().target_networks(), (self.policy.slow, self.policy.actor)]


def test_a_slow_copy_that_an_algorithm_moves_is_sent_and_not_shared(tmp_path):
    model = {"algorithm": MovesSlowQ, "compile": False}
    data, policy = {"replay": rl.ReplayBuffer}, {"policy_class": SlowQ}
    module, *_ = train(tmp_path, data=data, model=model, policy=policy)
    slow = {f"slow.{name}" for name, _ in module.policy.slow.named_parameters()}
    assert slow <= set(changing_weights(module.policy))
    acts = acting_copy(module.policy, torch.device("cpu"))
    learnt = dict(module.policy.named_parameters())
    assert not [name for name, weight in acts.named_parameters() if weight is learnt[name]]


def test_the_newest_weights_act_however_they_arrive_and_are_not_kept():
    """An off-policy learner publishes within an iteration too; calls may overtake each other on their way."""
    spaces = gymnasium.spaces.Box(-1.0, 1.0, (3,)), gymnasium.spaces.Discrete(2)
    learner, actor = rl.ActorCritic(*spaces, (4,)), ray.RayActor()
    actor._policy = rl.ActorCritic(*spaces, (4,))
    sent = {}
    for number in (1, 3, 2):
        torch.nn.init.constant_(learner.actor[0].weight, float(number))
        sent[number] = {name: tensor.clone() for name, tensor in changing_weights(learner).items()}
    for number, acts in ((1, 1), (3, 3), (2, 3)):
        actor.publish(ray._to_message(sent[number]), number)
        assert actor._load_weights(lambda: None) == (acts == number)
        assert (actor._policy.actor[0].weight == acts).all()
        assert actor._newest is None, "the store could not have its memory back"


def test_several_learners_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ray.ranks, "world_size", lambda: 2)
    with refused(names=("RayCollector", "2")):
        ray._refuse_misplaced(None, None)
