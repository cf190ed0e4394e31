"""What must hold of a policy that sees, reads and acts in chunks, and of its training."""

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import (
    GRPO,
    PPO,
    ActionChunk,
    AsyncCollector,
    BehaviorCloning,
    DatasetCollector,
    PointMass,
    PushBlocks,
    PushCube,
    RLDataModule,
    SyncCollector,
    VLAPolicy,
)
from lightning_rl.extensions.datasets.demonstrations import expert_episodes
from lightning_rl.extensions.datasets.writer import EpisodeWriter
from tests.algorithms import with_first_ratios
from tests.helpers import assert_same_run, fit_in, last, make_collector, scalars
from tests.messages import refused
from tests.variants import after

HEADS = [(head, level) for head in ("token", "gaussian") for level in ("token", "action", "chunk")]


def make_env(num_envs=8):
    return ActionChunk(num_envs, lambda n: PushBlocks(n, size=32), 4)


def make_policy(env=None, **kwargs):
    env = make_env(1) if env is None else env
    return VLAPolicy(env.single_observation_space, env.single_action_space, **kwargs)


@pytest.mark.parametrize("head", ["token", "gaussian"])
def test_what_is_sampled_has_the_distribution_whose_log_prob_is_given(head):
    """Temperature included: the mean of the log-prob of samples is minus the entropy."""
    torch.manual_seed(1)
    env = make_env(1)
    policy = make_policy(env, head=head, temperature=0.5)
    torch.nn.init.normal_(next(iter(policy.head.parameters())))  # far from uniform
    observation = env.reset(seed=0)[0]
    td = TensorDict({"observation": torch.cat([observation] * 4000)}, [4000])
    with torch.no_grad():
        entropy = policy.evaluate_actions(policy(td)[:1])["entropy"][0]
        sampled = td["sample_log_prob"]
    error = sampled.std(0) / 4000**0.5
    assert (sampled.mean(0) + entropy).abs().div(error + 1e-4).max() < 4.5


def test_tokens_are_bins_from_bound_to_bound_and_the_mode_is_the_likeliest():
    torch.manual_seed(2)
    env = make_env(16)
    policy = make_policy(env, num_bins=5)
    td = policy.get_action(TensorDict({"observation": env.reset(seed=0)[0]}, [16]))
    assert set(td["action"].unique().tolist()) == {-1.0, -0.5, 0.0, 0.5, 1.0}
    tokens = policy.fields_of(td["action"])["action_tokens"]
    assert torch.equal(tokens, td["action_tokens"])
    greedy = policy.get_action(td.clone(), deterministic=True)
    assert (greedy["sample_log_prob"] >= td["sample_log_prob"] - 1e-6).all()
    assert torch.equal(
        policy.get_action(td.clone(), deterministic=True)["action"], greedy["action"]
    )


def test_the_value_has_its_own_learning_rate_and_leaves_the_backbone_alone():
    env = make_env(4)
    policy = make_policy(env, value_lr_scale=3.0)
    td = TensorDict({"observation": env.reset(seed=0)[0]}, [4])
    policy.get_value(td)["value"].sum().backward()
    assert all(p.grad is None for p in policy.backbone.parameters())
    assert all(p.grad is not None for p in policy.value_head.parameters())
    first, second = policy.parameter_groups()
    counted = sum(p.numel() for p in [*first["params"], *second["params"]])
    assert counted == sum(p.numel() for p in policy.parameters())
    assert second["lr_scale"] == 3.0
    shared = make_policy(env, detach_value=False)
    shared.get_value(td.select("observation"))["value"].sum().backward()
    assert any(p.grad is not None for p in shared.backbone.parameters())


