"""The reader of the output ends before the run, as `tee` does at Ctrl-C: the run goes on, or saves itself."""

import json
import os
import pty
import signal
import sys
import threading
from pathlib import Path

import pytest

from lightning_rl.cli.app import run
from lightning_rl.system.output import tell
from lightning_rl.system.signals import STOPS
from tests.callbacks import callback, send
from tests.helpers import last, load, train

SMALL = [
    *("--data.num_envs", "2", "--data.buffer_size", "16", "--model.batch_size", "32"),
    *("--data.total_env_steps", "512", "--data.iterations_per_epoch", "2"),
    *("--data.num_eval_episodes", "1"),
]


def read_by_others(pair, monkeypatch, *names):
    """Replace streams by ends of pipes or terminals, and return the other ends."""
    pairs = [pair() for _ in names]
    for name, (_, ours) in zip(names, pairs, strict=True):
        monkeypatch.setattr(sys, name, os.fdopen(ours, "w", buffering=1))
    return [theirs for theirs, _ in pairs]


@pytest.mark.parametrize("pair", [os.pipe, pty.openpty], ids=["pipe", "terminal"])
@pytest.mark.parametrize("names", [("stdout",), ("stdout", "stderr")], ids=["stdout", "both"])
def test_a_run_goes_on_without_its_output(pair, names, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        readers = read_by_others(pair, patch, *names)

        def head():
            """Read up to the first line about progress, as `head` would, and close all."""
            seen = b""
            while b"env steps" not in seen:
                seen += os.read(readers[0], 4096)
            for descriptor in readers:
                os.close(descriptor)

        reader = threading.Thread(target=head)
        reader.start()
        run(["fit", "--config", "ppo.yaml", *SMALL])
        reader.join()
    (run_dir,) = Path("outputs").iterdir()
    assert json.loads((run_dir / "run.json").read_text())["outcome"] == "finished"
    assert load(last(run_dir))["lightning_rl"]["env_steps"] == 512
    if pair is os.pipe and "stderr" not in names:  # with a terminal, rich redirects both
        error = capsys.readouterr().err
        assert error.count("Standard output is lost (") == 1, error


def test_ctrl_c_saves_a_run_whose_output_it_ends(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        readers = read_by_others(os.pipe, patch, "stdout", "stderr")

        def interrupt(trainer, *args):
            """Close the readers, and send Ctrl-C, before an evaluation and its line."""
            if trainer.is_last_batch:
                while readers:
                    os.close(readers.pop())
                os.kill(os.getpid(), signal.SIGINT)

        interrupts = callback(on_train_batch_end=interrupt)
        settings = {"callbacks": [interrupts], "enable_progress_bar": True}
        _, _, trainer = train(tmp_path / "run", trainer=settings)
    assert trainer.stop_signal == signal.SIGINT
    assert load(last(tmp_path / "run"))["global_step"] == trainer.global_step > 0


def test_a_reader_that_stops_before_the_training_holds_up_no_signal(tmp_path, monkeypatch):
    """A signal comes while more is printed than a pipe holds."""

    def print_more(*args):
        threading.Timer(0.3, send()).start()
        tell("a line" * 100_000)

    handlers = [signal.getsignal(number) for number in STOPS]
    settings = {"callbacks": [callback(on_train_start=print_more)]}
    with monkeypatch.context() as patch:
        read_by_others(os.pipe, patch, "stdout", "stderr")
        with pytest.raises(SystemExit) as end:
            train(tmp_path / "run", trainer=settings)
    assert end.value.code == 1
    assert [signal.getsignal(number) for number in STOPS] == handlers
    assert json.loads((tmp_path / "run" / "run.json").read_text())["outcome"] == "interrupted"
