"""Losses, gradients, targets and chunks of FQL and QC are those of float64 references, written from the papers."""

from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import (
    FQL,
    GRU,
    QC,
    SAC,
    ActionChunk,
    FlowActorCritic,
    GymnasiumEnv,
    HindsightReplay,
    MixedReplay,
    NatureCNN,
    PerceptronEncoder,
    PointMass,
    ReplayBuffer,
    SquashedActorCritic,
    ValueAtoms,
    read_episodes,
)
from lightning_rl.extensions.datasets.playing import ChunkActor
from lightning_rl.extensions.datasets.replays import read_replay
from lightning_rl.extensions.tasks.base import Pictures
from lightning_rl.system import ranks
from tests.arms import helped_arm
from tests.arms import mixed as mixed_replay
from tests.core.equivalence.test_resume import assert_resumes
from tests.core.numerics.test_replay import Stream
from tests.core.numerics.test_sac import (
    OBSERVATION_SPACE,
    SPACE,
    actor_layers,
    critic_layers,
    exact,
)
from tests.goal_envs import GoalProbe
from tests.helpers import last, train
from tests.messages import refused
from tests.numerics.test_iql import asks, mixed, run_on, with_unknown_ends  # noqa: F401  # a fixture
from tests.q_references import backward, flat, forward
from tests.references import numeric_gradient
from tests.variants import before

CHUNK, STEPS, ROWS, GAMMA, ALPHA = 2, 4, 12, 0.9, 3.0
NUMBERS = CHUNK * 2


class Paper:
    """Park et al. 2025, equations 5 to 8: time runs from noise at 0 to actions at 1."""

    def __init__(self, policy, target):
        self.flow, self.actor = actor_layers(policy.flow), actor_layers(policy.actor)
        self.critics, self.targets = critic_layers(policy.critic), critic_layers(target)

    def velocity(self, seen, x, time):
        # The network gives noise minus action, and reads one minus the paper's time.
        return -forward(self.flow, np.hstack([seen, x, 1.0 - time]))[0]

    def integrate(self, seen, noise):
        x = noise
        for step in range(STEPS):
            x = x + self.velocity(seen, x, np.full((len(x), 1), step / STEPS)) / STEPS
        return np.clip(x, -1, 1)

    def values(self, critics, seen, unit):
        return np.stack([forward(critic, np.hstack([seen, unit]))[0][:, 0] for critic in critics])

    def act(self, seen, noise):
        return forward(self.actor, np.hstack([seen, noise]))[0]

    def chosen(self, seen, noise):
        """By the one-step actor, or the best of several samples, one after the other."""
        if self.actor:
            return np.clip(self.act(seen, noise), -1, 1)
        drawn = [self.integrate(seen, part) for part in np.split(noise, 3, axis=1)]
        values = [self.values(self.critics, seen, unit).mean(0) for unit in drawn]
        best = np.argmax(values, axis=0)
        return np.stack([drawn[index][row] for row, index in enumerate(best)])

    def errors(self, batch):
        seen = batch["next_observation"]
        chosen = self.chosen(seen, batch["next_noise"])
        next_q = self.values(self.targets, seen, chosen).mean(0)
        target = batch["reward"] + batch["discount"] * next_q
        counted = batch["executed"][:, -1] | (batch["discount"] == 0)
        return (self.values(self.critics, batch["observation"], batch["unit"]) - target) * counted

    def flow_loss(self, batch):
        start, goal, seen = batch["flow_noise"], batch["unit"], batch["observation"]
        time = 1.0 - batch["flow_time"][:, None]
        between = (1 - time) * start + time * goal
        squares = (self.velocity(seen, between, time) - (goal - start)) ** 2
        return np.mean(squares * batch["executed"].repeat(2, axis=1))

    def actor_loss(self, batch, goal, scale):
        seen = batch["observation"]
        action = self.act(seen, batch["actor_noise"])
        q = self.values(self.critics, seen, np.clip(action, -1, 1)).mean(0)
        distance = np.mean((action - goal) ** 2)
        return self.flow_loss(batch) + ALPHA * distance - scale * q.mean()


