"""What a run prints: what begins, its line in a narrow terminal, in a pipe and in a notebook, and why it ended."""

import io
import sys
from types import ModuleType

import pytest
from lightning.pytorch.callbacks import EarlyStopping
from rich.console import Console

from lightning_rl.training.callbacks import progress as module
from lightning_rl.training.callbacks.progress import EnvStepProgress, return_text
from tests.helpers import train
from tests.messages import assert_names

SHOWN = {"enable_progress_bar": True, "logger": False}


def test_a_run_in_python_says_what_begins_where_and_how_to_go_on(tmp_path, capsys):
    train(tmp_path / "run", trainer=SHOWN)
    begins, place, *_, closing = capsys.readouterr().out.split("\n", 2)
    assert_names(begins, "PPO", "ActorCritic", "CartPole-v1", "envs", "env steps", "cpu")
    assert place == f"Run directory: {tmp_path / 'run'}"
    for words in ("Run directory:", "Best:      eval/avg_reward", "Evaluate:", "Train on:"):
        assert words in closing
    assert "Ended at" not in closing
    train(tmp_path / "quiet")
    assert "un directory" not in capsys.readouterr().out


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
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Ended at")]
    assert_names(line, "10,000", reason)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_keeps_eval_and_the_time_left_to_the_last(width, tmp_path, monkeypatch):
    output = io.StringIO()

    def on_a_terminal(metrics):
        shown = EnvStepProgress(metrics, interval=0.0)
        shown.console = Console(file=output, force_terminal=True, width=width)
        return shown

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("lightning_rl.training.trainer.EnvStepProgress", on_a_terminal)
    lines = []
    line_of = EnvStepProgress._line

    def spy(self, *args):
        lines.append((line_of(self, *args), args[2]))
        return lines[-1][0]

    monkeypatch.setattr(EnvStepProgress, "_line", spy)
    train(tmp_path / "run", data={"iterations_per_epoch": 1}, trainer=SHOWN)
    assert len(lines) > 3
    for line, space in lines:
        assert "ETA" in line
        assert len(line) <= max(space, 30)
    assert all("eval" in line for line, _ in lines[2:])
    assert ("steps/s" in lines[-1][0]) == (width >= 80)


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


@pytest.mark.parametrize(
    ("value", "text"),
    {
        500.0: "500.00",
        -1234.5: "-1234.50",
        0.0: "0.00",
        0.01234: "0.0123",
        3.2e-7: "3.20e-07",
        1.5: "1.50",
    }.items(),
)
def test_small_returns_have_three_significant_digits(value, text):
    assert return_text(value) == text
    assert return_text(float("nan")) == "nan"
