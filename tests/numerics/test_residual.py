"""What must hold of a correction of a frozen policy, alone and in a run with help and demonstrations."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDict

from lightning_rl import (
    GRU,
    SAC,
    ActorCritic,
    AsyncCollector,
    GaussianResidualActorCritic,
    PerceptronEncoder,
    ResidualActorCritic,
    SquashedActorCritic,
)
from lightning_rl.extensions.export.graph import ActingGraph, ports_of
from lightning_rl.rollout.names import named
from tests.arms import ACTION, OBSERVATION, helped_arm, mixed
from tests.core.equivalence.test_resume import TWO_ENVS, assert_resumes, stop_and_resume
from tests.helpers import assert_same, assert_same_run, last, load, train
from tests.messages import refused

BASE = partial(ActorCritic, hidden_sizes=(8,))


def make(space=OBSERVATION, action=ACTION, base=BASE, **kwargs):
    torch.manual_seed(0)
    return ResidualActorCritic(space, action, base=base, hidden_sizes=(16,), **kwargs)


def seen(count=64):
    return TensorDict({"observation": 3.0 * torch.randn(count, 4)}, [count])


def test_without_a_correction_it_acts_as_its_base():
    policy, td = make(), seen()
    wanted = policy.base.get_action(td.clone(), deterministic=True)["action"]
    low, high = (torch.as_tensor(bound) for bound in (ACTION.low, ACTION.high))
    found = policy.get_action(td.clone(), deterministic=True)["action"]
    assert torch.equal(found, wanted.clamp(low, high))
    assert found.unique(dim=0).shape[0] > 32
    # Also the log standard deviations, which are outputs of the same layer.
    assert not policy.actor[-1].bias.any()


@pytest.mark.parametrize("scale", [0.1, 2.0])
def test_a_correction_stays_within_its_scale_and_actions_within_their_bounds(scale):
    policy, td = make(scale=scale), seen(512)
    torch.nn.init.normal_(policy.actor[-1].bias, std=3.0)
    base = policy.base_action(td)
    action = policy.get_action(td.clone())["action"]
    assert torch.all((policy.unit(action) - base).abs() <= scale + 1e-6)
    assert policy.unit(action).abs().max() <= 1.0
    inside = (base + scale * torch.tensor([-1.0, 1.0])[:, None, None]).abs().amax(0) < 1.0
    assert ((policy.unit(action) - base).abs() > 0.5 * scale)[inside].any() or scale == 2.0
    features, noise = policy.actor_features(td), torch.randn(512, 3)
    unit, log_prob = policy.draw_unit(td, noise, features)
    acted = policy(TensorDict({**td, "action_noise": noise}, [512]))
    torch.testing.assert_close(policy.unit(acted["action"]), unit)
    correction, expected = SquashedActorCritic.draw_unit(policy, td, noise, features)
    assert torch.equal(log_prob, expected)
    torch.testing.assert_close(unit, (base + scale * correction).clamp(-1, 1))


def test_actor_and_critics_read_the_bases_action_and_the_base_its_own_keys():
    space = Dict({"near": Box(-1, 1, (2,)), "far": Box(-1, 1, (3,))})
    base = partial(ActorCritic, hidden_sizes=(8,), ignore_keys=["near"])
    policy = make(space, base=base, ignore_keys=["far"], normalize_observation=True)
    assert policy.acting_space == space
    tree = TensorDict({"near": torch.randn(5, 2), "far": torch.randn(5, 3)}, [5])
    td = TensorDict({"observation": tree}, [5])
    features = policy.critic_features(td)
    assert features.shape == (5, 2 + 3)
    assert torch.equal(features[:, -3:], policy.base_action(td))
    moved = TensorDict({"observation": tree.clone().set("far", torch.randn(5, 3))}, [5])
    assert not torch.equal(policy.actor_features(moved)[:, -3:], features[:, -3:])
    assert torch.equal(policy.actor_features(moved)[:, :2], features[:, :2])


@pytest.mark.parametrize("cls", [ResidualActorCritic, GaussianResidualActorCritic])
def test_what_only_the_bases_critic_reads_is_not_needed_to_act(cls):
    """As on a robot, or in a graph: its simulator's state is not there."""
    bodies = {"joints": Box(-1, 1, (4,)), "true_state": Box(-1, 1, (2,))}
    asymmetric = partial(BASE, actor_keys=["joints"], critic_keys=["joints", "true_state"])
    trained = asymmetric(Dict(bodies), ACTION)
    sensors = Dict({"joints": bodies["joints"]})
    policy = cls(sensors, ACTION, base=lambda *spaces: trained, hidden_sizes=(16,))
    assert policy.acting_space == sensors
    observation = {"joints": torch.randn(5, 4)}
    td = TensorDict({"observation": TensorDict(observation, [5])}, [5])
    alone = trained.get_action(td.clone(), deterministic=True)["action"]
    action = policy.get_action(td.clone(), deterministic=True)["action"]
    torch.testing.assert_close(policy.unit(action), policy.unit(alone).clamp(-1, 1))
    graph = ActingGraph(policy, ports_of(policy))
    assert graph({"observation.joints": torch.zeros(2, 4)})["action"].shape == (2, *ACTION.shape)


