"""Whole updates of IQL and AWAC are those of float64 references, with and without an env."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import (
    AWAC,
    GRU,
    IQL,
    SAC,
    ActorCritic,
    Algorithm,
    DatasetCollector,
    EpisodeWriter,
    NatureCNN,
    PushCube,
    ReplayBuffer,
    SquashedActorCritic,
    read_episodes,
    write_minari,
)
from lightning_rl.algorithms.learner import Learner
from lightning_rl.collectors import SyncCollector
from lightning_rl.compiled.choice import CompileDecision
from lightning_rl.extensions.datasets.demonstrations import expert_episodes
from lightning_rl.extensions.tasks.base import Pictures
from lightning_rl.policies.precision import autocast
from lightning_rl.rollout.allocation import allocate_rollout
from lightning_rl.rollout.contract import FinalObservationWriter, next_observations
from lightning_rl.system import ranks
from tests.core.equivalence.test_resume import assert_resumes
from tests.core.numerics.test_sac import (
    OBSERVATION_SPACE,
    SPACE,
    actor_layers,
    critic_layers,
    exact,
)
from tests.envs import UNIT, ScriptedTask
from tests.helpers import assert_same, last, train
from tests.messages import refused
from tests.q_references import Adam, backward, flat, forward, log_density
from tests.references import gae_by_sum, numeric_gradient
from tests.variants import after, variant

RATE, TAU, GAMMA, EXPECTILE, BETA, MOST, WITHIN = 1e-2, 0.1, 0.9, 0.8, 2.0, 1.5, 0.9


class Reference:
    def __init__(self, module):
        policy = module.policy
        self.implicit = isinstance(module, IQL)
        self.actor = actor_layers(policy.actor)
        self.value = actor_layers(module.value) if self.implicit else []
        self.critics, self.targets = critic_layers(policy.critic), critic_layers(policy.critic)
        self.adams = [Adam(RATE) for _ in range(3)]

    def act(self, seen):
        mean, log_std = np.split(forward(self.actor, seen)[0], 2, axis=-1)
        return mean, np.exp(np.clip(log_std, -20, 2))

    def least(self, seen, unit):
        return np.min([forward(c, np.hstack([seen, unit]))[0][:, 0] for c in self.targets], 0)

    def value_of(self, seen, noise):
        if self.implicit:
            return forward(self.value, seen)[0][:, 0]
        mean, std = self.act(seen)
        return self.least(seen, np.tanh(mean + std * noise))

    def update(self, batch):
        size, seen = len(batch["reward"]), batch["observation"]
        target_q = self.least(seen, batch["unit"])
        if self.implicit:
            value, inputs = forward(self.value, seen)
            u = target_q - value[:, 0]
            slope = -2 * np.abs(EXPECTILE - (u < 0)) * u / size
            found, _ = backward(self.value, inputs, slope[:, None])
            self.adams[0].step(flat(self.value), flat(found))
        following = self.value_of(batch["next_observation"], batch["next_noise"])
        wanted = batch["reward"] + GAMMA * batch["continuing"] * following
        arrays, gradients = [], []
        for critic in self.critics:
            q, inputs = forward(critic, np.hstack([seen, batch["unit"]]))
            found, _ = backward(critic, inputs, (q - wanted[:, None]) / size)
            arrays, gradients = arrays + flat(critic), gradients + flat(found)
        self.adams[1].step(arrays, gradients)
        advantage = target_q - self.value_of(seen, batch["noise"])
        weight = np.minimum(np.exp(BETA * advantage), MOST)
        inner = np.arctanh(np.clip(batch["unit"], -WITHIN, WITHIN))
        self.adams[2].step(
            flat(self.actor),
            numeric_gradient(
                lambda: -np.mean(weight * log_density(inner, *self.act(seen))), flat(self.actor)
            ),
        )
        for slow, fast in zip(self.targets, self.critics, strict=True):
            for a, b in zip(flat(slow), flat(fast), strict=True):
                a += TAU * (b - a)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("algorithm", [IQL, AWAC])
def test_updates_are_those_of_the_reference(algorithm, dtype, traced_only):
    """In float32 also compiled; there Adam divides tiny gradients by their rounded size."""
    torch.manual_seed(1)
    policy = exact(SquashedActorCritic)(OBSERVATION_SPACE, SPACE, (8, 8))
    settings = {"learning_rate": RATE, "tau": TAU, "gamma": GAMMA}
    settings |= {"advantage_scale": BETA, "max_weight": MOST, "actions_within": WITHIN}
    own = {"expectile": EXPECTILE, "value_hidden_sizes": (8,)} if algorithm is IQL else {}
    module = algorithm(policy, **settings, **own).to(dtype)
    for parameter in policy.actor[-1].parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    choice = CompileDecision(dtype == torch.float32, None)
    module.attach_learner(Learner(module, module.objectives, module.configure_optimizers(), choice))
    update = module.learner.sequence(tuple(module.objectives), module.update_target, module._moved)
    reference, rng = Reference(module), np.random.default_rng(1)
    for _ in range(5):
        batch = {key: rng.normal(size=(16, 3)) for key in ("observation", "next_observation")}
        batch |= {"reward": rng.normal(size=16), "continuing": (rng.random(16) < 0.7) * 1.0}
        batch |= {key: rng.normal(size=(16, 2)) for key in ("noise", "next_noise")}
        batch["unit"] = rng.uniform(-1, 1, size=(16, 2))
        low, high = np.float64(SPACE.low), np.float64(SPACE.high)
        fields = {key: batch[key] for key in batch if key != "unit"}
        fields["action"] = (low + high) / 2 + (high - low) / 2 * batch["unit"]
        update(TensorDict({k: torch.as_tensor(v).to(dtype) for k, v in fields.items()}, [16]))
        reference.update(batch)
    most = 1e-6 if dtype == torch.float64 else 1e-4
    pairs = [(actor_layers(policy.actor), reference.actor)]
    pairs += [(actor_layers(module.value), reference.value)] if algorithm is IQL else []
    pairs += zip(critic_layers(policy.critic), reference.critics, strict=True)
    pairs += zip(critic_layers(module.target_critic), reference.targets, strict=True)
    for ours, theirs in pairs:
        for a, b in zip(flat(ours), flat(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=most)


@pytest.mark.parametrize("algorithm", [IQL, AWAC])
def test_advantages_are_those_of_the_recorded_steps(algorithm):
    """With gae_lambda, by the value of the algorithm; the weight of an action is of its step's."""
    torch.manual_seed(1)
    policy = SquashedActorCritic(OBSERVATION_SPACE, SPACE, (8,))
    module = algorithm(policy, gamma=GAMMA, gae_lambda=0.7, max_weight=MOST)
    module.noise_fields = lambda count: {
        key: torch.ones(count, 2) for key in ("noise", "next_noise")
    }
    envs, steps = 3, 12
    rollout = allocate_rollout(OBSERVATION_SPACE, SPACE, envs, steps)
    for key in ("observation", "reward"):
        rollout[key].normal_()
    for key in ("terminated", "truncated"):
        rollout[key].bernoulli_(0.2)
    rollout["done"].copy_(rollout["terminated"] | rollout["truncated"])
    writer = FinalObservationWriter(rollout)
    for t in range(steps):
        writer.write(t, torch.randn(envs, 3))
    module.write_advantages(rollout, module.gae_lambda)
    noise = np.ones((1, 2))
    reference = Reference(module)

    def value(observation):
        seen = observation.reshape(-1, 3).double().numpy()
        return reference.value_of(seen, noise.repeat(len(seen), 0))

    values = value(rollout["observation"]).reshape(envs, steps + 1)
    following = value(next_observations(rollout)).reshape(envs, steps)
    ends = [rollout[key][:, :-1].numpy() for key in ("terminated", "truncated")]
    reward = rollout["reward"][:, :-1].double().numpy()
    wanted = gae_by_sum(reward, values, *ends, following, GAMMA, 0.7)
    np.testing.assert_allclose(rollout["advantage"][:, :-1], wanted, rtol=0, atol=1e-5)
    batch = TensorDict({"observation": torch.zeros(2, 3), "action": torch.zeros(2, 2)}, [2])
    batch["advantage"] = torch.tensor([0.0, 9.0])
    _, scalars = module.actor_loss(batch)
    assert scalars["weight"].item() == pytest.approx((1 + MOST) / 2)


