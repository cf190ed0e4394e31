"""Random first steps: they are counted as env steps, and a memory goes on through them."""

from functools import partial

import pytest
import torch

from lightning_rl import GRU, SAC, TD3, ActionChunk, GymnasiumEnv, ReplayBuffer
from lightning_rl.algorithms.rollout_evaluation import states_of
from lightning_rl.collectors import AsyncCollector
from tests.helpers import last, train
from tests.messages import refused
from tests.variants import before

REPLAY = partial(ReplayBuffer, capacity=600)


def run(run_dir, algorithm=SAC, *, data=None, model=None, env="Pendulum-v1", **settings):
    """Train, and return (env steps before, rollout, its states by `states_of`) of each iteration."""
    seen = []

    def look(module, rollout, batch_idx):
        again = states_of(module.policy, rollout) if module.policy.is_recurrent else None
        seen.append((module.env_steps, rollout.clone(), again))

    small = {"num_envs": 2, "buffer_size": 8, "replay": REPLAY, "iterations_per_epoch": 50}
    slow = {"batch_size": 16, "updates_per_env_step": 0.02, "compile": False}
    learner = {"algorithm": before(algorithm, training_step=look), "learning_starts": 40}
    settings |= {"data": small | (data or {}), "model": slow | learner | (model or {})}
    train(run_dir, env=env, trainer={"limit_val_batches": 0}, **settings)
    return seen


def is_uniform(rollout):
    return len(rollout["sample_log_prob"][:, :-1].unique()) == 1


@pytest.mark.parametrize("algorithm", [SAC, TD3])
@pytest.mark.parametrize("noise", [0.0, 0.5], ids=["", "noise"])
def test_a_memory_goes_on_through_them_as_the_policys_does(tmp_path, algorithm, noise):
    policy = {"memory": partial(GRU, size=4), "noise_correlation": noise}
    model = {"random_env_steps": 32, "sequence_length": 4, "learning_starts": 60}
    data = {"total_env_steps": 64}
    seen = run(tmp_path, algorithm, data=data, policy=policy, model=model)
    assert [is_uniform(rollout) for _, rollout, _ in seen[:2]] == [True, True] or algorithm is TD3
    size = 4  # behind it in the state lies the noise, which is the actor's own
    for number, (_, rollout, again) in enumerate(seen):
        assert (rollout["state"] - again)[..., :size].abs().max() < 1e-5
        assert (rollout["state"][:, 0, :size].abs().max() > 0) == (number > 0)


def test_it_is_forgotten_where_an_episode_ends(tmp_path):
    short = partial(GymnasiumEnv, id="Pendulum-v1", env_kwargs={"max_episode_steps": 3})
    policy, model = {"memory": partial(GRU, size=4)}, {"random_env_steps": 16, "sequence_length": 4}
    (_, rollout, again), *_ = run(
        tmp_path, env=short, data={"total_env_steps": 48}, policy=policy, model=model
    )
    state, done = rollout["state"], rollout["done"][:, :-1]
    assert done.any()
    assert (state[:, 1:][done] == 0).all()
    assert (state[:, 1:][~done].abs().amax(-1) > 0).all()
    assert (state - again).abs().max() < 1e-5


@pytest.mark.parametrize("buffer_size", [2, 32])
def test_resumed_with_rollouts_of_another_size_they_end_at_the_same_env_step(tmp_path, buffer_size):
    model = {"random_env_steps": 192}
    run(tmp_path, data={"total_env_steps": 64}, model=model)
    data = {"total_env_steps": 320, "buffer_size": buffer_size}
    seen = run(tmp_path, data=data, model=model, ckpt_path=last(tmp_path))
    assert [is_uniform(rollout) for _, rollout, _ in seen] == [steps < 192 for steps, _, _ in seen]


def test_in_the_background_too_they_are_as_many_as_were_asked_for(tmp_path):
    data = {"total_env_steps": 96, "collector": AsyncCollector}
    seen = run(tmp_path, data=data, model={"random_env_steps": 48})
    assert [is_uniform(rollout) for _, rollout, _ in seen] == [True] * 3 + [False] * 3


def test_of_chunks_the_steps_that_were_executed_count(tmp_path):
    """Episodes of 5 steps in chunks of 4: the second chunk of each executes one."""
    short = partial(GymnasiumEnv, id="Pendulum-v1", env_kwargs={"max_episode_steps": 5})
    chunks = partial(ActionChunk, env=short, chunk_size=4)
    seen = run(tmp_path, env=chunks, data={"total_env_steps": 240}, model={"random_env_steps": 64})
    assert [steps for steps, _, _ in seen][:3] == [0, 40, 80]
    assert [is_uniform(rollout) for _, rollout, _ in seen][:3] == [True, True, False]


def test_in_other_processes_than_before_they_do_not_begin_again(tmp_path):
    """A checkpoint of two processes has no collector for this one, but it has the env steps."""
    model = {"random_env_steps": 48}
    run(tmp_path, data={"total_env_steps": 64}, model=model)
    path = last(tmp_path)
    content = torch.load(path, weights_only=True)
    states = content["RLDataModule"]
    for key in ("collectors", "replays"):
        states[key] = states[key] * 2
    content["lightning_rl"]["ranks"] *= 2
    torch.save(content, path)
    with refused(UserWarning, names="2 processes"):
        seen = run(tmp_path, data={"total_env_steps": 96}, model=model, ckpt_path=path)
    assert [steps for steps, _, _ in seen] == [64, 80]
    assert not any(is_uniform(rollout) for _, rollout, _ in seen)
