"""An evaluation says the truth: an episode depends on its seed alone, and has failed if nothing is said of it."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch

from lightning_rl import PPO, ActionChunk, GymnasiumEnv, PointMass, PushCube, RLTrainer
from lightning_rl.collectors.evaluation import (
    EpisodeSeeds,
    logged_values,
    run_episodes,
    summarize,
    wilson_interval,
)
from tests.callbacks import fail
from tests.envs import UNIT, ScriptedEnv, zeros
from tests.helpers import make_data, make_ppo, policy_for, scalars, train
from tests.messages import refused
from tests.policies import ScriptedPolicy
from tests.variants import after, before, variant


def rare(says=True):
    """Succeed where the seed divides by 4, and say it then alone; the others end without a word."""

    def begin(env):
        env.lucky = (env.np_random.integers(100) if env.seed is None else env.seed) % 4 == 0

    def said(env):
        return {"success": True} if env.lucky and says else {}

    return ScriptedEnv(UNIT, observe=zeros, terminated=True, begin=begin, info=said)


gymnasium.register("tests/Rare-v0", rare)
gymnasium.register("tests/Silent-v0", partial(rare, says=False))


@pytest.mark.parametrize("num_envs", [1, 3])
def test_an_episode_that_ends_without_a_word_of_success_has_failed(num_envs):
    env, episodes = GymnasiumEnv(num_envs, "tests/Rare-v0"), []
    for seeds in EpisodeSeeds(1, 12, num_envs):  # the first three fail
        episodes += run_episodes(policy_for(env, seed=0), env, seeds)
    env.close()
    summary = summarize(episodes)
    assert summary["success_rate"] == 3 / 12
    assert summary["success_ci95"] == wilson_interval(3, 12)


@pytest.mark.parametrize("own_env", [False, True])
def test_a_rate_of_zero_is_said_where_training_has_met_successes(own_env, tmp_path):
    """Of the training's env alone: one of another class may never say success."""
    data = {"eval_seed": 1, "num_eval_episodes": 3}
    if own_env:
        data["eval_env"] = partial(GymnasiumEnv, id="tests/Silent-v0")
    module, _, _ = train(tmp_path, env="tests/Rare-v0", data=data)
    assert module.evaluation["success_rate"] == (None if own_env else 0.0)
    rate = scalars(tmp_path)["charts/success_rate_avg_100"][-1][1]
    assert 0.1 < rate < 0.45


def dice(env):
    """A policy of a user's, which draws in a way of its own."""

    def draw(policy, td, generator):
        return (torch.rand(len(td), generator=generator) * 2).long()

    value = fail(AssertionError("evaluation needs no value"))
    policy = variant(ScriptedPolicy, get_value=value, evaluate_actions=value)
    return policy(env.single_observation_space, env.single_action_space, draw)


DRAWN = {
    "discrete": (partial(GymnasiumEnv, id="CartPole-v1"), policy_for),
    "task": (partial(PointMass, max_episode_steps=20), policy_for),
    "chunks": (lambda n: ActionChunk(n, partial(PushCube, max_episode_steps=18), 4), policy_for),
    "own": (partial(GymnasiumEnv, id="CartPole-v1"), dice),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawn_episode_depends_on_its_seed_and_not_on_how_many_are_played_at_once(name):
    make, policy_of = DRAWN[name]

    def play(num_envs, seeds=range(7, 12)):
        env, found = make(num_envs), []
        policy = policy_of(env)
        for first in range(0, len(seeds), num_envs):
            batch = list(seeds[first : first + num_envs])
            found += run_episodes(policy, env, batch, deterministic=False)
        env.close()
        return found

    together = play(5)
    assert len({episode["return"] for episode in together}) > 1
    for num_envs in (1, 2, 3, 8):
        assert play(num_envs) == together
    assert play(5, [11, 9, 7, 8, 10]) == [together[i] for i in (4, 2, 0, 1, 3)]
    twice = play(3, [9, 9, 9])
    assert twice == [together[2]] * 3


def test_the_wilson_interval_is_that_of_its_formula():
    # The ends are where a rate p lies 1.96 standard deviations sqrt(p (1 - p) / n) from k / n.
    for k, n in ((3, 10), (0, 5), (5, 5), (70, 100)):
        for p in wilson_interval(k, n):
            if 0 < p < 1:
                assert abs(k / n - p) == pytest.approx(1.959964 * np.sqrt(p * (1 - p) / n))
    assert wilson_interval(0, 5) == [0.0, pytest.approx(0.4345, abs=1e-4)]
    assert wilson_interval(5, 5)[1] == 1.0


def test_no_seed_of_a_test_has_chosen_the_best_whatever_the_number_of_episodes():
    seeds = set()
    for episodes in (10, 5, 100):
        data = make_data(seed=1, num_eval_episodes=episodes)
        assert data.val_dataloader().batches == [list(range(11_000, 11_000 + episodes))]
        seeds.update(*data.test_dataloader().batches)
    assert seeds == set(range(111_000, 111_100))


def test_the_evaluation_has_an_env_of_its_own_settings():
    limited = partial(PushCube, max_episode_steps=2)
    data = make_data(PushCube, eval_env=limited, num_eval_envs=3, num_eval_episodes=5)
    assert data.eval_env.max_episode_steps == 2
    assert data.eval_env.num_envs == 3
    assert [len(batch) for batch in data.val_dataloader()] == [3, 2]
    other = make_data("CartPole-v1", eval_env=partial(GymnasiumEnv, id="Acrobot-v1"))
    make_ppo(other)
    with refused(names=("data.eval_env", "data.env", "(6,)", "(4,)")):
        _ = other.eval_env


def test_what_an_error_ended_is_no_part_of_the_next_evaluation(tmp_path):
    lost = [RuntimeError("the camera is gone")]

    def look(module, seeds, batch_idx):
        if batch_idx == 2 and lost:
            raise lost.pop()

    data = make_data(num_eval_episodes=4, num_eval_envs=1)
    module = make_ppo(data, algorithm=before(PPO, validation_step=look))
    trainer = RLTrainer(run_dir=str(tmp_path), logger=False, enable_progress_bar=False)
    with refused(RuntimeError, names="camera"):
        trainer.validate(module, datamodule=data)
    trainer.validate(module, datamodule=data)
    assert module.evaluation["seeds"] == [data.eval_seed + i for i in range(4)]


def test_what_an_algorithm_logs_of_its_own_is_returned_too(tmp_path):
    data = make_data(total_env_steps=64)
    own = after(PPO, on_validation_epoch_end=lambda module, _: module.log("eval/own", 7.0))
    module = make_ppo(data, algorithm=own)
    trainer = RLTrainer(run_dir=str(tmp_path), logger=False, enable_progress_bar=False)
    trainer.fit(module, data)
    (returned,) = trainer.validate(module, data)
    assert returned == logged_values(module.evaluation) | {"eval/own": 7.0}
    monitored = float(trainer.callback_metrics["eval/avg_reward"])
    assert monitored == pytest.approx(np.mean(module.evaluation["returns"]))
