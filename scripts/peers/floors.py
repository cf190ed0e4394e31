"""Time parts of the work that no library can do without.

`--env` steps the envs with random actions, vectorised as the libraries do. `--unwrapped` steps them
without wrappers and vector env (in W3: without time limit and reset), and without MuJoCo's
profiler. `--matmuls` multiplies the matrices of the update: both networks, forward and backward,
all minibatches of an iteration; of SAC those of `sac_products`; in W4 also those of acting, step by
step, and of the values of a rollout.
"""

import gc
import timeit
from collections.abc import Callable
from functools import partial
from itertools import cycle, pairwise
from typing import Any

import gymnasium
import torch
from common import OFF_POLICY, ON_POLICY, W4, Clock, Run, parse
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from pendulum import ACTION_SIZE, OBSERVATION_SIZE, Pendulum, move
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_rl import CartPole
from lightning_rl.compiled.graphs import compile_graph
from lightning_rl.envs.gymnasium.mujoco_bindings import set_mujoco_profiler

Action = Callable[[], Any]

TORCH = ("W3", "S64")
"""Workloads whose env is the pendulum in torch."""
BLOCK = 2048
"""Samples whose products are made one after the other."""


def pendulum_of(run: Run) -> tuple[Pendulum, torch.Tensor]:
    """Return the pendulums of a workload, and random torques for all of them."""
    pendulum = Pendulum(run.workload.num_envs, run.device, run.seed)
    pendulum.reset()
    return pendulum, torch.rand(run.workload.num_envs, 1, device=run.device) * 2 - 1


def wrapped(run: Run) -> Action:
    work = run.workload
    if run.name in TORCH:
        pendulum, torques = pendulum_of(run)
        return lambda: pendulum.step(torques)
    makers = [lambda: gymnasium.make(work.env)] * work.num_envs
    env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset(seed=run.seed)
    env.action_space.seed(run.seed)
    actions = cycle([env.action_space.sample() for _ in range(work.steps)])
    return lambda: env.step(next(actions))


def unwrapped(run: Run) -> Action:
    work = run.workload
    if run.name in TORCH:
        pendulum, torques = pendulum_of(run)
        return lambda: move(pendulum.state, torques)
    limit = gymnasium.spec(work.env).max_episode_steps
    envs = [gymnasium.make(work.env).unwrapped for _ in range(work.num_envs)]
    set_mujoco_profiler(enabled=False)
    ages = [0] * work.num_envs
    for i, env in enumerate(envs):
        env.reset(seed=run.seed + i)
        env.action_space.seed(run.seed + i)
    actions = cycle([envs[0].action_space.sample() for _ in range(work.steps)])

    def step() -> None:
        action = next(actions)
        for i, env in enumerate(envs):
            terminated = env.step(action)[2]
            ages[i] += 1
            if terminated or ages[i] >= limit:
                env.reset()
                ages[i] = 0

    return step