def data_module(num_envs=8, buffer_size=4, iterations=2, collector=SyncCollector, epochs=1):
    steps = num_envs * 4 * (buffer_size * iterations - 1)
    settings = {"num_envs": num_envs, "buffer_size": buffer_size, "total_env_steps": steps}
    settings |= {"iterations_per_epoch": iterations // epochs, "collector": collector}
    return RLDataModule(make_env, num_eval_episodes=2, **settings)


def fit(run_dir, module, data, ckpt_path=None, **kwargs):
    fit_in(run_dir, module, data, ckpt_path=ckpt_path, **kwargs)
    return module


@pytest.mark.parametrize(("head", "level"), HEADS)
@pytest.mark.parametrize("algorithm", [PPO, GRPO])
def test_the_first_ratio_is_one_and_the_policy_moves(algorithm, head, level, tmp_path):
    def count_steps(module, result, rollout, batch_idx):
        module.counted = module.env_steps, module.data.collector.env_steps

    policy = make_policy(head=head, log_prob_level=level)
    before = [p.clone() for p in policy.head.parameters()]
    settings = {"n_epochs": 2, "batch_size": 16, "ent_coef": 0.01}
    if algorithm is GRPO:
        settings |= {"group_size": 4, "kl_coef": 0.01, "aggregation": "trajectory"}
    watched = after(with_first_ratios(algorithm), training_step=count_steps)
    module = watched(policy, **settings)
    fit(tmp_path, module, data_module(), enable_checkpointing=False)
    assert len(module.firsts) >= 2
    assert max(first.abs().max() for first in module.firsts) < 1e-5
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.head.parameters(), strict=True))
    trained, collected = module.counted
    assert trained == collected > 0


def test_resume_is_exact(tmp_path):
    def run(name, **kwargs):
        torch.manual_seed(5)
        module = PPO(make_policy(value_lr_scale=2.0), n_epochs=1, batch_size=16, gamma=0.9)
        fit(tmp_path / name, module, data_module(iterations=4, epochs=2), **kwargs)

    run("whole")
    run("cut", max_epochs=1)
    run("cut", ckpt_path=last(tmp_path / "cut"))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("correction", ["decoupled", "loglinear", "vtrace", "bypass"])
def test_stale_rollouts_train_too(correction, tmp_path):
    module = PPO(make_policy(), n_epochs=1, batch_size=16, off_policy_correction=correction)
    fit(tmp_path, module, data_module(iterations=4, collector=AsyncCollector))
    logged = scalars(tmp_path)
    assert max(value for _, value in logged["async/staleness_max"]) == 1
    assert all(np.isfinite(value) for _, value in logged["train/policy_loss"])


def test_what_is_no_dataset_for_this_env_is_refused(tmp_path):
    pytest.importorskip("pyarrow", reason="needs the extra data")
    pytest.importorskip("av", reason="needs the extra data")
    env = make_env(5)
    policy, path = make_policy(env), str(tmp_path / "data")
    spaces = env.env.single_observation_space, env.env.single_action_space
    writer = EpisodeWriter(path, *spaces, env.env.render_fps, pictures="png")
    for episode in expert_episodes(env.env, 2, 3):
        writer.write(episode)
    with refused(names=("2 demonstrations", "9", "episodes")):
        make_collector(DatasetCollector, env, policy, 4, 1, path, episodes=9)
    with refused(names=("10 frames per second", "25 steps per second")):
        make_collector(DatasetCollector, env, policy, 4, 1, path, fps=25)
    with refused(names=("none", "meta/info.json")):
        make_collector(DatasetCollector, env, policy, 4, 1, str(tmp_path / "none"))
    other = ActionChunk(5, lambda n: PushBlocks(n, size=16), 4)
    with refused(names=("observation.images.rgb", "[32, 32, 3]", "[16, 16, 3]")):
        make_collector(DatasetCollector, other, make_policy(other), 4, 1, path)
    with refused(names=("PointMass", "path", "PushBlocks")):
        make_collector(DatasetCollector, ActionChunk(2, PointMass), policy, 4, 1)


def test_what_a_vla_cannot_take_is_refused(tmp_path):
    env = make_env(1)
    observations, actions = env.single_observation_space, env.single_action_space
    flat = PushCube(1).single_observation_space
    with refused(names=("rgb, uint8", "(12,)", "VLAObservation")):
        VLAPolicy(flat, actions)
    with refused(names=("VLA", "Box", "class_path: ActionChunk")):
        VLAPolicy(observations, PushBlocks(1).single_action_space)
    unbounded = gymnasium.spaces.Box(-np.inf, np.inf, (4, 2), np.float32)
    with refused(names=("bounds", "inf", "action_statistics")):
        VLAPolicy(observations, unbounded)
    with refused(names=("temperature", "0.0")):
        make_policy(temperature=0.0)
    with refused(names=("BehaviorCloning", "SyncCollector", "class_path: DatasetCollector")):
        fit(tmp_path, BehaviorCloning(make_policy(), batch_size=16), data_module())