def made(algorithm, num_samples=None, **settings):
    torch.manual_seed(2)
    networks = {"activation": "relu", "critic_normalization": "none", "num_samples": num_samples}
    sizes = {"flow_steps": STEPS, "chunk_size": CHUNK}
    policy = exact(FlowActorCritic)(OBSERVATION_SPACE, SPACE, (8, 8), **networks, **sizes)
    module = algorithm(policy, gamma=GAMMA, batch_size=ROWS, **settings).double()
    for network in (policy.flow, policy.actor):
        for parameter in network[-1].parameters() if len(network) else ():
            torch.nn.init.normal_(parameter, std=2.0)
    for slow in module.target_critic.parameters():
        slow.data.normal_(std=0.5)
    return module


def drawn(samples=1):
    rng = np.random.default_rng(3)
    batch = {key: rng.normal(size=(ROWS, 3)) for key in ("observation", "next_observation")}
    batch |= {key: rng.normal(size=(ROWS, NUMBERS)) for key in ("flow_noise", "actor_noise")}
    batch |= {"next_noise": rng.normal(size=(ROWS, samples * NUMBERS)), "reward": rng.normal(size=ROWS)}  # fmt: skip
    batch |= {"flow_time": rng.random(ROWS), "unit": rng.uniform(-1, 1, (ROWS, NUMBERS))}
    executed = np.ones((ROWS, CHUNK), bool)
    executed[:6, 1] = False  # cut by a termination, and by a time limit
    batch |= {"executed": executed, "discount": np.full(ROWS, GAMMA**CHUNK)}
    batch["discount"][:3], batch["discount"][3:6] = 0.0, GAMMA
    low, high = np.float64(SPACE.low), np.float64(SPACE.high)
    action = (low + high) / 2 + (high - low) / 2 * batch["unit"].reshape(ROWS, CHUNK, 2)
    fields = {key: torch.as_tensor(value) for key, value in batch.items() if key != "unit"}
    return batch, TensorDict(fields | {"action": torch.as_tensor(action)}, [ROWS])


def gradients(module):
    """Of the layers of a perceptron, as in `actor_layers`."""
    linear = [layer for layer in module if isinstance(layer, torch.nn.Linear)]
    return [g for layer in linear for g in (layer.weight.grad.numpy().T, layer.bias.grad.numpy())]


@pytest.mark.parametrize(("algorithm", "samples"), [(FQL, None), (QC, 3)])
def test_the_loss_of_the_critics_and_its_gradient_are_the_papers(algorithm, samples):
    module = made(algorithm, samples, **({"target_samples": 3} if samples else {}))
    batch, minibatch = drawn(samples or 1)
    paper = Paper(module.policy, module.target_critic)
    loss, scalars = module.critic_loss(minibatch)
    errors = paper.errors(batch)
    assert (errors[:, 3:6] == 0).all()
    assert (errors[:, :3] != 0).all()
    assert loss.item() == pytest.approx(np.mean(errors**2), rel=1e-9)  # of two critics
    assert {"q", "q_target"} <= scalars.keys()
    loss.backward()
    for index, critic in enumerate(paper.critics):
        _, inputs = forward(critic, np.hstack([batch["observation"], batch["unit"]]))
        found, _ = backward(critic, inputs, errors[index][:, None] / ROWS)
        for weight, (expected, _) in zip(module.policy.critic.weights, found, strict=True):
            np.testing.assert_allclose(weight.grad[index], expected, atol=1e-9)


