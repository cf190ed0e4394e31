"""Whatever goes wrong beside the learner ends or recovers as documented, says why, and leaves nothing behind."""

import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from traceback import walk_tb

import gymnasium
import numpy as np
import pytest
import yaml

from lightning_rl import AsyncCollector, GymnasiumEnv
from lightning_rl.buffers import WriterError
from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.envs.gymnasium.workers import WorkerVectorEnv
from tests.callbacks import callback, fail
from tests.commands import ROOT, Command, wait_until
from tests.envs import ScriptedEnv, zeros
from tests.helpers import last, load, train
from tests.messages import refused

END = threading.Event()
"""Ends a step that hangs in this process."""

LIMIT = 60.0
"""Seconds, ten times what the slowest takes: in time for no step of 1,000 s, and for no rollout."""


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    END.clear()
    before, start = set(threading.enumerate()), time.monotonic()
    yield
    END.set()
    if "command" not in request.node.name:  # most of that is its start
        assert time.monotonic() - start < LIMIT

    def collectors():
        return [t for t in set(threading.enumerate()) - before if t.name == "collector"]

    wait_until(lambda: not collectors(), LIMIT)  # one that an env held up ends when the env does
    assert not multiprocessing.active_children(), "a process was left behind"


def make_faulty(fault, at=20):
    """Make an env that does something wrong from its 20th step on."""

    def act(env):
        if env.steps < at:
            return
        if fault == "raise":
            raise FloatingPointError("the motor is on fire")
        if fault == "hang":
            END.wait(100)
        if fault == "slow":
            time.sleep(0.03)

    space = gymnasium.spaces.Box(-10, 10, (1,), np.float32)
    return ScriptedEnv(space, observe=zeros, act=act, reward=1.0, length=5)


gymnasium.register("FaultyInBackground-v0", make_faulty)


def run(
    run_dir, fault, vectorization="sync", timeout_s=30.0, at=20, data=None, callbacks=(), **kwargs
):
    """Train; the evaluation gets the env, too, but plays none of its episodes."""
    made = partial(GymnasiumEnv, id="FaultyInBackground-v0", vectorization=vectorization)
    env = partial(made, env_kwargs={"fault": fault, "at": at})
    collector = partial(AsyncCollector, timeout_s=timeout_s)
    data = {"num_envs": 2, "collector": collector, **(data or {})}
    trainer = {"limit_val_batches": 0, "callbacks": [*callbacks]}
    return train(run_dir, env=env, data=data, trainer=trainer, **kwargs)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_env_that_raises_ends_the_run_with_its_own_traceback(vectorization, tmp_path):
    with refused(WriterError, names=("FloatingPointError", "the motor is on fire")) as caught:
        run(tmp_path, "raise", vectorization)
    cause = caught.value.__cause__
    assert isinstance(cause, FloatingPointError)
    if vectorization == "async":
        (note,) = cause.__notes__
        assert note.startswith("In the process of env 0:\nTraceback")
        assert 'raise FloatingPointError("the motor is on fire")' in note
    else:
        *_, (frame, _) = walk_tb(cause.__traceback__)
        assert frame.f_code.co_qualname == "make_faulty.<locals>.act"


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_env_that_hangs_is_reported_with_the_line_it_hangs_in(
    vectorization, tmp_path, monkeypatch
):
    monkeypatch.setattr("lightning_rl.collectors.asynchronous.JOIN_SECONDS", 0.1)
    place = "in step" if vectorization == "sync" else "in recv"
    with refused(TimeoutError, names=("1 s", "collector", place)):
        run(tmp_path, "hang", vectorization, timeout_s=1.0)


def test_an_exception_whose_constructor_wants_more_is_reported_too():
    env = WorkerVectorEnv([partial(make_faulty, "none")] * 2)
    env.error_queue.put((1, UnicodeDecodeError, "odd", "Traceback of it"))
    with pytest.raises(RuntimeError, match="UnicodeDecodeError: odd") as caught:
        env._raise_if_errors([True, False])
    assert caught.value.__notes__ == ["In the process of env 1:\nTraceback of it"]
    env.close()


def test_an_error_of_the_learner_ends_the_thread(tmp_path):
    fails = callback(on_train_batch_end=fail(KeyError("of the learner")))
    with pytest.raises(KeyError, match="of the learner"):
        run(tmp_path, "slow", "async", at=1, callbacks=[fails])


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_rollout_that_takes_long_is_honoured_soon(
    number, vectorization, tmp_path
):
    """An env step takes 0.03 s or 0.06 s, a rollout of 2,000 of them a minute or more."""
    data = {"buffer_size": 2000, "total_env_steps": 100_000}
    sent = []

    def send():
        time.sleep(0.5)
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    sends = callback(on_train_start=lambda *_: threading.Thread(target=send).start())
    _, _, trainer = run(tmp_path, "slow", vectorization, at=1, data=data, callbacks=[sends])
    assert time.monotonic() - sent[0] < 20  # 0.1 s where the machine has nothing else to do
    assert trainer.stop_signal == number
    assert load(last(tmp_path))["global_step"] == 0


def configured(directory, **env):
    """Write a config of the faulty env, and a module that registers it; run the command here."""
    (directory / "faulty.py").write_text(
        "import gymnasium\nfrom tests.core.faults.test_async_faults import make_faulty\n"
        "gymnasium.register('FaultyToo-v0', make_faulty)\n"
    )
    config = yaml.safe_load(shipped_configs()["ppo_async.yaml"].read_text())
    config["data"]["env"]["init_args"] = {"id": "faulty:FaultyToo-v0", **env}
    config["data"] |= {"num_envs": 2, "buffer_size": 128, "num_eval_episodes": 1}
    config["model"]["init_args"]["policy"] = {
        "class_path": "SlowPolicy",
        "init_args": {"policy": config["model"]["init_args"]["policy"], "delay_ms": 1},
    }
    config["model"]["init_args"]["compile"] = False  # as its budget would have it
    (directory / "faulty.yaml").write_text(yaml.safe_dump(config))
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    return Command("fit", "--config", "faulty.yaml", env={"PYTHONPATH": path})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "it closes"])
def test_what_a_terminal_sends_to_all_saves_and_leaves_no_process(number, tmp_path, monkeypatch):
    """To the command and to the processes of its envs."""
    monkeypatch.chdir(tmp_path)
    options = {"env_kwargs": {"fault": "slow", "at": 1}, "vectorization": "async"}
    process = configured(tmp_path, **options)
    process.wait_for("Run directory")
    wait_until(lambda: list(tmp_path.glob("outputs/*/run.json")), of=process)  # it trains
    time.sleep(1.0)  # in the middle of the first rollout
    children = process.children()
    os.killpg(process.pid, number)
    sent = time.monotonic()
    process.wait(120)
    assert time.monotonic() - sent < LIMIT
    assert process.returncode == 128 + number, process.stderr
    assert "Resume: rl-cli fit --ckpt_path" in process.stderr
    assert not [child for child in children if os.path.exists(f"/proc/{child}")]
    assert list(tmp_path.glob("outputs/*/checkpoints/last.ckpt"))
