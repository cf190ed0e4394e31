"""A typed option that has no effect with the other options is named, with what it is for."""

import pytest

from lightning_rl.cli.app import run
from lightning_rl.cli.arguments import complete
from lightning_rl.cli.options import parse_options
from lightning_rl.extensions.export.command import OPTIONS as EXPORT
from lightning_rl.extensions.recap.command import OPTIONS as RECAP
from lightning_rl.extensions.recap.label_command import OPTIONS as LABEL
from lightning_rl.extensions.reports.command import OPTIONS as REPORT
from tests.messages import assert_names, refused

ROUNDS = ["--config", "c", "--run_dir", "d"]
COMMANDS = {
    "export, a path": (EXPORT, ["--ckpt_path", "a.ckpt"], ["--output_dir=o"], "last or best"),
    "label, fitted": (LABEL, ["data"], ["--output_dir=o", "--trust_code=true"], "--value"),
    "label, the mean": (LABEL, ["data", "--value=mean"], ["--trust_code=true"], "--value mean"),
    "label, a checkpoint": (LABEL, ["data", "--value=last"], ["--seed=1"], "--value fitted"),
    "recap, one round": (
        RECAP,
        [*ROUNDS, "--from=data", "--rounds=1"],
        ["--episodes=400", "--task=lift"],
        "--from",
    ),
    "recap, no base": (RECAP, ROUNDS, ["--output_dir=o", "--trust_code=true"], "--base"),
    "report": (REPORT, ["runs", "--format=md"], ["--films_mib=10"], "html"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_of_a_subcommand(name, capsys):
    options, needed, unused, cure = COMMANDS[name]
    parse_options("command", "", options, [*needed, *unused])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(unused)
    for line, option in zip(lines, unused, strict=True):
        assert_names(line, option.partition("=")[0], cure)


@pytest.mark.parametrize(
    ("options", "typed"),
    [
        (EXPORT, ["--ckpt_path=last", "--output_dir=o", "--trust_code=true"]),
        (LABEL, ["data", "--value=best", "--output_dir=o", "--failure_cost=3"]),
        (LABEL, ["data", "--value_steps=3", "--seed=2", "--reward=success", "--failure_cost=3"]),
        (RECAP, [*ROUNDS, "--from=data", "--episodes=4", "--base=last", "--output_dir=o"]),
        (REPORT, ["runs", "--output=a.html", "--films_mib=1"]),
    ],
)
def test_options_with_an_effect_are_not_named(options, typed, capsys):
    parse_options("command", "", options, typed)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["validate", "test", "play"])
def test_settings_of_training_in_an_evaluation(command, capsys):
    settings = ["--model.init_args.learning_rate=1", "--trainer.keep_checkpoints=2"]
    settings += ["--restore_replay=false", "--data.replay.capacity=9"]
    with refused(names="none.ckpt"):
        complete([command, "--ckpt_path=none.ckpt", "--data.num_eval_episodes=9", *settings])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(settings)
    for line, option in zip(lines, settings, strict=True):
        assert_names(line, option, command)


def test_settings_of_a_resumed_run_and_of_a_new_one(capsys):
    with refused(names="none.ckpt"):
        complete(["fit", "--ckpt_path=none.ckpt", "--trainer.init_from=last", "--trust_code=true"])
    assert_names(capsys.readouterr().err, "--trainer.init_from=last")
    complete(["fit", "--config=ppo.yaml", "--restore_replay=false", "--trust_code=true"])
    lines = capsys.readouterr().err.splitlines()
    assert_names(lines[0], "--restore_replay=false", "--ckpt_path")
    assert_names(lines[1], "--trust_code=true", "--ckpt_path")


def test_a_format_that_the_name_of_the_file_contradicts_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run(["report", "runs", "--format", "md", "--output", "report.html"])
    assert_names(capsys.readouterr().err, "--output report.html", ".md", "--format md")
