"""Processes that an env starts: they end when it ends them, work in workers, and outlive nothing."""

import gc
import multiprocessing
import os
import signal
import subprocess
import time
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch

from lightning_rl import GymnasiumEnv
from lightning_rl.envs.gymnasium.workers import WorkerDied
from lightning_rl.system import signals
from lightning_rl.system.signals import STOPS, handle_signals
from tests.commands import children_of, is_running, wait_until
from tests.envs import ScriptedEnv
from tests.helpers import train


def serve(pipe):
    while (number := pipe.recv()) is not None:
        pipe.send(number + 1)


def start_forked(env):
    env.pipe, other = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    env.process = context.Process(target=serve, args=(other,), daemon=env.daemon)
    env.process.start()


def start_program(env):
    env.process = subprocess.Popen(["sleep", "600"])


STARTED = []
"""Processes that envs have started in the process of the tests."""


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        (getattr(process, "join", None) or process.wait)()


def use_pool(env):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]


def restart(start):
    """Start a process at each reset, after the end of the last one."""

    def begin(env):
        process = getattr(env, "process", None)
        if process is not None:
            process.terminate()
            (getattr(process, "join", None) or process.wait)(5)
            code = getattr(process, "exitcode", getattr(process, "returncode", None))
            assert code == -signal.SIGTERM
        start(env)
        STARTED.append(env.process)

    return begin


START = {"forked": start_forked, "program": start_program}
BEGIN = {name: restart(start) for name, start in START.items()} | {"pool": use_pool}


def make(begin, daemon=True):
    return ScriptedEnv(length=8, begin=BEGIN[begin], daemon=daemon)


gymnasium.register("WithProcess-v0", make)


def in_workers(**kwargs):
    return partial(GymnasiumEnv, id="WithProcess-v0", vectorization="async", env_kwargs=kwargs)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("begin", BEGIN)
def test_a_process_of_an_env_ends_when_the_env_ends_it(begin, vectorization, tmp_path):
    env = partial(in_workers(begin=begin), vectorization=vectorization)
    train(tmp_path, env=env, data={"num_envs": 2, "buffer_size": 16, "total_env_steps": 32})


def wait_for_end(pids):
    assert pids
    wait_until(lambda: not any(map(is_running, pids)), 30)


@pytest.mark.parametrize("start", START)
@pytest.mark.parametrize("daemon", [True, False])
def test_what_an_env_started_ends_with_it(start, daemon):
    env = in_workers(begin=start, daemon=daemon)(2)
    workers = [process.pid for process in env._env.processes]
    env.reset(seed=1)
    pids = [pid for worker in workers for pid in children_of(worker)]
    env.close()
    wait_for_end([*workers, *pids])


@pytest.mark.parametrize("start", START)
def test_a_killed_learner_leaves_nothing(start):
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")

    def run_until_killed():
        env = in_workers(begin=start, daemon=False)(2)
        env.reset(seed=1)
        theirs.send([process.pid for process in env._env.processes])
        time.sleep(600)

    learner = context.Process(target=run_until_killed)
    learner.start()
    workers = ours.recv()
    pids = [pid for worker in workers for pid in children_of(worker)]
    assert len(pids) == 2
    learner.kill()
    learner.join()
    wait_for_end([*workers, *pids])


def test_a_killed_worker_whose_env_has_a_process_is_noticed():
    env = in_workers(begin="forked")(2)
    env.reset(seed=1)
    env._env.processes[1].kill()
    env._env.processes[1].join(0.2)
    with pytest.raises(WorkerDied, match="env 1 with exit code -9"):
        env._env.step(np.zeros(2, int))
    env.close()


def test_a_worker_does_not_wait_for_the_threads_of_the_learner():
    """A fork has none of them: an env that used torch waited for ever, after an update by several."""
    threads = torch.get_num_threads()
    make = partial(ScriptedEnv, reward=lambda env: torch.get_num_threads())
    gymnasium.register("Threads-v0", make)
    torch.set_num_threads(2)
    try:
        env = GymnasiumEnv(1, "Threads-v0", vectorization="async")
        env.reset(seed=0)
        assert env.step(torch.zeros(1, dtype=torch.int64))[1].item() == 1
        env.close()
    finally:
        torch.set_num_threads(threads)


def test_a_signal_to_all_processes_of_a_job_leaves_the_workers_to_the_learner():
    env = in_workers(begin="program")(2)
    env.reset(seed=1)
    for number in STOPS:
        for process in env._env.processes:
            os.kill(process.pid, number)
    env._env.step(np.zeros(2, int))
    env.close()


@pytest.fixture
def handled():
    restore = handle_signals(STOPS, lambda *_: None)
    yield
    restore()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_forked_process_has_the_former_handlers_from_its_first_instruction(number, handled):
    former = signals._replaced[0].get(number)
    if former is not signal.SIG_DFL:  # `nohup pytest`
        pytest.skip(f"the tests have another handler: {former}")
    pid = os.fork()
    if pid == 0:
        gc.disable()
        time.sleep(30)
        os._exit(0)
    os.kill(pid, number)  # perhaps before Python runs there
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -number


def test_handlers_are_restored_in_any_order(handled):
    outer = signal.getsignal(signal.SIGTERM)
    first = handle_signals([signal.SIGTERM], print)
    second = handle_signals([signal.SIGTERM], repr)
    first()
    second()
    assert signal.getsignal(signal.SIGTERM) is outer
