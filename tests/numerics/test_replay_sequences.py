"""Sequences from a replay lead a memory to what it had come to, wherever they begin, and SAC and TD3 learn through them."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict

from lightning_rl import (
    GRU,
    LSTM,
    SAC,
    TD3,
    DeterministicActorCritic,
    GripperActorCritic,
    MixedReplay,
    NatureCNN,
    ReplayBuffer,
    SquashedActorCritic,
    SyncCollector,
)
from lightning_rl.rollout.contract import final_observations
from lightning_rl.rollout.sequences import Sequences, sequences_of, with_sequences
from tests.arms import ACTION as GRIP
from tests.core.numerics.test_sac import actor_layers, critic_layers
from tests.envs import ScriptedTask
from tests.helpers import make_collector, train
from tests.messages import refused
from tests.numerics.test_recurrence import Double
from tests.q_references import SACReference, forward, log_density
from tests.references import gru_step, numeric_gradient

SPACE, ACTION = Box(-9.0, 9.0, (2,), np.float32), Box(-1.0, 1.0, (1,), np.float32)


def walk(num_envs):
    """A random walk that is lost beyond 1 or cut after 6 steps; no observation comes twice."""

    def move(env, state, action):
        place = 1.3 * state["at"] + 0.3 * action
        return {"at": place}, place.sum(-1), (place.abs() > 1).any(-1)

    settings = {"observation_space": SPACE, "action_space": ACTION, "steps": 6, "start_size": 2}
    return ScriptedTask(num_envs, lambda uniform: {"at": uniform - 0.5}, move, **settings)


def policy_for(memory=GRU, cls=SquashedActorCritic, size=5, **kwargs):
    policy = cls(SPACE, ACTION, (6,), memory=partial(memory, size=size), **kwargs)
    for parameter in policy.actor.parameters():  # so that what is remembered shows in actions
        torch.nn.init.normal_(parameter)
    return policy


def collected(policy, broken=(), sizes=5, envs=3):
    """A replay that took rollouts in, of which some were dropped, and what each env did, step by step."""
    env = walk(envs)
    replay = ReplayBuffer(SPACE, ACTION, envs, seed=2, capacity=20 * envs + 1)
    streams = [[] for _ in range(envs)]
    collector = make_collector(SyncCollector, env, policy, sizes, seed=2)
    for k in range(8):
        rollout = collector.collect()
        if k in broken:
            for stream in streams:
                stream[-1]["goes_on"] = False
            continue
        if k - 1 in broken:
            rollout["continues"] = torch.zeros_like(rollout["continues"])
        replay.extend(rollout)
        for n, stream in enumerate(streams):
            for t in range(sizes):
                done, following = bool(rollout["done"][n, t]), rollout["observation"][n, t + 1]
                if done:
                    row, step = torch.tensor([n]), torch.tensor([t])
                    following = final_observations(rollout, row, step)[0]
                stream.append(
                    {key: rollout[key][n, t].clone() for key in ("observation", "state", "reward")}
                    | {"next": following.clone(), "terminated": bool(rollout["terminated"][n, t])}
                    | {"goes_on": not done}
                )
    return replay, [stream[-20:] for stream in streams]


CASES = {
    "single steps": {"length": 1},
    "short": {"length": 4},
    "with burn-in": {"length": 4, "burn_in": 3},
    "several rewards": {"length": 5, "burn_in": 2, "n_steps": 3},
    "longer than an episode": {"length": 13, "burn_in": 9, "n_steps": 2},
    "all that is held": {"length": 20, "burn_in": 4, "n_steps": 4},
}


@torch.no_grad()
@pytest.mark.parametrize("broken", [(), (5,)], ids=["whole", "a rollout was dropped"])
@pytest.mark.parametrize("memory", [GRU, LSTM])
@pytest.mark.parametrize("name", CASES)
def test_they_lead_to_what_was_remembered_here_and_behind(name, memory, broken):
    settings = dict(CASES[name])
    length, n_steps = settings.pop("length"), settings.get("n_steps", 1)
    policy = policy_for(memory)
    replay, streams = collected(policy, broken)
    places = {
        tuple(step["observation"].tolist()): (n, t)
        for n, stream in enumerate(streams)
        for t, step in enumerate(stream)
    }
    if broken and length > 10:
        with refused(RuntimeError, names=(length, "model.sequence_length", "data.replay.capacity")):
            next(replay.sequences(1, 4, length, gamma=0.9, **settings))
        return
    begun = set()
    for batch in replay.sequences(3, 16, length, gamma=0.9, **settings):
        sequences = sequences_of(batch)
        assert batch.batch_size == (16 * length,)
        assert sequences.length == length
        features = policy.actor_features(batch)
        following = TensorDict({"observation": batch["next_observation"]}, batch.batch_size)
        coming, _ = policy.features_for_target(batch, following, (None, None))
        for k, row in enumerate(batch["observation"]):
            n, t = places[tuple(row.tolist())]
            begun |= {(n, t)} if k % length == 0 else set()
            steps, reward = [streams[n][t]], 0.0
            while len(steps) < n_steps and steps[-1]["goes_on"] and t + len(steps) < 20:
                steps.append(streams[n][t + len(steps)])
            for i, step in enumerate(steps):
                reward += 0.9**i * float(step["reward"])
            final = steps[-1]
            assert float(batch["reward"][k]) == pytest.approx(reward, abs=1e-5)
            discount = 0.0 if final["terminated"] else 0.9 ** len(steps)
            assert float(batch["discount"][k]) == pytest.approx(discount, abs=1e-6)
            assert torch.equal(batch["next_observation"][k], final["next"])
            here, _ = policy.memory(row[None], streams[n][t]["state"][None])
            torch.testing.assert_close(features[k], here[0], rtol=1e-4, atol=1e-6)
            _, state = policy.memory(final["observation"][None], final["state"][None])
            there, _ = policy.memory(final["next"][None], state)
            torch.testing.assert_close(coming[k], there[0], rtol=1e-4, atol=1e-6)
    every = 3 * (20 - length + 1)
    assert len(begun) > every * 0.3, "they begin anywhere"
    if not broken:
        assert {t for _, t in begun} <= set(range(20 - length + 1))


def random_sequences(n_steps=1, count=2, length=4):
    """Random numbers of float64 as a replay would give them, an end at one step in five."""
    rng = np.random.default_rng(1)
    unrolled = length + n_steps - 1
    steps = {
        "observation": rng.normal(size=(count, unrolled, 2)),
        "starts": rng.random((count, unrolled)) < 0.2,
        "state": rng.normal(size=(count, 3)),
    }
    steps["starts"][:, 0] = False
    further = rng.integers(0, n_steps, (count, length))
    batch = {
        "next_observation": rng.normal(size=(count, length, 2)),
        "unit_action": rng.uniform(-1, 1, (count, length, 1)),
        "reward": rng.normal(size=(count, length)),
        "discount": 0.9 * (rng.random((count, length)) > 0.3),
        "noise": rng.normal(size=(count, length, 1)),
        "next_noise": rng.normal(size=(count, length, 1)).clip(-1, 1),
    }
    batch = {key: value.reshape(count * length, *value.shape[2:]) for key, value in batch.items()}
    return batch, steps, further


def minibatch_of(batch, steps, further):
    fields = {key: torch.as_tensor(value) for key, value in batch.items()}
    fields["action"] = fields.pop("unit_action")
    count, length = further.shape
    fields["observation"] = torch.as_tensor(steps["observation"][:, :length]).flatten(0, 1)
    unrolled = steps["starts"].shape[1]
    lead = {key: torch.as_tensor(value) for key, value in steps.items()}
    state, lead = lead.pop("state"), TensorDict(lead, [count, unrolled])
    place = np.arange(count)[:, None] * unrolled + np.arange(length) + further
    place = torch.as_tensor(place.ravel())
    sequences = Sequences(lead, state, 0, None, unrolled - length, place)
    return with_sequences(TensorDict(fields, [count * length]), sequences)


def remembered(weights, batch, steps, further):
    """What a GRU gives at the samples, and where what followed them is read, row by row."""
    here, there = [], []
    count, length = further.shape
    for s in range(count):
        state, states = steps["state"][s], []
        for t in range(steps["starts"].shape[1]):
            state = np.zeros_like(state) if steps["starts"][s, t] else state
            _, state = gru_step(steps["observation"][s, t], state, weights)
            states.append(state)
        here += states[:length]
        for t in range(length):
            before = states[t + further[s, t]]
            there.append(gru_step(batch["next_observation"][s * length + t], before, weights)[0])
    return np.array(here), np.array(there)


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("algorithm", [SAC, TD3])
def test_the_critics_loss_and_its_gradient_through_time_are_those_of_the_definition(
    algorithm, n_steps
):
    torch.manual_seed(3)
    cls = SquashedActorCritic if algorithm is SAC else DeterministicActorCritic
    policy = policy_for(cls=cls, size=3, encoder=Double).double()
    module = algorithm(policy, n_steps=n_steps, sequence_length=4).double()
    for parameter in [*module.target_memory.parameters(), *module.target_critic.parameters()]:
        torch.nn.init.normal_(parameter, std=0.5)  # another one than the memory that it follows
    batch, steps, further = random_sequences(n_steps)
    loss, _ = module.critic_loss(minibatch_of(batch, steps, further))
    loss.backward()

    def weights_of(memory):
        return {key: value.detach().numpy().copy() for key, value in memory.named_parameters()}

    online, slow = weights_of(policy.memory), weights_of(module.target_memory)
    critics = critic_layers(policy.critic)
    actor = actor_layers(policy.actor if algorithm is SAC else module.target_actor)
    _, coming = remembered(online, batch, steps, further)
    _, judged = remembered(slow, batch, steps, further)
    if algorithm is SAC:
        reference = SACReference(actor, critics, alpha=1.0, rate=0.1, tau=0.1, target_entropy=-1)
        u, mean, _, std, _ = reference.act(coming, batch["next_noise"])
        action, entropy = np.tanh(u), -log_density(u, mean, std)
    else:
        best = np.tanh(forward(actor, judged)[0])
        action, entropy = (best + batch["next_noise"]).clip(-1, 1), 0.0
    targets = [
        forward(critic, np.hstack([judged, action]))[0][:, 0]
        for critic in critic_layers(module.target_critic)
    ]
    target = batch["reward"] + batch["discount"] * (np.min(targets, 0) + entropy)

    def reference_loss():
        here, _ = remembered(online, batch, steps, further)
        q = [forward(c, np.hstack([here, batch["unit_action"]]))[0][:, 0] for c in critics]
        return sum(0.5 * np.mean((one - target) ** 2) for one in q)

    assert float(loss.detach()) == pytest.approx(float(reference_loss()), rel=1e-9)
    gradients = numeric_gradient(reference_loss, [*online.values()], step=1e-6)
    for key, expected in zip(online, gradients, strict=True):
        found = dict(policy.memory.named_parameters())[key].grad.numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7, err_msg=key)
    assert all(one.grad is None for one in policy.actor.parameters())


@pytest.mark.parametrize("algorithm", [SAC, TD3])
def test_the_actor_moves_no_memory_that_the_critics_share(algorithm):
    cls = SquashedActorCritic if algorithm is SAC else DeterministicActorCritic
    policy = policy_for(cls=cls, size=3, encoder=Double).double()
    module = algorithm(policy, sequence_length=4).double()
    module.actor_loss(minibatch_of(*random_sequences()))[0].backward()
    assert all(one.grad is None for one in policy.memory.parameters())
    assert all(one.grad is not None for one in policy.actor.parameters())
    trained = {id(p) for objective in module.configure_objectives() for p in objective.parameters}
    assert {id(p) for p in policy.memory.parameters()} <= trained


def settings(**more):
    data = {"num_envs": 2, "buffer_size": 8, "total_env_steps": 128}
    data |= {"replay": partial(ReplayBuffer, capacity=100), **more.pop("data", {})}
    model = {"algorithm": SAC, "sequence_length": 8, "burn_in": 2, **more.pop("model", {})}
    return {
        "env": walk,
        "data": data,
        "policy": {"memory": partial(GRU, size=4)},
        "model": model,
    } | more


REFUSED = {
    "no memory": (
        {"policy": {}},
        ("sequence_length and burn_in", "SquashedActorCritic", "class_path: LSTM"),
    ),
    "another replay": (
        {"data": {"replay": partial(MixedReplay, online=ReplayBuffer, offline=ReplayBuffer)}},
        ("MixedReplay", "data.replay: ReplayBuffer"),
    ),
    "no room": (
        {"data": {"replay": partial(ReplayBuffer, capacity=20)}, "model": {"sequence_length": 16}},
        ("data.replay.capacity=20", "model.sequence_length=16", "data.num_envs=2"),
    ),
    "no budget": (
        {"model": {"sequence_length": 100}},
        ("200 env steps", "128 (data.total_env_steps)", "model.random_env_steps=32"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_a_memory_is_refused(name, tmp_path):
    more, message = REFUSED[name]
    with refused(names=message):
        train(tmp_path, **settings(**more))


def test_shifted_pictures_and_a_gripper_are_refused():
    pictures = Box(0, 255, (40, 40, 3), np.uint8)
    policy = SquashedActorCritic(pictures, ACTION, (6,), encoder=NatureCNN, memory=GRU)
    with refused(names=("random_shift=4", "memory")):
        SAC(policy, random_shift=4)
    with refused(names=("GripperActorCritic", "memory")):
        GripperActorCritic(SPACE, GRIP, memory=GRU)


def test_of_a_policy_that_never_stored_a_state_there_are_none():
    replay = ReplayBuffer(SPACE, ACTION, 2, capacity=100)
    policy = SquashedActorCritic(SPACE, ACTION, (6,))
    replay.extend(make_collector(SyncCollector, walk(2), policy, 8, seed=0).collect())
    with refused(names=("replay", "memory")):
        next(replay.sequences(1, 2, 4))
