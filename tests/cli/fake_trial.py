"""In place of `rl-cli fit`, what a sweep reads of a run: written in milliseconds. As a script, a sweep of such trials."""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import yaml

from lightning_rl.extensions.sweeps import sweep as sweeps
from lightning_rl.extensions.sweeps.trials import TrialProcess

STEP = 64


def trial(arguments):
    """Evaluate and save each 64 env steps; the score is gamma times them. A gamma above 1 is refused.

    One of 0 diverges after the first evaluation.
    """
    options = dict(one[2:].split("=", 1) for one in arguments if "=" in one)
    rest = [one for one in arguments[1:] if "=" not in one]
    options |= {name[2:]: value for name, value in zip(rest[::2], rest[1::2], strict=True)}
    if "ckpt_path" in options:
        last = Path(options["ckpt_path"])
        state = json.loads(last.read_text())
    else:
        base = yaml.safe_load(Path(options["config"]).read_text())
        gamma = float(options.get("model.gamma", 0.99))
        total = int(options.get("data.total_env_steps", base["data"]["total_env_steps"]))
        if gamma > 1:
            print(f"rl-cli: error: gamma must lie in [0, 1], got {gamma}.", file=sys.stderr)
            sys.exit(1)
        run = Path(options["output_dir"], f"{options['exp_name']}_20260101_000000")
        (run / "checkpoints").mkdir(parents=True)
        (run / "logs").mkdir()
        (run / "logs" / "metrics.csv").write_text("env_steps,eval/avg_reward\n")
        last, state = run / "checkpoints" / "last.ckpt", {"at": 0, "total": total, "gamma": gamma}
        state["parts"] = 0
    state["parts"] += 1
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    while state["at"] < state["total"]:
        state["at"] += STEP
        with (last.parents[1] / "logs" / "metrics.csv").open("a") as file:
            diverged = state["gamma"] == 0 and state["at"] > STEP
            score = math.nan if diverged else state["at"] * state["gamma"]
            file.write(f"{state['at']},{score}\n")
        beside = last.with_suffix(".part")
        beside.write_text(json.dumps(state))
        beside.replace(last)
        if stopped:
            sys.exit(128 + signal.SIGTERM)
        time.sleep(float(os.environ.get("TRIAL_PAUSE", "0")))


class FakeTrial(TrialProcess):
    def __init__(self, begin, *rest):
        super().__init__(trial, *rest)


if __name__ == "__main__":
    from lightning_rl.cli.app import run

    sweeps.TrialProcess = FakeTrial
    run(["sweep", *sys.argv[1:]])
