"""Train a policy whose weights are sharded over processes (FSDP2)."""

from lightning_rl.extensions.fsdp.strategy import FSDP2Strategy as FSDP2Strategy
