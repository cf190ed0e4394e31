"""Collecting in the background without lag is collecting in the foreground, bit for bit; with a lag nothing is lost."""

import os
import signal
import threading
import time
from collections import Counter
from functools import partial

import gymnasium
import pytest
import torch

from lightning_rl import GRPO, LSTM, AsyncCollector, CartPole, SyncCollector
from tests.callbacks import callback, signal_at
from tests.envs import ScriptedTask
from tests.helpers import assert_same, last, load, scalars, train
from tests.messages import refused
from tests.probes import ValueProbe
from tests.variants import before

CLOCKED = ("charts/SPS", "async/", "ray/")
GRPO_MODEL = {"algorithm": GRPO, "group_size": 4, "batch_size": 32}


def background(max_staleness, **kwargs):
    return partial(AsyncCollector, max_staleness=max_staleness, timeout_s=30, **kwargs)


def assert_same_training(one, other, keys=("statistics", "env_steps")):
    """Assert that two runs have trained alike; of a collector's state only some keys need be equal."""
    a, b = load(last(one)), load(last(other))
    for key in ("state_dict", "optimizer_states", "lightning_rl", "global_step", "epoch"):
        assert_same(a[key], b[key], key)
    a, b = a["RLDataModule"]["collectors"][0], b["RLDataModule"]["collectors"][0]
    for key in keys:
        assert_same(a[key], b[key], key)
    curves, others = scalars(one, CLOCKED), scalars(other, CLOCKED)
    assert_same(curves, others)
    assert "charts/episode_reward_avg_100" in curves


RUNS = {
    "PPO CartPole-v1": {},
    "PPO Pendulum-v1": {
        "env": "Pendulum-v1",
        "policy": {"normalize_observation": True, "squash": True},
        "model": {"normalize_reward": True},
        "data": {"buffer_size": 20},  # 200 steps are an episode
    },
    "PPO torch": {"env": CartPole, "policy": {"normalize_observation": True}},
    "GRPO CartPole-v1": {"model": GRPO_MODEL},
    "GRPO torch": {
        "env": lambda n: ValueProbe(n, delay=15),
        "model": GRPO_MODEL | {"kl_coef": 0.1},
    },
    "PPO recurrent": {"policy": {"memory": LSTM}, "model": {"sequence_length": 8, "burn_in": 4}},
    "GRPO going on": {"model": GRPO_MODEL | {"reset_every_rollout": False, "mode": "step"}},
}


@pytest.mark.parametrize("name", RUNS)
def test_without_lag_background_is_foreground_bit_for_bit(name, tmp_path):
    run = dict(RUNS[name])
    data = {"num_envs": 4, "buffer_size": 16, "iterations_per_epoch": 10} | run.pop("data", {})
    data["total_env_steps"] = 20 * 4 * data["buffer_size"]
    for kind, collector in {"sync": SyncCollector, "async": background(0)}.items():
        module, *_ = train(tmp_path / kind, data=data | {"collector": collector}, **run)
    assert module.policy.version >= 20  # more where rollouts end with their episodes
    assert_same_training(tmp_path / "sync", tmp_path / "async")


def test_an_evaluation_neither_stops_nor_disturbs_collection(tmp_path):
    ahead = []

    def look(trainer, module):
        buffer = trainer.datamodule.collector._buffer
        wait_for(lambda: buffer.statistics()["queue_depth"] == 2)  # filled while this lasts
        ahead.append(buffer.statistics()["queue_depth"])

    data = {"collector": background(1), "iterations_per_epoch": 1}
    train(
        tmp_path / "watched", data=data, trainer={"callbacks": [callback(on_validation_start=look)]}
    )
    assert ahead == [2.0] * 6
    for every in (1, 6):
        data = {"collector": background(0), "iterations_per_epoch": every}
        train(tmp_path / str(every), data=data)
    for key in ("state_dict", "optimizer_states"):
        assert_same(load(last(tmp_path / "1"))[key], load(last(tmp_path / "6"))[key])


