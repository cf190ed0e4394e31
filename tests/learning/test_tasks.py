"""The shipped task configs learn; with all their seeds they are run by scripts/reproduce.sh tasks."""

import json
from pathlib import Path

import pytest

from lightning_rl.cli.app import run


def evaluate_after_training(tmp_path, monkeypatch, config, *arguments):
    monkeypatch.chdir(tmp_path)
    run(["fit", "--config", config, "--data.num_eval_episodes", "32", *arguments])
    (run_dir,) = Path("outputs").iterdir()
    run(["validate", "--ckpt_path", str(run_dir / "checkpoints" / "last.ckpt")])
    return json.loads((run_dir / "evaluation.json").read_text())


def test_grpo_balances_cart_pole_within_a_fifth_of_its_budget(tmp_path, monkeypatch):
    evaluation = evaluate_after_training(
        tmp_path, monkeypatch, "grpo.yaml", "--data.total_env_steps", "100_000"
    )
    assert evaluation["avg_reward"] > 300


def test_ppo_learns_to_push_the_cube(tmp_path, monkeypatch):
    """Seed 2 does so within 450,000 steps, seed 1 within 800,000."""
    budget = ("--data.total_env_steps", "500_000", "--model.lr_schedule", "constant")
    budget += (
        "--data.iterations_per_epoch",
        "62",
        "--seed_everything",
        "2",
    )  # one evaluation, at the end
    evaluation = evaluate_after_training(tmp_path, monkeypatch, "ppo_push_cube.yaml", *budget)
    assert evaluation["success_rate"] > 0.8
    assert evaluation["avg_length"] < 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "key", "bar"),
    [
        ("ppo_cart_pole_task.yaml", "avg_length", 495),
        ("grpo_cart_pole_task.yaml", "avg_length", 495),
        ("ppo_push_cube.yaml", "success_rate", 0.95),
        ("grpo_push_cube.yaml", "success_rate", 0.85),
        ("ppo_point_mass.yaml", "success_rate", 0.95),
        ("grpo.yaml", "avg_reward", 475),
    ],
)
def test_a_shipped_config_reaches_its_bar(config, key, bar, tmp_path, monkeypatch):
    assert evaluate_after_training(tmp_path, monkeypatch, config)[key] >= bar
