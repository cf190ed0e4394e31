"""Learn the torch tasks and the VLA toy by their shipped configs, on the device, to their bars.

The bars are those of docs/results.md, with one seed. Envs are on the device too, which the configs
do not ask for.
"""

from typing import Any

from findings import Findings
from training import Watch, command

BARS = {
    "ppo_cart_pole": ("ppo_cart_pole_task.yaml", "avg_length", 495),
    "ppo_push_cube": ("ppo_push_cube.yaml", "success_rate", 0.95),
    "ppo_point_mass": ("ppo_point_mass.yaml", "success_rate", 0.95),
    "grpo_cart_pole": ("grpo_cart_pole_task.yaml", "avg_length", 495),
    "grpo_push_cube": ("grpo_push_cube.yaml", "success_rate", 0.85),
}
"""Of each check: config, metric and the least that it must reach."""

CLONE, VLA = (0.3, 0.7), 0.93
"""Success of the VLA toy: from and to, of the clone; and at least, of what has learnt on."""

SMALL = {
    "data.total_env_steps": 512,
    "data.num_envs": 16,
    "data.buffer_size": 4,
    "data.num_eval_episodes": 2,
    "model.n_epochs": 1,
    "model.batch_size": 32,
}
FULL = {
    "data.num_eval_episodes": 100,
    # One evaluation, at the end: episodes that are played in between take a GPU long.
    "data.iterations_per_epoch": 100_000,
}


def learn(findings: Findings) -> None:
    config, metric, bar = BARS[findings.directory.name]
    run = fit(findings, config, {"data.env.init_args.device": findings.device})
    judge(findings, config, run, metric, bar)


def learn_vla(findings: Findings) -> None:
    """Clone the task's expert, and go on from there."""
    config = f"{findings.directory.name}.yaml"
    settings = {"data.env.init_args.env.init_args.device": findings.device}
    settings |= {} if findings.small else {"data.num_eval_episodes": 400}
    few = {"data.collector.init_args.episodes": 16} if findings.small else {}
    clone = fit(findings, "vla_bc.yaml", settings | few)
    judge(findings, "vla_bc.yaml", clone, "success_rate", *CLONE)
    run = fit(findings, config, settings | {"trainer.init_from": clone.trainer.run_dir})
    judge(findings, f"{config} from the clone", run, "success_rate", VLA)


def fit(findings: Findings, config: str, settings: dict[str, Any]) -> Watch:
    sizes = SMALL if findings.small else FULL
    options = [f"--{key}={value}" for key, value in (sizes | settings).items()]
    where = ["--output_dir", str(findings.directory), "--trainer.devices", "1"]
    return command(findings, config, "fit", "--config", config, *where, *options)


def judge(
    findings: Findings, name: str, run: Watch, metric: str, least: float, most: float | None = None
) -> None:
    value = run.module.evaluation[metric]
    speed = run.module.env_steps / run.seconds
    bar = f"{metric} at least {least:g}" + (f", at most {most:g}" if most else "")
    figure = f"{metric} {value:.3g} after {run.module.env_steps:,} env steps, {speed:,.0f} a second"
    passed: bool | None = least <= value and (most is None or value <= most)
    if findings.small:
        passed, bar = None, f"not applied: {bar}"
    findings.add(name, passed, figure, bar, found=value, sps=speed)