def wait_for(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


def lead_by(rollouts):
    """End each iteration with so many rollouts collected ahead: a checkpoint then does not depend on the machine."""

    def wait(trainer, *args):
        buffer = trainer.datamodule.collector._buffer
        wait_for(lambda: buffer.statistics()["queue_depth"] >= rollouts)

    return callback(on_train_batch_end=wait)


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("name", ["PPO CartPole-v1", "PPO torch", "GRPO CartPole-v1"])
def test_resume_without_lag_is_exact(name, lead, tmp_path):
    run = RUNS[name] | {"data": {"collector": background(0)}}
    train(tmp_path / "whole", **run)
    callbacks = [signal_at(3), *([lead_by(1)] if lead else [])]
    train(tmp_path / "stopped", trainer={"callbacks": callbacks}, **run)
    windows = load(last(tmp_path / "stopped"))["RLDataModule"]["collectors"][0]["buffer"]["windows"]
    assert len(windows) == 1 if lead else len(windows) <= 1
    train(tmp_path / "stopped", ckpt_path=last(tmp_path / "stopped"), **run)
    assert_same_training(tmp_path / "whole", tmp_path / "stopped")


def signaller(make, at):
    """Return what makes an env that, at one step of the whole process, sends a signal and then takes its time."""
    counts = Counter()

    def slow_step(env, action):
        if threading.current_thread().name == "collector":
            counts["steps"] += 1
            if counts["steps"] == at:
                os.kill(os.getpid(), signal.SIGTERM)
            if counts["steps"] >= at and counts["slow"] < 30:
                counts["slow"] += 1
                time.sleep(0.3)

    def make_slow(num_envs):
        env = make(num_envs)
        env.__class__ = before(type(env), step=slow_step)
        return env

    make_slow.counts = counts
    return make_slow


@pytest.mark.parametrize("iteration", [0, 4])
def test_a_signal_while_the_learner_waits_is_honoured_at_once_and_loses_nothing(
    iteration, tmp_path
):
    """In the middle of any rollout of two epochs; the rest of that rollout would take seconds."""
    data, probe = {"collector": background(0)}, lambda n: ValueProbe(n, delay=3)
    train(tmp_path / "whole", env=probe, data=data)
    env = signaller(probe, at=16 * iteration + 7)
    began = []

    stopped = callback(on_train_end=lambda *_: began.append(env.counts["slow"]))
    _, _, trainer = train(
        tmp_path / "stopped", env=env, data=data, trainer={"callbacks": [stopped]}
    )
    assert trainer.stop_signal == signal.SIGTERM
    assert trainer.global_step == iteration
    assert began[0] <= 4, "nobody waited for the rest of the rollout, which takes 10 steps"
    train(tmp_path / "stopped", env=probe, data=data, ckpt_path=last(tmp_path / "stopped"))
    assert_same_training(tmp_path / "whole", tmp_path / "stopped")


def step_counter(num_envs):
    """Make an env that shows how many steps it has made, whatever becomes of the process."""

    def move(env, state, action):
        return ({"steps": state["steps"] + 1},)

    return ScriptedTask(
        num_envs,
        lambda uniform: {"steps": torch.zeros(len(uniform), 1)},
        move,
        action_space=gymnasium.spaces.Discrete(2),
        steps=10**9,
    )


def keeps_what_is_trained_on():
    """Make a callback with the `steps` that are trained on, and their `lags`; no evaluation, which would not end."""

    def look(trainer, module, batch, batch_idx):
        kept.steps += batch["observation"][0, :-1, 0].long().tolist()
        kept.lags.append(module.staleness(batch))

    kept = callback(
        setup=lambda trainer, *_, **__: setattr(trainer, "limit_val_batches", 0),
        on_train_batch_start=look,
    )
    kept.steps, kept.lags = [], []
    return kept


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_a_run_with_lag_that_was_stopped_twice_trains_on_each_step_once(max_staleness, tmp_path):
    """Once between two iterations with rollouts waiting, once while waiting for a rollout."""
    trained = keeps_what_is_trained_on()
    data = {"collector": background(max_staleness), "total_env_steps": 4 * 16 * 12}
    run = {"env": step_counter, "data": data}
    stops = [trained, signal_at(4), lead_by(max_staleness)]
    train(tmp_path, trainer={"callbacks": stops}, **run)
    saved = load(last(tmp_path))["RLDataModule"]["collectors"][0]
    windows = saved["buffer"]["windows"]
    assert len(windows) >= max_staleness
    versions = [window["fields"]["policy_version"][0, 0].item() for window in windows]
    assert versions[0] < 5, "collected before the checkpoint's own update"
    assert saved["buffer"]["written_steps"] == 4 * 16 * (5 + len(windows))
    run_on = {"ckpt_path": last(tmp_path), **run, "env": signaller(step_counter, at=40)}
    train(tmp_path, trainer={"callbacks": [trained]}, **run_on)
    module, _, trainer = train(
        tmp_path, trainer={"callbacks": [trained]}, **run_on | {"env": step_counter}
    )
    assert trained.steps == list(range(12 * 16))
    assert trainer.global_step == module.policy.version == 12
    assert module.env_steps == 4 * 16 * 12
    assert max(trained.lags) <= max_staleness
    counters = load(last(tmp_path))["RLDataModule"]["collectors"][0]
    assert counters["buffer"]["read_steps"] == counters["env_steps"] == 4 * 16 * 12
    assert counters["buffer"]["dropped_steps"] == 0


def test_a_resumed_run_with_a_smaller_bound_drops_what_is_too_old(tmp_path):
    trained = keeps_what_is_trained_on()
    callbacks = [trained, signal_at(4), lead_by(3)]
    for staleness, expected in ((3, None), (1, "max_staleness=1")):
        data = {"collector": background(staleness), "total_env_steps": 4 * 16 * 10}
        resume = {"ckpt_path": last(tmp_path)} if expected else {}
        run = partial(train, tmp_path, env=step_counter, data=data, **resume)
        if expected is None:
            run(trainer={"callbacks": callbacks})
        else:
            with refused(UserWarning, names=expected):
                run(trainer={"callbacks": [trained]})
    assert max(trained.lags[5:]) <= 1
    assert len(set(trained.steps)) == len(trained.steps) == 160, "no step was trained twice"
    assert trained.steps == sorted(trained.steps)
    dropped = trained.steps[-1] + 1 - 160
    assert dropped > 0
    assert scalars(tmp_path)["async/dropped_steps"][-1][1] == 4 * dropped


def test_a_checkpoint_goes_from_one_collector_to_the_other(tmp_path):
    env = {"env": step_counter}
    for first, second in (("sync", "async"), ("async", "sync")):
        kinds = {"sync": SyncCollector, "async": background(1)}
        run_dir, trained = tmp_path / first, keeps_what_is_trained_on()
        callbacks = [trained, signal_at(2), *([lead_by(1)] if first == "async" else [])]
        train(run_dir, data={"collector": kinds[first]}, trainer={"callbacks": callbacks}, **env)
        resume = {"ckpt_path": last(run_dir), "trainer": {"callbacks": [trained]}, **env}
        if second == "sync":
            with refused(UserWarning, names=("rollouts", "AsyncCollector")):
                train(run_dir, data={"collector": kinds[second]}, **resume)
        else:
            train(run_dir, data={"collector": kinds[second]}, **resume)
        assert trained.steps == sorted(set(trained.steps))
        assert len(trained.steps) == 6 * 16


def test_a_compiled_update_works_beside_the_thread(tmp_path, traced_only):
    """The first update, which compiles, is awaited."""
    written = []

    def look(trainer, *args):
        if not written:
            time.sleep(0.2)  # a hundred times what a rollout takes
            written.append(trainer.datamodule.collector._buffer.statistics()["written_steps"])

    data = {"collector": background(1), "total_env_steps": 4 * 16 * 3}
    kwargs = {
        "model": {"n_epochs": 1, "compile": True},
        "trainer": {"callbacks": [callback(on_train_batch_start=look)]},
    }
    module, *_ = train(tmp_path, data=data, **kwargs)
    assert written == [4 * 16], "nothing ran beside the compiler"
    assert module.optimizer_steps == 6
    assert all(p.isfinite().all() for p in module.policy.parameters())
