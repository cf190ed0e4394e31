"""Settings of the whole suite."""

import gc
import os
import random
import shutil
import sys
import tempfile
from contextlib import chdir
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import xdist
from xdist.scheduler import LoadScopeScheduling

from tests.slow_cases import is_slow

# What a run finds out about the machine is asked once, and not left in the user's own cache.
os.environ.setdefault("LIGHTNING_RL_CACHE", f"{tempfile.gettempdir()}/lightning_rl_tests")

# Nobody cuts the power: a disk takes 4 ms for each file that is flushed, of which a short run has ten.
# That they are flushed, and when, is asked of the calls (test_checkpoints.py).
os.fsync = os.fstat

# Lightning looks through all that is installed for each trainer, a twelfth of a short run.
metadata.entry_points = cache(metadata.entry_points)

MOST_WORKERS = 8
"""Each takes up to 1 GB, and the longest tests that run in one piece set the time by then."""

TOGETHER = {
    "tests/equivalence/test_ddp.py": "one launch of two ranks for all, half a minute",
    "tests/numerics/test_reward_classifier.py": "one dataset and one classifier for all",
    "tests/numerics/test_gradients.py": "the second to compile a graph finds it in Inductor's cache",
}
"""Files whose tests run in one worker, and why; any other test runs in whichever is free."""


class Scheduling(LoadScopeScheduling):
    """Hand out one test at a time, or one of those files: these first.

    `--dist loadgroup` would do, but takes no notice of its marks with pytest 9.2 (xdist issue 1386).
    """

    def _split_scope(self, nodeid):
        file = nodeid.split("::")[0]
        return file if file in TOGETHER else nodeid


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """Return what gives ./outputs a run of `rl-cli fit`: a copy, where this process has made one like it."""
    made = {}

    def give(*arguments):
        from lightning_rl.cli.app import run

        if arguments not in made:
            with chdir(tmp_path_factory.mktemp("finished")):
                run(["fit", *arguments])
                (made[arguments],) = (path.absolute() for path in Path("outputs").iterdir())
        to = Path("outputs", made[arguments].name)
        return Path(shutil.copytree(made[arguments], to, copy_function=shutil.copy))

    return give


SEED = int(os.environ.get("TEST_SEED", "0"))
"""TEST_SEED=1 pytest: no test may need the seed that it has by default."""


def begin_at_seed():
    """What is drawn from here on is the same whichever tests the worker ran before."""
    import numpy
    import torch

    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    if fixturedef.scope != "function":  # made by whichever of its tests comes first
        begin_at_seed()


@pytest.fixture(autouse=True)
def _seeded():
    begin_at_seed()


@pytest.fixture
def traced_only():
    """For what is about the trace and not about the compiler."""
    from tests.helpers import uncompiled_traces

    with uncompiled_traces():
        yield


def pytest_sessionstart(session):
    """Nothing that is imported or collected ever becomes garbage, and each look at all of it takes half a second."""
    gc.disable()
    if not xdist.is_xdist_controller(session):  # which runs no test, and waits for no import
        import torch

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


def pytest_sessionfinish():
    if "tests.commands" in sys.modules:
        sys.modules["tests.commands"].end()


def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log) if config.getvalue("dist") == "load" else None


def pytest_xdist_auto_num_workers():
    """Return how many CPUs this process may use: xdist counts the cores of the whole machine."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    try:
        count = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # macOS
        count = float(os.cpu_count() or 1)
    quota = Path("/sys/fs/cgroup/cpu.max")  # of a container, in microseconds per period
    if quota.exists() and not quota.read_text().startswith("max"):
        allowed, period = map(int, quota.read_text().split())
        count = min(count, allowed / period)
    return min(max(round(count), 1), MOST_WORKERS)