def asks(num_envs):
    """Pays 1 - (a - o / 2)^2 for an observed o of -1 or 1, eight times."""

    def move(env, state, action):
        reward = 1.0 - (action - 0.5 * state["sign"]).square()[:, 0]
        no = torch.zeros(num_envs, dtype=torch.bool)
        return {"sign": (env.uniform(1) - 0.5).sign()}, reward, no, {"success": no}

    def expert(state):
        """A fifth of the best actions, and others at random."""
        drawn = torch.rand(2, num_envs, 1, generator=generator)
        return torch.where(drawn[0] < 0.2, 0.5 * state["sign"], 2.0 * drawn[1] - 1.0)

    generator = torch.Generator().manual_seed(1)
    return ScriptedTask(
        num_envs,
        lambda uniform: {"sign": (uniform - 0.5).sign()},
        move,
        observation_space=UNIT,
        steps=8,
        expert=expert,
    )


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A dataset of 320 steps, and the mean of its returns."""
    pytest.importorskip("pyarrow", reason="datasets: pip install -e '.[data]'")
    path, env = tmp_path_factory.mktemp("mixed") / "data", asks(40)
    spaces = env.single_observation_space, env.single_action_space
    writer = EpisodeWriter(path, *spaces, env.render_fps)
    returns = []
    for episode in expert_episodes(env, 40, 1):
        writer.write(episode)
        returns.append(float(episode.reward.sum()))
    writer.finalise()
    return str(path), np.mean(returns)


def run_on(path, algorithm=IQL, iterations=6, **model):
    own = {"gamma": 0.5, "advantage_scale": 10.0, "tau": 0.05}
    settings = {"learning_rate": 5e-3, "n_epochs": 10, "batch_size": 64, "algorithm": algorithm}
    return {
        "env": asks,
        "policy": {"policy_class": SquashedActorCritic},
        "model": settings | own | model,
        "data": {
            "collector": partial(DatasetCollector, path=path),
            "num_envs": 40,
            "buffer_size": 8,
            "total_env_steps": 320 * iterations,
            "iterations_per_epoch": iterations,
            "num_eval_episodes": 20,
        },
    }


@pytest.mark.parametrize("algorithm", [IQL, AWAC])
def test_it_learns_in_bfloat16_and_its_values_are_not_rounded(algorithm, mixed, tmp_path):
    precision = {"precision": "bf16-mixed"}
    module = train(tmp_path, **run_on(mixed[0], algorithm, 4), trainer=precision)[0]
    assert module.evaluation["avg_reward"] > 7.3  # of 8
    samples = TensorDict({"observation": torch.randn(5, 1), "noise": torch.zeros(5, 1)}, [5])
    with autocast(torch.device("cpu"), torch.bfloat16):
        assert module.state_value(samples).dtype == torch.float32


@pytest.mark.parametrize("algorithm", [IQL, AWAC])
def test_it_is_resumed_bit_for_bit_and_sac_goes_on_from_it(algorithm, mixed, tmp_path):
    run = run_on(mixed[0], algorithm, iterations=4, n_epochs=1, gae_lambda=0.9)
    module = assert_resumes(tmp_path, 2, **run)
    assert not module.target_critic.training, "or dropout would act in the targets alone"
    data = {"replay": partial(ReplayBuffer, capacity=500), "num_envs": 4, "buffer_size": 8}
    online, *_ = train(
        tmp_path / "online", env=asks, data=data | {"total_env_steps": 128},
        model={"algorithm": SAC, "learning_rate": 1e-9, "tau": 1e-9},
        trainer={"init_from": str(last(tmp_path / "whole"))},
    )  # fmt: skip
    own = module.policy
    pairs = [(online.policy.actor, own.actor), (online.policy.critic, own.critic)]
    for one, other in [*pairs, (online.target_critic, own.critic)]:
        torch.testing.assert_close([*one.parameters()], [*other.parameters()], rtol=0, atol=1e-6)


def with_unknown_ends(path, folder):
    """Return two copies of a dataset: without final observations, and without last steps instead."""
    env = asks(1)
    unknown = [replace(episode, final_known=False) for episode in read_episodes(path)[:10]]
    copies = {"unknown": unknown, "shorter": [part.steps_with_successor() for part in unknown]}
    for name, episodes in copies.items():
        spaces = env.single_observation_space, env.single_action_space
        writer = EpisodeWriter(folder / name, *spaces, env.render_fps)
        for episode in episodes:
            writer.write(episode)
        writer.finalise()
    return [str(folder / name) for name in copies]


@pytest.mark.parametrize("own", [{"gae_lambda": 0.9}, {"algorithm": AWAC}])
def test_without_a_final_observation_the_last_step_is_left_out(own, mixed, tmp_path):
    """As by replays: LeRobot's own datasets cannot store what a truncated episode ends with."""
    modules = []
    for path in with_unknown_ends(mixed[0], tmp_path):
        run = run_on(path, iterations=1, n_epochs=1, **own)
        module = train(tmp_path / "run", **run, trainer={"limit_val_batches": 0})[0]
        shutil.rmtree(tmp_path / "run")
        modules.append(module)
    assert modules[0].optimizer_steps > 5
    assert_same(*([*module.parameters()] for module in modules))


