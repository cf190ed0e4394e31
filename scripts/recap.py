"""Measure RECAP and clones of the successes on five doors and on PushBlocks, for docs/results.md.

    python scripts/recap.py doors outputs/doors                  # five seeds: half an hour
    python scripts/recap.py blocks outputs/blocks --seeds 1 2 3

The variants of a seed share the base. What is finished is not repeated. On doors also weights by
the advantage are measured. On PushBlocks, from pictures, the expert of the 2,000 demonstrations
hesitates: every 8 steps it draws the block that it pushes, with probability 0.7 the wrong one. The
demonstrations are the episodes of the first round; in two more rounds the policy plays 400 episodes
each.
"""

import itertools
import json
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from lightning_rl import Algorithm, EpisodeWriter, PushBlocks, read_episodes
from lightning_rl.cli.app import run
from lightning_rl.envs import VectorEnv
from lightning_rl.extensions.datasets.episode import Episode
from lightning_rl.extensions.datasets.playing import play_policy, play_side_by_side
from lightning_rl.extensions.tasks.probes import FiveDoors
from scripting import parser_of

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
EPISODES = 400


class Task(NamedTuple):
    """The env, the maximum length of an episode, the chunk size, evaluated episodes and rounds."""

    make_env: Callable[[int], VectorEnv]
    max_steps: int
    chunk_size: int
    evaluated: int
    rounds: int


DOORS = Task(FiveDoors, 10, 1, 2000, 2)
VARIANTS = ("recap", "recap_default_share", "awr", "successes")


SIZE, DEMONSTRATIONS = 32, 2_000
HESITATION, WRONG = 8, 0.7
ENV = {"size": SIZE, "instructions": [0]}
BLOCKS = Task(partial(PushBlocks, **ENV), 48, 4, 400, 3)
VALUE = Path(__file__).with_name("recap_value.yaml")


def config_of(folder: Path, seed: int, weights: bool) -> Path:
    """Write the config of a seed: with the condition, or with weights by the advantage."""
    config = yaml.safe_load((CONFIGS / "recap_doors.yaml").read_text())
    config["seed_everything"] = seed
    config["trainer"]["logger"] = False
    settings = config["model"]["init_args"]
    if weights:
        settings["policy"] = settings["policy"]["init_args"]["policy"]
        settings["advantage_temperature"] = 0.05
        del settings["condition_dropout"]
    file = folder / ("awr.yaml" if weights else "recap.yaml")
    file.write_text(yaml.safe_dump(config))
    return file


def success(task: Task, checkpoint: Path, condition: str | None = None) -> float:
    """Return the success rate of a checkpoint's policy, asked for its own or another condition."""
    policy = Algorithm.load_from_checkpoint(checkpoint).policy
    if condition is not None:
        policy.condition = condition
    env, seeds = task.make_env(task.evaluated), range(task.evaluated)
    played = play_policy(env, policy, seeds, task.max_steps, chunk_size=task.chunk_size)
    return sum(bool(episode.success) for episode in played) / task.evaluated


def improve(
    task: Task, run_dir: Path, config: Path, seed: int, num_envs: int, *options: str
) -> dict[str, Any]:
    """Run the rounds of `rl-cli recap`; return the success after each, and if asked for bad."""
    numbers = {"rounds": task.rounds, "episodes": EPISODES, "eval_episodes": task.evaluated}
    settings = numbers | {"config": config, "run_dir": run_dir, "seed": seed, "num_envs": num_envs}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    run(["recap", *words, *options])
    results = curve(run_dir, task.rounds)
    if run_dir.name != "awr":
        results["asked for bad"] = success(task, run_dir / f"round_{task.rounds}" / "policy", "bad")
    return results


def curve(run_dir: Path, rounds: int) -> dict[str, Any]:
    """Return the results of each round of a finished `rl-cli recap`."""
    done = json.loads((run_dir / "recap.json").read_text())["done"]
    stages = ["base", *(f"round {number}" for number in range(1, rounds + 1))]
    tests = {stage: done[f"{stage} evaluation"] for stage in stages}
    results = {stage: test["successes"] / test["episodes"] for stage, test in tests.items()}
    spreads = [done[f"{stage} labels"]["error_over_spread"] for stage in stages[1:]]
    return results | {"error/spread": spreads}


def right(run_dir: Path) -> float:
    """Return the share of positive tries that walked through the right door."""
    total = good = 0
    for episode in read_episodes(run_dir / "dataset"):
        place = episode.observation["proprio"][: len(episode), :1]
        door = 0.7 * torch.cos(1.5 * place + 0.4 * torch.arange(8))
        passed = (episode.action - door).abs().mean(1) < 0.15
        positive = episode.extra["advantage_positive"] > 0.5
        total, good = total + int(positive.sum()), good + int((positive & passed).sum())
    return good / total


