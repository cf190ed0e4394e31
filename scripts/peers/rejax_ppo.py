"""Time rejax's PPO, in whose program the envs of gymnax are; evaluation is left out.

`train` of rejax is one program of many iterations, and so is what is timed: as many iterations as
the warm-up has, compiled once ahead, run until all are done. A start has compiling in it, and one
iteration of the first of these runs.

What is not alike: rejax evaluates the critic at each step and we once per rollout; it clips the
value's loss too, and each gradient by itself; it takes the end of the time limit for a failure, as
gymnax does not tell them apart.
"""

from typing import Any

import jax
from common import W4, Clock, cpu_seconds, parse, version_of
from rejax import PPO


def main() -> None:
    run = parse(W4, torch=False)
    work, clock = run.workload, Clock(run)
    if work.warmup < 1 or work.iterations % work.warmup:
        raise SystemExit(
            f"--iterations {work.iterations} is no multiple of --warmup {work.warmup}, which is "
            "what one call of the program has."
        )
    in_one_call = work.warmup * work.env_steps
    algorithm = PPO.create(
        env="CartPole-v1",
        agent_kwargs={"activation": work.activation, "hidden_layer_sizes": work.hidden},
        num_envs=work.num_envs,
        num_steps=work.steps,
        num_epochs=work.epochs,
        num_minibatches=work.minibatches,
        learning_rate=work.learning_rate,
        gamma=work.gamma,
        gae_lambda=work.gae_lambda,
        clip_eps=work.clip,
        ent_coef=work.ent_coef,
        vf_coef=work.vf_coef,
        max_grad_norm=work.max_grad_norm,
        normalize_observations=work.normalize,
        normalize_rewards=work.normalize,
        total_timesteps=in_one_call,
        eval_freq=in_one_call,
        skip_initial_evaluation=True,
    )
    algorithm = algorithm.replace(eval_callback=lambda *_: ())
    state = jax.jit(algorithm.init_state)(jax.random.key(run.seed))
    jax.block_until_ready(state)
    clock.start()
    program: Any = jax.jit(lambda state: algorithm.train(train_state=state)[0], donate_argnums=0)
    program = program.lower(state).compile()
    compiled = cpu_seconds() - clock.cpu_ends[0]
    for _ in range(run.total // work.warmup):
        state = jax.block_until_ready(program(state))
        clock.end_iterations(work.warmup)
    if int(state.global_step) != run.total * work.env_steps:
        raise RuntimeError(f"rejax took {state.global_step} env steps")
    first_call = clock.cpu_ends[work.warmup] - clock.cpu_ends[0] - compiled
    versions = {name: version_of(name) for name in ("jax", "jaxlib", "flax", "gymnax")}
    clock.report(
        "rejax",
        "rejax",
        compile_seconds=compiled,
        start_cpu_seconds=clock.cpu_ends[0] + compiled + first_call / work.warmup,
        first_iteration_seconds=None,
        peer_versions=versions,
    )


if __name__ == "__main__":
    main()
