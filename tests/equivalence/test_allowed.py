"""Masks, actions of several parts and correlated noise: resumed, compiled, in the background, cloned, as they are alone."""

from functools import partial

import pytest
import torch

import lightning_rl as rl
import tests.envs  # noqa: F401  # registers envs
from tests.core.equivalence.test_resume import TWO_ENVS, assert_resumes
from tests.equivalence.test_async import background
from tests.helpers import assert_same, last, load, train
from tests.messages import refused
from tests.probes import MaskProbe, StructureProbe

masked = partial(rl.GymnasiumEnv, id="tests/ReportsActionMask-v0", wrappers=[rl.ActionMask])


RUNS = {
    "masks": {"env": masked},
    "masks, workers": {"env": partial(masked, vectorization="async"), "data": TWO_ENVS},
    "masks of a torch env, GRPO": {
        "env": MaskProbe,
        "model": {"algorithm": rl.GRPO, "group_size": 4, "batch_size": 32, "kl_coef": 0.1},
        "data": {"buffer_size": 32, "total_env_steps": 4 * 32 * 5},
    },
    "parts of a torch env, squashed": {"env": StructureProbe, "policy": {"squash": True}},
    "parts, noise": {
        "env": "tests/StructuredActionEnv-v0",
        "policy": {"noise_correlation": 0.9, "normalize_observation": True},
    },
    "noise": {"env": "Pendulum-v1", "policy": {"noise_correlation": 0.9}},
    "noise, SAC": {
        "env": "Pendulum-v1",
        "policy": {"noise_correlation": 0.9},
        "model": {"algorithm": rl.SAC},
        "data": {"num_envs": 2, "buffer_size": 8, "total_env_steps": 96, "replay": partial(rl.ReplayBuffer, capacity=60)},
    },
}  # fmt: skip
"""Episodes go on where rollouts end, so that a run is stopped amid the noise of each."""

NEIGHBOURS = ("masks", "parts, noise", "noise, SAC")


@pytest.mark.parametrize("name", RUNS)
def test_resume_is_exact_for(name, tmp_path):
    assert_resumes(tmp_path, 3, **RUNS[name])


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_compiled_it_follows_the_eager_run(name, tmp_path, traced_only):
    settings = RUNS[name]
    eager, *_ = train(tmp_path / "eager", **settings)
    model = settings.get("model", {}) | {"compile": True}
    compiled, *_ = train(tmp_path / "compiled", **settings | {"model": model})
    assert compiled.learner.compilation.compiled
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_in_the_background_without_lag_it_is_what_it_is_in_the_foreground(name, tmp_path):
    settings = RUNS[name]
    train(tmp_path / "sync", **settings)
    data = settings.get("data", {}) | {"collector": background(0)}
    train(tmp_path / "async", **settings | {"data": data})
    for key in ("state_dict", "optimizer_states"):
        assert_same(*(load(last(tmp_path / kind))[key] for kind in ("sync", "async")))


def record(env, path, forbidden=False):
    """Write four episodes of the first action that is allowed, or of the first one that is not."""
    writer = rl.EpisodeWriter(
        path, env.single_observation_space, env.single_action_space, env.render_fps
    )
    for seed in range(4):
        observation, _ = env.reset(seed=seed)
        done = False
        while not done:
            seen = {key: value[0].numpy().copy() for key, value in observation.items()}
            allowed = observation["action_mask"].argmax(-1)
            action = (observation["action_mask"] == 0).int().argmax(-1) if forbidden else allowed
            observation, reward, terminated, truncated, info = env.step(allowed)
            done = bool(terminated | truncated)
            writer.add(seen, action[0].numpy(), float(reward[0]), done, False)
        final = info["final_obs"]
        writer.end_episode({key: value[0].numpy() for key, value in final.items()})


@pytest.mark.parametrize("forbidden", [False, True])
def test_cloning_holds_to_the_masks_of_the_demonstrations(forbidden, tmp_path):
    pytest.importorskip("pyarrow", reason="datasets need the extra data")
    record(masked(1), tmp_path / "data", forbidden)
    demonstrations = partial(rl.DatasetCollector, path=str(tmp_path / "data"))
    settings = {
        "env": masked,
        "model": {"algorithm": rl.BehaviorCloning, "n_epochs": 20, "learning_rate": 1e-2},
        "data": {
            "collector": demonstrations,
            "total_env_steps": 28 * 40,
            "iterations_per_epoch": 20,
        },
    }
    if forbidden:
        with refused(names="action_mask"):
            train(tmp_path / "run", **settings)
        return
    module, *_ = train(tmp_path / "run", **settings)
    # Of two allowed actions the first is always meant; which of the five that is, only the mask says.
    assert module.metrics["train/negative_log_prob"] < 0.45
