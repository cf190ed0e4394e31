"""Fine-tune a VLA with simulated inference time, with and without background collection.

    rl-cli fit --config vla_bc.yaml
    python scripts/bench_vla_async.py --init_from outputs/vla_bc_... --delay_ms 200

Both runs train `configs/vla_ppo.yaml` from the same clone, for the same number of env steps, unless
the background run gets more of the time that it saves. Each inference takes `delay_ms` more
(`SlowPolicy`), and each update is delayed until collecting to learning is 1:1; the delays leave the
CPU free. Prints wall time, and the success of the final greedy policies on held-out episodes.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import seed_everything

from bench_async import SlowUpdate
from lightning_rl import (
    PPO,
    ActionChunk,
    AsyncCollector,
    PushBlocks,
    RLDataModule,
    RLTrainer,
    SlowPolicy,
    SyncCollector,
    VLAPolicy,
)
from lightning_rl.checkpoints.format import read_checkpoint
from lightning_rl.cli.config_files import find_config
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.system.saved_runs import find_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--init_from", required=True, help="a checkpoint or run directory")
    parser.add_argument("--delay_ms", type=float, default=200.0)
    parser.add_argument("--iterations", type=int, default=65)
    parser.add_argument(
        "--background_iterations", type=int, help="of the background's side; as many, if not given"
    )
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    start = read_checkpoint(find_checkpoint(args.init_from, "outputs"))["state_dict"]
    # seconds of collecting and learning without the delays
    own = train("sync", 0.0, 0.0, start, args, 6)
    collect = own["collect"] + own["decisions"] * args.delay_ms / 1000
    update = max(0.0, collect - own["learn"])
    counts = {"sync": args.iterations, "async": args.background_iterations or args.iterations}
    rows = {
        side: train(side, args.delay_ms, update, start, args, count)
        for side, count in counts.items()
    }
    ratio = rows["async"]["wall"] / rows["sync"]["wall"]
    result = {"delay_ms": args.delay_ms, "seed": args.seed, "wall_ratio": ratio, **rows}
    print(json.dumps(result, indent=2))
    if args.output:
        args.output.write_text(json.dumps(result, indent=2))


def train(
    side: str,
    delay_ms: float,
    update_seconds: float,
    start: dict[str, Any],
    args: argparse.Namespace,
    iterations: int,
) -> dict[str, float]:
    """Train one of the two runs; return its seconds and the success of the policy."""
    seed_everything(args.seed, verbose=False)
    config = yaml.safe_load(find_config("vla_ppo.yaml").read_text())
    settings = config["model"]["init_args"]
    policy_settings = settings.pop("policy")["init_args"]
    num_envs, steps = config["data"]["num_envs"], config["data"]["buffer_size"]
    kinds = {"sync": SyncCollector, "async": partial(AsyncCollector, max_staleness=1)}
    chunk = config["data"]["env"]["init_args"]["chunk_size"]
    data = RLDataModule(
        partial(ActionChunk, env=PushBlocks, chunk_size=chunk),
        num_envs=num_envs,
        buffer_size=steps,
        total_env_steps=num_envs * steps * chunk * iterations * 2,
        iterations_per_epoch=iterations,
        collector=kinds[side],
    )
    spaces = (data.observation_space, data.action_space)
    policy = SlowPolicy(*spaces, partial(VLAPolicy, **policy_settings), delay_ms)
    cloned = {key.removeprefix("policy."): value for key, value in start.items()}
    inner = policy.inner.state_dict()
    policy.inner.load_state_dict(
        {key: cloned[key] for key in inner} | {"version": inner["version"]}
    )
    clocks = SlowUpdate(update_seconds)
    with tempfile.TemporaryDirectory() as scratch:
        RLTrainer(
            run_dir=scratch,
            callbacks=[clocks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            limit_val_batches=0,
            max_epochs=1,
            accelerator="cpu",
        ).fit(PPO(policy, **settings), data)
    env = ActionChunk(args.episodes, PushBlocks, chunk)
    seeds = range(900_000, 900_000 + args.episodes)
    episodes = run_episodes(policy.inner, env, seeds)
    return {
        "wall": clocks.ends[-1],
        "collect": clocks.collected / iterations,
        "learn": clocks.learned / iterations,
        "decisions": steps,
        "success": sum(episode["success"] for episode in episodes) / args.episodes,
    }


if __name__ == "__main__":
    main()
