"""What a run writes down beside its checkpoints: curves, a table, hyperparameters."""

import csv
import math
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

from lightning_rl import GRPO
from lightning_rl.cli.app import run
from tests.algorithms import Reinforce
from tests.callbacks import at_iteration, callback, fail
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
    found, expected = curves_of(table(run_dir)), scalars(run_dir)
    assert found == curves_of(table(tmp_path / "whole"))
    assert found.keys() == expected.keys()
    for name, curve in expected.items():
        assert found[name] == [(step, pytest.approx(value, rel=1e-6)) for step, value in curve]


def test_with_an_interval_of_0_evaluations_alone_are_logged(tmp_path):
    train(tmp_path, trainer={"log_every_n_steps": 0})
    assert [row["env_steps"] for row in table(tmp_path)] == [192, 384]
    assert all(name.startswith("eval/") for name in curves_of(table(tmp_path)))


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


def test_a_run_of_one_process_writes_its_logs_whatever_rank_the_environment_names(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # as Lightning does by SLURM_PROCID, on import
    train(tmp_path, data={"total_env_steps": 64})
    assert rank_zero_only.rank == 0
    assert [row["env_steps"] for row in table(tmp_path)] == [64]
    assert scalars(tmp_path)


def test_the_best_so_far_skips_an_evaluation_that_is_not_finite(tmp_path):
    scores = iter([math.nan, 1.0, math.nan, 2.0])

    def replace(trainer, module):
        module.evaluation = module.evaluation | {"avg_reward": next(scores)}

    settings = {"callbacks": [callback(on_validation_end=replace)]}
    few = {"iterations_per_epoch": 1, "total_env_steps": 256}
    train(tmp_path, data=few, trainer=settings)
    best = [row.get("eval/avg_reward_best") for row in table(tmp_path)]
    assert best == [None, 1.0, 1.0, 2.0]


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
