"""Train with shards on several ranks, and leave what became of it in files; `test_fsdp.py` reads them.

python -m torch.distributed.run --standalone --nproc_per_node 2 -m tests.equivalence.fsdp_runs DIRECTORY quick

does the same outside of the suite; instead of quick: slow, four or killed.
"""

import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_rl as rl
from lightning_rl.collectors.weights import changing_weights
from lightning_rl.extensions.vla.backbone import Features
from lightning_rl.system import ranks
from lightning_rl.system.sharded import local, whole_state
from tests.callbacks import at_iteration, callback, signal_at
from tests.helpers import fit_in, last
from tests.numerics.test_vla_loading import CONFIGS
from tests.variants import after, before, passing


class Layers(rl.Backbone):
    """Layers of one size, of which one at a time is gathered."""

    blocks = ("layers.*",)
    slot_size, summary_size = 8, 64

    def __init__(self, meta: bool = False) -> None:
        super().__init__()
        self.meta = meta

    def build(self, observation, num_slots):
        with torch.device("meta" if self.meta and not ranks.is_first_process() else "cpu"):
            self.first = nn.Linear(48, 64)
            self.layers = nn.ModuleList([Layer(64, 64) for _ in range(14)])
            self.to_slots = nn.Linear(64, num_slots * 8)
            self.register_buffer("scale", torch.tensor([255.0]), persistent=False)

    def forward(self, observation):
        pictures = observation["rgb"].permute(0, 3, 1, 2) / self.scale[:, None, None]
        x = self.first(nn.functional.adaptive_avg_pool2d(pictures, 4).flatten(1)).tanh()
        for layer in self.layers:
            x = layer(x)
        return Features(self.to_slots(x).unflatten(1, (-1, 8)), x)


class Layer(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).tanh()


def reward_actions(env, result, action):
    """Rewards what the actions are."""
    observation, _, terminated, truncated, info = result
    info["step_reward"] = action.mean(2)
    return observation, action.mean(2).sum(1), terminated, truncated, info


REWARDING = before(after(rl.ActionChunk, step=reward_actions), step=lambda *_: BYTES.look())
"""On rank 0 episodes end after three chunks, on rank 1 after five."""


def chunked(num_envs):
    limit = 5 + 4 * int(os.environ.get("RANK", 0))
    return REWARDING(num_envs, lambda n: rl.PushBlocks(n, size=16, max_episode_steps=limit), 2)


class Bytes(TorchDispatchMode):
    """The most bytes of parameters, gathered ones among them, gradients and optimizer states."""

    def __init__(self):
        super().__init__()
        self.module, self.peak = None, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in PEAKS:
            self.look()
        return result

    def look(self):
        module = self.module
        if module is None:
            return
        held = []
        for block in module.modules():
            if isinstance(block, FSDPModule):
                for group in block._get_fsdp_state()._fsdp_param_groups:
                    for one in group.fsdp_params:
                        held += [one._sharded_param_data, *one.all_gather_outputs]
                        gathered = getattr(one, "_unsharded_param", None)
                        held += [one.sharded_param.grad, one.unsharded_accumulated_grad]
                        held += [None if gathered is None else gathered.grad]
        for p in module.parameters():
            held += [p, p.grad]
        for optimizer in module.trainer.optimizers:
            held += [x for one in optimizer.state.values() for x in one.values()]
        storages = [local(x).untyped_storage() for x in held if isinstance(x, torch.Tensor)]
        sizes = {storage.data_ptr(): storage.size() for storage in storages if storage.size()}
        self.peak = max(self.peak, sum(sizes.values()))


ATEN = torch.ops.aten
PEAKS = (ATEN.addmm.default, ATEN.mm.default, ATEN._fused_adam_.default)
"""Operations after which it looks: in a block's forward and backward pass, and in the step."""

BYTES = Bytes()


def measures():
    """Make callbacks that measure an update, and all rollouts (in `REWARDING`)."""

    def begin(trainer, module):
        BYTES.module, BYTES.peak = module, 0

    def end(trainer, module):
        BYTES.module = None

    return [
        callback(on_train_start=begin, on_train_end=end),
        at_iteration(1, lambda trainer: BYTES.__enter__(), "on_train_batch_start"),
        at_iteration(2, lambda trainer: BYTES.__exit__(None, None, None)),
    ]


def uneven(module, rollout, keys, mask=None):
    """On rank 1, two steps of the rollout count, so that one of its three minibatches is empty."""
    mask = torch.ones(rollout.shape[0], rollout.shape[1] - 1, dtype=torch.bool)
    if ranks.rank() == 1:
        mask[:] = False
        mask[0, :2] = True
    return rollout, keys, mask


UNEVEN = passing(rl.PPO, minibatches=uneven)


def run(
    run_dir,
    algorithm,
    strategy,
    *,
    devices=2,
    data=None,
    policy=None,
    wrap=None,
    ckpt_path=None,
    trainer=None,
    backbone=Layers,
    **model,
):
    """Train for three iterations, of which each is an epoch."""
    seed_everything(3)
    settings = {"num_envs": 4, "buffer_size": 5, "num_eval_episodes": 3, "num_eval_envs": 2}
    settings |= {"total_env_steps": 10**6, "iterations_per_epoch": 1}
    data = rl.RLDataModule(chunked, **settings | (data or {}))
    spaces = data.observation_space, data.action_space
    made = rl.VLAPolicy(*spaces, backbone=backbone(), num_bins=5, **(policy or {}))
    made = made if wrap is None else wrap(*spaces, lambda *_: made)
    own = {"group_size": 2, "kl_coef": 0.5} if issubclass(algorithm, rl.GRPO) else {}
    module = algorithm(made, n_epochs=1, batch_size=8, learning_rate=1e-3, **own | model)
    settings = {"max_epochs": 3, "limit_val_batches": 0, "logger": False}
    settings |= {"strategy": strategy, "devices": devices} | (trainer or {})
    return module, fit_in(run_dir, module, data, ckpt_path=ckpt_path, **settings)


