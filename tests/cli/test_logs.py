"""What a run writes down beside its checkpoints: curves, a table, hyperparameters, a manifest."""

import csv
import json
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import Logger
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

from lightning_rl import GRPO
from lightning_rl.cli.app import run
from lightning_rl.training.callbacks import EnvStepCSV
from tests.algorithms import Reinforce
from tests.callbacks import at_iteration, fail, signal_at
from tests.helpers import SMALL_RUN, last, scalars, train
from tests.variants import variant


def table(run_dir):
    """Return the rows of `metrics.csv`, each without its empty cells."""
    with open(Path(run_dir, "logs", "metrics.csv"), newline="") as file:
        return [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


def curves_of(rows):
    """Return what `scalars` returns, from a table."""
    names = sorted({name for row in rows for name in row} - {"env_steps"})
    found = {n: [(int(r["env_steps"]), r[n]) for r in rows if n in r] for n in names}
    return {name: curve for name, curve in found.items() if not name.startswith("charts/SPS")}


def assert_table_equals_curves(run_dir):
    expected = scalars(run_dir)
    found = curves_of(table(run_dir))
    assert found.keys() == expected.keys()
    for name, curve in expected.items():
        assert found[name] == [(step, pytest.approx(value, rel=1e-6)) for step, value in curve]


def test_the_table_holds_what_tensorboard_shows(tmp_path):
    train(tmp_path)
    rows = table(tmp_path)
    assert [row["env_steps"] for row in rows] == [64, 128, 192, 256, 320, 384]
    evaluated = [row for row in rows if "eval/avg_reward" in row]
    assert evaluated == [rows[2], rows[5]], "an evaluation stands beside the training of its step"
    for row in evaluated:
        assert {"train/loss", "eval/ci95_low", "eval/avg_reward_best", "charts/SPS"} < row.keys()
    assert_table_equals_curves(tmp_path)


def test_a_resumed_table_has_each_row_once(tmp_path):
    train(tmp_path / "whole")
    run_dir = tmp_path / "part"
    # Two iterations after the checkpoint are written and then played again.
    with pytest.raises(ZeroDivisionError):
        train(run_dir, trainer={"callbacks": [at_iteration(5, fail(ZeroDivisionError()))]})
    assert [row["env_steps"] for row in table(run_dir)][-1] == 256
    with open(run_dir / "logs" / "metrics.csv", "a") as file:
        file.write("320,0.1")  # a row that a kill has cut short
    train(run_dir, ckpt_path=last(run_dir))
    steps = [row["env_steps"] for row in table(run_dir)]
    assert steps == [64, 128, 192, 256, 320, 384]
    assert curves_of(table(run_dir)) == curves_of(table(tmp_path / "whole"))
    assert_table_equals_curves(run_dir)


def test_a_row_is_on_the_disk_before_the_evaluation_adds_to_it(tmp_path):
    """A kill during the evaluation, or while its values are written, loses no row."""
    path = tmp_path / "logs" / "metrics.csv"
    logger = EnvStepCSV(path)
    for step in (64, 128):
        logger.log_metrics({"train/loss": 0.5, "eval/avg_reward": float("nan")}, step)
        assert table(tmp_path)[-1]["train/loss"] == 0.5
        logger.log_metrics({"eval/avg_reward": 7.0, "train/loss": 0.25}, step)  # longer and shorter
        assert table(tmp_path)[-1] == {"env_steps": step, "train/loss": 0.25, "eval/avg_reward": 7}
    logger.finalize("success")
    logger.log_metrics({"train/loss": 2, "eval/late": 1}, 128)  # opened again, a column more
    assert [row["env_steps"] for row in table(tmp_path)] == [64, 128]
    assert table(tmp_path)[-1]["train/loss"] == 2
    assert table(tmp_path)[-1]["eval/avg_reward"] == 7


def test_a_new_column_is_added_and_rows_cost_the_same_however_many_there_are(tmp_path):
    path = tmp_path / "logs" / "metrics.csv"
    logger, opened = EnvStepCSV(path), []
    original = logger._open
    logger._open = lambda *args, **kwargs: (opened.append(1), original(*args, **kwargs))
    for step in range(500):
        logger.log_metrics(
            {"a": step, **({'late, "quoted"': 2.5} if step % 100 == 99 else {})}, step
        )
    logger.finalize("success")
    assert len(opened) == 2, "one for each set of columns"
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["env_steps"] for row in rows] == [str(step) for step in range(500)]
    assert rows[99] == {"env_steps": "99", "a": "99", 'late, "quoted"': "2.5"}
    assert rows[98]['late, "quoted"'] == ""


