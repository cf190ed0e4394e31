"""Measure how many env steps per second the tasks take, with random actions.

    python scripts/bench_tasks.py --threads 2
    python scripts/bench_tasks.py --device cuda --num-envs 4096 16384 65536

Prints a Markdown table, in thousands of env steps per second. A measurement is the best of several
rounds, since what else runs on the machine only ever takes away; the time of all of `step` counts,
with rewards, metrics and the starts of new episodes.
"""

import argparse
import time

import torch

from lightning_rl.envs import CartPole, PointMass, PushCube
from lightning_rl.envs.tasks.base import Task

TASKS = (CartPole, PushCube, PointMass)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=5, help="of a measurement, the best counts")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"{args.device}, {args.threads} thread(s), torch {torch.__version__}; 1,000 env steps/s\n"
    )
    print("| Task | " + " | ".join(f"{n:,} envs" for n in args.num_envs) + " |")
    print("|---" * (len(args.num_envs) + 1) + "|")
    for make in TASKS:
        rates = [
            measure(make(n, device=args.device), args.seconds / args.rounds, args.rounds)
            for n in args.num_envs
        ]
        cells = [make.__name__, *(f"{rate / 1000:,.0f}" for rate in rates)]
        print("| " + " | ".join(cells) + " |", flush=True)


@torch.no_grad()
def measure(env: Task, seconds: float, rounds: int) -> float:
    """Return the env steps per second of the best round."""
    env.reset(seed=0)
    generator = torch.Generator(env.device).manual_seed(0)
    shape = (32, env.num_envs, *(env.single_action_space.shape or ()))
    actions = torch.randn(shape, generator=generator, device=env.device).unbind(0)
    best = 0.0
    for _ in range(rounds + 1):
        steps, begin = 0, time.perf_counter()
        while (now := time.perf_counter()) - begin < seconds or not steps:
            for action in actions:
                env.step(action)
            if env.device.type == "cuda":
                torch.cuda.synchronize()
            steps += len(actions)
        best = max(best, steps * env.num_envs / (now - begin))
    return best


if __name__ == "__main__":
    main()
