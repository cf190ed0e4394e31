"""What tests of forged checkpoints share: one that is honest, and a place to stand."""

import sys

import pytest

from tests.helpers import last, load, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return the content of a checkpoint of a short run of PPO on CartPole-v1."""
    directory = tmp_path_factory.mktemp("trained")
    train(directory, data={"total_env_steps": 128})
    return load(last(directory))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Stand in an empty directory, and give back what an import adds to the search path."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path