def test_without_an_env_it_learns_the_same(mixed, tmp_path):
    """With one, that is stepped in evaluations alone."""
    run = run_on(mixed[0], iterations=2, n_epochs=1)
    run["data"]["offline"] = True
    made = []

    def counted(num_envs):
        made.append(num_envs)
        return asks(num_envs)

    with_env, *_ = train(tmp_path / "env", **run | {"env": counted})
    assert made == [1, 20]
    assert with_env.evaluation["episodes"] == 20
    module, data, trainer = train(tmp_path / "alone", **run | {"env": None})
    assert not module.evaluation
    assert_same([*module.parameters()], [*with_env.parameters()])
    assert [f.level for f in trainer.check(module, data, seconds=0.1)].count("error") == 0
    with refused(names=("data.offline: true", "data.env")):
        trainer.validate(module, datamodule=data)


def test_a_dataset_gives_the_spaces(mixed, tmp_path):
    """As recorded here, of another LeRobot dataset, and of Minari's."""
    env = asks(1)
    wanted = env.single_observation_space, env.single_action_space
    episodes = read_episodes(mixed[0])
    observation, action = episodes.spaces()
    assert (observation.shape, action) == (wanted[0].shape, wanted[1])
    other = shutil.copytree(mixed[0], tmp_path / "other")
    (other / "meta/lightning_rl.json").unlink()
    taken = torch.cat([episode.action for episode in episodes])
    action = read_episodes(other).spaces()[1]
    assert (action.low.item(), action.high.item()) == (taken.min().item(), taken.max().item())
    (other / "meta/stats.json").write_text("{}")
    with refused(names=("stats.json", "data.env")):
        read_episodes(other).spaces()
    pytest.importorskip("minari", reason="pip install -e '.[minari]'")
    write_minari(tmp_path / "minari", [episodes[0]], *wanted)
    assert read_episodes(tmp_path / "minari").spaces() == wanted


