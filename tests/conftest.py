"""Settings of the whole suite."""

import gc
import os
import random
import shutil
import sys
from contextlib import ExitStack, chdir
from functools import cache
from importlib import metadata
from itertools import count
from pathlib import Path

import pytest
import xdist
from xdist.scheduler import LoadScopeScheduling

from tests.slow_cases import is_slow

# No test cuts the power. A flush takes 4 ms on a disk, and a short run flushes ten files.
# test_checkpoints.py checks the calls of fsync.
os.fsync = os.fstat

# No test writes a key into the home, or trusts the run of another test.
os.environ["LIGHTNING_RL_KEY"] = f"{os.devnull}/none"

# The suite compiles many graphs, so Inductor's headers are compiled once.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "1")

# Lightning searches all installed packages for each trainer: a twelfth of a short run.
metadata.entry_points = cache(metadata.entry_points)

MOST_WORKERS = 8
"""Each takes up to 1 GB; with this many, the longest single tests determine the time."""

TOGETHER = {
    "tests/equivalence/test_ddp.py": "one launch of two ranks for all, half a minute",
    "tests/equivalence/test_fsdp.py": "the same",
    "tests/numerics/test_reward_classifier.py": "one dataset and one classifier for all",
    "tests/test_architecture.py": "one syntax tree of each file for all",
    "tests/numerics/test_recap.py": "one run of rounds for all",
    "tests/numerics/test_graphs.py": "one export of a flow for all",
    "tests/security/test_graphs.py": "the same",
    "tests/cli/test_first_check.py": "one list of all names for all",
    "tests/core/numerics/test_gradients.py": "the second to compile a graph finds it in Inductor's cache",
}
"""Files whose tests run in one worker, with the reason; other tests run in any worker."""


class Scheduling(LoadScopeScheduling):
    """Distribute single tests, and whole files of `TOGETHER` first.

    `--dist loadgroup` ignores its marks with pytest 9.2 (xdist issue 1386).
    """

    def _split_scope(self, nodeid):
        file = nodeid.split("::")[0]
        return file if file in TOGETHER else nodeid


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """Return a function that copies a run of `rl-cli fit` to ./outputs; equal runs are trained once."""
    made = {}

    def give(*arguments):
        from lightning_rl.cli.app import run

        if arguments not in made:
            with chdir(tmp_path_factory.mktemp("finished")):
                run(["fit", *arguments])
                (made[arguments],) = (path.absolute() for path in Path("outputs").iterdir())
        to = Path("outputs", made[arguments].name)
        shutil.rmtree(to, ignore_errors=True)  # the test has asked for it before
        return Path(shutil.copytree(made[arguments], to, copy_function=shutil.copy))

    return give


SEED = int(os.environ.get("TEST_SEED", "0"))
"""Seed of each test; `TEST_SEED=1 pytest` changes it, because no test may need the default."""


def begin_at_seed():
    """Seed all random streams, so that draws do not depend on earlier tests of the worker."""
    import numpy
    import torch

    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    if fixturedef.scope != "function":  # the first of its tests makes it
        begin_at_seed()


@pytest.fixture(autouse=True)
def _seeded():
    begin_at_seed()


@pytest.fixture
def own_directory(tmp_path, monkeypatch):
    """Work in a directory of the test's own, with a search path of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Stand in an empty directory, and give back what an import adds to the search path."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return the content of a checkpoint of a short run of PPO on CartPole-v1."""
    from tests.helpers import last, load, train

    directory = tmp_path_factory.mktemp("trained")
    train(directory, data={"total_env_steps": 128})
    return load(last(directory))


@pytest.fixture
def traced_only():
    """Skip the compiler in tests of the trace."""
    from tests.helpers import uncompiled_traces

    with uncompiled_traces():
        yield


def pytest_sessionstart(session):
    """Disable garbage collection during imports and collection: each pass takes half a second."""
    gc.disable()
    if xdist.is_xdist_controller(session):  # it runs no test, and needs no imports
        from tests.commands import shared_server

        stack = ExitStack()
        stack.enter_context(shared_server())
        session.config.add_cleanup(stack.close)
    else:
        import torch

        from lightning_rl.training.callbacks import manifest
        from tests.commands import keep_parsers

        # Each run asks git for the commit: a sixth of a short run.
        manifest._git_commit = cache(manifest._git_commit)
        keep_parsers()
        # Two threads that wait for each other on a busy machine of two cores are slower than one.
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


STARTED = count(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Freeze what tests have imported since, now and then: each pass over it takes a seventh of a second."""
    if next(STARTED) % 50 == 0:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish():
    if "tests.commands" in sys.modules:
        sys.modules["tests.commands"].end()


def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log) if config.getvalue("dist") == "load" else None


def pytest_xdist_auto_num_workers():
    """Return one worker more than this process has CPUs, because some tests wait; xdist counts all cores of the machine."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    try:
        cpus = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # macOS
        cpus = float(os.cpu_count() or 1)
    quota = Path("/sys/fs/cgroup/cpu.max")  # of a container, in microseconds per period
    if quota.exists() and not quota.read_text().startswith("max"):
        allowed, period = map(int, quota.read_text().split())
        cpus = min(cpus, allowed / period)
    return min(max(round(cpus), 1) + 1, MOST_WORKERS)
