"""A file is whole or absent."""

import multiprocessing
import os
import signal
import stat
import time
from itertools import count

import torch

from lightning_rl.system.files import write_atomically
from lightning_rl.training.callbacks import AtomicCheckpointIO
from tests.helpers import last, load, train
from tests.messages import refused


def test_an_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "deep" / "state.bin"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"half of the new")
        raise OSError("No space left on device")

    with refused(OSError, names=("state.bin", "No space left on device")):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_others_may_read_a_file_as_far_as_the_umask_lets_them(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "config.yaml", lambda file: file.write(b"seed: 1"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == 0o640


def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path):
    path, context = tmp_path / "last.ckpt", multiprocessing.get_context("fork")

    def write(begun):
        for number in count(1):
            weights = torch.full((400_000,), float(number))
            AtomicCheckpointIO().save_checkpoint({"number": number, "weights": weights}, path)
            begun.set()

    for delay in (0.0, 0.004, 0.011, 0.017, 0.023):
        begun = context.Event()
        writer = context.Process(target=write, args=(begun,))
        writer.start()
        assert begun.wait(60)  # it has saved once, and goes on
        time.sleep(delay)
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
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