@pytest.mark.parametrize("normalize_q", [False, True])
def test_the_gradient_of_the_one_step_actor_is_that_of_finite_differences(normalize_q):
    module = made(FQL, alpha=ALPHA, normalize_q=normalize_q)
    batch, minibatch = drawn()
    paper = Paper(module.policy, module.target_critic)
    goal = paper.integrate(batch["observation"], batch["actor_noise"])
    action = paper.act(batch["observation"], batch["actor_noise"])
    assert (np.abs(action) > 1).any(), "a clipped number has no gradient of Q"
    q = paper.values(paper.critics, batch["observation"], np.clip(action, -1, 1)).mean(0)
    scale = 1 / np.mean(np.abs(q)) if normalize_q else 1.0
    loss, _ = module.actor_loss(minibatch)
    assert loss.item() == pytest.approx(paper.actor_loss(batch, goal, scale), rel=1e-9)
    loss.backward()
    for network, layers in ((module.policy.actor, paper.actor), (module.policy.flow, paper.flow)):
        expected = numeric_gradient(lambda: paper.actor_loss(batch, goal, scale), flat(layers))
        for ours, theirs in zip(gradients(network), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-7)


def test_qc_clones_by_its_flow_and_the_best_of_one_sample_is_the_clone():
    module = made(QC, 1, target_samples=1)
    module.policy.requires_grad_(False)
    batch, minibatch = drawn()
    paper = Paper(module.policy, module.target_critic)
    assert module.actor_loss(minibatch)[0].item() == pytest.approx(paper.flow_loss(batch), rel=1e-9)
    policy, td = module.policy, minibatch.select("observation")
    noise = minibatch["flow_noise"]
    clone = policy.flow_unit(td["observation"], noise)
    np.testing.assert_allclose(clone, paper.integrate(batch["observation"], batch["flow_noise"]))
    assert torch.equal(policy.chosen_unit(td, td["observation"], noise), clone)
    td.update({"state": torch.zeros(ROWS, 3).double(), "action_noise": noise})
    acted = policy.get_action(td)["action"]
    assert torch.equal(acted, policy.distribution.from_unit(clone)[:, 0])
    td.set("state", torch.zeros(ROWS, 3).double())
    acted = policy.get_action(td.exclude("action_noise"), deterministic=True)["action"]
    center = policy.flow_unit(td["observation"], torch.zeros_like(noise))
    assert torch.equal(acted, policy.distribution.from_unit(center)[:, 0])
    assert not [name for name in policy.acting_state() if "critic" in name], "the clone needs none"


def test_a_chunk_is_executed_before_another_one_is_chosen():
    policy = FlowActorCritic(OBSERVATION_SPACE, SPACE, (8,), chunk_size=3)
    state, actions, chunks = policy.first_state(2)["state"], [], []
    for step in range(7):
        if step == 5:
            state[1] = 0.0  # as after the end of an episode
        noise = policy.draw_noise([2])
        td = TensorDict({"observation": torch.randn(2, 3), "state": state, "action_noise": noise}, [2])  # fmt: skip
        chunks.append(policy.distribution.from_unit(policy.one_step(td["observation"], noise).clamp(-1, 1)))  # fmt: skip
        result = policy.get_action(td)
        actions.append(result["action"])
        state = result["next_state"]
    for row, parts in enumerate(([0, 0, 0, 3, 3, 3, 6], [0, 0, 0, 3, 3, 5, 5])):
        first = 0
        for step, begun in enumerate(parts):
            first = step if step == 0 or begun != parts[step - 1] else first
            torch.testing.assert_close(actions[step][row], chunks[begun][row, step - first])
    assert policy.is_recurrent
    assert torch.equal(*(policy.get_action(TensorDict({"observation": torch.ones(1, 3), **policy.first_state(1)}, [1]), deterministic=True)["action"] for _ in range(2)))  # fmt: skip


