"""What must hold of flow-matching heads, and of policies that steer their noise."""

import runpy
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lightning_rl import (
    GRPO,
    PPO,
    SAC,
    ActionChunk,
    AsyncCollector,
    BehaviorCloning,
    DatasetCollector,
    FlowSettings,
    GymnasiumEnv,
    NoiseActorCritic,
    NoisePolicy,
    NoiseSAC,
    PerceptronBackbone,
    PushBlocks,
    ReplayBuffer,
    RLDataModule,
    SteeredActorCritic,
    SyncCollector,
    VLAPolicy,
)
from lightning_rl.deploy.loading import load_trained
from lightning_rl.extensions.tasks.probes import TwoDoors
from lightning_rl.extensions.vla.backbone import Features
from lightning_rl.extensions.vla.flow import FlowHead
from lightning_rl.functional import flow_transition, interpolate
from tests import references
from tests.algorithms import with_first_ratios
from tests.arms import HELP
from tests.helpers import assert_same, assert_same_run, fit_in, last, make_collector, scalars
from tests.messages import refused

LEARNT = FlowSettings(steps=3, noise="learnt")
DOORS = partial(ActionChunk, env=TwoDoors, chunk_size=8)
BLOCKS = partial(ActionChunk, env=lambda n: PushBlocks(n, size=16), chunk_size=4)
blocks_policy = partial(VLAPolicy, head="flow")


def proprio(env):
    """The observation as a VLA reads it."""
    space = gymnasium.spaces.Dict({"proprio": env.observation_space})
    wrap = gymnasium.wrappers.TransformObservation
    return wrap(env, lambda observation: {"proprio": observation}, space)


def helped_arm(num_envs):
    """An arm that takes two actions together; a script takes over at each third step."""
    arm = partial(GymnasiumEnv, id="tests/Arm-v0", wrappers=[proprio])
    return ActionChunk(num_envs, arm, 2)


def flow_policy(*spaces, **kwargs):
    return VLAPolicy(*spaces, PerceptronBackbone((32,), 4), head="flow", **kwargs)


def make_policy(make=DOORS, cls=flow_policy, **kwargs):
    env = make(1)
    return cls(env.single_observation_space, env.single_action_space, **kwargs)


def observed(num_envs, make=DOORS):
    return TensorDict({"observation": make(num_envs).reset(seed=0)[0]}, [num_envs])


@pytest.mark.parametrize("steps", [1, 4])
def test_a_stochastic_step_is_that_of_the_reference(steps):
    generator = torch.Generator().manual_seed(1)
    x, velocity = torch.randn(2, 32, 5, generator=generator, dtype=torch.float64)
    t = 1.0 - torch.randint(steps, (32,), generator=generator).double() / steps
    mean, std = flow_transition(x, velocity, t, step_size=1 / steps, noise_level=0.7)
    expected = references.stochastic_flow_step(
        x.numpy(), velocity.numpy(), t.numpy(), 1 / steps, 0.7
    )
    torch.testing.assert_close(mean, torch.as_tensor(expected[0]))
    torch.testing.assert_close(std.squeeze(1), torch.as_tensor(expected[1]))


class Straight(nn.Module):
    """A velocity of the noise and the time; of three numbers for two."""

    action_size = 3

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 3)

    def forward(self, features, x, t):
        return self.mix(torch.cat((x, t[:, None, None].expand(*x.shape[:2], 1)), -1))


def padded_head(**settings):
    torch.manual_seed(0)
    space = gymnasium.spaces.Box(-2, 4, (4, 2), np.float32)
    return FlowHead(space, "token", Straight(), 6, FlowSettings(**settings))


