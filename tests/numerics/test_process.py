"""How the process computes: freed memory stays with it, denormal numbers are zero where that is wanted."""

import json
import os
import platform
import threading

import pytest
import torch

from lightning_rl import PPO, AsyncCollector, SyncCollector
from lightning_rl.extensions.datasets.ahead import ChunksAhead
from lightning_rl.policies.acting import NumpyActor
from lightning_rl.system.process import flush_denormals, flushes_denormals
from tests.commands import rl_cli
from tests.helpers import train
from tests.variants import before

FAULTS = """
import resource, torch
from lightning_rl.system.process import keep_freed_memory
print(int(keep_freed_memory()))
def allocate():
    blocks = [torch.ones(2**20) for _ in range(4)]  # 4 MiB each
for _ in range(5):
    allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    allocate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def run(code, path, **environment):
    path.write_text(code)
    ended = rl_cli(program=path, env=environment)
    assert ended.returncode == 0, ended.stderr
    return [int(line) for line in ended.stdout.split()]


@glibc
def test_blocks_that_were_freed_are_used_again_without_page_faults(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    kept, faults = run(FAULTS, tmp_path / "faults.py")
    assert kept == 1
    assert faults < 1000  # each of the 40 blocks has 1,024 pages


@pytest.fixture
def restored():
    before = flushes_denormals()
    yield
    flush_denormals(before)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("collector", [SyncCollector, AsyncCollector])
def test_denormals_are_flushed_in_every_thread_that_computes(
    wanted, collector, tmp_path, monkeypatch, restored
):
    """In the learner, where the collector steps, and in evaluations; run.json says so."""
    if not flush_denormals(True):
        pytest.skip("this CPU cannot")
    flush_denormals(not wanted)
    seen = {"learner": [], "collector": [], "evaluation": []}
    act = NumpyActor.act

    def acting(self, t):
        seen["collector"].append(flushes_denormals())
        act(self, t)

    def note(side):
        return lambda *args: seen[side].append(flushes_denormals())

    noting = before(PPO, training_step=note("learner"), play=note("evaluation"))

    monkeypatch.setattr(NumpyActor, "act", acting)
    data = {"collector": collector, "total_env_steps": 4 * 16 * 3}
    trainer = {"flush_denormal": wanted}
    train(tmp_path, data=data, model={"algorithm": noting}, trainer=trainer)
    assert {name: set(flags) for name, flags in seen.items()} == {name: {wanted} for name in seen}
    computing = json.loads((tmp_path / "run.json").read_text())["computing"]
    assert computing["flush_denormal"] is wanted


def test_a_thread_that_computes_takes_as_many_cores_as_the_one_that_starts_it(
    tmp_path, monkeypatch
):
    """Otherwise its matrix products take all cores, and on some CPUs sum in another order."""
    cores, set_number = {}, torch.set_num_threads
    before = torch.get_num_threads()

    def noting(number):
        cores[threading.current_thread().name] = number
        set_number(number)

    monkeypatch.setattr(torch, "set_num_threads", noting)
    data = {"collector": AsyncCollector, "total_env_steps": 4 * 16}
    try:
        train(tmp_path, data=data, trainer={"num_threads": 2})
        ahead = ChunksAhead(4).episode(lambda observation, running: torch.zeros(1, 4, 2))
        ahead(torch.zeros(1, 3), torch.ones(1, dtype=torch.bool))
    finally:
        set_number(before)
    assert {"collector": 2, "inference_0": 2}.items() <= cores.items()