def test_an_intervention_ends_a_chunk_in_training_and_where_it_plays_but_no_memory(tmp_path):
    seen = []
    look = before(FQL, training_step=lambda module, rollout, index: seen.append(rollout.clone()))
    data = {"num_envs": 1, "buffer_size": 6, "total_env_steps": 12, "replay": ReplayBuffer}
    model = {"algorithm": look, "random_env_steps": 0, "batch_size": 2}
    module, *_ = train(tmp_path, env=helped_arm, data=data, model=model, policy={"chunk_size": 6})
    helped = seen[0]["intervened"][0, :-1].tolist()
    assert helped == [False, False, True, False, False, True]
    assert seen[0]["state"][0, :, -1].tolist() == [0, 5, 4, 0, 5, 4, 0]
    policy, counts = module.policy, []
    policy.register_forward_hook(lambda _, __, td: counts.append(int(td["next_state"][0, -1])))
    for is_plan in (True, False):
        policy.state_is_plan = is_plan
        counts.clear()
        was_helped = lambda: [False, *helped][len(counts)]  # noqa: E731
        actor = ChunkActor(policy, 1, None, is_outdated=was_helped)
        for _ in range(6):
            actor(torch.rand(1, 4), torch.ones(1, dtype=torch.bool))
        assert counts == ([5, 4, 3, 5, 4, 3] if is_plan else [5, 4, 3, 2, 1, 0])


def chunk_by_definition(steps, first, size):
    """The sum of rewards from a step on, and which of the chunk's actions were executed in its episode."""
    total, discount, actions = 0.0, 1.0, []
    for step in steps[first : first + size]:
        total += discount * step["reward"]
        discount *= GAMMA
        actions.append(step["action"])
        if step["terminated"] or step["truncated"]:
            discount *= not step["terminated"]
            break
    return total, discount, actions


@pytest.mark.parametrize("capacity", [100, 14])  # also with slots that were written twice
def test_chunks_of_the_replay_respect_ends_time_limits_and_interventions(capacity):
    replay = ReplayBuffer(OBSERVATION_SPACE, SPACE, 2, capacity=capacity)
    stream = Stream(OBSERVATION_SPACE, 2, seed=4, action=SPACE, person=True, end=0.15)
    rollouts = [stream.next(5) for _ in range(3)]
    for rollout in rollouts:
        replay.extend(rollout)
    found = set()
    keys = ("observation", "reward", "terminated", "truncated")
    streams = [[{key: float(r[key][env, t]) if key != "observation" else r[key][env, t] for key in keys} | {"action": r["executed_action"][env, t]} for r in rollouts for t in range(5)] for env in range(2)]  # fmt: skip
    (batch,) = replay.chunks(1, 400, n_steps=3, gamma=GAMMA)
    for row in range(400):
        sample = batch[row]
        env, first = next((env, t) for env in range(2) for t in range(15) if torch.equal(streams[env][t]["observation"], sample["observation"]))  # fmt: skip
        total, discount, actions = chunk_by_definition(streams[env], first, 3)
        assert sample["reward"].item() == pytest.approx(total, abs=1e-6)
        assert sample["discount"].item() == pytest.approx(discount)
        assert sample["executed"].tolist() == [k < len(actions) for k in range(3)]
        expected = torch.stack([*actions, *[actions[-1]] * (3 - len(actions))])
        torch.testing.assert_close(sample["action"], expected)
        found.add((len(actions), discount == 0))
    assert {1, 2, 3} == {length for length, _ in found}


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_goals_in_hindsight_and_interventions_give_chunks(chunk_size, tmp_path):
    data = {"num_envs": 2, "buffer_size": 8, "total_env_steps": 96}
    run = {"model": {"algorithm": FQL}, "policy": {"chunk_size": chunk_size}}
    keys = ["achieved_goal", "desired_goal", "observation"]
    read = {"policy": run["policy"] | {"actor_keys": keys[1:], "critic_keys": keys}}
    goals = data | {"replay": partial(HindsightReplay, capacity=60)}
    module, *_ = train(tmp_path / "goals", env=GoalProbe, data=goals, **run | read)
    assert module.updates_done > 50
    helped = data | {"replay": mixed_replay}
    module, *_ = train(tmp_path / "help", env=helped_arm, data=helped, **run)
    assert module.updates_done > 50


