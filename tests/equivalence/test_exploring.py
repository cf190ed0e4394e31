"""Mirrored samples, curiosity and style meet compiled updates, resume and the background; two ranks are in ddp_runs.py."""

from functools import partial

import pytest
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict

from lightning_rl import CuriousPPO, CuriousSAC, ReplayBuffer, StylePPO, SymmetricPPO
from tests.core.equivalence.test_resume import stop_and_resume
from tests.envs import ScriptedTask
from tests.equivalence.test_async import assert_same_training, background
from tests.helpers import assert_same_run, scalars, train

RUN = {
    "env": "Pendulum-v1",
    "data": {"buffer_size": 40, "total_env_steps": 4 * 40 * 6},  # 200 steps are an episode
    "policy": {"normalize_observation": True},
}
MODELS = {
    "train/mirror_loss": {
        "algorithm": SymmetricPPO,
        "joints": {"0": "-0"},
        "observation": {"height": [1], "side": [-1], "speed": [-1]},
        "mirror_loss_coef": 0.5,
    },
    "train/curiosity_loss": {"algorithm": CuriousPPO, "normalize_reward": True},
    "rewards/curiosity": {"algorithm": CuriousSAC, "updates_per_env_step": 0.1},
    "train/style_loss": {"algorithm": StylePPO, "discriminator": {"hidden_sizes": [8]}},
}
"""By a curve that only they have."""


def styled(num_envs):
    """Points whose motion is anywhere in the upper right."""
    key = Box(-9, 9, (2,))

    def move(env, state, action):
        return ({"place": state["place"] + 0.1 * action, "motion": env.uniform(4)},)

    def observe(state):
        place, motion = state["place"], state["motion"]
        return TensorDict({"policy": place, "style": place, "motion": motion}, state.batch_size)

    return ScriptedTask(
        num_envs,
        lambda uniform: {"place": uniform[:, :2], "motion": uniform},
        move,
        observe=observe,
        observation_space=Dict({"policy": key, "style": key, "motion": Box(-9, 9, (4,))}),
        action_space=Box(-1, 1, (2,)),
        start_size=4,
    )


def run_of(curve, **model):
    replay = {"replay": partial(ReplayBuffer, capacity=500)} if "SAC" in str(MODELS[curve]) else {}
    run = RUN | {"model": MODELS[curve] | model, "data": RUN["data"] | replay}
    if curve == "train/style_loss":
        run |= {"env": styled, "policy": {"ignore_keys": ["style", "motion"]}}
    return run


@pytest.mark.parametrize("curve", MODELS)
def test_in_the_background_and_stopped_they_end_as_uninterrupted(curve, tmp_path):
    run = run_of(curve)
    train(tmp_path / "whole", **run)
    train(tmp_path / "background", **run | {"data": run["data"] | {"collector": background(0)}})
    assert_same_training(tmp_path / "whole", tmp_path / "background")
    stop_and_resume(tmp_path / "stopped", 3, **run)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert all(value > 0 for _, value in scalars(tmp_path / "whole")[curve])


@pytest.mark.parametrize("curve", MODELS)
def test_compiled_they_follow_the_eager_run(curve, tmp_path, traced_only):
    eager, *_ = train(tmp_path / "eager", **run_of(curve))
    compiled, *_ = train(tmp_path / "compiled", **run_of(curve, compile=True))
    assert any(key[1] == "loss" for key in compiled.learner.graphs._compiled)
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict(), rtol=1e-3, atol=1e-4)


def test_an_algorithm_may_be_curious_and_symmetric(tmp_path):
    both = type("Both", (CuriousPPO, SymmetricPPO), {})
    model = MODELS["train/mirror_loss"] | {"algorithm": both}
    data = RUN["data"] | {"total_env_steps": 4 * 40 * 3}
    train(tmp_path, **RUN | {"model": model, "data": data})
    for curve in ("train/mirror_loss", "train/curiosity_loss", "rewards/curiosity"):
        assert all(value > 0 for _, value in scalars(tmp_path)[curve])


@pytest.mark.parametrize("augmentation", [True, False])
def test_with_correlated_noise_a_mirrored_actor_waits_for_its_critic(augmentation, tmp_path):
    settings = {"augmentation": augmentation, "critic_warmup_iterations": 2}
    model = MODELS["train/mirror_loss"] | settings
    run = {"env": "Pendulum-v1", "policy": {"noise_correlation": 0.9}, "model": model}
    actors = [
        train(tmp_path / str(steps), **run, trainer={"max_steps": steps})[0].policy.actor[0].weight
        for steps in (1, 2, 3)
    ]
    assert torch.equal(actors[0], actors[1])
    assert not torch.equal(actors[0], actors[2])
