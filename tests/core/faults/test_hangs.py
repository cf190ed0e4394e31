"""An env that hangs ends the run, says which env, in what and where, and leaves nothing behind."""

import multiprocessing
import os
import re
import sys
import threading
import time
from functools import partial

import gymnasium
import numpy as np
import pytest

from lightning_rl import AsyncCollector, GymnasiumEnv
from lightning_rl.buffers.waiting import wait_for
from lightning_rl.cli.app import _curable
from lightning_rl.envs.watch import EnvTimeoutError, EnvWatch
from tests.commands import wait_until
from tests.envs import ScriptedEnv, ScriptedVector, zeros
from tests.helpers import last, load, make_data, train
from tests.messages import refused
from tests.probes import ValueProbe

TIMEOUT = 1.0
END = threading.Event()
"""Ends what hangs in a thread of the tests that cannot be interrupted."""


@pytest.fixture(autouse=True)
def nothing_stays():
    """No process, no thread; and it ends long before the hang of 1,000 s would."""
    END.clear()
    MADE[0] = 0
    before, start = set(threading.enumerate()), time.monotonic()
    yield
    assert time.monotonic() - start < TIMEOUT + 60
    END.set()
    wait_until(lambda: set(threading.enumerate()) <= before, 30)
    assert not multiprocessing.active_children()


def in_c():
    END.wait(1000)


MADE = [0]


def hanging(where):
    """Hangs in its 21st step, in its reset, or when the second one is made, or one in a worker."""

    def hang_in(place):
        def act(env):
            if env.where == place and (place == "reset" or env.steps > 20):
                in_c()

        return act

    MADE[0] += 1
    in_worker = multiprocessing.parent_process() is not None
    if where == "construction" and (in_worker or MADE[0] == 2):
        in_c()
    space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    script = {"observe": zeros, "length": 10, "where": where}
    return ScriptedEnv(space, begin=hang_in("reset"), act=hang_in("step"), **script)


def hanging_vector(num_envs, where):
    """A batched env of a user."""

    def hang_in_step(env, results):
        if where == "step" and env.steps > 20:
            in_c()
        return results

    make = partial(hanging, "reset" if where == "reset" else "never")
    return ScriptedVector(num_envs, make, change=hang_in_step)


class HangingTask(ValueProbe):
    """A batched env in torch."""

    def __init__(self, num_envs, where):
        super().__init__(num_envs, delay=3)
        self.where, self.steps = where, 0

    def initial_state(self, uniform):
        if self.where == "reset":
            in_c()
        return super().initial_state(uniform)

    def transition(self, state, action):
        self.steps += 1
        if self.where == "step" and self.steps > 20:
            in_c()
        return super().transition(state, action)


gymnasium.register("Hanging-v0", hanging, vector_entry_point=hanging_vector)


def env_of(kind, where):
    if kind == "task":
        return partial(HangingTask, where=where)
    return partial(GymnasiumEnv, id="Hanging-v0", env_kwargs={"where": where}, vectorization=kind)


def run(directory, env, trainer=None, **data):
    """Train without evaluations in two envs with the time limit."""
    data = {"env_timeout_s": TIMEOUT, "num_envs": 2} | data
    train(directory, env=env, data=data, trainer={"limit_val_batches": 0} | (trainer or {}))


def message(kind, where):
    """Return what the whole message has to be; of the stack, the env's line and the last one."""
    name = "HangingTask" if kind == "task" else "GymnasiumEnv 'Hanging-v0'"
    name = "" if where == "construction" else rf" \({name}\)"  # there is no env yet
    return re.compile(
        rf"^The 2 envs of the training{name} hung: the {where} took more than data\.env_timeout_s: 1 seconds\. Raise this limit "
        r"if a step may take longer, or set it to null \(no limit\) if a person takes part\. "
        rf'The stack where it hangs:\n(.*\n)*  File ".*test_hangs\.py", line \d+,? in (in_c|step|reset|__init__|hang_in)\n'
    )


