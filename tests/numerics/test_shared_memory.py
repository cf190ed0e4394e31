"""Processes exchange bytes through shared memory: none torn, none lost, and no endless wait."""

import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from lightning_rl.system import shared_memory
from lightning_rl.system.shared_memory import HEADER, LostRankError, SharedTable, open_table

pytestmark = pytest.mark.skipif(not shared_memory._possible(), reason="needs Linux on x86-64")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(shared_memory, "CAPACITY", 64)
    monkeypatch.setattr(shared_memory, "CHECK_SECONDS", 0.01)


def memory(world):
    return bytearray(world * (HEADER + 2 * 64))


def given(rank, turn):
    """What a rank gives in its turn: fewer bytes than a slot has, as many, or several times that."""
    generator = np.random.default_rng((rank, turn))
    return generator.integers(2**15, size=generator.choice([0, 4, 32, 33, 100]), dtype=np.int16)


def test_everyone_gets_what_everyone_gave_however_late_they_are():
    world, turns = 3, 400
    shared, wrong, finished = memory(world), [], []

    def take_part(rank):
        table = SharedTable(shared, rank, [os.getpid()] * world, 60.0)
        clock = random.Random(rank)
        for turn in range(turns):
            if clock.random() < 0.1:
                time.sleep(clock.random() * 2e-3)
            for other, part in enumerate(table.exchange(given(rank, turn))):
                if not np.array_equal(part, given(other, turn)):
                    wrong.append((rank, turn, other))
        finished.append(rank)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(finished) == [0, 1, 2]
    assert not wrong


def test_who_has_ended_or_left_or_does_not_come_is_named():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    while shared_memory._alive(ended.pid):  # until it has ended; nobody has waited for it yet
        time.sleep(0.01)
    here = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    data = np.zeros(8)
    try:
        with pytest.raises(LostRankError, match="rank 1 has ended"):
            SharedTable(memory(2), 0, [here.pid, ended.pid], 60.0).exchange(data)
        with pytest.raises(LostRankError, match="rank 1 did not come within 0 s"):
            SharedTable(memory(2), 0, [here.pid, here.pid], 0.05).exchange(data)
        shared = memory(2)
        SharedTable(shared, 1, [here.pid, here.pid], 60.0).leave()
        with pytest.raises(LostRankError, match="rank 1 has ended"):
            SharedTable(shared, 0, [here.pid, here.pid], 60.0).exchange(data)
    finally:
        here.communicate()
        ended.wait()


def test_without_memory_in_common_there_is_no_table(monkeypatch):
    assert open_table(0, lambda value: [value], 1.0) is not None
    elsewhere = lambda value: [(value[0], b"another!") if isinstance(value[1], bytes) else value]  # noqa: E731
    table = open_table(0, lambda value: elsewhere(value) if value else [value], 1.0)
    assert table is None, "the file of that name is not the one of rank 0"
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: "arm64")
    assert open_table(0, lambda value: [value], 1.0) is None
