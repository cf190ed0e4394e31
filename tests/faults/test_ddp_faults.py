"""What happens to one process of a run happens to all of them, and none is left."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands import Command, free_port, wait_until
from tests.equivalence.test_ddp import of_rank, on_two_ranks
from tests.helpers import assert_same_run, last, load, train
from tests.messages import assert_names, refused

MODULE = """
import os, time
from pathlib import Path
from lightning_rl import CartPole

class Fragile(CartPole):
    '''Fails on one rank, while the other is in the middle of a long rollout or waits for it.'''

    def __init__(self, num_envs: int, fails_on: int = -1, hangs: bool = False):
        super().__init__(num_envs)
        self.fails_on, self.hangs, self.steps = fails_on, hangs, 0

    def step(self, action):
        self.steps += 1
        if self.steps >= 100:
            rank = int(os.environ.get("LOCAL_RANK", 0))
            if self.steps == 100:
                Path(f"at_work_{rank}").write_text(str(os.getpid()))
            other = Path(f"at_work_{1 - rank}")
            # Both have said that they work: the failure ends the other process.
            if rank == self.fails_on and other.exists() and other.read_text():
                if self.hangs:
                    time.sleep(1000)
                raise ValueError("the sensor is gone")
        time.sleep(0.001)
        return super().step(action)
"""

CONFIG = """
model:
  class_path: PPO
  init_args:
    policy: {class_path: ActorCritic, init_args: {hidden_sizes: [8]}}
    n_epochs: 1
    compile: false  # however large the budget
    batch_size: 32
data:
  env: {class_path: fragile.Fragile}
  num_envs: 4
  buffer_size: 16
  total_env_steps: 10_000_000
  iterations_per_epoch: 10_000
trainer: {accelerator: cpu}
"""

RL_CLI = ("--no-python", sys.executable, "-m", "lightning_rl")
LAUNCHERS = {
    "lightning": ("lightning_rl", ()),
    "torchrun": ("torch.distributed.run", ("--standalone", "--nproc_per_node=2", *RL_CLI)),
}
"""The program, and what stands before the arguments of `rl-cli`."""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Start training on two processes, return those started here; whatever is left is killed in the end."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fragile.py").write_text(MODULE)
    (tmp_path / "run.yaml").write_text(CONFIG)
    begun = []

    def begin(*options, launcher="lightning"):
        fit = ["fit", "--config", "run.yaml", "--config", "trainer/ddp.yaml", *options]
        env = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        if launcher == "forks":
            port = free_port()
            begun.extend(Command(*fit, env=env | of_rank(rank, port)) for rank in range(2))
        else:
            program, before = LAUNCHERS[launcher]
            begun.append(Command(*before, *fit, program=program, env=env))
        return begun

    yield begin
    for process in begun:
        for pid in in_session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def in_session(leader):
    """Return the processes that a launch has left or still has: all are in its session."""
    members = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            state, _, _, session = (path / "stat").read_text().rpartition(") ")[2].split()[:4]
            if int(session) == leader and state != "Z":
                members.append(int(path.name))
    return members


def at_work(process, directory):
    """Wait until both ranks have trained for some iterations; return their process ids."""
    files = [directory / f"at_work_{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), of=process)
    return [int(file.read_text()) for file in files]


def end_of(process):
    """Wait for the end, and for that of every process; return what they have printed."""
    deadline = time.monotonic() + 60
    while process.poll() is None or in_session(process.pid):
        if time.monotonic() > deadline:
            going_on = in_session(process.pid)
            for pid in going_on:
                os.kill(pid, signal.SIGABRT)  # faulthandler says where it is
            time.sleep(1)
            pytest.fail(f"{going_on} went on: {process.stdout + process.stderr}")
        time.sleep(0.05)
    return process.stdout + process.stderr


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
class TestTwoProcesses:
    @pytest.mark.parametrize(
        ("rank", "launcher"),
        [
            (0, "lightning"),
            pytest.param(1, "torchrun", marks=pytest.mark.slow),
        ],
    )
    def test_an_exception_on_one_rank_ends_both(self, rank, launcher, launch, tmp_path):
        (process,) = launch("--data.env.fails_on", str(rank), launcher=launcher)
        at_work(process, tmp_path)
        log = end_of(process)
        assert process.returncode != 0
        assert "ValueError: the sensor is gone" in log

    # A hanging env is an exception in its own process (test_hangs.py), and the test above has one.
    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [0, 1])
    def test_an_env_that_hangs_on_one_rank_ends_both(self, rank, launch, tmp_path):
        hang = ("--data.env.fails_on", str(rank), "--data.env.hangs", "true")
        (process,) = launch(*hang, "--data.env_timeout_s", "2")
        at_work(process, tmp_path)
        log = end_of(process)
        assert process.returncode != 0
        assert_names(log, "rl-cli: error", "4 envs", "Fragile", "data.env_timeout_s")
        assert "    time.sleep(1000)\n" in log

    @pytest.mark.parametrize(
        ("to", "launcher"),
        [
            (0, "forks"),
            pytest.param("all", "torchrun", marks=pytest.mark.slow),
            pytest.param(1, "lightning", marks=pytest.mark.slow),
        ],
    )
    def test_sigterm_ends_both_with_a_whole_checkpoint(self, to, launcher, launch, tmp_path):
        process, *other = launch(launcher=launcher)
        ranks = at_work(process, tmp_path)
        for pid in {"all": [process.pid, *ranks], 0: ranks[:1], 1: ranks[1:]}[to]:
            os.kill(pid, signal.SIGTERM)
        log = "".join(map(end_of, [process, *other]))
        if launcher != "torchrun":
            assert process.returncode == 128 + signal.SIGTERM, log
        assert log.count("Stopped by a signal") == 1, log
        (run_dir,) = (tmp_path / "outputs").iterdir()
        checkpoint = load(run_dir / "checkpoints" / "last.ckpt")
        assert len(checkpoint["RLDataModule"]["collectors"]) == 2
        assert checkpoint["global_step"] >= 1
        assert checkpoint["lightning_rl"]["env_steps"] == 2 * 4 * 16 * checkpoint["global_step"]


def test_a_rank_that_is_killed_in_a_save_leaves_the_one_before_and_both_go_on_bit_for_bit(tmp_path):
    with on_two_ranks(tmp_path, "killed") as (first, second):
        second.wait(120)
        first.wait(60)
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 1
    assert_names(first.stderr, "Rank 0")
    saved, folder = load(last(tmp_path / "killed")), tmp_path / "killed" / "checkpoints" / "replay"
    assert saved["global_step"] == 2
    named = {name for state in saved["RLDataModule"]["replays"] for name in state["files"]}
    written = {path.name for path in folder.iterdir()}
    assert named < written, "files of the save that was cut short"
    assert {name[:5] for name in named} == {name[:5] for name in written - named} == {"rank0", "rank1"}  # fmt: skip
    with on_two_ranks(tmp_path, "resumed") as begun:
        for process in begun:
            assert process.wait(120).returncode == 0, process.stderr[-4000:]
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    for run in ("whole", "killed"):
        replays = load(last(tmp_path / run))["RLDataModule"]["replays"]
        left = (tmp_path / run / "checkpoints" / "replay").iterdir()
        assert {path.name for path in left} == {n for state in replays for n in state["files"]}


def test_what_processes_cannot_share_is_refused(tmp_path):
    with refused(ValueError, names=("trainer.strategy", "DDPStrategy", "--trainer.strategy ddp")):
        train(tmp_path, trainer={"devices": 1, "strategy": "ddp_fork"})
