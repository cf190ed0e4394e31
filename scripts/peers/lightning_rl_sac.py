"""Time lightning_rl's SAC.

`--plain` leaves out what it does for speed on some machines alone (`trainer.machine`), and takes
denormal numbers as they are. The row says under `computing` which ways the run took.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from common import SAC_LEARNING_STARTS, Clock, parse
from lightning.pytorch import seed_everything
from lightning_rl_ppo import PendulumEnv, Timestamps

from lightning_rl import (
    SAC,
    GymnasiumEnv,
    ReplayBuffer,
    RLDataModule,
    RLTrainer,
    SquashedActorCritic,
)
from lightning_rl.machine import PLAIN


def main() -> None:
    run = parse(("S1", "S64"), "compile", "plain")
    work, clock = run.workload, Clock(run)
    seed_everything(run.seed, verbose=False)
    env: Any = partial(GymnasiumEnv, id=work.env)
    if run.name == "S64":
        env = partial(PendulumEnv, device=run.device)
    data = RLDataModule(
        env,
        num_envs=work.num_envs,
        buffer_size=work.steps,
        total_env_steps=run.total * work.env_steps,
        iterations_per_epoch=run.total,
        replay=partial(ReplayBuffer, capacity=1_000_000),
    )
    policy = SquashedActorCritic(
        data.observation_space, data.action_space, work.hidden, activation=work.activation
    )
    model = SAC(
        policy,
        learning_rate=work.learning_rate,
        batch_size=work.replay_batch_size,
        gamma=work.gamma,
        updates_per_env_step=work.updates / work.env_steps,
        random_env_steps=SAC_LEARNING_STARTS,
        compile=bool(run.flags.compile),
    )
    with tempfile.TemporaryDirectory() as directory:
        trainer = RLTrainer(
            num_threads=run.threads,
            machine=PLAIN if run.flags.plain else None,
            flush_denormal=not run.flags.plain,
            run_dir=directory,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[Timestamps(clock)],
            accelerator="cpu" if run.device == "cpu" else "gpu",
            devices=1,
            limit_val_batches=0,
        )
        trainer.fit(model, data)
        computing = json.loads(Path(directory, "run.json").read_text())["computing"]
    name = "lightning_rl, compiled" if run.flags.compile else "lightning_rl"
    if work.env_steps == 1:
        name += ", weights out at every env step"
    name += ", without what is about the machine" if run.flags.plain else ""
    clock.report(name, "lightning-rl", computing=computing)


if __name__ == "__main__":
    main()