def test_the_clone_loss_is_that_of_the_definition_without_padding():
    head = padded_head()
    noise = head.draw_clone_noise((64,))
    action = torch.rand(64, 4, 2) * 6 - 2
    features = Features(torch.zeros(64, 8, 1), torch.zeros(64, 6))
    loss, _ = head.clone_loss(features, action, noise)
    start, uniform = noise[:, :-1].view(64, 4, 3), noise[:, -1]
    t = (0.001 + 0.999 * uniform ** (1 / 1.5))[:, None, None]
    goal = torch.cat(((action - 1) / 3, torch.zeros(64, 4, 1)), -1)
    x = (1 - t) * goal + t * start
    wrong = head.expert(features, x, t.flatten()) - (start - goal)
    torch.testing.assert_close(loss, wrong[..., :2].flatten(1).square())
    torch.testing.assert_close(x, interpolate(goal, start, t.flatten()))
    assert loss.sum(0).grad_fn is not None
    drawn = head.draw_clone_noise((4000,))[:, -1]
    assert 0 <= drawn.min() < 0.01
    assert 0.99 < drawn.max() < 1  # Beta(1.5, 1) by its inverse: mean .6
    assert (drawn ** (1 / 1.5)).mean() == pytest.approx(0.6, abs=0.02)


def test_one_step_of_each_chain_is_drawn_and_the_others_are_of_the_ode():
    head = padded_head()
    noise = head.draw_noise((4096,))
    features = Features(torch.zeros(4096, 8, 1), torch.zeros(4096, 6))
    with torch.no_grad():
        sample = head.sample(features, noise)
        steps, drawn = sample["chain_step"], noise[:, 12:24].view(-1, 4, 3)
        assert torch.bincount(steps).tolist() == pytest.approx([1024] * 4, abs=130)
        x = noise[:, :12].view(-1, 4, 3)
        for k in range(4):
            chosen = steps == k
            assert torch.equal(x[chosen], sample["chain_from"][chosen])
            t = torch.full((4096,), 1 - k / 4)
            velocity = head.expert(features, x, t)
            mean, std = references.stochastic_flow_step(
                *(one.double().numpy() for one in (x, velocity, t)), 0.25, 0.5
            )
            stochastic = torch.as_tensor(mean) + torch.as_tensor(std)[:, None, None] * drawn
            x = torch.where(chosen[:, None, None], stochastic.float(), x - velocity / 4)
            torch.testing.assert_close(x[chosen], sample["chain_to"][chosen])
            density = references.gaussian_log_prob(
                sample["chain_to"][chosen, :, :2, None].double().numpy(),
                mean[chosen.numpy(), :, :2, None],
                std[chosen.numpy()][:, None, None, None],
            )
            expected = torch.as_tensor(density).flatten(1)
            found = sample["sample_log_prob"][chosen].double()
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
            x = sample["chain_to"].where(chosen[:, None, None], x)
    torch.testing.assert_close(sample["action"], x[..., :2] * 3 + 1)


def test_a_learnt_chain_has_the_entropy_of_its_samples():
    head = padded_head(steps=3, noise="learnt")
    one = Features(torch.zeros(8000, 8, 1), torch.ones(8000, 6))
    with torch.no_grad():
        sample = head.sample(one, head.draw_noise((8000,)))
        fields = {key: sample[key] for key in head.fields}
        _, entropy = head.log_prob_and_entropy(one, fields)
    error = sample["sample_log_prob"].std(0) / 8000**0.5
    difference = sample["sample_log_prob"].mean(0) + entropy.mean(0)
    assert (difference.abs() / error).max() < 4.5


def test_what_a_flow_cannot_do_is_refused():
    policy = make_policy()
    for algorithm in (PPO, partial(GRPO, group_size=2), BehaviorCloning):
        with refused(names=("ent_coef=0.1", "VLAPolicy", "noise: learnt")):
            algorithm(policy, ent_coef=0.1)
        algorithm(make_policy(flow=LEARNT), ent_coef=0.1)
    with refused(names=("flow", "head", "gaussian")):
        make_policy(BLOCKS, VLAPolicy, head="gaussian", flow=FlowSettings())
    with refused(names=("temperature=2", "flow.noise_level")):
        make_policy(temperature=2.0)
    with refused(
        names=("rgb, uint8", "Dict('proprio'", "VLAObservation")
    ):  # TinyVLA needs pictures
        make_policy(cls=VLAPolicy, head="flow")


