"""Train a small VLA with shards (FSDP2), and compare it with whole policies.

Started once by the check, and by it as a worker on each rank, as `processes.py` is.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from findings import Findings
from lightning.pytorch import seed_everything
from processes import end_with_launcher, launch
from training import accelerator, difference

from lightning_rl import (
    GRPO,
    PPO,
    ActionChunk,
    FSDP2Strategy,
    PushBlocks,
    RLDataModule,
    RLTrainer,
    VLAPolicy,
)
from lightning_rl.system.sharded import local, whole_state
from scripting import QUIET

TOLERANCE = 1e-5
"""Between the weights of both after three iterations."""


def in_shards(findings: Findings) -> None:
    """Compare `fsdp` with `ddp`, on two devices if there are two."""
    world = 2 if findings.device == "cpu" or torch.cuda.device_count() > 1 else 1
    strategies = ("ddp", "fsdp", "sharded", "bf16")
    plain, *others = (_ranks(findings, strategy, world) for strategy in strategies)
    for name, ranks in zip(("fsdp", "acting sharded"), others, strict=False):
        for algorithm, state in ranks[0]["states"].items():
            gap = difference(plain[0]["states"][algorithm], state)
            title = f"{world} ranks, {ranks[0]['backend']}: {algorithm}, {name}, to ddp"
            findings.compare(title, gap, TOLERANCE)
        share = ranks[0]["kept"] / plain[0]["kept"]
        bar = f"at most {0.1 + 1 / world:.2f}"
        findings.add(f"{name}: kept bytes, to ddp", share <= 0.1 + 1 / world, f"{share:.2f}", bar)
    gap = difference(plain[0]["states"]["PPO"], others[2][0]["states"]["PPO"])
    findings.compare("bf16-mixed, fsdp, to float32", gap, 0.1)


def _ranks(findings: Findings, strategy: str, world: int) -> list[dict[str, Any]]:
    """Train on all ranks; return what they left."""
    launch(__file__, [str(findings.directory), findings.device, strategy], world, world)
    paths = [findings.directory / f"{strategy}.{rank}.pt" for rank in range(world)]
    return [torch.load(path, weights_only=True) for path in paths]


def work() -> None:
    """Train on this rank, and leave what became of it."""
    place, device, strategy = sys.argv[1:]
    directory = Path(place)
    end_with_launcher()
    states, kept = {}, 0
    for algorithm, settings in (
        (PPO, {}),
        (GRPO, {"group_size": 2, "kl_coef": 0.5, "ent_coef": 0.1}),
    ):
        module, kept = _train(directory, device, strategy, algorithm, settings)
        state = whole_state(module.policy)
        states[algorithm.__name__] = {name: value.cpu() for name, value in state.items()}
    content = {"states": states, "kept": kept, "backend": torch.distributed.get_backend()}
    torch.save(content, directory / f"{strategy}.{os.environ['RANK']}.pt")


def _train(
    directory: Path, device: str, strategy: str, algorithm: Any, settings: dict[str, Any]
) -> tuple[Any, int]:
    """Train on this rank; return the module, and the bytes that the rank keeps."""
    seed_everything(3)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    data = RLDataModule(
        lambda n: ActionChunk(n, lambda k: PushBlocks(k, size=16, device=device), 2),
        num_envs=4,
        buffer_size=5,
        total_env_steps=10**6,
        iterations_per_epoch=3,
    )
    policy = VLAPolicy(data.observation_space, data.action_space, num_bins=5)
    module = algorithm(policy, n_epochs=2, batch_size=8, compile=False, **settings)
    strategies = {"ddp": "ddp", "fsdp": "fsdp", "bf16": "fsdp", "sharded": FSDP2Strategy("sharded")}
    trainer = RLTrainer(
        run_dir=str(directory / f"{strategy} {algorithm.__name__}"),
        strategy=strategies[strategy],
        accelerator=accelerator(device),
        devices=int(os.environ["WORLD_SIZE"]),
        precision="bf16-mixed" if strategy == "bf16" else "32-true",
        max_epochs=1,
        **QUIET | {"enable_checkpointing": True},
    )
    trainer.fit(module, data)
    states = [x for state in trainer.optimizers[0].state.values() for x in state.values()]
    return module, sum(local(x).nbytes for x in (*module.parameters(), *states))


if __name__ == "__main__":
    work()