def successes_alone(
    task: Task, config: Path, folder: Path, seed: int, demonstrations: Path | None = None
) -> dict[str, Any]:
    """Clone the successes of all rounds, from the base; demonstrations replace the first round."""
    base = folder / "recap" / "base"
    env, checkpoint, results = task.make_env(EPISODES), base, {"base": success(task, base)}
    dataset = folder / "successes" / "dataset"
    for number in range(1, task.rounds + 1):
        run_dir = folder / "successes" / f"round_{number}"
        if not run_dir.exists():
            episodes: Iterable[Episode]
            if number == 1 and demonstrations is not None:
                episodes = read_episodes(demonstrations)
            else:
                policy = Algorithm.load_from_checkpoint(checkpoint).policy
                first = seed * 10**6 + number * 10**4
                seeds, size = range(first, first + EPISODES), task.chunk_size
                episodes = play_policy(env, policy, seeds, task.max_steps, chunk_size=size)
            write(dataset, env, (episode for episode in episodes if episode.success))
            options = [f"--data.collector.path={dataset}", "--data.collector.episodes=null"]
            options += [f"--trainer.init_from={base}", f"--trainer.run_dir={run_dir}"]
            options += ["--model.policy.init_args.condition=absent"]
            options += ["--model.policy.init_args.guidance=1.0"]
            run(["fit", f"--config={config}", *options])
        checkpoint = run_dir
        results[f"round {number}"] = success(task, run_dir)
    return results


def demonstrate(folder: Path, seed: int) -> Path:
    """Record demonstrations of a hesitant expert; most of them fail."""
    path = folder / "demonstrations"
    if path.exists():
        return path
    env = BLOCKS.make_env(DEMONSTRATIONS)
    generator = torch.Generator().manual_seed(seed)
    steps = itertools.count()
    wrong = torch.empty(DEMONSTRATIONS, dtype=torch.bool)

    def choose(*_: object) -> torch.Tensor:
        if next(steps) % HESITATION == 0:
            wrong.copy_(torch.rand(DEMONSTRATIONS, generator=generator) < WRONG)
        state = env.state.copy()
        other = (state["task"] + 2) % 4  # the other block, to the same side
        return env.expert(state.set("task", torch.where(wrong, other, state["task"])))

    unfinished = path.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    seeds = range(seed * 10**6, seed * 10**6 + DEMONSTRATIONS)
    write(unfinished, env, play_side_by_side(env, choose, seeds, BLOCKS.max_steps))
    return unfinished.rename(path)


def write(path: Path, env: VectorEnv, episodes: Iterable[Episode]) -> None:
    """Write episodes as a dataset, or add them to one."""
    spaces = (env.single_observation_space, env.single_action_space)
    writer = EpisodeWriter(path, *spaces, env.render_fps, pictures="png")
    for episode in episodes:
        writer.write(episode)
    writer.finalise()


def config_of_blocks(folder: Path, demonstrations: Path, seed: int) -> Path:
    """Write the config of the policy."""
    config = yaml.safe_load((CONFIGS / "vla_flow_bc.yaml").read_text())
    config["seed_everything"] = seed
    inner = config["model"]["init_args"]["policy"]
    inner["init_args"]["flow"] = {"noise_level": 0.01}  # acting is nearly the ODE, from drawn noise
    conditioned = {"class_path": "ConditionedPolicy", "init_args": {"guidance": 1.5}}
    conditioned["init_args"]["policy"] = inner
    config["model"]["init_args"]["policy"] = conditioned
    config["data"]["total_env_steps"] = 720_000
    config["data"]["env"]["init_args"]["env"] = {"class_path": "PushBlocks", "init_args": ENV}
    config["data"]["collector"]["init_args"] = {"path": str(demonstrations)}
    config["trainer"] = {"accelerator": "cpu", "logger": False, "limit_val_batches": 0}
    file = folder / "policy.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def on_doors(folder: Path, seed: int, variant: str) -> dict[str, Any]:
    config, run_dir = config_of(folder, seed, variant == "awr"), folder / variant
    if variant == "successes":
        return successes_alone(DOORS, config, folder, seed)
    options = ["--n_steps", "1"]
    options += ["--positive", "0.2"] if variant == "recap" else []
    if variant == "recap_default_share":
        options += ["--base", str(folder / "recap" / "base")]
    results = improve(DOORS, run_dir, config, seed, 400, *options)
    return results if variant == "awr" else results | {"positives right": right(run_dir)}


def on_blocks(folder: Path, seed: int, variant: str) -> dict[str, Any]:
    demonstrations = demonstrate(folder, seed)
    policy = config_of_blocks(folder, demonstrations, seed)
    if variant == "successes":
        return successes_alone(BLOCKS, policy, folder, seed, demonstrations)
    options = ["--value", str(VALUE), "--from", str(demonstrations), "--n_steps", "8"]
    return improve(BLOCKS, folder / "recap", policy, seed, 200, *options)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("task", choices=("doors", "blocks"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    args = parser.parse_args()
    measure = {"doors": on_doors, "blocks": on_blocks}[args.task]
    for variant in VARIANTS if args.task == "doors" else ("recap", "successes"):
        for seed in args.seeds:
            folder = (args.folder / str(seed)).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            result = measure(folder, seed, variant)
            print(f"RESULT {variant} seed {seed}: {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
