"""Freed memory stays with the process, and what the environment says of it is respected."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from lightning_rl.allocator import keep_freed_memory
print(int(keep_freed_memory()))
def allocate():
    blocks = [torch.ones(2**22) for _ in range(4)]  # 16 MiB each
for _ in range(5):
    allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    allocate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def run(code, **environment):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    command = [sys.executable, "-c", code]
    out = subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, check=True
    )
    return [int(line) for line in out.stdout.split()]


@glibc
def test_blocks_that_were_freed_are_used_again_without_page_faults():
    kept, faults = run(FAULTS)
    assert kept == 1
    assert faults < 1000  # each of the 40 blocks has 4,096 pages


@glibc
def test_the_environment_has_the_last_word():
    kept, faults = run(FAULTS, MALLOC_MMAP_THRESHOLD_="1000000", MALLOC_TRIM_THRESHOLD_="0")
    assert kept == 0
    assert faults > 1000, "or the test above could not fail"
