"""Measure the env steps per second of the tasks, with random actions or in rollouts.

    python scripts/bench_tasks.py --threads 2
    python scripts/bench_tasks.py --device cuda --num-envs 4096 16384 65536
    python scripts/bench_tasks.py --threads 1 --num-envs 8 64 256 1024 --rollouts 32

Prints a Markdown table in thousands of env steps per second. A measurement is the best of several
rounds, because other load only slows; it covers all of `step`: rewards, metrics and new episodes.
With `--rollouts`, a policy of two perceptrons of 64x64 acts, and rollouts of that many steps are
written: eager and compiled ones alternate, and the table has their ratio.
"""

import argparse
import time

import torch

from lightning_rl import ActorCritic, CartPole, CollectorContext, PointMass, PushCube, SyncCollector
from lightning_rl.compiled.choice import CompileDecision, StepsCompileDecision
from lightning_rl.extensions.tasks.base import Task

TASKS = (CartPole, PushCube, PointMass)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rollouts", type=int, help="collect, in rollouts of so many steps")
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
        cells = [make.__name__]
        for n in args.num_envs:
            if args.rollouts:
                eager, compiled = collect(make, n, args)
                ratio = f"{compiled / eager:.1f}"
                cells.append(f"{eager / 1000:,.0f}, {compiled / 1000:,.0f} ({ratio})")
            else:
                rate = measure(make(n, device=args.device), args.seconds / args.rounds, args.rounds)
                cells.append(f"{rate / 1000:,.0f}")
        print("| " + " | ".join(cells) + " |", flush=True)


def collect(make: type[Task], num_envs: int, args: argparse.Namespace) -> tuple[float, float]:
    """Return the env steps per second of the best rollout, eagerly and compiled."""
    collectors = []
    for compiled in (False, True):
        env = make(num_envs, device=args.device)
        torch.manual_seed(0)
        policy = ActorCritic(env.single_observation_space, env.single_action_space)
        choice = StepsCompileDecision(compiled, None, CompileDecision(compiled, None))
        policy = policy.to(args.device)
        context = CollectorContext(env, policy, args.rollouts, 1, compilation=choice)
        collectors.append(SyncCollector(context))
        if compiled and not choice.compiled:
            raise SystemExit(f"{make.__name__} is not stepped compiled: {choice.why}")
    best = [0.0, 0.0]
    begin = time.perf_counter()
    while time.perf_counter() - begin < args.seconds * args.rounds:
        for i, collector in enumerate(collectors):
            start = time.perf_counter()
            collector.collect()
            if args.device != "cpu":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            best[i] = max(best[i], args.rollouts * num_envs / seconds)
    return best[0], best[1]


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
