"""Settings of the whole suite."""

import os
from pathlib import Path

import torch

# Two threads that wait for each other on a busy machine of two cores are slower than one.
torch.set_num_threads(1)

MOST_WORKERS = 8
"""Each takes up to 1 GB, and the longest tests that run in one piece set the time by then."""


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
