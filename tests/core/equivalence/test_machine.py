"""What is done for speed alone can be left out, to the same results, and `run.json` says so."""

import json
from types import SimpleNamespace

import pytest
import torch

from lightning_rl.system import machine
from lightning_rl.system.machine import MachineSettings
from lightning_rl.training.callbacks import graceful_stop
from tests.helpers import train


def computing(run_dir):
    return json.loads((run_dir / "run.json").read_text())["computing"]


def run(run_dir, **switches):
    trainer = {"machine": MachineSettings(**switches)}
    return train(run_dir, data={"total_env_steps": 4 * 16 * 3}, trainer=trainer)[0]


def test_without_numpy_a_policy_acts_alike_but_for_last_digits(tmp_path):
    quick, plain = run(tmp_path / "quick"), run(tmp_path / "plain", numpy_acting=False)
    assert computing(tmp_path / "quick")["acting"] == "NumpyActor"
    assert computing(tmp_path / "plain")["acting"] == "StepwiseActor"
    torch.testing.assert_close(
        [*quick.policy.parameters()], [*plain.policy.parameters()], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("wanted", [True, False])
def test_what_lightning_asks_before_each_batch_is_left_out_where_it_is_wanted(
    wanted, tmp_path, monkeypatch
):
    skipped = []
    monkeypatch.setattr(graceful_stop, "skip_signal_exchange", skipped.append)
    monkeypatch.setattr(graceful_stop.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(machine, "_in_force", MachineSettings(skip_signal_exchange=wanted))
    trainer = SimpleNamespace(world_size=2, datamodule=SimpleNamespace(dataset=None))
    graceful_stop.GracefulStop(tmp_path).on_train_start(trainer, None)
    assert skipped == ([trainer] if wanted else [])