def test_several_processes_are_refused(monkeypatch):
    module = AWAC(SquashedActorCritic(OBSERVATION_SPACE, SPACE, (8,)))
    monkeypatch.setattr(Algorithm, "setup", lambda self, stage: None)
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    with refused(names=("AWAC", "2", "trainer.devices: 1")):
        module.setup("fit")


UNREWARDED = after(
    DatasetCollector,
    collect=lambda collector, rollout: rollout.set("reward", 0 * rollout["reward"]),
)


def fill_with_an_unrewarded_episode(collector, episodes):
    first, *others = episodes
    unrewarded = replace(first, reward=first.reward * torch.nan)
    DatasetCollector._fill(collector, [unrewarded, *others])


PARTLY_REWARDED = variant(DatasetCollector, "PartlyRewarded", _fill=fill_with_an_unrewarded_episode)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"collector": SyncCollector}}, "SyncCollector"),
        ({"data": {"collector": UNREWARDED}}, ("rewards", "0")),
        ({"data": {"collector": PARTLY_REWARDED}}, ("Some rewards", "rl-cli label")),
        ({"policy": {"policy_class": ActorCritic}}, "SquashedActorCritic"),
        ({"policy": {"memory": GRU}}, "memory, value_atoms"),
        ({"data": {"collector": SyncCollector, "offline": True}}, "data.collector"),
        ({"env": None}, ("data.env", "data.offline: true")),
    ],
)
def test_what_does_not_fit_is_refused(change, words, mixed, tmp_path):
    run = run_on(mixed[0], iterations=1)
    run |= {key: run[key] | value if key != "env" else value for key, value in change.items()}
    if (collector := run["data"]["collector"]) in (UNREWARDED, PARTLY_REWARDED):
        run["data"]["collector"] = partial(collector, path=mixed[0])
    with refused(names=words):
        train(tmp_path, **run)


@pytest.mark.parametrize("gae_lambda", [None, 0.9])
def test_pictures_are_encoded_by_what_the_critics_train(gae_lambda, tmp_path):
    pytest.importorskip("pyarrow", reason="datasets: pip install -e '.[data]'")
    make_env = partial(PushCube, pictures=Pictures(36, 1))
    env, path = make_env(4), tmp_path / "data"
    spaces = env.single_observation_space, env.single_action_space
    writer = EpisodeWriter(path, *spaces, env.render_fps, pictures="png")
    for episode in expert_episodes(env, 4, 1):
        writer.write(episode)
    writer.finalise()
    run = run_on(str(path), iterations=1, n_epochs=1, gae_lambda=gae_lambda)
    policy = {"policy_class": SquashedActorCritic, "encoder": NatureCNN}
    data = run["data"] | {"num_envs": 4, "buffer_size": 32, "total_env_steps": 128}
    settings = {"env": make_env, "policy": policy, "trainer": {"limit_val_batches": 0}}
    module, _, trainer = train(tmp_path / "run", **run | settings | {"data": data})
    states = [one.state for one in trainer.optimizers]
    for parameter in module.policy.encoder.parameters():
        (state,) = (one[parameter] for one in states if parameter in one)
        assert parameter.isfinite().all()
        assert state["exp_avg"].any()