def test_another_logger_gets_the_same_keys_over_env_steps(tmp_path):
    rows = []
    logger = variant(
        Logger,
        name="other",
        version="0",
        log_metrics=lambda logger, metrics, step: rows.append((step, dict(metrics))),
        log_hyperparams=lambda *args: None,
    )
    train(tmp_path / "stub", trainer={"logger": logger()})
    train(tmp_path / "default")
    expected = {name for row in table(tmp_path / "default") for name in row} - {"env_steps"}
    assert {name for _, row in rows for name in row} == expected
    assert [step for step, _ in rows] == [64, 128, 192, 192, 256, 320, 384, 384]
    assert len(table(tmp_path / "stub")) == 6, "the table is written whatever the logger"
    assert not list((tmp_path / "stub" / "logs").glob("events*"))
    assert "wandb" not in sys.modules


def test_callbacks_that_count_iterations_are_over_env_steps_too(tmp_path):
    train(tmp_path, trainer={"callbacks": [LearningRateMonitor("step")], "log_every_n_steps": 1})
    name = next(name for name in curves_of(table(tmp_path)) if name.startswith("lr"))
    assert {step for step, _ in curves_of(table(tmp_path))[name]} <= set(range(0, 385, 64))


def test_hyperparameters_and_the_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = [*SMALL_RUN, "--data.total_env_steps", "384"]
    run(["fit", "--config", "ppo.yaml", *small, "--output_dir", "o", "--video"])
    (run_dir,) = Path("o").iterdir()
    out = capsys.readouterr().out
    for line in (
        "Best:      eval/avg_reward ",
        f"rl-cli validate --ckpt_path {run_dir}/checkpoints/best.ckpt",
        f"rl-cli fit --ckpt_path {run_dir}/checkpoints/last.ckpt",
        f"tensorboard --logdir {run_dir.parent} ",
        f"{run_dir}/logs/metrics.csv",
        f"Videos:    {run_dir}/videos",
    ):
        assert line in out
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["trainer"]["video"] is True
    assert yaml.safe_load((run_dir / "logs" / "hparams.yaml").read_text()) == config
    ((row, shown),) = compared_runs("o").items()
    assert row == f"{run_dir.name}/logs"
    assert shown["model.init_args.batch_size"] == 32
    assert shown["model.class_path"] == "lightning_rl.PPO"
    assert shown["data.env.init_args.id"] == "CartPole-v1"
    assert not [path for path in (run_dir / "logs").iterdir() if path.is_dir()], "no stray runs"


def compared_runs(directory):
    """Return what TensorBoard's HPARAMS tab shows of each run: settings and last metrics."""
    runs = EventMultiplexer().AddRunsFromDirectory(str(directory))
    runs.Reload()
    provider = MultiplexerDataProvider(runs, str(directory))
    board = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    asked = context.RequestContext()
    metadata = board.hparams_metadata(asked, "")
    experiment = board.experiment_from_metadata(asked, "", True, metadata, [])
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=100, allowed_statuses=range(4), include_metrics=True
    )
    for metric in experiment.metric_infos:
        column = request.col_params.add(metric=metric.name)
        assert not column.metric.group, "a metric of a directory below that of the run"
    for setting in experiment.hparam_infos:
        request.col_params.add(hparam=setting.name)
    answer = list_session_groups.Handler(asked, board, "", request).run()
    shown = {}
    for group in answer.session_groups:
        values = {n: getattr(v, v.WhichOneof("kind")) for n, v in group.hparams.items()}
        metrics = {value.name.tag: value.value for value in group.metric_values}
        shown[group.sessions[0].name] = values | metrics
    return shown


def fixes_an_argument(module, policy, mine=3, **kwargs):
    """Fix an argument of the base in a constructor, and pass others on."""
    Reinforce.__init__(module, policy, gamma=0.5, **kwargs)
    module.mine = mine


