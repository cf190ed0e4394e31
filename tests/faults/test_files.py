"""A file is whole or absent."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from lightning_rl.callbacks import AtomicCheckpointIO
from lightning_rl.files import write_atomically
from tests.helpers import last, load, train


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "deep" / "state.bin"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"half of the new")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


WRITER = """
import os, sys, torch
from lightning_rl.callbacks import AtomicCheckpointIO

def write():
    io, number = AtomicCheckpointIO(), 0
    while True:
        number += 1
        io.save_checkpoint({"number": number, "weights": torch.full((400_000,), float(number))}, sys.argv[1])
        if number == 1:
            print(os.getpid(), flush=True)

torch.set_num_threads(1)
for _ in sys.stdin:  # a writer for each line: forks, since imports take seconds
    writer = os.fork() or write()
    print(os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]), flush=True)
"""


def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    command = [sys.executable, "-c", WRITER, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        for delay in (0.0, 0.004, 0.011, 0.017, 0.023):
            print("begin", file=process.stdin, flush=True)
            writer = int(process.stdout.readline())  # it has saved once, and goes on
            time.sleep(delay)
            os.kill(writer, signal.SIGKILL)
            assert int(process.stdout.readline()) == -signal.SIGKILL
            content = load(path)
            assert (content["weights"] == content["number"]).all()


def test_a_checkpoint_loads_without_unpickling_code(tmp_path):
    train(tmp_path)
    assert torch.load(last(tmp_path), weights_only=True)["global_step"] == 6
    assert torch.load(tmp_path / "checkpoints" / "best.ckpt", weights_only=True)


def test_the_package_saves_through_the_atomic_plugin(tmp_path):
    _, _, trainer = train(tmp_path)
    assert isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO)


def test_signals_are_given_back_after_training(tmp_path):
    before = [
        signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    ]
    train(tmp_path)
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    assert before == after
