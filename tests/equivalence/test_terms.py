"""A user's own terms meet the rest: resume, background, remote, two ranks, chunks, compiled steps, untrusted checkpoints."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from lightning_rl import GRPO, PushCube, SyncCollector, load_policy
from lightning_rl.cli.app import run
from lightning_rl.envs import ActionChunk
from lightning_rl.extensions.managers import Event, term
from lightning_rl.extensions.remote import ray
from tests import own_terms
from tests.callbacks import at_iteration, stop
from tests.equivalence.test_async import background
from tests.equivalence.test_compiled_steps import assert_follows, collector_of, is_compiled
from tests.equivalence.test_ray import remote
from tests.helpers import assert_same, assert_same_run, error_of, last, load, newest, scalars, train
from tests.messages import assert_names, refused
from tests.remote import Threads

EVENTS = {
    "bump": Event(own_terms.bump, {"size": 0.05}, mode="interval", every_s=(0.2, 0.4)),
    "place": Event("randomize", {"name": "goal", "low": -0.3, "high": 0.3}, mode="reset"),
    "friction": Event("randomize", {"name": "friction", "low": 0.1, "high": 0.9}, mode="startup"),
}


NEAR = {"name": "distance", "promote": 0.3, "demote": 0.6}


def managed(num_envs, events=None):
    """A task with a term of each kind, most of them a user's own."""
    return PushCube(
        num_envs,
        rewards={"goal_progress": 5.0, "near_wall": term.Reward(own_terms.near_wall, weight=-1.0)},
        terminations={
            "idle": term.Termination(own_terms.Idle, {"steps": 3, "min_distance": 0.01}, "fail")
        },
        observations={
            "actor": {
                "own": term.Observation(
                    "task_observation", noise=term.Noise(std=0.01), delay=(0, 2)
                ),
                "compass": term.Observation(own_terms.compass, history=3),
            },
            "critic": {"own": term.Observation("task_observation")},
        },
        curriculum={
            "level": term.Curriculum("by_success"),
            "near": term.Curriculum("ByMean", NEAR),
        },
        max_episode_steps=12,
        events=events,
    )


RUN = {
    "env": managed,
    "policy": {"actor_keys": ["actor"], "ignore_keys": ["critic"]},
    "data": {"events": EVENTS, "eval_events": {"place": EVENTS["place"]}},
}


def test_they_are_stepped_compiled_as_eagerly(traced_only):
    assert_follows(lambda: managed(6, EVENTS), 16, 3)


def noisy(env):
    return torch.rand(env.num_envs)


def decided(env):
    return env.elapsed.float() if env.action.sum() > 1e9 else env.measurements["distance"]


class Counting:
    """Keeps in the object what belongs into the memory of `start`."""

    count = 0

    def __call__(self, env):
        self.count += 1
        return env.measurements["distance"]


UNCOMPILED = {
    "draws": (noisy, ("aten.rand.default", "self.uniform(count)", "env.uniform(count)")),
    "a decision": (decided, ("test_terms.py, line",)),
    "an attribute": (Counting, ("Counting.count",)),
}


@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_cannot_be_compiled_runs_eagerly_and_is_named(name, traced_only):
    reward, why = UNCOMPILED[name]
    with refused(UserWarning, names=why):
        collector = collector_of(lambda: PushCube(4, rewards={"own": term.Reward(reward)}), True, 4)
    assert not is_compiled(collector)
    assert_names(collector.context.compilation.why, *why)
    collector.collect()


@pytest.mark.parametrize("kind", ["in the background", "by a remote collector"])
def test_collected_elsewhere_without_lag_they_do_what_they_do_in_the_foreground(
    kind, tmp_path, monkeypatch
):
    monkeypatch.setattr(ray, "RayCluster", Threads)
    monkeypatch.setattr(Threads, "made", [])
    elsewhere = {
        "in the background": background(0),
        "by a remote collector": remote(),
    }[kind]
    for name, collector in {"here": SyncCollector, "there": elsewhere}.items():
        train(tmp_path / name, **RUN | {"data": RUN["data"] | {"collector": collector}})
    a, b = load(last(tmp_path / "here")), load(last(tmp_path / "there"))
    assert_same(a["state_dict"], b["state_dict"])
    curves = scalars(tmp_path / "here")
    for tag in ("rewards/near_wall", "rewards/goal_progress", "metrics/level"):
        assert_same(curves[tag], scalars(tmp_path / "there")[tag])


def test_events_and_memories_of_terms_are_saved_and_resumed_bit_for_bit(tmp_path):
    train(tmp_path / "whole", **RUN)
    train(tmp_path / "parts", **RUN, trainer={"callbacks": [at_iteration(3, stop)]})
    saved = load(last(tmp_path / "parts"))["RLDataModule"]["collectors"][0]["loop"]
    names = saved["env"]["state"]
    kept = {"events/bump.left", "friction", "terminations/idle/count"}
    assert kept | {"curriculum/level", "curriculum/near/sum"} <= names.keys()
    assert names["friction"].unique().numel() == 4
    train(tmp_path / "parts", **RUN, ckpt_path=last(tmp_path / "parts"))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_resumed_with_other_events_the_env_begins_new_episodes_and_says_why(tmp_path):
    train(tmp_path, **RUN, trainer={"callbacks": [at_iteration(3, stop)]})
    data = RUN["data"] | {"events": {"place": EVENTS["place"]}}
    with refused(UserWarning, names="events/bump.left, friction"):
        train(tmp_path, **RUN | {"data": data}, ckpt_path=last(tmp_path))