@pytest.mark.parametrize("where", ["step", "reset", "construction"])
def test_processes_that_hang_are_killed_and_the_run_ends(where, tmp_path):
    with pytest.raises(EnvTimeoutError) as caught:
        run(tmp_path, env_of("async", where))
    assert message("async", where).search(str(caught.value)), caught.value
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("kind", ["sync", "async", "vector_entry_point", "task"])
@pytest.mark.parametrize("where", ["step", "reset"])
def test_a_learner_that_waits_for_another_thread_gets_the_error(kind, where, tmp_path):
    with pytest.raises(Exception, match="hung") as caught:
        run(tmp_path, env_of(kind, where), collector=AsyncCollector)
    error = _curable(caught.value)
    assert isinstance(error, EnvTimeoutError)
    assert message(kind, where).search(str(error)), error
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("sync", "step"),
        ("sync", "construction"),
        ("vector_entry_point", "reset"),
        ("task", "step"),
    ],
)
def test_an_env_in_the_learners_thread_ends_the_process(kind, where, tmp_path):
    """With the message, exit code 1, and what an exception would have done, within ten seconds."""

    def train_alone():
        error = (tmp_path / "error").open("w")
        os.dup2(error.fileno(), 2)
        sys.stderr = error
        evaluated = {"limit_val_batches": 1.0, "num_sanity_val_steps": 0}
        run(tmp_path, env_of(kind, where), evaluated, eval_env=env_of("async", "step"))

    process = multiprocessing.get_context("fork").Process(target=train_alone)
    process.start()
    process.join(30)
    assert process.exitcode == 1
    error = (tmp_path / "error").read_text()
    assert "Traceback" not in error
    said = error.partition("rl-cli: error: ")[2].rstrip().rpartition("\n")[0]
    assert message(kind, where).search(said), said
    assert not (tmp_path / ".lock").exists()
    if where != "construction":  # there is no run before the env is made
        outcome = (tmp_path / "run.json").read_text()
        assert '"outcome": "failed: EnvTimeoutError: ' in outcome


def test_one_that_hangs_in_the_evaluation_is_said_to(tmp_path):
    with refused(
        EnvTimeoutError,
        names=("The 2 envs", "evaluation", "'Hanging-v0'", "step", "data.env_timeout_s"),
    ):
        train(
            tmp_path,
            env=env_of("sync", "never"),
            data={"env_timeout_s": TIMEOUT, "eval_env": env_of("async", "step")},
            trainer={"num_sanity_val_steps": 1},
        )


def test_what_comes_back_in_time_is_no_hang_and_a_replay_may_last(tmp_path, monkeypatch):
    """A resumed run replays an episode that takes longer, in turns that do not."""

    def slow(env):
        return gymnasium.wrappers.TransformReward(env, lambda r: time.sleep(0.02) or r)

    env = partial(GymnasiumEnv, id="CartPole-v1", wrappers=[slow])
    settings = {"num_envs": 1, "buffer_size": 32, "iterations_per_epoch": 1}

    def go_on(steps, limit, **kwargs):
        data = settings | {"total_env_steps": steps, "env_timeout_s": limit}
        train(tmp_path, env=env, data=data, trainer={"limit_val_batches": 0}, seed=5, **kwargs)

    go_on(64, 0.2)
    loop = load(last(tmp_path))["RLDataModule"]["collectors"][0]["loop"]
    limit = 0.02 * len(loop["env"]["episodes"][0]["actions"]) / 2
    monkeypatch.setattr("lightning_rl.envs.gymnasium.episode_log.REPLAY_SECONDS", limit / 10)
    go_on(96, limit, ckpt_path=last(tmp_path))


def test_no_limit_watches_nothing():
    before = {*threading.enumerate()}  # of a test before this one
    data = make_data("CartPole-v1", env_timeout_s=None)
    data._env.reset(seed=1)
    begun = {*threading.enumerate()} - before
    assert not [thread for thread in begun if thread.name.startswith("watch of")]
    data.close()
    with refused(names=("data.env_timeout_s", "0")):
        make_data("CartPole-v1", env_timeout_s=0)


def test_an_env_that_is_debugged_does_not_hang():
    """A person looks at its thread: `breakpoint()` there runs the code of `bdb`."""
    names = {"__name__": "bdb", "hang": lambda: END.wait(4 * 0.3)}
    exec("def trace_dispatch():\n    hang()", names)
    calls = EnvWatch("the training", 0.3)
    env = calls.make(lambda n: ValueProbe(n, delay=3), 1)
    with calls("step"):
        names["trace_dispatch"]()
    env.close()
    calls.close()


def test_a_wait_for_the_other_thread_leaves_out_a_stop(monkeypatch):
    """As the clock has it, an hour passes between two looks."""
    clock, looks = iter([0.0, 0.5, 3600.0, 3600.5, 3601.0]), iter([False, False, False, True])
    changed = threading.Condition()
    monkeypatch.setattr(changed, "wait_for", lambda possible, seconds: possible())
    monkeypatch.setattr("lightning_rl.buffers.waiting.time.perf_counter", lambda: next(clock))
    assert wait_for(changed, lambda: next(looks), 10.0) == (True, 2.5)
