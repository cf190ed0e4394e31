"""Shard a module's parameters over processes (FSDP2), and gather them."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_rl import Policy, PolicyWrapper
from lightning_rl.extend.algorithms import shard_like
from lightning_rl.extend.errors import require
from lightning_rl.extensions.fsdp.sharding import Acting, Sharding


class FSDP2Strategy(ModelParallelStrategy):
    """Shard parameters, gradients and optimizer states over the processes: `strategy: fsdp`.

    Each process has its envs, as with `ddp`. A checkpoint is one file with whole tensors, as from
    one process; any number of processes can resume from it.

    Args:
        acting: `whole` gathers the policy once per rollout and per batch of evaluation episodes,
            and needs memory for a whole policy. `sharded` gathers each block at each step, which
            all processes take together.
        process_group_backend: `nccl` or `gloo`. Default: by the device.
        timeout: timeout of an exchange between processes.
    """

    def __init__(
        self,
        acting: Acting = "whole",
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.acting: Acting = acting

    def shard(self, policy: Policy, compile: bool | str = "auto") -> None:
        """Shard a policy over all processes, in place, and set its `sharding`.

        Raises:
            ConfigurationError: if the setting `compile` of the update is true.
        """
        require(
            compile is not True,
            "trainer.strategy fsdp does not compile updates, but model.compile is true: remove it, "
            "or use --trainer.strategy ddp.",
        )
        if isinstance(policy, PolicyWrapper):
            return self.shard(policy.inner)
        policy.sharding = Sharding(policy, self.device_mesh["data_parallel"], self.acting)

    def setup_environment(self) -> None:
        # Shard over all processes; Lightning's default is one data process per node.
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    # Lightning's strategy would restore checkpoints in its own format, after `on_fit_start`.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self._on_first(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        saved = optimizer.state_dict()
        return saved | {"state": {i: self._on_first(state) for i, state in saved["state"].items()}}

    def _on_first(self, state: Mapping[str, Any]) -> dict[str, Any]:
        gathered_state = {}
        for name, value in state.items():
            # All ranks take part in gathering; only the first needs the result.
            gathered = value.full_tensor().cpu() if isinstance(value, DTensor) else value
            if self.is_global_zero:
                gathered_state[name] = gathered
        return gathered_state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        # Skip ModelParallelStrategy, which does not use `checkpoint_io`.
        ParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        targets = self.lightning_module.state_dict()
        state = {k: shard_like(targets.get(k), v) for k, v in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(state, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = []
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            # An optimizer numbers its states by the order of the parameters in its groups.
            numbered = dict(enumerate(parameters))
            state = {
                i: {name: shard_like(numbered.get(i), value) for name, value in entries.items()}
                for i, entries in saved["state"].items()
            }
            states.append(saved | {"state": state})
        ParallelStrategy.load_optimizer_state_dict(self, {"optimizer_states": states})
