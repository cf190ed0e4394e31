"""`data.random_first_episode_length`: first episodes of training envs begin at a random step."""

from functools import partial
from types import SimpleNamespace

import gymnasium
import pytest
import torch

from lightning_rl import (
    GRPO,
    ActionChunk,
    GymnasiumEnv,
    RLDataModule,
    RslRlVecEnv,
    TensorSimulator,
    TermWrapper,
)
from lightning_rl.envs.factories import make_env
from lightning_rl.system import ranks
from tests.core.equivalence.test_resume import assert_resumes
from tests.envs import ScriptedEnv, ScriptedTask
from tests.equivalence.test_async import assert_same_training, background
from tests.helpers import train
from tests.messages import refused

LIMIT, ENVS = 12, 8

gymnasium.register(
    "Endless-v0", partial(ScriptedEnv, action_space=gymnasium.spaces.Box(-1, 1, (1,)))
)


def endless(num_envs, vectorization="sync", **kwargs):
    """Gymnasium envs that only the time limit ends."""
    limit = {"max_episode_steps": LIMIT} | kwargs
    return GymnasiumEnv(num_envs, "Endless-v0", limit, vectorization)


def walk(num_envs):
    """A torch env that only the time limit ends; it observes nothing but the number of its steps."""
    return ScriptedTask(
        num_envs,
        lambda uniform: {"age": 0 * uniform},
        lambda env, state, action: ({"age": state["age"] + 1},),
        steps=LIMIT,
    )


def vec_env(num_envs):
    """An env for rsl_rl that only the time limit ends."""
    env = SimpleNamespace(num_envs=num_envs, num_actions=1, device="cpu", max_episode_length=LIMIT)
    env.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64)
    env.get_observations = lambda: env.episode_length_buf[:, None].float()

    def step(action):
        env.episode_length_buf = env.episode_length_buf + 1
        done = env.episode_length_buf >= LIMIT
        env.episode_length_buf[done] = 0
        return env.get_observations(), done.float(), done, {"time_outs": done}

    env.step = step
    return env


foreign = partial(
    TensorSimulator, make=lambda n: RslRlVecEnv(vec_env(n)), missing_final="last_observation"
)
KINDS = {
    "Gymnasium": endless,
    "in processes": partial(endless, vectorization="async"),
    "torch": walk,
    "terms around Gymnasium": partial(TermWrapper, env=endless),
    "chunks of Gymnasium": partial(ActionChunk, env=endless, chunk_size=5),
    "rsl_rl": foreign,
}


def ends_of(env, seed=7):
    """Return the env steps [2, N] at which the first two episodes of each row are cut."""
    env.reset(seed=seed)
    ends, elapsed = [[] for _ in range(env.num_envs)], torch.zeros(env.num_envs)
    shape = env.single_action_space.shape
    while min(map(len, ends)) < 2:
        *_, terminated, truncated, info = env.step(torch.zeros(env.num_envs, *shape))
        executed = info["executed"].sum(1) if "executed" in info else 1
        elapsed = elapsed + executed
        assert not terminated.any()
        for row in truncated.nonzero().flatten().tolist():
            if not isinstance(env, TensorSimulator):  # the true one, not that after the reset
                assert info["final_obs"][row].item() == elapsed[row]
            ends[row].append(int(elapsed[row]))
            elapsed[row] = 0
    env.close()
    return torch.tensor([row[:2] for row in ends]).T


def randomized(make, num_envs=ENVS):
    return make_env(make, num_envs, "data.env", random_first_episodes=True)


@pytest.mark.parametrize("kind", KINDS)
def test_first_episodes_are_cut_at_random_steps_and_later_ones_are_whole(kind):
    num_envs = 2 if "processes" in kind else ENVS
    first, second = ends_of(randomized(KINDS[kind], num_envs))
    assert second.tolist() == [LIMIT] * num_envs
    assert first.min() >= 1
    assert first.max() <= LIMIT
    assert first.max() > first.min() or num_envs == 2
    again, _ = ends_of(randomized(KINDS[kind], num_envs))
    assert torch.equal(first, again), "a function of the seed"
    other, _ = ends_of(randomized(KINDS[kind], num_envs), seed=8_000)
    assert not torch.equal(first, other)
    plain, _ = ends_of(KINDS[kind](num_envs))
    assert plain.tolist() == [LIMIT] * num_envs


def test_it_is_of_training_alone_and_of_each_rank(monkeypatch):
    data = RLDataModule(walk, 4, random_first_episode_length=True, seed=1)
    assert ends_of(data.eval_env)[0].tolist() == [LIMIT] * data.eval_env.num_envs
    own = ends_of(data.new_env(), data.seed_for("collector"))[0]
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    assert not torch.equal(own, ends_of(data.new_env(), data.seed_for("collector"))[0])
    assert data.settings()["random_first_episode_length"] is True


RUNS = {
    "Gymnasium": {"env": endless},
    "processes": {"env": KINDS["in processes"]},
    "compiled steps": {"env": walk, "model": {"compile": True}},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_stopped_within_the_first_episodes_ends_as_uninterrupted(
    name, tmp_path, traced_only
):
    run = RUNS[name] | {"data": {"random_first_episode_length": True, "buffer_size": 8}}
    assert_resumes(tmp_path, 1, **run)


def test_in_the_background_without_lag_it_is_the_foreground(tmp_path):
    data = {"random_first_episode_length": True}
    train(tmp_path / "sync", env=walk, data=data)
    train(tmp_path / "async", env=walk, data=data | {"collector": background(0)})
    assert_same_training(tmp_path / "sync", tmp_path / "async")


def test_an_env_that_cannot_is_refused():
    with refused(names=("data.random_first_episode_length", "Endless-v0", "max_episode_steps")):
        randomized(partial(endless, max_episode_steps=None), 2)
    batched = GymnasiumEnv(2, "lightning_rl/CartPole-v0", None, "vector_entry_point")
    with refused(names=("GymnasiumEnv", "data.random_first_episode_length", "sync", "async")):
        batched.randomize_first_episodes(500)


def test_a_simulator_without_the_counter_is_refused():
    def make(num_envs):
        env = vec_env(num_envs)
        counter = vars(env).pop("episode_length_buf")
        env.get_observations = lambda: counter[:, None].float()
        return RslRlVecEnv(env)

    simulator = partial(TensorSimulator, make=make)
    with refused(names=("TensorSimulator", "episode_length_buf", "remove")):
        randomized(simulator, 2)


def test_a_run_without_continued_episodes_is_refused(tmp_path):
    run = {"model": {"algorithm": GRPO, "group_size": 2}, "env": "CartPole-v1"}
    with refused(names=("data.random_first_episode_length", "GRPO", "remove")):
        train(tmp_path, data={"random_first_episode_length": True}, **run)