def fit(run_dir, algorithm, make, policy, data=None, ckpt_path=None, max_epochs=2, **settings):
    torch.manual_seed(3)
    own = {"num_envs": 8, "buffer_size": 2, "iterations_per_epoch": 2, "num_eval_episodes": 2}
    module = algorithm(make_policy(make, policy), **settings)
    data = RLDataModule(make, **own | {"total_env_steps": 10**6} | (data or {}))
    fit_in(run_dir, module, data, ckpt_path=ckpt_path, max_epochs=max_epochs)
    return module


ON_POLICY = {"n_epochs": 2, "batch_size": 8}
TRAINED = {
    "sde": (with_first_ratios(PPO), DOORS, flow_policy),
    "sde per chunk": (with_first_ratios(PPO), DOORS, partial(flow_policy, log_prob_level="chunk")),
    "learnt": (with_first_ratios(PPO), DOORS, partial(flow_policy, flow=LEARNT)),
    "grpo": (partial(with_first_ratios(GRPO), group_size=4, kl_coef=0.1), BLOCKS, blocks_policy),
    "noise": (with_first_ratios(PPO), DOORS, partial(NoisePolicy, base=flow_policy)),
    "noise, grpo": (partial(with_first_ratios(GRPO), group_size=4), DOORS, partial(NoisePolicy, base=flow_policy)),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_the_first_ratio_is_one_in_the_background_too(name, tmp_path):
    algorithm, make, policy = TRAINED[name]
    runs = {}
    for kind, collector in {"here": SyncCollector, "background": AsyncCollector}.items():
        settings = {} if kind == "here" else {"max_staleness": 0}
        data = {"collector": partial(collector, **settings)}
        data |= {"iterations_per_epoch": 3}
        run = fit(tmp_path / kind, algorithm, make, policy, data, max_epochs=1, **ON_POLICY)
        assert len(run.firsts) == 3
        assert max(first.abs().max() for first in run.firsts) < 5e-6
        runs[kind] = run.state_dict()
    start = make_policy(make, policy)
    assert "train/entropy" in scalars(tmp_path / "here") or not start.has_entropy
    assert_same(runs["here"], runs["background"])
    moved = {
        n for n, p in start.named_parameters() if not torch.equal(p, runs["here"][f"policy.{n}"])
    }
    assert any("expert" in n or "actor" in n for n in moved)  # fmt: skip


@pytest.mark.parametrize("name", ["ppo", "clone"])
def test_compiled_it_follows_the_eager_run(name, tmp_path, traced_only):
    *what, settings, data = RESUMED[name]
    eager, compiled = (
        fit(tmp_path / str(compile), *what, data, max_epochs=1, compile=compile, **settings)
        for compile in (False, True)
    )
    assert compiled.learner.compilation.compiled
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-5)