def matmuls(run: Run) -> Action:
    """Return one minibatch's products, block by block: blocks of samples stay in the cache.

    On a CPU each is by the faster of MKL and oneDNN, or all are one compiled graph; whichever takes
    less time.
    """
    work = run.workload
    rows = min(BLOCK, work.replay_batch_size or work.batch_size)
    inputs, outputs = sizes_of(run)
    if work.replay_batch_size:
        networks = sac_products(inputs, outputs, work.hidden)
    else:
        networks = [([inputs, *work.hidden, last], 1, True, False) for last in (outputs, 1)]
    block = products(run, networks, rows)

    def minibatch() -> None:
        for _ in range(1 if work.replay_batch_size else work.batch_size // rows):
            block()

    return minibatch


def rollout_matmuls(run: Run) -> Action:
    """Return the products of collecting: the actor at each step, the critic once per rollout."""
    work = run.workload
    inputs, outputs = sizes_of(run)
    act = products(run, [([inputs, *work.hidden, outputs], 1, False, False)], work.num_envs)
    rows = min(BLOCK, work.env_steps)
    value = products(run, [([inputs, *work.hidden, 1], 1, False, False)], rows)

    def rollout() -> None:
        for _ in range(work.steps):
            act()
        for _ in range(work.env_steps // rows):
            value()

    return rollout


def sizes_of(run: Run) -> tuple[int, int]:
    """Return how many numbers a policy reads, and how many it writes."""
    work = run.workload
    if run.name in TORCH:
        return OBSERVATION_SIZE, ACTION_SIZE
    if run.name in W4:
        cart_pole = CartPole(1)
        return cart_pole.single_observation_space.shape[0], cart_pole.single_action_space.shape[0]
    env = gymnasium.make(work.env)
    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    outputs = int(env.action_space.n) if discrete else env.action_space.shape[0]
    return env.observation_space.shape[0], outputs


def products(run: Run, networks: list[tuple[list[int], int, bool, bool]], rows: int) -> Action:
    """Return the products of so many rows; of each network as `sac_products` tells of it."""
    pairs = []
    for sizes, forwards, weights, of_input in networks:
        for layer, (wide, narrow) in enumerate(pairwise(sizes)):
            shapes = ((rows, wide), (narrow, wide), (rows, narrow))
            x, weight, y = (torch.randn(shape, device=run.device) for shape in shapes)
            pairs += [(x, weight.t())] * forwards
            if weights:
                pairs.append((y.t(), x))
            if of_input or (weights and layer > 0):
                pairs.append((y, weight))
    return fastest([one_by_one(pairs), *([graph(pairs)] if run.device == "cpu" else [])])


def sac_products(
    inputs: int, outputs: int, hidden: tuple[int, ...]
) -> list[tuple[list[int], int, bool, bool]]:
    """Return what one update of SAC with two critics cannot do without.

    Of each pass: sizes of the layers, passes forward, whether the derivatives by the weights are
    asked for, and whether those by the input. The targets take the actor and both target critics
    forward; the critics' loss, both critics forward and back; the actor's loss, actor and both
    critics forward, and back to the actor through them.
    """
    critic, actor = [inputs + outputs, *hidden, 1], [inputs, *hidden, 2 * outputs]
    of_one = [(critic, 1, False, False), (critic, 1, True, False), (critic, 1, False, True)]
    return [*of_one, *of_one, (actor, 1, False, False), (actor, 1, True, False)]


def one_by_one(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Action:
    """Return a call for each product, MKL's into the same memory every time."""
    calls = []
    for left, right in pairs:
        out = left.new_empty(left.shape[0], right.shape[1])
        ways: list[Action] = [partial(torch.mm, left, right, out=out)]
        if left.device.type == "cpu" and torch.backends.mkldnn.is_available():
            linear = torch.ops.mkldnn._linear_pointwise.default
            ways.append(partial(linear, left, right.t(), None, "none", [], ""))
        calls.append(fastest(ways))

    def block() -> None:
        for call in calls:
            call()

    return block


def graph(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Action:
    """Return the products as one graph, as a compiled update of lightning_rl has them."""
    inputs = [matrix for pair in pairs for matrix in pair]
    traced = make_fx(lambda *m: list(map(torch.mm, m[::2], m[1::2])))(*inputs)
    calls = compile_graph(traced, [], inputs)
    return lambda: calls(*inputs)


def fastest(ways: list[Action]) -> Action:
    return min(ways, key=lambda way: min(timeit.repeat(way, number=20, repeat=5)))


def main() -> None:
    run = parse((*ON_POLICY, *W4, *OFF_POLICY), "env", "unwrapped", "matmuls")
    work, clock = run.workload, Clock(run)
    torch.manual_seed(run.seed)
    if run.flags.matmuls:
        name = "floor: matmuls of the update"
        parts = [("update", matmuls(run), work.updates or work.epochs * work.minibatches)]
        if run.name in W4:
            name = "floor: matmuls of acting, values and update"
            parts.append(("collect", rollout_matmuls(run), 1))
    elif run.flags.unwrapped:
        name, parts = "floor: env, unwrapped", [("collect", unwrapped(run), work.steps)]
    else:
        name, parts = "floor: env, random actions", [("collect", wrapped(run), work.steps)]
    gc.freeze()  # what was imported is not to be looked through while the clock runs
    clock.start()
    with torch.no_grad():
        for _ in range(run.total):
            for part, act, repeats in parts:
                began = clock.now()
                for _ in range(repeats):
                    act()
                clock.add(part, clock.now() - began)
            clock.end_iteration(rest=False)
    clock.report(name, None if run.flags.matmuls or run.name in TORCH else "gymnasium")


if __name__ == "__main__":
    main()
