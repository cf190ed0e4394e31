"""Measure W3, the workload of scripts/bench_peers.py in torch alone, and steps, on the device."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from findings import Findings

import bench_tasks

PEERS = Path(__file__).resolve().parents[1] / "peers"
OURS, THEIRS = "lightning_rl", "RSL-RL"
SCRIPTS = {OURS: "ours.py", THEIRS: "rsl_rl_ppo.py"}
NUM_ENVS = (4096, 16384)
TIMEOUT = 120.0
"""Seconds that one run may take."""

INSTALL = "rsl_rl is not installed: pip install rsl-rl-lib==5.5.1"


def w3(findings: Findings) -> None:
    """Run ours, eager and compiled, and RSL-RL beside it where it is installed."""
    libraries = [OURS, THEIRS] if importlib.util.find_spec("rsl_rl") else [OURS]
    for num_envs in (64, 128) if findings.small else NUM_ENVS:
        for kind in ("eager", "compiled"):
            if findings.small and kind == "compiled" and num_envs > 64:
                continue  # compiling takes a CPU longer than all the rest
            speeds = {library: _run(findings, library, num_envs, kind) for library in libraries}
            _judge(findings, num_envs, kind, speeds)
    if THEIRS not in libraries:
        findings.add(THEIRS, None, INSTALL)


def _run(findings: Findings, library: str, num_envs: int, kind: str) -> dict[str, Any] | str:
    """Return what a runner reports, or the end of what it said when it failed."""
    warmup, iterations = ("1", "1") if findings.small else ("5", "30")
    command = [sys.executable, str(PEERS / SCRIPTS[library]), "W3", "--num-envs", str(num_envs)]
    command += ["--device", findings.device, "--warmup", warmup, "--iterations", iterations]
    command += ["--compile"] if kind == "compiled" else []
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, cwd=findings.directory
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {TIMEOUT:.0f} s"
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr, flush=True)  # the report shows it whole
        return done.stderr.strip().splitlines()[-1]
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def _judge(
    findings: Findings, num_envs: int, kind: str, speeds: dict[str, dict[str, Any] | str]
) -> None:
    name = f"W3, {num_envs:,} envs, {kind}"
    ours, theirs = speeds[OURS], speeds.get(THEIRS)
    if isinstance(ours, str):
        findings.add(name, False, ours)
        return
    figure = f"{ours['sps']:,.0f} env steps/s"
    if isinstance(theirs, dict):
        ratio = ours["sps"] / theirs["sps"]
        figure += f", {ratio:.2f} times {THEIRS}'s {theirs['sps']:,.0f}"
    elif theirs is not None:
        figure += f"; {THEIRS} failed: {theirs}"
    ways = ours.get("computing", {})
    if kind == "compiled":
        figure += f"; steps {'by graphs' if ways.get('steps_compiled') else 'EAGER'}"
        figure += ", CUDA graphs" if ways.get("cuda_graphs") else ""
        if not ways.get("steps_compiled"):
            findings.add(name, False, f"{figure}: {ways.get('steps_why')}", "steps by graphs")
            return
    # How fast is fast enough nobody has said for a GPU yet: the figure is what is wanted.
    findings.add(name, True, figure, "it runs", ours=ours, theirs=theirs)
    peak = ours.get("peak_gpu_mb")
    if peak is not None:
        row = {"run": name, "estimate": None, "peak": peak * 2**20, "growth": None}
        findings.memory.append(row | {"iterations": ours["env_steps"] // (num_envs * 24)})


def steps(findings: Findings) -> None:
    """Collect in each task eagerly and by graphs, as scripts/bench_tasks.py does."""
    rollout, seconds = (4, 0.1) if findings.small else (24, 3.0)
    for make in bench_tasks.TASKS[:1] if findings.small else bench_tasks.TASKS:
        for num_envs in (64,) if findings.small else NUM_ENVS:
            eager, compiled = bench_tasks.collect(make, num_envs, findings.device, rollout, seconds)
            figure = f"{compiled:,.0f} env steps/s, {compiled / eager:.2f} times the eager ones'"
            name = f"rollouts of {make.__name__}, {num_envs:,} envs"
            bar = "" if findings.small else "more than eagerly"
            passed = None if findings.small else compiled > eager
            findings.add(name, passed, figure, bar, eager=eager, compiled=compiled)