def found(module, runner):
    """Return what is compared: weights, optimizer, metrics of the last iteration, evaluation."""
    named = dict(module.policy.named_parameters())
    return {
        "sent": [name for name in changing_weights(module.policy) if name in named],
        "state": {k: v for k, v in whole_state(module).items() if torch.is_tensor(v)},
        "optimizer": runner.strategy.optimizer_state(runner.optimizers[0]),
        "metrics": {k: v for k, v in module.metrics.items() if not k.startswith("charts")},
        "evaluation": module.evaluation,
        "peak": BYTES.peak,
    }


def keep(directory, findings, name, *args, **settings):
    findings[name] = found(*run(directory / name, *args, **settings))


TWICE = {"max_epochs": 2}


def quick(directory, findings):
    sharded = rl.FSDP2Strategy(acting="sharded")
    # Lightning's strategies replace the attribute `forward`, which is nothing to save.
    warnings.filterwarnings("error", ".*register_buffer")
    note = partial(keep, directory, findings)
    for name, strategy in {"ddp": "ddp", "fsdp": sharded}.items():
        note(f"PPO {name}", rl.PPO, strategy, trainer=TWICE | {"callbacks": measures()})
        # Three micro-batches on rank 0, and four on rank 1, whose episodes are longer.
        small = {"policy": {"micro_batch_size": 5}}
        note(f"GRPO {name}", rl.GRPO, name, **small, trainer=TWICE)
        again = {"ckpt_path": last(directory / f"GRPO {name}")}
        note(f"resumed {name}", rl.GRPO, name, **small | again)


def killed(directory, findings):
    run(
        directory / "killed", rl.GRPO, "fsdp", trainer={"callbacks": [signal_at(2, signal.SIGKILL)]}
    )


def slow(directory, findings):
    note = partial(keep, directory, findings)
    note("whole", rl.GRPO, "fsdp")
    note("acts whole", rl.PPO, "fsdp", trainer=TWICE | {"callbacks": measures()})
    note("acts sharded", rl.PPO, rl.FSDP2Strategy("sharded"))
    note("resumed", rl.GRPO, "fsdp", ckpt_path=last(directory / "killed"))
    for strategy in ("ddp", "fsdp"):
        note(f"uneven {strategy}", UNEVEN, strategy)
        note(f"micro {strategy}", UNEVEN, strategy, policy={"micro_batch_size": 3})
        note(f"warm-up {strategy}", rl.PPO, strategy, critic_warmup_iterations=2)
        note(f"bf16 {strategy}", rl.PPO, strategy, trainer={"precision": "bf16-mixed"})
        note(f"shown {strategy}", rl.GRPO, strategy, **SHOWN)
        note(f"lora {strategy}", rl.GRPO, strategy, **lora(strategy))
    note("shown sharded", rl.GRPO, rl.FSDP2Strategy("sharded"), **SHOWN)
    for lag in (0, 1):
        data = {"collector": partial(rl.AsyncCollector, max_staleness=lag)}
        note(f"async {lag}", rl.GRPO, "fsdp", data=data)
    note("meta", rl.GRPO, "fsdp", backbone=partial(Layers, meta=True))
    note("wrapped", rl.GRPO, "fsdp", wrap=partial(rl.SlowPolicy, delay_ms=0.0))
    teacher = str(last(directory / "whole"))
    for strategy in ("ddp", "fsdp"):
        note(f"taught {strategy}", rl.BehaviorCloning, strategy, teacher=teacher, trust_code=True)
        note(f"warm start {strategy}", rl.GRPO, strategy, trainer={"init_from": teacher})


SHOWN = {
    "data": {"num_eval_episodes": 1, "eval_deterministic": False},
    "trainer": {"limit_val_batches": 1.0},
}
"""Rank 1 has no episode of an evaluation."""


def lora(strategy):
    """A model of transformers with an adapter, in the background; on rank 1 it begins on meta."""
    settings = {"config": CONFIGS["smolvlm"], "lora": {"r": 2}, "meta": strategy == "fsdp"}
    backbone = partial(rl.TransformersBackbone, "hf_config", **settings)
    data = {"collector": partial(rl.AsyncCollector, max_staleness=0), "num_envs": 2}
    return {"backbone": backbone, "data": data, "policy": {"micro_batch_size": 4}}


def four(directory, findings):
    path, devices = last(directory / "whole"), int(os.environ["WORLD_SIZE"])
    settings = {"devices": devices, "ckpt_path": path, "trainer": {"max_epochs": 4}}
    findings["resumed"] = found(*run(directory / "four", rl.GRPO, "fsdp", **settings))


if __name__ == "__main__":
    from tests.equivalence import fsdp_runs  # checkpoints name its classes, and none of __main__

    torch.set_num_threads(1)
    findings, directory, what = {}, Path(sys.argv[1]), sys.argv[2]
    getattr(fsdp_runs, what)(directory, findings)
    torch.save(findings, directory / f"{what}{ranks.rank()}.pt")