def test_a_base_of_joints_in_another_order_is_refused():
    joints = Box(-1, 1, (2,))
    base = BASE(named(joints, ("hip", "knee")), ACTION)
    ResidualActorCritic(joints, ACTION, base=lambda *spaces: base)
    with refused(names=("hip, knee", "knee, hip")):
        ResidualActorCritic(named(joints, ("knee", "hip")), ACTION, base=lambda *spaces: base)


def settings(**model):
    own = {"algorithm": SAC, "random_env_steps": 0, "updates_per_env_step": 0.5, **model}
    encoder = partial(PerceptronEncoder, hidden_sizes=(8,), normalize=True)
    policy = {"policy_class": ResidualActorCritic, "base": BASE, "encoder": encoder}
    data = {"num_envs": 2, "buffer_size": 8, "total_env_steps": 2 * 8 * 5, "replay": mixed}
    return {"env": helped_arm, "data": data, "policy": policy, "model": own}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with help, which goes into both replays: its directory, module and replay."""
    place, made, run = tmp_path_factory.mktemp("whole"), [], settings()

    def kept(*args, **kwargs):
        made.append(mixed(*args, **kwargs))
        return made[-1]

    run["data"]["replay"] = kept
    return place, train(place, **run)[0], made[0]


def test_it_is_resumed_exactly(whole, tmp_path):
    stop_and_resume(tmp_path, 2, **settings())
    assert_same_run(whole[0], tmp_path)


@pytest.mark.slow  # quick: equivalence/test_off_policy.py, the same of SAC with a memory
def test_in_the_background_without_lag_it_is_what_it_is_in_the_foreground(whole, tmp_path):
    run = settings()
    run["data"]["collector"] = partial(AsyncCollector, max_staleness=0, timeout_s=30)
    train(tmp_path, **run)
    assert_same(*(load(last(place))["state_dict"] for place in (whole[0], tmp_path)))


@pytest.mark.slow  # quick: numerics/test_flows.py, a frozen policy in a compiled update
def test_compiled_it_follows_the_eager_run(whole, tmp_path, traced_only):
    compiled, *_ = train(tmp_path, **settings(compile=True))
    assert compiled.learner.compilation.compiled
    torch.testing.assert_close(compiled.state_dict(), whole[1].state_dict(), rtol=1e-3, atol=1e-4)


def test_what_cannot_be_corrected_is_refused(tmp_path):
    with refused(names=("scale", "(0, 2]", "0")):
        make(scale=0)
    with refused(names=("checkpoint", "base")):
        make(base=None)
    with refused(names=("ResidualActorCritic", "memory", "ActorCritic")):
        make(base=partial(ActorCritic, memory=GRU))
    with refused(names=("ResidualActorCritic", "memory", "correction")):
        make(memory=GRU)
    with refused(names=("base policy", "data.env", "(2,)", "(4,)")):
        make(base=lambda *_: ActorCritic(Box(-1, 1, (2,)), ACTION))
    with refused(names=("ResidualActorCritic", "'base_action'")):
        make(Dict({"base_action": OBSERVATION}))
    with refused(names=("ResidualActorCritic", "random_env_steps: 0")):
        SAC(make(), random_env_steps=10)
    with refused(names=("ResidualActorCritic", "base policy")):
        make().fields_of(torch.zeros(2, 3))


def gaussian(**kwargs):
    torch.manual_seed(0)
    settings = {"base": BASE, "hidden_sizes": (16,), "log_std_init": -1.5, **kwargs}
    return GaussianResidualActorCritic(OBSERVATION, ACTION, **settings)


@pytest.mark.parametrize("log_std", ["parameter", "state_dependent"])
def test_a_gaussian_correction_begins_at_the_base_and_has_exact_log_probs(log_std):
    policy, td = gaussian(log_std=log_std, scale=0.3), seen(16)
    width = (ACTION.high - ACTION.low) / 2.0
    acted = policy.base.get_action(td.clone(), deterministic=True)["action"].double().numpy()
    base = np.clip(acted, ACTION.low, ACTION.high).astype(np.float64)
    first = policy.get_action(td.clone(), deterministic=True)["action"]
    np.testing.assert_allclose(first.numpy(), base, atol=1e-6)
    torch.nn.init.normal_(policy.actor[-1].bias[:3], std=2.0)
    acted = policy.get_action(td.clone())
    result = policy.evaluate_actions(acted)
    torch.testing.assert_close(result["sample_log_prob"], acted["sample_log_prob"])
    correction = policy.actor[-1].bias[:3].detach().double().numpy()
    mean = base + width * 0.3 * np.tanh(correction)
    deviation = width * np.exp(-1.5)
    error = (acted["action"].double().numpy() - mean) / deviation
    density = np.exp(-0.5 * error**2) / (deviation * np.sqrt(2.0 * np.pi))
    expected = np.log(density).sum(-1)
    np.testing.assert_allclose(result["sample_log_prob"].detach().numpy(), expected, atol=1e-4)
    # An action of somebody else has the same log-prob as a drawn one.
    other = TensorDict({"observation": td["observation"], "action": acted["action"]}, [16])
    other.update(policy.fields_of(acted["action"]))
    cloned = policy.evaluate_actions(other)["sample_log_prob"]
    torch.testing.assert_close(cloned, result["sample_log_prob"], rtol=1e-4, atol=1e-4)


def test_ppo_trains_a_gaussian_correction_and_resumes_exactly(tmp_path):
    policy = {"policy_class": GaussianResidualActorCritic, "base": BASE, "scale": 0.3}
    policy |= {"normalize_observation": True, "value_lr_scale": 10.0}
    module = assert_resumes(tmp_path, 2, env="Pendulum-v1", data=TWO_ENVS, policy=policy)
    trained = module.policy
    assert trained.actor[-1].weight.abs().max() > 0
    correction, value = trained.parameter_groups()
    assert value["lr_scale"] == 10.0
    assert {id(p) for p in value["params"]} == {id(p) for p in trained.critic.parameters()}
    moved = {id(p) for p in (*correction["params"], *value["params"])}
    assert not moved & {id(p) for p in trained.base.parameters()}
    assert moved == {id(p) for p in trained.parameters() if p.requires_grad}


def test_what_cannot_be_corrected_by_a_gaussian_is_refused():
    with refused(names=("GaussianResidualActorCritic", "Discrete(2)")):
        GaussianResidualActorCritic(OBSERVATION, Discrete(2), base=BASE)
    with refused(names=("GaussianResidualActorCritic", "squash")):
        gaussian(squash=True)
    with refused(names=("GaussianResidualActorCritic", "memory", "correction")):
        gaussian(memory=GRU)
