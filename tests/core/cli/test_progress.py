"""What a run prints: what begins, its line in a narrow terminal, in a pipe and in a notebook, and why it ended."""

import io
import re
import sys
from types import ModuleType

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from rich.console import Console

from lightning_rl.training.callbacks import progress as module
from lightning_rl.training.callbacks.progress import EnvStepProgress
from tests.helpers import train
from tests.messages import assert_names

SHOWN = {"enable_progress_bar": True, "logger": False}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_epochs": 1}, "trainer.max_epochs is 1"),
        ({"max_steps": 1}, "trainer.max_steps is 1"),
        ({"max_time": {"seconds": 0}}, "trainer.max_time"),
        (
            {"callbacks": [EarlyStopping("eval/avg_reward", mode="max", stopping_threshold=-1.0)]},
            "EarlyStopping of eval/avg_reward",
        ),
    ],
    ids=["epochs", "steps", "time", "early stopping"],
)
def test_a_run_that_ends_early_says_why(settings, reason, tmp_path, capsys):
    few = {"iterations_per_epoch": 1, "total_env_steps": 10_000}
    train(tmp_path / "run", data=few, trainer=SHOWN | settings)
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("Ended at")]
    assert_names(line, "10,000", reason)
    # The command that trains on raises what ended the run, not the budget.
    for command in [line for line in lines if line.startswith("Train on:")]:
        assert re.findall(r"--(\S+) \.\.\.", command) == re.findall(r"trainer\.\w+", reason)


def test_the_last_lines_name_the_metric_of_the_best_checkpoint(tmp_path, capsys):
    """Not that of a checkpoint of the user's."""
    other = ModelCheckpoint(tmp_path / "other", monitor="eval/avg_length")
    train(tmp_path / "run", trainer=SHOWN | {"callbacks": [other]})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Best:")]
    assert_names(line, "eval/avg_reward", "best.ckpt")


def test_a_bar_and_a_checkpoint_of_lightning_do_what_they_say(tmp_path, recwarn):
    """Its bar is the only one; its checkpoint saves, without a warning about its optimizer."""
    bar, saved = TQDMProgressBar(), tmp_path / "own"
    own = ModelCheckpoint(saved, "{step}", every_n_train_steps=3, save_top_k=-1)
    _, _, trainer = train(tmp_path / "run", trainer=SHOWN | {"callbacks": [bar, own]})
    assert trainer.progress_bar_callback is bar
    assert sorted(path.name for path in saved.iterdir()) == ["step=3.ckpt", "step=6.ckpt"]
    assert not [warning for warning in recwarn if "ModelCheckpoint" in str(warning.message)]


def test_a_run_without_a_terminal_prints_a_line_after_a_silence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "SILENCE_S", 0.0)
    train(tmp_path / "run", data={"iterations_per_epoch": 3}, trainer=SHOWN)
    lines = [line for line in capsys.readouterr().out.splitlines() if "env steps " in line]
    assert len(lines) > 6


def test_a_notebook_has_one_display_that_changes(tmp_path, monkeypatch):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown[-1] = data["text/plain"]

    def display(data, raw, display_id):
        shown.append(data["text/plain"])
        return Handle()

    fake = ModuleType("IPython.display")
    fake.display = display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)

    def in_a_notebook(metrics):
        progress = EnvStepProgress(metrics, interval=0.0)
        progress.console = Console(file=io.StringIO(), force_jupyter=True)
        return progress

    monkeypatch.setattr("lightning_rl.training.trainer.EnvStepProgress", in_a_notebook)
    train(tmp_path / "run", trainer=SHOWN)
    (text,) = shown
    assert "trains ActorCritic" in text
    assert "Run directory" in text
    assert text.count("ETA") < 5
