"""Time lightning_rl's PPO and SAC.

`--plain` leaves out what it does for speed on some machines alone (`trainer.machine`), and takes
denormal numbers as they are. The row says under `computing` which ways the run took.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from common import OFF_POLICY, ON_POLICY, SAC_LEARNING_STARTS, W4, Clock, Run, parse
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from pendulum import OBSERVATION_SIZE, TIME_LIMIT, move, observe, start
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import (
    PPO,
    SAC,
    ActorCritic,
    CartPole,
    GymnasiumEnv,
    ReplayBuffer,
    RLDataModule,
    RLTrainer,
    SquashedActorCritic,
)
from lightning_rl.envs.torch.torch_env import TorchEnv
from lightning_rl.system import ranks
from lightning_rl.system.machine import PLAIN


class PendulumEnv(TorchEnv):
    start_size = 2

    def __init__(self, num_envs: int, device: str) -> None:
        observations = gymnasium.spaces.Box(-np.inf, np.inf, (OBSERVATION_SIZE,), np.float32)
        actions = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        super().__init__(num_envs, observations, actions, TIME_LIMIT, device)

    def initial_state(self, uniform: Tensor) -> TensorDict:
        return TensorDict({"state": start(uniform)}, [len(uniform)])

    def observe(self, state: TensorDict) -> Tensor:
        return observe(state["state"])

    def transition(
        self, state: TensorDict, action: Tensor
    ) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        moved, reward = move(state["state"], action)
        terminated = torch.zeros_like(reward, dtype=torch.bool)
        return TensorDict({"state": moved}, state.batch_size), reward, terminated, {}


IN_TORCH = {"pendulum in torch": PendulumEnv, "CartPole": CartPole}
"""By a workload's `env`, those that are stepped as batched tensors."""


class Timestamps(Callback):
    """End an iteration of the clock where Lightning ends a batch."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.start()
        for name in ("sum_over_ranks", "max_over_ranks", "gather_over_ranks"):
            self.clock.wrap(ranks, name, "reduction")

    def on_train_batch_start(self, *args: Any) -> None:
        self.began = self.clock.now()

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        self.clock.add("update", self.clock.now() - self.began)
        self.clock.add("collect", trainer.datamodule.dataset.collect_seconds)
        self.clock.end_iteration()


def data_of(run: Run) -> RLDataModule:
    """Return the data module of a workload."""
    work = run.workload
    if work.env in IN_TORCH:
        env: Any = partial(IN_TORCH[work.env], device=run.device)
    else:
        env = partial(GymnasiumEnv, id=work.env)
    return RLDataModule(
        env,
        num_envs=work.num_envs,
        buffer_size=work.steps,
        total_env_steps=run.total * work.env_steps * run.processes,
        iterations_per_epoch=run.total,
        replay=partial(ReplayBuffer, capacity=1_000_000) if run.name in OFF_POLICY else None,
    )


def ppo_of(run: Run, *spaces: Any) -> PPO:
    work = run.workload
    policy = ActorCritic(
        *spaces,
        work.hidden,
        activation=work.activation,
        normalize_observation=work.normalize,
    )
    return PPO(
        policy,
        learning_rate=work.learning_rate,
        n_epochs=work.epochs,
        batch_size=work.batch_size,
        gamma=work.gamma,
        gae_lambda=work.gae_lambda,
        clip_coef=work.clip,
        ent_coef=work.ent_coef,
        vf_coef=work.vf_coef,
        max_grad_norm=work.max_grad_norm,
        normalize_reward=work.normalize,
        compile=run.flags.compile,
    )


def sac_of(run: Run, *spaces: Any) -> SAC:
    work = run.workload
    return SAC(
        SquashedActorCritic(*spaces, work.hidden, activation=work.activation),
        learning_rate=work.learning_rate,
        batch_size=work.replay_batch_size,
        gamma=work.gamma,
        updates_per_env_step=work.updates / work.env_steps,
        random_env_steps=SAC_LEARNING_STARTS,
        compile=run.flags.compile,
    )


def main() -> None:
    run = parse((*ON_POLICY, *W4, *OFF_POLICY), "compile", "plain")
    clock = Clock(run)
    seed_everything(run.seed, verbose=False)
    data = data_of(run)
    algorithm = sac_of if run.name in OFF_POLICY else ppo_of
    model = algorithm(run, data.observation_space, data.action_space)
    with tempfile.TemporaryDirectory() as directory:
        trainer = RLTrainer(
            num_threads=run.workload.threads,
            machine=PLAIN if run.flags.plain else None,
            flush_denormal=not run.flags.plain,
            run_dir=directory,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[Timestamps(clock)],
            accelerator="cpu" if run.device == "cpu" else "gpu",
            devices=run.processes,
            strategy="ddp" if run.processes > 1 else "auto",
            limit_val_batches=0,
        )
        trainer.fit(model, data)
        if not trainer.is_global_zero:
            return
        computing = json.loads(Path(directory, "run.json").read_text())["computing"]
    name = "lightning_rl, compiled" if run.flags.compile else "lightning_rl"
    name += ", without what is about the machine" if run.flags.plain else ""
    clock.report(name, "lightning-rl", computing=computing)


if __name__ == "__main__":
    main()