def test_a_curriculum_that_every_rollout_would_begin_again_is_refused(tmp_path):
    env = partial(PushCube, curriculum={"level": term.Curriculum("by_success")})
    with refused(names=("PushCube", "curriculum", "level", "reset_every_rollout: false")):
        train(tmp_path, env=env, model={"algorithm": GRPO, "group_size": 2})


def test_a_run_says_which_level_its_evaluations_play(tmp_path, caplog):
    caplog.set_level("INFO")
    env = partial(PushCube, curriculum={"level": term.Curriculum("by_success")})
    data = {"num_envs": 2, "buffer_size": 16, "total_env_steps": 32}
    train(tmp_path / "alike", env=env, data=data)
    assert_names(caplog.text, "best.ckpt", "curriculum/level", "data.eval_env", "start")
    caplog.clear()
    train(tmp_path / "other", env=env, data=data | {"eval_env": partial(env)})
    assert "curriculum/level" not in caplog.text


def test_in_a_chunk_of_actions_they_do_what_they_do_one_by_one():
    env, chunks = managed(5, EVENTS), ActionChunk(5, lambda n: managed(n, EVENTS), 4)
    first, _ = env.reset(seed=3)
    assert_same(first.to_dict(), chunks.reset(seed=3)[0].to_dict())
    action = torch.rand(5, 4, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    _, _, ended, cut, info = chunks.step(action)
    done = torch.zeros(5, dtype=torch.bool)
    total = torch.zeros(5)
    for k in range(4):
        _, reward, terminated, truncated, _ = env.step(action[:, k])
        total += torch.where(done, 0.0, reward)
        done |= terminated | truncated
    assert torch.equal(done, ended | cut)
    torch.testing.assert_close(info["step_reward"].sum(1), total)


YAML = """
data:
  env:
    class_path: PushCube
    init_args:
      max_episode_steps: 12
      rewards: {goal_progress: 5.0, smoothness: null, near_wall: {term: my_terms.near_wall, weight: -1, params: {margin: 0.2}}}
      terminations:
        success: {params: {radius: 0.12}}
        idle: {term: my_terms.Idle, ends: fail, params: {steps: 3, min_distance: 0.01}}
      observations:
        actor: {own: {term: task_observation, noise: {std: 0.01}, delay: [0, 2]}, compass: {term: my_terms.compass, history: 3}}
  num_envs: 4
  buffer_size: 8
  num_eval_episodes: 2
  iterations_per_epoch: 2
  events: {bump: {term: my_terms.bump, mode: interval, every_s: [0.2, 0.4], params: {size: 0.05}}}
seed_everything: 1
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A directory with a user's terms and the config of a run with them."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(own_terms.__file__, "my_terms.py")
    settings = yaml.safe_load(YAML)
    policy = {"class_path": "ActorCritic", "init_args": {"hidden_sizes": [8]}}
    model = {"policy": policy, "n_epochs": 1, "batch_size": 16, "compile": False}
    return settings | {"model": {"class_path": "PPO", "init_args": model}}


def fit(config, name, steps, *more):
    Path("mine.yaml").write_text(yaml.safe_dump(config))
    options = ["--exp_name", name, "--data.total_env_steps", steps, *more]
    run(["fit", "--config", "mine.yaml", *options])
    return newest()


def test_thirty_lines_and_a_yaml_train_and_resume_and_a_checkpoint_names_them_only_if_trusted(
    config, capsys
):
    whole, part = fit(config, "whole", "128"), fit(config, "part", "64")
    more = ["--data.total_env_steps", "128"]
    error = error_of(capsys, "fit", "--ckpt_path", part, *more)
    assert_names(error, "names 'my_terms.", "--trust_code true")
    run(["fit", "--ckpt_path", str(part), *more, "--trust_code", "true"])
    assert_same_run(whole, part)
    policy = load_policy(last(part))  # which needs neither the env nor its events
    assert policy.observation_space.shape == (12 + 3 * 2,)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (
            ("env", "init_args", "rewards", "near_wall", "params"),
            {"margn": 0.2},
            "the term 'near_wall' of rewards (my_terms.near_wall) has no parameter 'margn'; it "
            "takes margin; close matches: margin.",
        ),
        (("events", "bump", "every_s"), None, "has the mode interval: set every_s"),
        (("env", "init_args", "terminations", "idle", "ends"), "failed", "ends"),
    ],
)
def test_what_is_misspelt_is_named_with_what_there_is(place, value, said, config, capsys):
    *parents, key = place
    inner = config["data"]
    for parent in parents:
        inner = inner[parent]
    inner[key] = value
    with pytest.raises(SystemExit):
        fit(config, "wrong", "32")
    assert said in capsys.readouterr().err


def test_events_of_an_env_that_takes_none_are_refused():
    with refused(names=("GymnasiumEnv", "(bump)")):
        train("unused", data={"events": {"bump": EVENTS["bump"]}})
