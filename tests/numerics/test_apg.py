"""Whole updates of APG and SHAC are those of float64 references with derivatives by differences."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import (
    APG,
    GRU,
    SHAC,
    AsyncCollector,
    NatureCNN,
    PerceptronEncoder,
    PointMass,
    PushCube,
    TorchEnv,
)
from lightning_rl.envs import ActionChunk
from lightning_rl.extensions.algorithms.gradients import check_gradients
from lightning_rl.extensions.tasks.base import Pictures
from tests.core.equivalence.test_resume import assert_resumes
from tests.core.numerics.test_sac import actor_layers
from tests.helpers import assert_same, last, make_data, make_ppo, train
from tests.messages import refused
from tests.q_references import Adam, backward, flat, forward
from tests.references import gae_by_sum, numeric_gradient, segment_gain
from tests.variants import after, before, passing

GAMMA, LAMBDA, TAU, RATE = 0.9, 0.8, 0.3, 1e-2


class Spring(TorchEnv):
    """A point on a spring, that is lost beyond 1.4; an episode lasts at most five steps."""

    differentiable = True
    start_size = 2

    def __init__(self, num_envs):
        seen = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        moved = gymnasium.spaces.Box(-1.0, 3.0, (1,), np.float32)
        super().__init__(num_envs, seen, moved, max_episode_steps=5)

    def initial_state(self, uniform):
        return TensorDict({"x": uniform - 0.5}, [len(uniform)])

    def observe(self, state):
        return state["x"]

    def transition(self, state, action):
        following, reward = spring(state["x"], action, torch.stack)
        return TensorDict({"x": following}, [self.num_envs]), reward, following[:, 0] > 1.4, {}


def spring(at, action, stack):
    """The next state and the reward; of tensors [N, 2], or of an array [2]."""
    x, speed = at[..., 0], at[..., 1]
    speed = speed + 0.4 * action[..., 0] - 0.2 * x
    x = x + 0.3 * speed
    return stack((x, speed), -1), x - 0.5 * x * speed - 0.1 * action[..., 0] ** 2


def keeps_rollouts(algorithm):
    """An algorithm that keeps the rollouts that it trains on, and the weights that it begins with."""

    def keep(module, rollout):
        if not hasattr(module, "rollouts"):
            module.rollouts, module.begun = [], weights_of(module)
        module.rollouts.append(rollout.clone())

    return before(algorithm, improve_actor=keep)


def weights_of(module):
    """The layers of actor, critic and target, and the log standard deviation."""
    policy = module.policy
    networks = [policy.actor, *([policy.critic, module.target_critic] if policy.has_critic else [])]
    log_std = policy.distribution.log_std.detach().double().numpy().copy()
    return [actor_layers(one) for one in networks], log_std


class Reference:
    """Updates of actor, critic and target critic on rollouts."""

    def __init__(self, layers, log_std, limit):
        self.layers, self.log_std, self.limit = layers, log_std, limit
        kind = {"betas": (0.7, 0.95)} if len(layers) == 3 else {"eps": 1e-5}
        self.actor, self.critic = Adam(RATE, **kind), Adam(RATE, **kind)

    def act(self, observation, noise):
        u = forward(self.layers[0], observation)[0] + np.exp(self.log_std) * noise
        return 1.0 + 2.0 * np.tanh(u)

    def value(self, observation):
        return forward(self.layers[2], observation)[0][..., 0] if len(self.layers) == 3 else 0.0

    def update(self, rollout):
        steps = {key: rollout[key].double().numpy() for key in ("observation", "unsquashed_action")}
        steps |= {key: rollout[key][:, :-1].numpy() for key in ("terminated", "truncated")}
        observation = steps["observation"]
        mean = forward(self.layers[0], observation[:, :-1])[0]
        steps["noise"] = (steps["unsquashed_action"][:, :-1] - mean) / np.exp(self.log_std)
        move = partial(spring, stack=np.stack)
        length = steps["noise"].shape[1]
        arrays = [*flat(self.layers[0]), self.log_std]
        gradients = numeric_gradient(
            lambda: -segment_gain(self.act, move, self.value, steps, GAMMA) / length, arrays
        )
        if len(self.layers) == 3:
            targets = self.targets(rollout, steps)
        self.actor.step(arrays, gradients, self.limit)
        if len(self.layers) < 3:
            return
        x, y = observation[:, :-1].reshape(-1, 2), targets.reshape(-1)
        for _ in range(3):
            value, inputs = forward(self.layers[1], x)
            found, _ = backward(self.layers[1], inputs, 2 * (value - y[:, None]) / len(y))
            self.critic.step(flat(self.layers[1]), flat(found), self.limit)
        for slow, fast in zip(flat(self.layers[2]), flat(self.layers[1]), strict=True):
            slow += TAU * (fast - slow)

    def targets(self, rollout, steps):
        observation = steps["observation"]
        action = 1.0 + 2.0 * np.tanh(steps["unsquashed_action"][:, :-1])
        final, _ = spring(observation[:, :-1], action, np.stack)
        reward = rollout["reward"][:, :-1].double().numpy()
        ends = steps["terminated"], steps["truncated"], self.value(final)
        value = self.value(observation)
        return value[:, :-1] + gae_by_sum(reward, value, *ends, GAMMA, LAMBDA)


@pytest.mark.parametrize("algorithm", [APG, SHAC])
@pytest.mark.parametrize("limit", [None, 0.05])
def test_updates_are_those_of_the_reference(algorithm, limit, tmp_path):
    model = {
        "algorithm": keeps_rollouts(algorithm),
        "gamma": GAMMA,
        "learning_rate": RATE,
        "max_grad_norm": limit,
    }
    if algorithm is SHAC:
        model |= {"gae_lambda": LAMBDA, "tau": TAU, "n_epochs": 3, "batch_size": 4 * 7}
    data = {"buffer_size": 7, "total_env_steps": 4 * 7 * 3, "num_eval_envs": 2}
    policy = {"activation": "relu", "log_std_init": -1.0}
    module, *_ = train(tmp_path, env=Spring, data=data, model=model, policy=policy)
    reference = Reference(*module.begun, limit)
    seen = torch.cat(module.rollouts)[:, :-1]
    assert seen["terminated"].any()
    assert (seen["truncated"] & ~seen["terminated"]).any()
    for rollout in module.rollouts:
        reference.update(rollout)
    layers, log_std = weights_of(module)
    np.testing.assert_allclose(log_std, reference.log_std, rtol=0, atol=1e-6)
    for ours, theirs in zip(layers, reference.layers, strict=True):
        for a, b in zip(flat(ours), flat(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


SEGMENTS = {
    "APG": (APG, {"encoder": partial(PerceptronEncoder, hidden_sizes=(8,), normalize=True)}),
    "SHAC": (SHAC, {"normalize_observation": True, "noise_correlation": 0.5}),
}


def run_of(algorithm, policy):
    model = {"algorithm": algorithm, "lr_schedule": "linear"}
    return {"env": partial(PointMass, max_episode_steps=23), "model": model, "policy": policy}


@pytest.mark.parametrize("name", SEGMENTS)
def test_a_run_that_is_stopped_and_resumed_ends_as_uninterrupted(name, tmp_path):
    assert_resumes(tmp_path, 4, **run_of(*SEGMENTS[name]))


@pytest.mark.parametrize("name", SEGMENTS)
def test_the_update_steps_through_the_rollout_that_was_collected(name, tmp_path):
    """Of episodes that end within it, and of noise that is correlated."""
    differences, (algorithm, policy) = [], SEGMENTS[name]

    class Sees(algorithm):
        def improve_actor(self, rollout):
            self.replayed, env = [], self.data.collector.env
            before = env.state_dict()
            super().improve_actor(rollout)
            assert_same(before["state"], env.state.to_dict())
            replayed = torch.stack(self.replayed, 1)
            differences.append((replayed - rollout["action"][:, :-1]).abs().max())

        def act(self, observation, noise):
            action = super().act(observation, noise)
            self.replayed.append(action.detach())
            return action

    train(tmp_path, **run_of(Sees, policy))
    assert len(differences) == 6
    assert max(differences) < 1e-4


def test_a_sharded_policy_is_refused(tmp_path):
    def share(module):
        module.policy.sharding = object()

    with refused(names=("trainer.strategy fsdp", "ddp")):
        train(tmp_path, env=PointMass, model={"algorithm": before(APG, on_train_start=share)})


def test_a_run_begins_with_the_policy_and_the_critic_of_another(tmp_path):
    first, *_ = train(tmp_path / "ppo", env=PointMass, policy={"squash": True})
    run = {"env": PointMass, "model": {"algorithm": SHAC, "learning_rate": 1e-9, "tau": 1e-9}}
    run |= {"trainer": {"init_from": str(last(tmp_path / "ppo"))}}
    module, *_ = train(tmp_path / "shac", **run)
    assert not module.target_critic.training, "or dropout would act in the targets alone"
    torch.testing.assert_close(
        [*module.target_critic.parameters()], [*first.policy.critic.parameters()], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": {"squash": False}}, ("APG", "ActorOnly", "squash: true")),
        ({"policy": {"memory": GRU}}, ("APG", "policy.init_args.memory")),
        ({"policy": {"log_std": "state_dependent"}}, ("APG", "log_std", "parameter")),
        ({"env": PushCube}, ("PushCube", "PointMass, CartPole")),
        ({"env": lambda n: ActionChunk(n, PointMass, 2)}, ("ActionChunk", "differentiable = True")),
        (
            {"env": partial(PointMass, pictures=Pictures(48)), "policy": {"encoder": NatureCNN}},
            ("APG", "PointMass", "pictures"),
        ),
        (
            {"data": {"collector": partial(AsyncCollector, timeout_s=30)}},
            ("APG", "AsyncCollector", "data.collector: SyncCollector"),
        ),
        (
            {"model": {"algorithm": SHAC}, "policy": {"encoder": PerceptronEncoder}},
            ("SHAC", "policy.init_args.encoder"),
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings, words, tmp_path):
    run = {"env": PointMass, "model": {"algorithm": APG}} | settings
    with refused(names=words):
        train(tmp_path, **run)


def claims_another_gradient(env, state, action):
    """The gradient is of another action than it executes."""
    return state, action + (0.5 * action.sin()).detach()


def explodes(env, state, action):
    return TensorDict({"x": state["x"] * 3.0}, state.batch_size), action


def never_lost(env, result, state, action):
    moved, reward, lost, info = result
    return moved, reward, torch.zeros_like(lost), info


@pytest.mark.parametrize(
    ("env", "levels", "words"),
    [
        (Spring, ["ok", "ok", "ok"], "differs from finite differences by"),
        (
            passing(Spring, transition=claims_another_gradient),
            ["error", "ok", "ok"],
            "differs from finite differences by",
        ),
        (
            passing(Spring, transition=lambda env, state, action: (state, action.detach())),
            ["error"],
            "neither reward nor observation",
        ),
        (
            passing(Spring, transition=lambda env, state, action: (state, action.clamp(1.3, 1.31))),
            ["ok", "warning"],
            "100% of the gradients with respect to an action are zero",
        ),
        (
            after(passing(Spring, transition=explodes), transition=never_lost),
            ["ok", "ok", "warning"],
            "grows",
        ),
    ],
)
def test_a_check_compares_gradients_with_differences(env, levels, words):
    data = make_data(partial(endless, env), buffer_size=12)
    module = make_ppo(data, {"log_std_init": -1.0}, APG)
    found = check_gradients(module, data)
    assert [one.level for one in found] == levels
    assert any(words in one.text for one in found)
    assert all(bool(one.cure) == (one.level != "ok") for one in found)
    data.close()


def endless(env, num_envs):
    """An env whose episodes do not end within a test."""
    made = env(num_envs)
    made.max_episode_steps = 1000
    return made
