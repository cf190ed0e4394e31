"""Measure RECAP, advantage weights and successes alone on five doors, for docs/results.md.

    python scripts/recap_doors.py outputs/doors                  # all, five seeds: half an hour
    python scripts/recap_doors.py outputs/doors --variants recap awr --seeds 1 2

The variants of a seed share the base. What is finished is not repeated.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from lightning_rl import Algorithm, EpisodeWriter, read_episodes
from lightning_rl.cli.app import run
from lightning_rl.envs import VectorEnv
from lightning_rl.extensions.datasets.episode import Episode
from lightning_rl.extensions.datasets.playing import play_policy
from lightning_rl.extensions.tasks.probes import FiveDoors

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "recap_doors.yaml"
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


def config_of(folder: Path, seed: int, weights: bool) -> Path:
    """Write the config of a seed: with the condition, or with weights by the advantage."""
    config = yaml.safe_load(CONFIG.read_text())
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
    return sum(bool(one.success) for one in played) / task.evaluated


def rounds(folder: Path, seed: int, variant: str) -> dict:
    weights = variant == "awr"
    run_dir = folder / variant
    options = ["--config", str(config_of(folder, seed, weights)), "--run_dir", str(run_dir)]
    options += ["--rounds", str(DOORS.rounds), "--episodes", str(EPISODES), "--num_envs", "400"]
    options += ["--n_steps", "1", "--eval_episodes", str(DOORS.evaluated), "--seed", str(seed)]
    options += ["--positive", "0.2"] if variant == "recap" else []
    if not weights and variant != "recap":
        options += ["--base", str(folder / "recap" / "base")]
    run(["recap", *options])
    found = curve(run_dir, DOORS.rounds)
    if not weights:
        last = run_dir / f"round_{DOORS.rounds}" / "policy"
        found |= {"asked for bad": success(DOORS, last, "bad"), "positives right": right(run_dir)}
    return found


def curve(run_dir: Path, rounds: int) -> dict:
    """Return the results of each round of a finished `rl-cli recap`."""
    done = json.loads((run_dir / "recap.json").read_text())["done"]
    stages = ["base", *(f"round {number}" for number in range(1, rounds + 1))]
    tests = {one: done[f"{one} evaluation"] for one in stages}
    found = {one: test["successes"] / test["episodes"] for one, test in tests.items()}
    found["error/spread"] = [done[f"{one} labels"]["error_over_spread"] for one in stages[1:]]
    return found


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
) -> dict:
    """Clone the successes of all rounds, from the base; demonstrations replace the first round."""
    base = folder / "recap" / "base"
    env, checkpoint, found = task.make_env(EPISODES), base, {"base": success(task, base)}
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
            spaces = (env.single_observation_space, env.single_action_space)
            writer = EpisodeWriter(dataset, *spaces, env.render_fps, pictures="png")
            for episode in episodes:
                if episode.success:
                    writer.write(episode)
            writer.finalise()
            options = [f"--data.collector.path={dataset}", "--data.collector.episodes=null"]
            options += [f"--trainer.init_from={base}", f"--trainer.run_dir={run_dir}"]
            options += ["--model.policy.init_args.condition=absent"]
            options += ["--model.policy.init_args.guidance=1.0"]
            run(["fit", f"--config={config}", *options])
        checkpoint = run_dir
        found[f"round {number}"] = success(task, checkpoint)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    settings = parser.parse_args()
    for variant in settings.variants:
        for seed in settings.seeds:
            folder = settings.folder / str(seed)
            folder.mkdir(parents=True, exist_ok=True)
            if variant == "successes":
                found = successes_alone(DOORS, config_of(folder, seed, False), folder, seed)
            else:
                found = rounds(folder, seed, variant)
            print(f"RESULT {variant} seed {seed}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
