"""Learn to pick up a cube with human help: record demonstrations, train, evaluate.

    export MUJOCO_GL=egl
    python scripts/hil_pick_cube.py record demonstrations/pick_cube
    python scripts/hil_pick_cube.py train demonstrations/pick_cube --seed 1
    python scripts/hil_pick_cube.py record demonstrations/pick_cube_pixels --pictures
    python scripts/hil_pick_cube.py train demonstrations/pick_cube_pixels --pictures
    python scripts/hil_pick_cube.py train demonstrations/pick_cube --data.replay.demonstrations null

With `--pictures` the policy sees the two cameras (`configs/hil_pick_cube_pixels.yaml`), and is
evaluated after each 5,000 env steps.

`train` runs `configs/hil_pick_cube.yaml` by `rl-cli fit` without evaluations; options of `rl-cli`
follow its own. The last line above trains without demonstrations; `--data.env.wrappers` with all
wrappers of the config but the last trains without interventions. Then it plays 50 episodes without
help, on unused seeds, with the weights after 6,000 and after 3,000 env steps. It prints a line of
JSON: success, mean length of the successful episodes, and CPU seconds of the training.

Needs the environment of constraints-robots.txt.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rl import (
    GripperSAC,
)
from lightning_rl.cli.app import run
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.deploy.loading import load_trained
from lightning_rl.extensions.datasets.writer import EpisodeWriter
from lightning_rl.extensions.tasks.gym_hil import PickCube, PickCubeExpert
from scripting import parser_of

CONFIGS = Path(__file__).parents[1] / "configs"
ENV = {"random_block_position": True, "reset_delay_seconds": 0.0}
FIRST_DEMONSTRATION, DEMONSTRATIONS = 10_000, 20
FIRST_EVALUATION_SEED, EPISODES = 1_000_000, 50
"""Seeds and numbers of episodes."""


def main() -> None:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    record_parser = commands.add_parser("record")
    record_parser.add_argument("path", type=Path)
    record_parser.add_argument("--pictures", action="store_true")
    train_parser = commands.add_parser("train")
    train_parser.add_argument("demonstrations")
    train_parser.add_argument("--seed", type=int, default=1)
    train_parser.add_argument("--pictures", action="store_true")
    chosen, rest = parser.parse_known_args()
    if chosen.command == "record":
        record(chosen.path, chosen.pictures)
        return
    print(json.dumps(train(chosen.demonstrations, chosen.seed, chosen.pictures, rest)))


def record(path: Path, pictures: bool) -> None:
    """Record the expert's successful episodes, one per seed."""
    import gym_hil  # noqa: F401  # registers the env
    import gymnasium

    settings = {**ENV, "image_obs": pictures}
    made = gymnasium.make("gym_hil/PandaPickCube-v0", **settings)
    env: Any = PickCube(made, shadows=False, size=64) if pictures else PickCube(made)
    expert = PickCubeExpert(noise=0.1, seed=FIRST_DEMONSTRATION)
    about = 10.0, "Pick up the cube.", "png"
    writer = EpisodeWriter(path, env.observation_space, env.action_space, *about)
    lengths: list[int] = []
    seed = FIRST_DEMONSTRATION
    while len(lengths) < DEMONSTRATIONS:
        observation, _ = env.reset(seed=seed)
        expert.reset()
        ended, steps = False, 0
        while not ended:
            action = expert(env.state)
            following, reward, terminated, truncated, info = env.step(action)
            penalty = {"penalty": info["discrete_penalty"]}
            writer.add(observation, action, reward, terminated, truncated, extra=penalty)
            observation, ended, steps = following, terminated or truncated, steps + 1
        if info["success"]:
            writer.end_episode(observation, success=True)
            lengths.append(steps)
        else:
            writer.discard_episode()
        seed += 1
    writer.finalise()
    env.close()
    print(f"{DEMONSTRATIONS} episodes of {np.mean(lengths):.1f} steps: {path}")


def train(demonstrations: str, seed: int, pictures: bool, options: list[str]) -> dict[str, Any]:
    """Train by rl-cli, and evaluate the policy."""
    config = f"hil_pick_cube{'_pixels' * pictures}"
    run_dir = Path("outputs") / f"{config}-{seed}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    fixed = {
        "config": CONFIGS / f"{config}.yaml",
        "seed_everything": seed,
        "trainer.run_dir": run_dir,
        "trainer.limit_val_batches": 0,
        "trainer.checkpoint_every_n_iterations": 5_000 if pictures else 3_000,
        "data.replay.demonstrations": demonstrations,
    }
    started = time.process_time()
    run(["fit", *(f"--{key}={value}" for key, value in fixed.items()), *options])
    seconds = time.process_time() - started
    checkpoints = run_dir / "checkpoints"
    results: dict[str, Any] = {"seed": seed, "options": options, "cpu_seconds": seconds}
    for path in (checkpoints / "last.ckpt", *sorted(checkpoints.glob("iteration_*.ckpt"))):
        steps = GripperSAC.load_from_checkpoint(path).env_steps
        trained = load_trained(path, trust_code=True)
        results[f"after_{steps}"] = evaluate(trained.policy, trained.env())
    return results


def evaluate(policy: Any, env: Any) -> dict[str, float]:
    """Play episodes without help, each with its own seed, the same for every policy."""
    env.stop_interventions()
    seeds = range(FIRST_EVALUATION_SEED, FIRST_EVALUATION_SEED + EPISODES)
    played = [run_episodes(policy, env, [seed], deterministic=True)[0] for seed in seeds]
    env.close()
    lengths = [episode["length"] for episode in played if episode["success"]]
    return {
        "success": len(lengths) / EPISODES,
        "steps_of_a_success": float(np.mean(lengths)) if lengths else float("nan"),
        "episodes": EPISODES,
    }


if __name__ == "__main__":
    main()
