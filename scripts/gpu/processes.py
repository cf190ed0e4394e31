"""Train with several processes: equal on all ranks, and equal to one process with all envs.

Started once by the check, and by it as a worker on each rank:

    python -m torch.distributed.run ... processes.py DIRECTORY DEVICE small|full PER_NODE
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from findings import Findings
from lightning.pytorch.strategies import DDPStrategy
from tensordict import TensorDict
from training import Watch, difference, state_of, train

from lightning_rl import GRPO, ActorCritic, PushCube
from lightning_rl.buffers.segments import rollout_from, rollout_state
from lightning_rl.collectors import Collector, CollectorContext, SyncCollector
from lightning_rl.system import ranks

RECORDED, STEPS, ITERATIONS = 16, 16, 3
"""Envs of all ranks together and their steps, in the rollouts that all runs learn the same from."""

TOLERANCE = 1e-5
"""Between ranks that add up gradients of their parts, and one process that has the whole."""

TIMEOUT = 200.0


def in_processes(findings: Findings) -> None:
    """Compare one process, one with a group of its own, and two ranks."""
    _record(findings)
    alone = {name: state_of(run.module) for name, run in _runs(findings, 1, dict).items()}
    _compare(findings, "one process in a group", alone, _ranks(findings, 1, 1))
    if findings.device == "cpu" or torch.cuda.device_count() > 1:
        _compare(findings, "two ranks", alone, _ranks(findings, 2, 2))
        return
    findings.add("two ranks, a device each (NCCL)", None, "one device here")
    # NCCL refuses two ranks on one device; gloo takes its tensors.
    _compare(findings, "two ranks on one device (gloo)", alone, _ranks(findings, 2, 1))


def _record(findings: Findings) -> None:
    """Collect rollouts of all envs with some policy, for every run to learn from."""
    torch.manual_seed(1)
    env = PushCube(RECORDED, device=findings.device)
    spaces = env.single_observation_space, env.single_action_space
    policy = ActorCritic(*spaces, (64, 64)).to(findings.device)
    collector = SyncCollector(CollectorContext(env, policy, STEPS, seed=5))
    rollouts = []
    for version in range(ITERATIONS):
        rollout = collector.collect().clone()
        rollout["policy_version"].fill_(version)
        rollouts.append(rollout_state(rollout.cpu()))
    torch.save(rollouts, findings.directory / "rollouts.pt")


class Replayed(Collector):
    """Hand out recorded rollouts: to each rank its rows."""

    def __init__(self, path: Path, context: CollectorContext) -> None:
        super().__init__(context)
        rows = slice(ranks.rank() * self.env.num_envs, (ranks.rank() + 1) * self.env.num_envs)
        device = self.policy.version.device
        self.rollouts = [
            rollout_from(state)[rows].to(device) for state in torch.load(path, weights_only=True)
        ]

    def collect(self) -> TensorDict:
        return self.count_rollout(self.rollouts.pop(0).clone(), envs_were_reset=False, reports={})


def _runs(
    findings: Findings, world: int, trainer: Callable[[], dict[str, Any]]
) -> dict[str, Watch]:
    """Train in each way, as one of `world` processes; each trainer needs a strategy of its own."""
    replayed = {
        "num_envs": RECORDED // world,
        "buffer_size": STEPS,
        "collector": partial(Replayed, findings.directory / "rollouts.pt"),
        "total_env_steps": RECORDED * STEPS * ITERATIONS,
        "iterations_per_epoch": ITERATIONS,
    }
    # All that a rank has at once: shuffled apart, smaller minibatches would not be the same ones.
    batch = {"batch_size": RECORDED * STEPS // world, "n_epochs": 3}

    def named(name: str, **settings: Any) -> Watch:
        return train(findings, name, trainer=trainer(), **settings)

    suffix = f" {world}.{ranks.rank()}"
    groups = {"algorithm": GRPO, "model": batch | {"group_size": 4}}
    runs = {
        "PPO": named(f"PPO replayed{suffix}", data=replayed, model=batch),
        "GRPO": named(f"GRPO replayed{suffix}", data=replayed, **groups),
    }
    if findings.device == "cuda" or not findings.small:
        model = batch | {"compile": True}
        runs["PPO compiled"] = named(f"PPO compiled{suffix}", data=replayed, model=model)
    # Envs of their own, which no single process has: ranks are compared with each other alone.
    own = {"num_envs": 16, "buffer_size": 16, "total_env_steps": 16 * 16 * 3 * world}
    runs["own envs"] = named(f"own envs{suffix}", data=own, model={"batch_size": 64})
    return runs


def launch(script: str, arguments: Sequence[str], world: int, per_node: int) -> None:
    """Run a worker on all ranks, `per_node` on what counts as one machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = world // per_node
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={per_node}"]
    launcher += [f"--nnodes={nodes}", "--master_addr=127.0.0.1", f"--master_port={port}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*launcher, f"--node_rank={node}", script, *arguments], env=env)
        for node in range(nodes)
    ]
    statuses = [process.wait(timeout=TIMEOUT) for process in processes]
    if any(statuses):
        raise RuntimeError(f"The launcher of {world} ranks left with {statuses}; see stderr.")


def _ranks(findings: Findings, world: int, per_node: int) -> list[dict[str, Any]]:
    """Train on all ranks; return what they left."""
    size = "small" if findings.small else "full"
    arguments = [str(findings.directory), findings.device, size, str(per_node)]
    launch(__file__, arguments, world, per_node)
    paths = [findings.directory / f"{world}.{rank}.pt" for rank in range(world)]
    return [torch.load(path, weights_only=True) for path in paths]


def _compare(
    findings: Findings,
    title: str,
    alone: dict[str, dict[str, torch.Tensor]],
    ranks_left: list[dict[str, Any]],
) -> None:
    """Compare the ranks with each other, and those with rollouts of all envs with one process."""
    backend = ranks_left[0]["backend"]
    states = [rank["states"] for rank in ranks_left]
    if len(states) > 1:
        gap = max(difference(states[0][name], states[1][name]) for name in states[0])
        findings.compare(f"{title}, {backend}: the ranks", gap)
    for name, state in states[0].items():
        if name == "own envs" and len(states) > 1:
            continue
        expected = {key: value for key, value in alone[name].items() if key in state}
        gap = difference(expected, state)
        findings.compare(f"{title}, {backend}: {name}, to one process", gap, TOLERANCE)


def work() -> None:
    """Train on this rank, and leave what became of it."""
    directory, device, size, ranks_of_node = sys.argv[1:]
    per_node = int(ranks_of_node)
    end_with_launcher()
    world = int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        # Before envs are made: their device is `cuda`, which is the current one.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    findings = Findings(device, size == "small", Path(directory))
    # Not the directory's own findings, which the check is writing.
    findings.save = lambda: None  # type: ignore[method-assign]
    shared = device == "cuda" and per_node < world
    sizes = {"devices": per_node, "num_nodes": world // per_node}

    def trainer() -> dict[str, Any]:
        strategy = DDPStrategy(process_group_backend="gloo") if shared else "ddp"
        return {"strategy": strategy} | sizes

    runs = _runs(findings, world, trainer)
    content = {
        "backend": torch.distributed.get_backend(),
        "states": {name: state_of(run.module) for name, run in runs.items()},
    }
    torch.save(content, Path(directory) / f"{world}.{os.environ['RANK']}.pt")


def end_with_launcher() -> None:
    """Have this process killed with its launcher, which starts it in a session of its own."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    work()
