"""Measure the env steps per second of the tasks, with random actions or in rollouts.

    python scripts/bench_tasks.py --threads 2
    python scripts/bench_tasks.py --device cuda --num-envs 4096 16384 65536
    python scripts/bench_tasks.py --threads 1 --num-envs 8 64 256 1024 --rollouts 32

Prints a Markdown table in thousands of env steps per second. A measurement is the best of several
rounds, because other load only slows; it covers all of `step`: rewards, metrics and new episodes.
With `--rollouts`, a policy of two perceptrons of 64x64 acts, and rollouts of that many steps are
written: eager and compiled ones alternate, and the table has their ratio.
"""

import time

import torch

from lightning_rl import ActorCritic, CartPole, CollectorContext, PointMass, PushCube, SyncCollector
from lightning_rl.compiled.choice import CompileDecision, StepsCompileDecision
from lightning_rl.extensions.tasks.base import Task
from scripting import parser_of, table

TASKS = (CartPole, PushCube, PointMass)
SECONDS, ROUNDS = 5.0, 5
"""Of a measurement: the best round counts."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rollouts", type=int, help="collect, in rollouts of so many steps")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"{args.device}, {args.threads} thread(s), torch {torch.__version__}; 1,000 env steps/s\n"
    )
    rows = []
    for make in TASKS:
        rows.append([make.__name__])
        for n in args.num_envs:
            if args.rollouts:
                eager, compiled = collect(make, n, args.device, args.rollouts, SECONDS)
                ratio = f"{compiled / eager:.1f}"
                rows[-1].append(f"{eager / 1000:,.0f}, {compiled / 1000:,.0f} ({ratio})")
            else:
                rows[-1].append(f"{measure(make(n, device=args.device)) / 1000:,.0f}")
    print("\n".join(table(("Task", *(f"{n:,} envs" for n in args.num_envs)), rows)))


def collect(
    make: type[Task], num_envs: int, device: str, steps: int, seconds: float
) -> tuple[float, float]:
    """Return the env steps per second of the best rollout, eagerly and compiled."""
    collectors = [collector(make(num_envs, device=device), steps, c) for c in (False, True)]
    decision = collectors[1].context.compilation
    if not decision.compiled:
        raise SystemExit(f"{make.__name__} is not stepped compiled: {decision.why}")
    best = [0.0, 0.0]
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for i, each in enumerate(collectors):
            start = time.perf_counter()
            each.collect()
            if device != "cpu":
                torch.cuda.synchronize()
            rate = steps * num_envs / (time.perf_counter() - start)
            best[i] = max(best[i], rate)
    return best[0], best[1]


def collector(env: Task, steps: int, compiled: bool) -> SyncCollector:
    """Return what collects rollouts of an env with a small policy."""
    torch.manual_seed(0)
    policy = ActorCritic(env.single_observation_space, env.single_action_space).to(env.device)
    decision = StepsCompileDecision(compiled, None, CompileDecision(compiled, None))
    return SyncCollector(CollectorContext(env, policy, steps, 1, compilation=decision))


@torch.no_grad()
def measure(env: Task) -> float:
    """Return the env steps per second of the best round."""
    env.reset(seed=0)
    generator = torch.Generator(env.device).manual_seed(0)
    shape = (32, env.num_envs, *(env.single_action_space.shape or ()))
    actions = torch.randn(shape, generator=generator, device=env.device).unbind(0)
    best = 0.0
    for _ in range(ROUNDS + 1):
        steps, begin = 0, time.perf_counter()
        while (now := time.perf_counter()) - begin < SECONDS / ROUNDS or not steps:
            for action in actions:
                env.step(action)
            if env.device.type == "cuda":
                torch.cuda.synchronize()
            steps += len(actions)
        best = max(best, steps * env.num_envs / (now - begin))
    return best


if __name__ == "__main__":
    main()
