"""A critic that knows more than its actor: it learns where one that sees the same cannot tell luck from skill."""

from functools import partial
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from lightning.pytorch import seed_everything
from tensordict import TensorDict

from lightning_rl import PPO, ActorCritic, RLDataModule, RLTrainer
from tests.envs import ScriptedTask

STEPS, COST, ENV_STEPS, SEEDS = 20, 3.0, 16_000, 5
T_OF_4 = 2.776
"""The 97.5 % point of Student's t with four degrees of freedom."""


def cargo(num_envs):
    """Carry something to a place that is shown; what the cargo costs in each step nobody tells the carrier.

    Cost per step: up to 3, drawn for each episode, in units of the distance that is left. Nothing that is done changes
    it: all of the difference that it makes to a return is luck.
    """

    def start(uniform):
        place, goal, load = (2 * uniform - 1).split(1, 1)
        return {"place": place, "goal": goal, "cargo": load, "left": torch.ones_like(load)}

    def move(env, state, action):
        place = state["place"] + 0.2 * action.clamp(-1, 1)
        missed = (place - state["goal"]).abs()[:, 0]
        reward = -missed - COST * state["cargo"][:, 0]
        moved = {"place": place, "left": state["left"] - 1 / STEPS}
        return moved, reward, None, {"metrics": {"missed": missed}}

    def observe(state):
        seen = torch.cat((state["place"], state["goal"]), 1)
        told = torch.cat((state["cargo"], state["left"]), 1)
        return TensorDict({"seen": seen, "told": told}, state.batch_size)

    part = Box(-np.inf, np.inf, (2,))
    space = Dict({"seen": part, "told": part})
    settings = {"observation_space": space, "steps": STEPS, "start_size": 3}
    return ScriptedTask(num_envs, start, move, observe=observe, **settings)


def trained(run_dir, seed, critic_keys, env_steps=ENV_STEPS):
    seed_everything(seed)
    data = RLDataModule(
        cargo,
        num_envs=16,
        buffer_size=STEPS,
        total_env_steps=env_steps,
        iterations_per_epoch=env_steps // (16 * STEPS),
        num_eval_episodes=100,
        seed=seed,
    )
    policy = ActorCritic(
        data.observation_space,
        data.action_space,
        (32,),
        actor_keys=["seen"],
        critic_keys=critic_keys,
    )
    model = PPO(policy, batch_size=80, n_epochs=5, learning_rate=3e-3, normalize_reward=True)
    runner = partial(RLTrainer, accelerator="cpu", enable_progress_bar=False, logger=False)
    runner(run_dir=str(run_dir)).fit(model, data)
    return model


def interval(values):
    """The 95 % interval of the mean of five."""
    half = T_OF_4 * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


@pytest.mark.slow
def test_after_equal_steps_it_is_nearer_in_disjoint_intervals(tmp_path):
    missed = {}
    for name, keys in {"alike": ["seen"], "knows more": ["seen", "told"]}.items():
        runs = [trained(tmp_path / f"{name}{seed}", seed, keys) for seed in range(SEEDS)]
        missed[name] = [run.evaluation["metrics"]["missed"] for run in runs]
    print(missed)
    assert interval(missed["knows more"])[1] < interval(missed["alike"])[0]
    assert max(missed["knows more"]) < 0.1