RESUMED = {
    "ppo": (PPO, DOORS, flow_policy, ON_POLICY, {}),
    "clone": (
        BehaviorCloning,
        DOORS,
        flow_policy,
        {"n_epochs": 2, "batch_size": 4},
        {"collector": partial(DatasetCollector, episodes=8)},
    ),
    "noise, sac": (
        SAC,
        DOORS,
        partial(NoiseActorCritic, base=flow_policy, hidden_sizes=(16,)),
        {"batch_size": 8, "random_env_steps": 0, "updates_per_env_step": 0.05},
        {"replay": partial(ReplayBuffer, capacity=64)},
    ),
    "noise of actions, with help": (
        NoiseSAC,
        helped_arm,
        partial(SteeredActorCritic, base=flow_policy, hidden_sizes=(16,)),
        {"batch_size": 8, "random_env_steps": 0, "updates_per_env_step": 0.1},
        {"replay": partial(ReplayBuffer, capacity=64)},
    ),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_exact(name, tmp_path):
    *what, settings, data = RESUMED[name]

    def run(place, **fitting):
        return fit(tmp_path / place, *what, data, **fitting, **settings)

    whole = run("whole").state_dict()
    run("cut", max_epochs=1)
    run("cut", ckpt_path=last(tmp_path / "cut"))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    start = make_policy(*what[1:]).state_dict()
    assert any(not torch.equal(value, whole[f"policy.{key}"]) for key, value in start.items())


class ToDoors(nn.Module):
    """The exact velocity of a mixture of two normal distributions, around +c and -c of `TwoDoors`."""

    action_size = 1

    def forward(self, features, x, t):
        place, t = features.summary[:, :1], t[:, None]
        door = 0.7 * torch.cos(1.5 * place + 0.4 * torch.arange(8))
        x, weights, velocities = x.flatten(1), [], []
        for mean in (door, -door):
            variance = (1 - t) ** 2 * 0.05**2 + t**2
            off = x - (1 - t) * mean
            weights.append(-0.5 * off.square().sum(1) / variance.squeeze(1))
            action = mean + (1 - t) * 0.05**2 / variance * off
            velocities.append(t / variance * off - action)  # mean noise - mean action
        share = torch.stack(weights).softmax(0)[..., None]
        return (share * torch.stack(velocities)).sum(0)[..., None]


class SeesDoors(PerceptronBackbone):
    def build(self, observation, num_slots):
        self.summary_size = 2

    def forward(self, observation):
        proprio = observation["proprio"]
        return Features(proprio.new_zeros(len(proprio), 8, 1), proprio)

    def velocity_expert(self, space):
        return ToDoors()


def doors_policy(*spaces):
    return VLAPolicy(*spaces, SeesDoors(), head="flow")


def success_of(policy, noise=None):
    """Success over 1,000 starts: of what the policy does, or of the ODE from given noise."""
    env = DOORS(1000)
    td = TensorDict({"observation": env.reset(seed=5)[0]}, [1000])
    if noise is None:
        action = policy.get_action(td, deterministic=True)["action"]
    else:
        action = policy.decode(policy.features(td), noise)
    return env.step(action.detach())[4]["success"].float().mean().item()


def test_steering_finds_the_door_that_pays(tmp_path):
    noise = torch.randn(1000, 8, generator=torch.Generator().manual_seed(1))
    assert 0.4 < success_of(make_policy(cls=doors_policy), noise) < 0.6
    data = {"num_envs": 512, "buffer_size": 1, "iterations_per_epoch": 15}
    settings = {"n_epochs": 4, "batch_size": 128, "learning_rate": 1e-3}
    policy = partial(NoisePolicy, base=doors_policy)
    module = fit(tmp_path, PPO, DOORS, policy, data, max_epochs=1, **settings)
    assert success_of(module.policy) > 0.97


@pytest.mark.slow  # quick: the test above
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_clone_takes_both_doors_and_reinforcement_learning_the_one_that_pays(
    seed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    script = Path(__file__).parents[2] / "scripts" / "two_doors.py"
    monkeypatch.syspath_prepend(script.parent)
    found = runpy.run_path(str(script))["measured"](seed)
    assert 0.35 <= found["clone"]["success"] <= 0.45
    assert found["Gaussian clone"]["success"] < 0.02
    for name, seconds in {"PPO": 5, "steered by PPO": 3}.items():
        assert found[name]["success"] >= 0.99
        assert found[name]["seconds"] < 10 * seconds


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A run that has begun to clone demonstrations through both doors."""
    place = tmp_path_factory.mktemp("clone")
    *what, settings, data = RESUMED["clone"]
    fit(place, *what, data, max_epochs=1, **settings)
    return place


def test_a_steered_policy_begins_with_the_weights_of_a_checkpoint_and_keeps_them(clone, tmp_path):
    base = load_trained(clone).policy
    policy = partial(NoisePolicy, checkpoint=str(clone))
    module = fit(tmp_path, PPO, DOORS, policy, max_epochs=1, **ON_POLICY)
    assert_same(base.state_dict(), module.policy.base.state_dict())
    again, td = load_trained(tmp_path).policy, observed(5)
    action = module.policy.get_action(td.clone(), deterministic=True)["action"]
    assert torch.equal(again.get_action(td, deterministic=True)["action"], action)


def test_the_noise_is_one_choice_whose_log_prob_is_that_of_its_gaussian(clone):
    policy = make_policy(BLOCKS, NoisePolicy, base=blocks_policy, bound=0.5, log_std_init=0.3)
    td = policy.get_action(observed(16, BLOCKS))
    assert td["noise"].abs().max() > 0.5
    expected = references.gaussian_log_prob(
        td["noise"].double().numpy(), np.zeros(8), np.full(8, np.exp(0.3))
    )
    torch.testing.assert_close(
        td["sample_log_prob"].double(), torch.as_tensor(expected), rtol=0, atol=0.1
    )
    td["executed"] = torch.zeros(16, 4, dtype=torch.bool)  # the first action is the noise's, too
    again = policy.evaluate_actions(td)
    torch.testing.assert_close(again["sample_log_prob"], td["sample_log_prob"])
    features = policy.base.features(td)
    bounded = policy.base.decode(features, td["noise"].clamp(-0.5, 0.5))
    assert torch.equal(bounded, td["action"])
    assert not any(p.requires_grad for p in policy.base.parameters())
    moved = {id(p) for group in policy.parameter_groups() for p in group["params"]}
    assert not moved & {id(p) for p in policy.base.parameters()}


def test_critics_judge_what_was_done_and_those_of_noise_what_the_flow_makes_of_it(monkeypatch):
    policy = make_policy(helped_arm, SteeredActorCritic, base=flow_policy, hidden_sizes=(16,))
    module = NoiseSAC(policy, random_env_steps=0)
    rollout = make_collector(SyncCollector, helped_arm(4), policy, 9, 1).collect()
    replay = ReplayBuffer(policy.observation_space, policy.replay_action_space, 4, capacity=64)
    replay.extend(policy.rollout_for_replay(rollout))
    (batch,) = replay.batches(1, 64)
    helped = batch["action"][batch["intervened"]]
    assert len(helped) > 8
    done = (helped - torch.as_tensor(HELP)).abs().amax(-1).amin(1)
    assert (done == 0).all()  # one of the two actions was the script's
    tried, noise = torch.randn(64, 6), torch.randn(64, 6)
    batch.update({"tried_noise": tried, "next_noise": noise})
    features = policy.base.features(batch)
    noise_q = policy.noise_critic(features.summary, tried.clamp(-2, 2) / 2)
    action = policy.base.decode(features, tried.clamp(-2, 2))
    wanted = policy.critic(features.summary, policy.unit(action))
    loss, _ = module.noise_critic_loss(batch)
    torch.testing.assert_close(loss, 0.5 * (noise_q - wanted).square().mean(1).sum())
    loss.backward()
    assert all(p.grad is None for p in policy.critic.parameters())
    there = TensorDict({"observation": batch["next_observation"]}, [64])
    drawn, _ = policy.draw_unit(there, noise)
    wanted = policy.unit(policy.base.decode(policy.base.features(there), 2 * drawn))
    executed = []
    monkeypatch.setattr(SAC, "critic_outputs", lambda *arguments: executed.append(arguments[-1]))
    module.critic_outputs(batch, features.summary, drawn)
    torch.testing.assert_close(executed[0], wanted)
    assert torch.equal(policy.q_values(batch, drawn), policy.noise_critic(features.summary, drawn))


def test_what_cannot_be_steered_is_refused(clone, tmp_path):
    with refused(names=("VLAPolicy", "head: flow")):
        make_policy(BLOCKS, NoisePolicy, base=VLAPolicy)
    with refused(names=("checkpoint", "base")):
        make_policy(cls=NoisePolicy)
    with refused(names=("checkpoint", "base")):
        make_policy(cls=NoisePolicy, base=flow_policy, checkpoint=str(clone))
    with refused(names="checkpoint: last"):
        make_policy(cls=NoisePolicy, checkpoint="last")
    four = partial(ActionChunk, env=TwoDoors, chunk_size=4)
    with refused(names=("base policy", "data.env", "(8, 1)", "(4, 1)")):
        make_policy(four, NoisePolicy, checkpoint=str(clone))
    steered = make_policy(cls=NoiseActorCritic, checkpoint=str(clone))
    with refused(names=("random_env_steps=5000", "NoiseActorCritic", "random_env_steps: 0")):
        SAC(steered)
    td = TensorDict({"action": torch.zeros(2, 8, 1), "executed_action": torch.zeros(2, 8, 1)}, [2])
    with refused(names=("NoiseActorCritic", "SteeredActorCritic", "NoiseSAC")):
        steered.rollout_for_replay(td)
