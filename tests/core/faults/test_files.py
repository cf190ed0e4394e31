"""A file is whole or absent."""

import multiprocessing
import signal
import time
from itertools import count

import torch

from lightning_rl.training.callbacks import AtomicCheckpointIO
from tests.helpers import last, load, train


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
