"""Scripts of maintainers run: the checks for machines with a GPU, small on the CPU, and a runner of the comparison of speeds.
Every row of the results starts."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import rl_cli as run_script
from tests.helpers import only_parsed, parse_of_script, script

SCRIPTS = Path(__file__).parents[2] / "scripts"
REPRODUCE = (SCRIPTS / "reproduce.sh").read_text()
NOTED = """#!/bin/bash
{ printf '%s\\x1f' "${0##*/}" "$@"; printf '\\x1e'; } >> "$NOTED"
"""
"""A program that notes how it was called."""


def commands_of(family, tmp_path):
    """Run a family of rows with programs that only note their calls; return the words of each."""
    programs, tree = tmp_path / "bin", tmp_path / "tree"
    programs.mkdir()
    for name in ("python", "rl-cli", "pytest"):
        (programs / name).write_text(NOTED)
        (programs / name).chmod(0o755)
    for seed in (1, 2, 3):
        (tree / f"outputs/reproduce/ppo_quadruped_0_sweep_0/trial_0_seed{seed}_2").mkdir(
            parents=True
        )
    shutil.copytree(SCRIPTS, tree / "scripts", ignore=shutil.ignore_patterns("results"))
    shutil.copytree(SCRIPTS.parent / "docs" / "examples", tree / "docs" / "examples")
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "NOTED": str(tmp_path / "noted")}
    program = ["bash", str(tree / "scripts" / "reproduce.sh"), family]
    subprocess.run(program, check=True, env=os.environ | env)
    calls = (tmp_path / "noted").read_text().split("\x1e")[:-1]
    return tree, [call.split("\x1f")[:-1] for call in calls]


OF_OTHERS = ("dm_control", "gym_hil", "stable_baselines3")
"""Packages of some rows that the tests' environment lacks."""


def assert_taken(words, monkeypatch):
    """A script takes its arguments; scripts/reproduce.py ends, with a training that is only parsed."""
    if words[0] == "scripts/reproduce.py":
        monkeypatch.setattr(sys, "argv", words)
        rows = script("reproduce", monkeypatch)

        def parse(config, seeds, overrides, args):
            if seeds[0] == args.seeds[0]:  # the others with a warm start have the same settings
                only_parsed(["fit", "--config", config, *overrides, "--print_config"])
            return [(dict.fromkeys(rows.MEASURED, 1.0), Path("run"))] * len(seeds)

        monkeypatch.setattr(rows, "train", parse)
        monkeypatch.setattr(rows, "keep", lambda *_: None)
        rows.main()
        return
    try:
        assert not parse_of_script(*words)
    except ModuleNotFoundError as missing:
        if missing.name not in OF_OTHERS:
            raise


@pytest.mark.parametrize("family", re.findall(r"^(\w+)\)", REPRODUCE, re.MULTILINE))
def test_every_row_of_the_results_starts(family, tmp_path, monkeypatch, capsys):
    tree, commands = commands_of(family, tmp_path)
    assert commands
    monkeypatch.chdir(tree)
    monkeypatch.syspath_prepend("docs/examples")
    for program, *words in commands:
        if program == "python":
            assert_taken(words, monkeypatch)
        elif words[0] == "fit":
            only_parsed([*words, "--print_config"])
        elif program == "pytest":
            assert all((SCRIPTS.parent / word).is_file() for word in words if word.endswith(".py"))


def test_our_runner_trains_in_envs_of_the_framework(monkeypatch):
    ours = SCRIPTS / "peers" / "ours.py"
    done = run_script("W4-8", "--warmup", "1", "--iterations", "1", program=ours)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["env_steps"] == script("peers/common", monkeypatch).WORKLOADS["W4-8"].env_steps
    assert told["computing"]["stepping"] == "StepwiseStepper"
    assert told["start_cpu_seconds"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_check_runs_small_on_a_cpu(tmp_path, monkeypatch):
    checks = script("gpu_check", monkeypatch)
    status = checks.main(["--device", "cpu", "--output", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    assert status == 0, text
    assert [check["status"] for check in report["checks"]] == ["passed"] * len(checks.CHECKS)
    for row in (
        "| compiled: PPO compiled and eager | yes |",
        "| steps: steps of CartPole, compiled and eager | yes |",
        "| steps: steps of CartPole replayed as CUDA graphs | - | not on a CPU |",
        "| steps_speed: rollouts of CartPole, 64 envs | - |",
        "| compiled: PPO replayed as CUDA graphs | - | not on a CPU |",
        "| compiled: GRPO replayed as CUDA graphs | - | not on a CPU |",
        "| processes: two ranks, gloo: the ranks | yes | equal bit for bit |",
        "| async: async without lag, and sync | yes | equal bit for bit |",
        "| bf16: PPO bf16-mixed: first ratio | yes |",
        "| w3: W3, 64 envs, eager | yes |",
        "| vla_ppo: vla_ppo.yaml from the clone | - |",
        "not applied: success_rate at least 0.95",
        "| grpo_cart_pole: grpo_cart_pole_task.yaml | - |",
    ):
        assert row in text, row
