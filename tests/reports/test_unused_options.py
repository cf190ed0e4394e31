"""A typed option that has no effect with the other options is named, with what it is for."""

import pytest

from lightning_rl import PointMass
from lightning_rl.cli.app import run
from lightning_rl.cli.arguments import complete
from lightning_rl.cli.options import parse_options
from lightning_rl.extensions.datasets.record_command import tell_unused_in
from lightning_rl.extensions.export.command import OPTIONS as EXPORT
from lightning_rl.extensions.recap.command import OPTIONS as RECAP
from lightning_rl.extensions.recap.label_command import OPTIONS as LABEL
from lightning_rl.extensions.reports.command import OPTIONS as REPORT
from tests.messages import assert_names

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


CONFIG = ["--config=ppo.yaml", "--ckpt_path=a.ckpt"]


def lines_of(capsys, *arguments):
    complete(list(arguments))
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("command", ["validate", "test", "play"])
def test_settings_of_training_in_an_evaluation(command, capsys):
    settings = ["--model.init_args.learning_rate=1", "--model.gamma=1", "--data.replay.capacity=9"]
    settings += ["--restore_replay=false", "--trainer.keep_checkpoints=2"]
    used = ["--data.num_eval_episodes=9", "--model.policy.hidden_sizes=[4]"]
    places = ["--exp_name=e", "--output_dir=o"]
    lines = lines_of(capsys, command, *CONFIG, *used, *settings, *places)
    assert len(lines) == 2
    assert_names(lines[0], command, *settings)
    assert_names(lines[1], *places, "--ckpt_path last or best")
    for option in used:
        assert option not in "".join(lines)
    last = [command, CONFIG[0], "--ckpt_path=last", *places]
    assert lines_of(capsys, *last) == []


def test_an_algorithm_of_the_user_may_evaluate_by_its_settings(capsys):
    own = ["--model=mine.Mine", "--model.gamma=1", "--model.level=3"]
    assert lines_of(capsys, "validate", *CONFIG, *own) == []
    threshold = ["--model=RewardClassifier", "--model.threshold=.3"]
    assert lines_of(capsys, "validate", *CONFIG, *threshold) == []


def test_settings_of_a_resumed_run_and_of_a_new_one(capsys):
    start = ["--trainer.init_from=last", "--seed_everything=3", "--data.seed=3"]
    (line,) = lines_of(capsys, "fit", *CONFIG, *start, "--trust_code=true", "--exp_name=e")
    assert_names(line, *start)
    unused = ["--restore_replay=false", "--trust_code=true"]
    lines = lines_of(capsys, "fit", "--config=ppo.yaml", *unused, "--seed_everything=3")
    assert_names(lines[0], *unused, "--ckpt_path")
    assert len(lines) == 1


def test_a_number_of_checkpoints_needs_an_interval(capsys):
    keep, interval = "--trainer.keep_checkpoints=2", "--trainer.checkpoint_every_n_iterations"
    (line,) = lines_of(capsys, "fit", "--config=ppo.yaml", keep)
    assert_names(line, keep, interval)
    assert lines_of(capsys, "fit", "--config=ppo.yaml", keep, f"{interval}=3") == []


def test_the_interval_of_a_resumed_run_counts(own_directory, finished_run, capsys):
    options = ["--config=ppo.yaml", "--data.num_envs=2", "--data.buffer_size=32"]
    options += ["--model.batch_size=64", "--data.total_env_steps=64"]
    run_dir = finished_run(*options, "--trainer.checkpoint_every_n_iterations=1")
    capsys.readouterr()
    keep = "--trainer.keep_checkpoints=2"
    assert lines_of(capsys, "fit", f"--ckpt_path={run_dir}", keep) == []


@pytest.mark.parametrize("pictures", ["png", "video", None])
def test_a_format_of_pictures_that_an_env_does_not_observe(pictures, capsys):
    tell_unused_in(PointMass(1), None, pictures)
    assert ("--pictures" in capsys.readouterr().err) == (pictures is not None)


def test_a_format_that_the_name_of_the_file_contradicts_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run(["report", "runs", "--format", "md", "--output", "report.html"])
    assert_names(capsys.readouterr().err, "--output report.html", ".md", "--format md")