def test_pictures_train_the_encoder_by_both_losses_and_keys_may_differ(tmp_path):
    make_env = partial(PointMass, max_episode_steps=9, pictures=Pictures(12, 2))
    encoder = partial(NatureCNN, size=8, channels=(4,), kernels=(4,), strides=(2,))
    data = {"num_envs": 2, "buffer_size": 8, "total_env_steps": 64, "replay": partial(ReplayBuffer, capacity=90)}  # fmt: skip
    for name, algorithm, policy in (
        ("shared", FQL, {}),
        ("apart", FQL, {"share_encoder": False}),
        ("best of n", QC, {"share_encoder": False, "num_samples": 2}),
    ):
        policy |= {"encoder": encoder, "chunk_size": 2}
        model = {"algorithm": algorithm, "random_shift": 1}
        module, *_ = train(tmp_path / name, env=make_env, data=data, policy=policy, model=model)
        assert module.updates_done > 20
        assert module.metrics["train/skipped_steps"] == 0


def offline(path, algorithm=FQL, iterations=4, **policy):
    run = run_on(path, iterations=iterations)
    data = {"num_envs": 1, "buffer_size": 320, "replay": partial(ReplayBuffer, capacity=320)}
    model = {"algorithm": algorithm, "batch_size": 64, "learning_rate": 5e-3, "gamma": 0.5}
    model |= {"tau": 0.05, "random_env_steps": 0, "updates_per_env_step": 0.4}
    settings = {"policy": policy, "data": run["data"] | data | {"offline": True}}
    return run | settings | {"model": model}


def test_the_targets_of_the_first_update_read_the_statistics_of_the_dataset(mixed, tmp_path):  # noqa: F811
    means = []

    def look(module, minibatch):
        encoders = module.policy.encoder, module.target_encoder
        means.extend(encoder.normalizer.mean.tolist() for encoder in encoders)

    encoder = partial(PerceptronEncoder, hidden_sizes=[4], normalize=True)
    run = offline(mixed[0], before(FQL, critic_loss=look), iterations=1, encoder=encoder)
    train(tmp_path, **run, trainer={"limit_val_batches": 0})
    assert means[0] != [0.0] * len(means[0])
    assert means == means[:1] * len(means)


def test_from_a_dataset_it_improves_on_the_data_and_goes_on_online(mixed, tmp_path):  # noqa: F811
    path, mean = mixed
    found = {}
    for name, settings in {
        "FQL": {},
        "QC": {"algorithm": QC, "num_samples": 8},
    }.items():
        run = offline(path, **settings)
        run["model"] |= {"alpha": 0.1} if name == "FQL" else {}
        found[name] = train(tmp_path / name, **run)[0].evaluation["avg_reward"]
    assert mean < 6
    assert min(found.values()) > 7.3  # of 8; a clone: 6.8
    replay = partial(MixedReplay, demonstrations=path, offline=partial(ReplayBuffer, capacity=320))
    data = {"replay": replay, "num_envs": 4, "buffer_size": 8, "total_env_steps": 64}
    online, *_ = train(
        tmp_path / "online", env=asks, data=data,
        model={"algorithm": FQL, "learning_rate": 1e-9, "tau": 1e-9, "random_env_steps": 0},
        trainer={"init_from": str(last(tmp_path / "FQL"))},
    )  # fmt: skip
    assert online.updates_done > 30
    assert online.evaluation["avg_reward"] > 7.3


