"""Measure RECAP and successes alone on PushBlocks from pictures, for docs/results.md.

    python scripts/recap_blocks.py outputs/blocks --seeds 1 2 3

The expert of the 2,000 demonstrations hesitates: every 8 steps it draws the block that it pushes,
with probability 0.7 the wrong one. The demonstrations are the episodes of the first round; in two
more rounds the policy plays 400 episodes each. Finished rounds are kept.
"""

import argparse
import itertools
import json
import shutil
from functools import partial
from pathlib import Path

import torch
import yaml

from lightning_rl import EpisodeWriter, PushBlocks
from lightning_rl.cli.app import run
from lightning_rl.extensions.datasets.playing import play_side_by_side
from recap_doors import EPISODES, Task, curve, success, successes_alone

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "vla_flow_bc.yaml"
SIZE, DEMONSTRATIONS = 32, 2_000
HESITATION, WRONG = 8, 0.7
ENV = {"size": SIZE, "instructions": [0]}
BLOCKS = Task(partial(PushBlocks, **ENV), 48, 4, 400, 3)
VALUE = """
model:
  class_path: ValueFit
  init_args:
    policy:
      class_path: ActorOnly
      init_args:
        hidden_sizes: [64]
        activation: relu
        encoder:
          class_path: BackboneEncoder
          init_args:
            backbone: {class_path: TinyVLA, init_args: {channels: [8, 16, 16], hidden_size: 64}}
    learning_rate: 3.0e-3
    lr_schedule: linear
    batch_size: 64
data:
  env: {class_path: ReturnFramesEnv, init_args: {bins: 51}}
  num_envs: 64
  buffer_size: 10
  total_env_steps: 64_000
  iterations_per_epoch: 40
trainer: {accelerator: cpu, logger: false}
"""


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

    spaces = (env.single_observation_space, env.single_action_space)
    unfinished = path.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    writer = EpisodeWriter(unfinished, *spaces, env.render_fps, pictures="png")
    first = seed * 10**6
    for episode in play_side_by_side(
        env, choose, range(first, first + DEMONSTRATIONS), BLOCKS.max_steps
    ):
        writer.write(episode)
    writer.finalise()
    return unfinished.rename(path)


def configs(folder: Path, demonstrations: Path, seed: int) -> tuple[Path, Path]:
    """Write the configs of policy and value."""
    config = yaml.safe_load(CONFIG.read_text())
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
    files = folder / "policy.yaml", folder / "value.yaml"
    for file, content in zip(files, (config, yaml.safe_load(VALUE)), strict=True):
        file.write_text(yaml.safe_dump(content))
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    settings = parser.parse_args()
    for seed in settings.seeds:
        folder = (settings.folder / str(seed)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        demonstrations = demonstrate(folder, seed)
        policy, value = configs(folder, demonstrations, seed)
        run_dir = folder / "recap"
        options = ["--config", str(policy), "--value", str(value), "--run_dir", str(run_dir)]
        options += ["--rounds", str(BLOCKS.rounds), "--episodes", str(EPISODES)]
        options += ["--num_envs", "200", "--eval_episodes", str(BLOCKS.evaluated)]
        options += ["--from", str(demonstrations), "--n_steps", "8"]
        run(["recap", *options, "--seed", str(seed)])
        last = run_dir / f"round_{BLOCKS.rounds}" / "policy"
        found = curve(run_dir, BLOCKS.rounds) | {"asked for bad": success(BLOCKS, last, "bad")}
        print(f"RESULT recap seed {seed}: {json.dumps(found)}", flush=True)
        found = successes_alone(BLOCKS, policy, folder, seed, demonstrations)
        print(f"RESULT successes seed {seed}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