def test_the_hparams_tab_compares_runs_of_python_and_of_other_algorithms(tmp_path):
    """Each setting of each run is a column, whichever run TensorBoard reads first."""
    train(tmp_path / "a_ppo", model={"learning_rate": 2e-3}, trainer={"best_mode": "min"})
    train(tmp_path / "b_grpo", model={"algorithm": GRPO, "group_size": 2, "mode": "step"})
    own = variant(Reinforce, __init__=fixes_an_argument)
    train(tmp_path / "c_own", model={"algorithm": own, "mine": 4, "lr_schedule": "constant"})
    runs = compared_runs(tmp_path)
    assert set(runs) == {"a_ppo/logs", "b_grpo/logs", "c_own/logs"}
    ppo, grpo, own = runs.values()
    assert ppo["model.class_path"] == "lightning_rl.PPO"
    assert ppo["model.init_args.learning_rate"] == 2e-3
    assert ppo["model.init_args.clip_coef"] == 0.2, "a default"
    assert ppo["model.init_args.policy.init_args.hidden_sizes"] == "[16]"
    assert ppo["data.env.class_path"] == "lightning_rl.GymnasiumEnv"
    assert ppo["data.env.init_args.id"] == "CartPole-v1"
    assert ppo["trainer.accelerator"] == "cpu"
    assert ppo["seed_everything"] == 3
    assert grpo["model.init_args.group_size"] == 2
    assert "model.init_args.group_size" not in ppo
    assert own["model.init_args.mine"] == 4
    assert own["model.init_args.n_epochs"] == 2
    assert "model.init_args.gamma" not in own, "it is not what its constructor took"
    for name, best in {"a_ppo": min, "b_grpo": max, "c_own": max}.items():
        curve = [value for _, value in scalars(tmp_path / name)["eval/avg_reward"]]
        shown = runs[f"{name}/logs"]
        assert shown["eval/avg_reward"] == pytest.approx(curve[-1])
        assert shown["eval/avg_reward_best"] == pytest.approx(best(curve))
    written = yaml.safe_load((tmp_path / "a_ppo" / "logs" / "hparams.yaml").read_text())
    assert written["model"]["init_args"]["learning_rate"] == 2e-3


def test_a_resumed_run_is_one_row_with_the_settings_that_it_ends_with(tmp_path):
    train(tmp_path / "run", data={"total_env_steps": 192})
    train(tmp_path / "run", data={"total_env_steps": 384}, ckpt_path=last(tmp_path / "run"))
    ((name, shown),) = compared_runs(tmp_path).items()
    assert name == "run/logs"
    assert shown["data.total_env_steps"] == 384
    curve = dict(scalars(tmp_path / "run")["eval/avg_reward"])
    assert list(curve) == [192, 384]
    assert shown["eval/avg_reward"] == pytest.approx(curve[384])
    assert shown["eval/avg_reward_best"] == pytest.approx(max(curve.values()))
    written = yaml.safe_load((tmp_path / "run" / "logs" / "hparams.yaml").read_text())
    assert written["data"]["total_env_steps"] == 384


def test_the_manifest_says_what_ran_and_how_it_ended(tmp_path):
    train(tmp_path, trainer={"callbacks": [signal_at(3)]})
    manifest = json.loads((tmp_path / "run.json").read_text())
    assert manifest["outcome"] == "stopped by SIGTERM"
    assert 0 < manifest["env_steps"] < 384
    failing = {"callbacks": [at_iteration(5, fail(ValueError("bad\nno such luck")))]}
    with pytest.raises(ValueError, match="no such luck"):
        train(tmp_path, ckpt_path=last(tmp_path), trainer=failing)
    manifest = json.loads((tmp_path / "run.json").read_text())
    assert manifest["outcome"] == "failed: ValueError: bad no such luck"
    train(tmp_path, ckpt_path=last(tmp_path))
    manifest = json.loads((tmp_path / "run.json").read_text())
    assert manifest["outcome"] == "finished"
    assert [part["outcome"][:7] for part in manifest["earlier"]] == ["stopped", "failed:"]
    assert manifest["env_steps"] == 384
    assert manifest["seed"] == 3
    assert manifest["command"] == sys.argv
    assert manifest["device"].startswith("cpu")
    assert 0 < manifest["seconds"]["evaluation"] < manifest["seconds"]["total"]
    assert manifest["seconds"]["cpu"] > 0
    assert manifest["peak_memory"]["process"] > 2**26  # torch alone takes more
    assert manifest["peak_memory"]["cuda"] is None
    assert manifest["started"] <= manifest["ended"]
    assert set(manifest["versions"]) > {"python", "torch", "lightning", "lightning-rl"}
    assert all(manifest["versions"].values())
