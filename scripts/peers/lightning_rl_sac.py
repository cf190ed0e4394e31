"""Time lightning_rl's SAC.

`--plain` leaves out what it does for speed on some machines alone (`trainer.machine`), and takes
denormal numbers as they are. The row says under `computing` which ways the run took.
"""

from functools import partial

from common import OFF_POLICY, SAC_LEARNING_STARTS, Clock, parse
from lightning.pytorch import seed_everything
from lightning_rl_ppo import data_of, train_and_report

from lightning_rl import SAC, ReplayBuffer, SquashedActorCritic


def main() -> None:
    run = parse(OFF_POLICY, "compile", "plain")
    work, clock = run.workload, Clock(run)
    seed_everything(run.seed, verbose=False)
    data = data_of(run, replay=partial(ReplayBuffer, capacity=1_000_000))
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
        compile=run.flags.compile,
    )
    train_and_report(run, clock, model, data)


if __name__ == "__main__":
    main()
