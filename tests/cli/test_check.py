"""`rl-cli check`: what fit would refuse, what it would do, and what of an env it would meet."""

import io
import json
import sys
from pathlib import Path

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from rich.console import Console

from lightning_rl.__main__ import main
from lightning_rl.cli.app import run
from lightning_rl.extensions.checks import check_env, checking
from lightning_rl.extensions.checks.check_env import Finding
from lightning_rl.extensions.checks.findings import print_findings
from tests.envs import ScriptedEnv, draw
from tests.helpers import error_of
from tests.messages import assert_names
from tests.variants import variant

SMALL = ["--data.num_eval_episodes", "2", "--seconds", "20"]
pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.fixture(autouse=True)
def some_steps_are_enough(monkeypatch):
    """So many, and not as many as a busy machine takes within a time."""
    monkeypatch.setattr(check_env, "PLAYED", 40)
    monkeypatch.setattr(check_env, "LONGEST", 40)
    monkeypatch.setattr(checking, "MOST_STEPS", 20)
    # A busy machine makes some steps slow, and would be given advice.
    monkeypatch.setattr(checking, "SLOW_STEP", 1e3)
    monkeypatch.setattr(checking, "WORKER_SECONDS", 1e3)


def check(*arguments):
    """Return exit code and findings of a check."""
    code = 0
    try:
        run(["check", *arguments, *SMALL, "--json_file", "found.json"])
    except SystemExit as stop:
        code = stop.code
    findings = [Finding(**one) for one in json.loads(Path("found.json").read_text())]
    Path("found.json").unlink()
    return code, findings


def texts(findings, topic):
    return [one.text for one in findings if one.topic == topic]


@pytest.mark.parametrize(
    ("config", "ways"),
    [
        ("ppo.yaml", ("ArrayStepper, sync", "NumpyActor")),
        ("ppo_push_cube.yaml", ("StepwiseStepper", "StepwiseActor")),
    ],
)
def test_of_a_shipped_config_it_warns_of_nothing_and_leaves_nothing(config, ways):
    code, findings = check("--config", config)
    assert code == 0
    assert {one.level for one in findings} <= {"ok", "note"}
    speed = texts(findings, "speed")[0]
    for way in ways:
        assert f"({way})" in speed
    assert not list(Path().iterdir())


def test_rollouts_that_cut_whole_episodes_are_told():
    _, findings = check("--config", "grpo.yaml", "--data.buffer_size", "100")
    (cut,) = [one for one in findings if one.level == "warning"]
    assert_names(cut.text, "32 envs", "100 env steps", "500")
    assert_names(cut.cure, "data.buffer_size")


def without_seed(env, *, seed=None, options=None):
    return CartPoleEnv.reset(env, options=options)


@pytest.fixture
def registry(monkeypatch):
    registry = dict(gymnasium.registry)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", registry)
    monkeypatch.setattr(gymnasium, "registry", registry)


def test_members_of_a_group_that_begin_otherwise_are_an_error(registry):
    anywhere = variant(CartPoleEnv, reset=without_seed)
    gymnasium.register("Anywhere-v0", anywhere, max_episode_steps=30)
    code, findings = check("--config", "grpo.yaml", "--data.env.id", "Anywhere-v0")
    assert code == 1
    (fault,) = [one for one in findings if one.level == "error"]
    assert_names(fault.text, "8 members", "seed")


def one_number_of_two():
    """One number of two in each step."""
    return ScriptedEnv(
        gymnasium.spaces.Box(-1.0, 1.0, (2,)),
        gymnasium.spaces.Box(-0.1, 0.1, (1,)),
        observe=lambda env: draw(env)[: 1 if env.age else 2],
        reward=1.0,
    )


def test_an_error_gives_status_1_and_the_rest_is_told_all_the_same(registry):
    gymnasium.register("Broken-v0", one_number_of_two)
    code, findings = check("--config", "ppo.yaml", "--data.env.id", "Broken-v0")
    assert code == 1
    (fault,) = [one for one in findings if one.level == "error"]
    assert fault.topic == "env"
    assert_names(fault.text, "'Broken-v0'", "[1]", "[2]")
    assert_names(fault.cure, "env")
    assert texts(findings, "update")


def test_what_fit_refuses_is_refused(capsys):
    arguments = ["--config", "grpo.yaml", "--data.num_envs", "30"]
    error = error_of(capsys, "check", *arguments, status=1)
    assert_names(error, "data.num_envs=30", "model.group_size=8", "32")
    assert not list(Path().iterdir())


def test_a_metric_of_a_success_that_is_never_reported_is_an_error():
    code, findings = check("--config", "ppo.yaml", "--trainer.best_metric", "eval/success_rate")
    assert code == 1
    (fault,) = [one for one in findings if one.level == "error"]
    assert_names(fault.text, "trainer.best_metric", "eval/success_rate")


def test_several_processes_are_named_and_not_begun():
    options = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    code, _ = check("--config", "ppo.yaml", *options)
    assert code == 0


def test_a_terminal_gets_a_table_that_fits():
    findings = [
        Finding("env", "ok", "8 × GymnasiumEnv CartPole-v1"),
        Finding("env", "warning", "word " * 30, "Do this."),
    ]
    for width in (80, 120):
        file = io.StringIO()
        print_findings(findings, Console(file=file, width=width, force_terminal=True))
        lines = Console(file=io.StringIO()).render_str(file.getvalue()).plain.splitlines()
        assert "→ Do this." in file.getvalue()
        assert file.getvalue().endswith("0 errors, 1 warning, 0 notes.\n")
        assert len(lines) > 4


def test_it_is_listed_where_subcommands_are(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rl-cli", "--help"])
    main()
    out = capsys.readouterr().out
    assert out.startswith("usage: rl-cli SUBCOMMAND [options]")
    assert "\n  check     try an env out:" in out
    monkeypatch.setattr(sys, "argv", ["rl-cli", "chek"])
    with pytest.raises(SystemExit):
        main()
    assert_names(capsys.readouterr().err, "'chek'", "fit, validate, test, check")
    with pytest.raises(SystemExit):
        run(["check", "--help"])
    page = capsys.readouterr().out
    assert "usage: rl-cli check [--config FILE]" in page
    assert "Play the env of a run for some seconds" in page
    assert "--seconds SECONDS" in page
    assert "--json_file JSON_FILE" in page
