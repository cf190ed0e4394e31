"""Estimate the memory of training at the start, before it runs out."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.optim.update import CPU_MICRO_BATCH
from lightning_rl.policies import Policy
from lightning_rl.policies.precision import autocast
from lightning_rl.rollout.contract import final_storage, flat_transitions
from lightning_rl.system.sharded import local
from lightning_rl.training.callbacks.typed import algorithm_of, data_of

WORTH_SAYING = 64 * 2**20
"""Minimum bytes to print an estimate."""

SAMPLES = 2
"""Number of samples on which the activations are measured."""


class MemoryEstimate(Callback):
    """Print the estimated memory of training, part by part, with the first rollout.

    Activations are measured in a forward pass of a few samples, and scaled to the samples per pass,
    without temporary memory. They are omitted if the policy does not evaluate actions.
    """

    def __init__(self) -> None:
        self._done = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict, batch_idx: int
    ) -> None:
        sharded = algorithm_of(pl_module).policy.sharding is not None
        if self._done or not (trainer.is_global_zero or sharded):
            return
        self._done = True
        parts = memory_parts(trainer, pl_module, batch)  # of a sharded policy by all ranks
        if not trainer.is_global_zero:
            return
        total, bar = sum(parts.values()), trainer.progress_bar_callback
        if total >= WORTH_SAYING and bar is not None:
            listed = ", ".join(f"{name} {_text(size)}" for name, size in parts.items() if size)
            bar.print(f"Memory, estimated: {_text(total)} = {listed}")


def memory_parts(trainer: Trainer, module: LightningModule, rollout: TensorDict) -> dict[str, int]:
    """Return the bytes that training keeps, by part, estimated from the first rollout [N, T+1]."""
    algorithm, collector = algorithm_of(module), data_of(trainer).collector
    gradients = sum(local(p).nbytes for p in module.parameters() if p.requires_grad)
    assert collector is not None
    kinds = (torch.optim.Adam, torch.optim.AdamW)
    averages = 2 if any(isinstance(entry, kinds) for entry in trainer.optimizers[:1]) else 0
    policy = algorithm.policy
    samples = min(algorithm.batch_size, policy.micro_batch_size or CPU_MICRO_BATCH)
    if policy.micro_batch_size is None and policy.version.device.type != "cpu":
        samples = algorithm.batch_size
    try:
        sample_bytes = activation_bytes(policy, rollout)
    except Exception:  # an estimate must not end a run
        sample_bytes = 0
    weights = sum(local(t).nbytes for t in (*module.parameters(), *module.buffers()))
    return {
        "weights": weights + (2 * gradients if collector.in_background else 0),  # acting, published
        "gradients": gradients,
        "optimizer": averages * gradients,
        "rollouts": (collector.num_rollouts + 1) * rollout.bytes()  # one more: the flat copy
        + collector.num_rollouts * final_storage(rollout).nbytes,
        f"activations of {samples} samples": samples * sample_bytes,
    }


def activation_bytes(policy: Policy, rollout: TensorDict) -> int:
    """Return the bytes per sample of a rollout [N, T+1] that a forward pass saves."""
    policy.put_in_eval_mode()  # eval mode as in the update: dropout would use torch's generator
    keys = sorted({"observation", "action", *policy.extra_fields})
    samples = flat_transitions(rollout, keys)[:SAMPLES].clone()  # not views of the rollout
    tensors = map(local, (*policy.parameters(), *policy.buffers()))
    weights = {t.untyped_storage().data_ptr() for t in tensors}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    precision = autocast(policy.version.device, policy.autocast_dtype)
    watched = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    with precision, torch.enable_grad(), watched:
        new = policy.evaluate_actions(samples)  # keep the tensor, so that no storage is reused
        del new
    return sum(saved.values()) // len(samples)


def _text(size: int) -> str:
    number, unit = (size / 2**30, "GiB") if size >= 2**30 else (size / 2**20, "MiB")
    return f"{number:.0f} {unit}" if number >= 10 else f"{number:.1f} {unit}"
