"""The scripts of real-time chunks run, with few steps."""

import runpy
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts_import_each_other(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_the_arm_never_waits_for_its_policy(tmp_path):
    """Without limits of time, which a busy machine exceeds: `scripts/real_time_arm.py` measures them."""
    script = runpy.run_path(str(SCRIPTS / "real_time_arm.py"))
    measured = script["pace"](45, 0.1, tmp_path / "journal")
    assert measured["waited"] == 0
    assert measured["steps"] == 45
    assert min(measured["delays"]) >= 2  # 100 ms at 30 Hz
