"""Time parts of the work that no library can do without.

`--env` steps the envs with random actions, vectorised as the libraries do. `--unwrapped` steps them
without wrappers and vector env (in W3: without time limit and reset). `--matmuls` multiplies the
matrices of the update: both networks, forward and backward, all minibatches of an iteration.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import gymnasium
import torch
from common import Clock, Run, parse
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from pendulum import ACTION_SIZE, OBSERVATION_SIZE, Pendulum, move

Action = Callable[[], Any]


def wrapped(run: Run) -> Action:
    work = run.workload
    if run.name == "W3":
        pendulum = Pendulum(work.num_envs, run.device, run.seed)
        pendulum.reset()
        torques = torch.rand(work.num_envs, 1, device=run.device) * 2 - 1
        return lambda: pendulum.step(torques)
    makers = [lambda: gymnasium.make(work.env)] * work.num_envs
    env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset(seed=run.seed)
    env.action_space.seed(run.seed)
    actions = [env.action_space.sample() for _ in range(work.steps)]
    turn = iter(range(10**12))
    return lambda: env.step(actions[next(turn) % work.steps])


def unwrapped(run: Run) -> Action:
    work = run.workload
    if run.name == "W3":
        pendulum = Pendulum(work.num_envs, run.device, run.seed)
        pendulum.reset()
        torques = torch.rand(work.num_envs, 1, device=run.device) * 2 - 1
        return lambda: move(pendulum.state, torques)
    spec = gymnasium.spec(work.env)
    envs = [gymnasium.make(work.env).unwrapped for _ in range(work.num_envs)]
    ages = [0] * work.num_envs
    for i, env in enumerate(envs):
        env.reset(seed=run.seed + i)
        env.action_space.seed(run.seed + i)
    actions = [envs[0].action_space.sample() for _ in range(work.steps)]
    turn = iter(range(10**12))

    def step() -> None:
        action = actions[next(turn) % work.steps]
        for i, env in enumerate(envs):
            terminated = env.step(action)[2]
            ages[i] += 1
            if terminated or ages[i] >= spec.max_episode_steps:
                env.reset()
                ages[i] = 0

    return step


def matmuls(run: Run) -> Action:
    """Return one minibatch's products, written into the same memory every time."""
    work, calls = run.workload, []
    if run.name == "W3":
        inputs, outputs = OBSERVATION_SIZE, ACTION_SIZE
    else:
        env = gymnasium.make(work.env)
        inputs = env.observation_space.shape[0]
        discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
        outputs = int(env.action_space.n) if discrete else env.action_space.shape[0]
    for last in (outputs, 1):
        sizes = [inputs, *work.hidden, last]
        for layer, (wide, narrow) in enumerate(pairwise(sizes)):
            shapes = ((work.batch_size, wide), (narrow, wide), (work.batch_size, narrow))
            x, weight, y = (torch.randn(shape, device=run.device) for shape in shapes)
            grad = torch.empty_like(weight)
            calls += [(x, weight.t(), y), (y.t(), x, grad)]
            if layer > 0:
                calls.append((y, weight, torch.empty_like(x)))

    def minibatch() -> None:
        for left, right, out in calls:
            torch.mm(left, right, out=out)

    return minibatch


def main() -> None:
    run = parse(("W1", "W2", "W2b", "W3"), "env", "unwrapped", "matmuls")
    work, clock = run.workload, Clock(run)
    torch.manual_seed(run.seed)
    if run.flags.matmuls:
        name, part, act = "floor: matmuls of the update", "update", matmuls(run)
        repeats = work.epochs * work.minibatches
    elif run.flags.unwrapped:
        name, part, act = "floor: env, unwrapped", "collect", unwrapped(run)
        repeats = work.steps
    else:
        name, part, act, repeats = "floor: env, random actions", "collect", wrapped(run), work.steps
    clock.start()
    with torch.no_grad():
        for _ in range(run.total):
            began = clock.now()
            for _ in range(repeats):
                act()
            clock.add(part, clock.now() - began)
            clock.end_iteration(rest=False)
    clock.report(name, None if run.flags.matmuls or run.name == "W3" else "gymnasium")


if __name__ == "__main__":
    main()