def test_without_a_final_observation_the_last_step_is_left_out(mixed, tmp_path):  # noqa: F811
    path, _ = with_unknown_ends(mixed[0], tmp_path)
    run = offline(path, iterations=1)
    run["model"]["updates_per_env_step"] = 0.05
    made = []

    def make_replay(*args, **settings):
        made.append(ReplayBuffer(*args, capacity=320, **settings))
        return made[0]

    run["data"]["replay"] = make_replay
    _, data, _ = train(tmp_path / "run", **run, trainer={"limit_val_batches": 0})
    spaces = data.observation_space, data.action_space
    transitions = []
    for replay in (made[0], read_replay(read_episodes(path, action_space=spaces[1]), *spaces)):
        (batch,) = replay.batches(1, 3000)
        keys = ("observation", "action", "reward", "next_observation", "discount")
        rows = torch.cat([batch[key].reshape(3000, -1) for key in keys], 1)
        transitions.append({tuple(row) for row in rows.tolist()})
    assert transitions[0] == transitions[1]
    assert len(made[0]) == 10 * 7


@pytest.mark.parametrize("settings", [{"chunk_size": 3}, {"algorithm": QC, "num_samples": 2}])
def test_on_a_dataset_it_is_resumed_bit_for_bit(settings, mixed, tmp_path):  # noqa: F811
    run = offline(mixed[0], **settings)
    run["model"]["updates_per_env_step"] = 0.05
    module = assert_resumes(tmp_path, 2, **run)
    assert module.updates_done > 50


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": {"num_samples": 2}}, ("FQL", "num_samples", "QC")),
        ({"policy": {"memory": GRU}}, ("FlowActorCritic", "policy.memory")),
        ({"policy": {"value_atoms": ValueAtoms(5, 1.0)}}, ("FQL", "policy.value_atoms")),
        ({"policy": {"chunk_size": 3}, "model": {"n_steps": 2}}, ("n_steps", "2", "chunk_size", "3")),
        ({"policy": {"policy_class": SquashedActorCritic}}, ("FQL", "FlowActorCritic")),
        ({"data": {"num_envs": 2}}, ("data.num_envs", "data.buffer_size", "320")),
        ({"data": {"replay": partial(ReplayBuffer, capacity=100)}}, ("data.replay.capacity", "320")),
        ({"collector": {"episodes_per_rollout": 4}}, ("4 of its", "data.collector.episodes_per_rollout")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change, words, mixed, tmp_path):  # noqa: F811
    run = offline(mixed[0], iterations=1)
    run["data"]["collector"].keywords.update(change.pop("collector", {}))
    run |= {key: run[key] | value for key, value in change.items()}
    with refused(names=words):
        train(tmp_path, **run)


def test_other_algorithms_chunks_of_the_env_and_means_over_ranks_are_refused(tmp_path, monkeypatch):
    policy = FlowActorCritic(OBSERVATION_SPACE, SPACE, (8,))
    with refused(names=("SAC", "SquashedActorCritic")):
        SAC(policy)
    with refused(names=("QC", "num_samples", "FQL")):
        QC(policy)
    env = GoalProbe(1)
    spaces = env.single_observation_space, env.single_action_space
    keys = {"actor_keys": ["observation"], "critic_keys": ["desired_goal", "achieved_goal"]}
    with refused(names=("num_samples", "critic_keys", "actor_keys", "FQL")):
        FlowActorCritic(*spaces, (8,), num_samples=2, **keys)
    chunked = partial(ActionChunk, env=partial(GymnasiumEnv, id="Pendulum-v1"), chunk_size=2)
    data = {"num_envs": 2, "replay": partial(ReplayBuffer, capacity=60)}
    with refused(names=("FQL", "ActionChunk", "policy.chunk_size")):
        train(tmp_path, env=chunked, data=data, model={"algorithm": FQL})
    module = FQL(policy, normalize_q=True)
    monkeypatch.setattr(SAC.__mro__[2], "setup", lambda self, stage: None)
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    with refused(names=("normalize_q", "2", "trainer.devices: 1")):
        module.setup("fit")
