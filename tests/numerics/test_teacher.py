"""A teacher that knows more labels what its student visits, and acts in a share of the steps."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict

from lightning_rl import (
    GRU,
    PPO,
    ActorCritic,
    ActorOnly,
    AsyncCollector,
    BehaviorCloning,
    DatasetCollector,
    ReplayBuffer,
)
from lightning_rl.extensions.algorithms.teacher import MixedActor, Teacher
from lightning_rl.policies.actors import StepwiseActor
from lightning_rl.rollout.allocation import allocate_rollout
from tests.envs import ScriptedTask
from tests.helpers import assert_same, fit_in, last, load, make_data, scalars, uncompiled_traces
from tests.messages import refused
from tests.variants import after, variant

PLACE, WIND = Box(-np.inf, np.inf, (1,)), Box(-1, 1, (1,))
SPACE, ACTION = Dict({"place": PLACE, "wind": WIND}), Box(-5.0, 5.0, (1,))
STEPS = 20


class Windy(ScriptedTask):
    """Stay at 0 in a wind that only the teacher feels. Where the teacher has been nobody sees which wind there is."""

    def __init__(self, num_envs):
        spaces = {"observation_space": SPACE, "action_space": ACTION}
        super().__init__(num_envs, start, move, observe=TensorDict.copy, steps=STEPS, **spaces)


def start(uniform):
    wind = torch.where(uniform < 0.5, -0.3, 0.3)
    return {"place": torch.zeros_like(wind), "wind": wind}


def move(env, state, action):
    place = state["place"] + 0.5 * action.clamp(-5, 5) + state["wind"]
    return {"place": place}, -place[:, 0].abs()


def knows(observation):
    """What the teacher does: it takes the wind back, and the way to 0."""
    return -2 * (observation["place"] + observation["wind"])


def saved(directory, weight=None, **settings):
    """A checkpoint of a policy with these weights, of a run of PPO that moved nothing."""
    policy = ActorCritic(SPACE, ACTION, (), rescale_action=False, **settings)
    if weight is not None:
        policy.actor[0].weight.data.copy_(torch.tensor([weight]))
    model = PPO(policy, learning_rate=1e-30, batch_size=64)
    fit_in(directory, model, make_data(Windy, total_env_steps=64, num_eval_episodes=1))
    return str(directory)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A checkpoint of a policy that acts as `knows`."""
    return saved(tmp_path_factory.mktemp("teacher") / "run", [-2.0, -2.0])


@pytest.fixture(scope="module")
def remembering(tmp_path_factory):
    """A checkpoint of a policy with a memory."""
    torch.manual_seed(4)
    return saved(tmp_path_factory.mktemp("remembering") / "run", memory=partial(GRU, size=4))


def teach(
    run_dir, teacher, algorithm=BehaviorCloning, *, iterations=6, data=None, trainer=None, **model
):
    """Have the student of a teacher learn, without the key that it does not read."""
    torch.manual_seed(1)
    own = {"num_envs": 8, "buffer_size": STEPS, "iterations_per_epoch": 3, "seed": 3}
    own |= {"total_env_steps": iterations * 8 * STEPS}
    keys = {"actor_keys": ["place"], "ignore_keys": ["wind"]}
    memory = model.pop("memory", None)
    policy = ActorOnly(SPACE, ACTION, (32,), log_std_init=-1, memory=memory, **keys)
    settings = {"learning_rate": 3e-3, "batch_size": 40, "n_epochs": 4} | model
    module = algorithm(policy, teacher=teacher, **settings)
    data = make_data(Windy, **own | (data or {}))
    fit_in(run_dir, module, data, **(trainer or {}))
    return module


REPLAY = partial(ReplayBuffer, capacity=5 * 8 * STEPS)


def keep_labels(module, learnt, rollout, teacher):
    module.done, module.learnt = rollout, learnt
    module.rollouts = [*getattr(module, "rollouts", []), learnt.clone()]
    # As an env that clips: what is executed is no label.
    learnt["executed_action"] = torch.zeros_like(learnt["action"])


def keep_drawn(module, minibatches, rollout):
    module.drawn = list(minibatches)
    return module.drawn


SPY = after(BehaviorCloning, labelled=keep_labels, _replayed=keep_drawn)


def test_it_is_the_states_of_the_student_that_are_labelled(teacher, tmp_path):
    model = teach(tmp_path, teacher, SPY)
    learnt = model.learnt[:, :-1]
    observation, told = learnt["observation"], learnt["action"]
    torch.testing.assert_close(told, knows(observation).clamp(-5, 5))
    assert not torch.allclose(model.done["action"][:, :-1], told, atol=0.1), "the student acted"
    assert observation["place"].abs().max() > 0.5, "and was where the teacher never is"
    for name, value in model.policy.fields_of(told.flatten(0, 1)).items():
        assert torch.equal(learnt[name].flatten(0, 1), value), "what belongs to an action follows"
    model.teacher = "gone.ckpt"
    model.setup("validate")  # evaluation needs no teacher


def test_of_a_replay_the_labels_of_the_last_rollouts_are_learnt(teacher, tmp_path):
    data = {"replay": partial(ReplayBuffer, capacity=2 * 8 * STEPS)}
    model = teach(tmp_path, teacher, SPY, data=data)
    assert len(model.drawn) == 4 * 8 * STEPS // 40, "as many as passes over the rollout have"
    drawn = torch.cat([one["observation", "place"] for one in model.drawn]).flatten()
    told = torch.cat([one["action"] for one in model.drawn])
    winds = torch.cat([one["observation", "wind"] for one in model.drawn])
    torch.testing.assert_close(told, knows({"place": drawn[:, None], "wind": winds}).clamp(-5, 5))
    places = [one["observation", "place"][:, 1:-1].flatten() for one in model.rollouts]
    shares = [torch.isin(places_of, drawn).float().mean() for places_of in places]
    assert max(shares[:4]) < 0.1, "these rollouts have left the buffer"
    assert min(shares[4:]) > 0.5, "these are in it"


def test_each_row_is_told_by_the_teacher_that_the_observation_names():
    space = Dict({"place": PLACE, "wind": WIND, "task": Box(0, 1, (2,))})
    policies = [ActorCritic(space, ACTION, (8,)) for _ in range(2)]
    teacher = Teacher(policies, ActorOnly(space, ACTION), key="task")
    task = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.2, 0.1]])
    observation = {"place": torch.randn(3, 1), "wind": torch.randn(3, 1), "task": task}
    td = TensorDict({"observation": TensorDict(observation, [3])}, [3])
    told = [policy(td.copy(), deterministic=True)["action"] for policy in policies]
    expected = torch.stack([told[1][0], told[0][1], told[0][2]])
    assert torch.equal(teacher.actions(td["observation"]), expected)
    for key in (None, "place", "colour"):
        with refused(names=("2 teachers", "teacher_key", key)):
            Teacher(policies, ActorOnly(space, ACTION), key=key)


def test_what_only_a_teachers_critic_reads_may_be_missing():
    keys = {"actor_keys": ["place"], "critic_keys": ["place", "wind"]}
    policy = ActorCritic(SPACE, ACTION, (8,), **keys)
    teacher = Teacher([policy], ActorOnly(Dict({"place": PLACE}), ACTION))
    seen = TensorDict({"place": torch.randn(3, 1)}, [3])
    assert teacher.actions(seen).shape == (3, *ACTION.shape)


def test_a_teacher_with_a_memory_remembers_the_episodes_of_the_student(remembering, tmp_path):
    """Episodes of 20 steps in rollouts of 15: a memory lasts over rollouts, and ends with its episode."""
    model = teach(tmp_path, remembering, SPY, data={"buffer_size": 15}, iterations=4)
    (policy,) = model._teacher.policies
    seen = torch.cat([one["observation"][:, :-1] for one in model.rollouts], 1)
    done = torch.cat([one["done"][:, :-1] for one in model.rollouts], 1)
    told = torch.cat([one["action"][:, :-1] for one in model.rollouts], 1)
    assert done.sum(1).tolist() == [4] * 8, "of 90 steps"
    state = torch.zeros(8, 4)
    for t in range(told.shape[1]):
        td = policy.get_action(
            TensorDict({"observation": seen[:, t], "state": state}, [8]), deterministic=True
        )
        torch.testing.assert_close(told[:, t], td["action"].clamp(-5, 5))
        state = td["next_state"] * ~done[:, t, None]


@torch.no_grad()
def mixed(share):
    """The actions of one rollout [T, N, 1], with what either of both would have done."""
    policy = ActorOnly(SPACE, ACTION, (8,), rescale_action=False)
    expert = ActorCritic(SPACE, ACTION, (8,), rescale_action=False)
    rollout = allocate_rollout(SPACE, ACTION, 64, 4, extra_fields=policy.extra_fields)
    rollout["observation", "place"].normal_()
    alone = rollout.clone()
    teacher = Teacher([expert], policy)
    actor = MixedActor(StepwiseActor(policy, rollout), teacher, share, rollout)
    actor.begin(torch.Generator().manual_seed(5))
    again = torch.Generator().manual_seed(5)
    own = StepwiseActor(policy, alone)
    own.begin(again)
    taken = []
    for t in range(4):
        actor.act(t)
        own.act(t)
        taken.append(torch.rand(64, generator=again) < share)
    told = teacher.actions(rollout["observation"].flatten(0, 1)).unflatten(0, (64, 5))
    return rollout["action"], alone["action"], told, torch.stack(taken, 1)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_teacher_acts_in_exactly_its_share_of_steps_row_by_row(share):
    done, own, told, taken = mixed(share)
    expected = torch.where(taken[..., None], told[:, :4], own[:, :4])
    assert torch.equal(done[:, :4], expected)
    assert float(taken.float().mean()) == pytest.approx(share, abs=0.1)


def test_its_share_falls_from_all_to_none(teacher, tmp_path):
    each = 8 * STEPS
    teach(tmp_path, teacher, teacher_env_steps=4 * each, trainer={"log_every_n_steps": 1})
    logged = scalars(tmp_path)["train/teacher_share"]
    assert [value for _, value in logged] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


MEMORIES = {
    "data": {"replay": REPLAY, "buffer_size": 15},
    "memory": partial(GRU, size=4),
    "sequence_length": 5,
    "burn_in": 2,
    "teacher_env_steps": 0,
}
WAYS = {
    "in the foreground": {},
    "in the background": {"data": {"collector": partial(AsyncCollector, max_staleness=0)}},
    "compiled": {"compile": True},
    "from a replay, in the background": {
        "data": {"collector": partial(AsyncCollector, max_staleness=0), "replay": REPLAY}
    },
    "from a replay, two memories": MEMORIES,
    "from a replay, two memories, compiled": MEMORIES | {"compile": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_stopped_while_both_act_it_ends_as_uninterrupted(way, teacher, remembering, tmp_path):
    settings = {"teacher_env_steps": 700, **WAYS[way]}
    teacher = remembering if "memories" in way else teacher
    with uncompiled_traces():
        teach(tmp_path / "whole", teacher, **settings)
        teach(tmp_path / "parts", teacher, trainer={"max_epochs": 1}, **settings)
        teach(
            tmp_path / "parts", teacher, trainer={"ckpt_path": last(tmp_path / "parts")}, **settings
        )
    whole, parts = (load(last(tmp_path / name)) for name in ("whole", "parts"))
    for key in ("state_dict", "optimizer_states", "lightning_rl"):
        assert_same(whole[key], parts[key], key)


def test_in_the_background_without_lag_it_is_what_it_is_in_the_foreground(teacher, tmp_path):
    runs = [
        teach(tmp_path / way.split()[-1], teacher, teacher_env_steps=700, **WAYS[way])
        for way in ("in the foreground", "in the background")
    ]
    assert_same(runs[0].state_dict(), runs[1].state_dict())


def test_what_cannot_be_taught_is_refused(teacher, tmp_path, monkeypatch):
    def skip_the_dataset(collector, *args, **settings):
        super(DatasetCollector, collector).__init__(*args, **settings)

    nothing = variant(DatasetCollector, "DatasetCollector", __init__=skip_the_dataset)
    with refused(names=("teacher_env_steps", "5", "teacher: PATH")):
        teach(tmp_path / "a", None, teacher_env_steps=5)
    with refused(names=("data.replay", "ReplayBuffer", "BehaviorCloning", "uses_replay")):
        teach(tmp_path / "e", None, data={"collector": nothing, "replay": REPLAY})
    with refused(names=("teacher", "DatasetCollector", "data.collector: SyncCollector")):
        teach(tmp_path / "b", teacher, data={"collector": nothing})
    with refused(names=("BehaviorCloning", "SyncCollector", "model.teacher")):
        teach(tmp_path / "c", None)
    monkeypatch.setattr(ActorOnly, "replay_action_space", WIND)
    with refused(names=("BehaviorCloning", "ActorOnly", "data.replay")):
        teach(tmp_path / "f", teacher, data={"replay": REPLAY})
    with refused(names=("nowhere", ".ckpt")):
        teach(tmp_path / "d", str(tmp_path / "nowhere"))


MISFITS = {
    "reads more": (
        (Dict({"place": PLACE}), ACTION),
        ActorCritic,
        ("teacher", "Dict('place'", "actor_keys"),
    ),
    "acts otherwise": ((SPACE, Box(-1.0, 1.0, (1,))), ActorCritic, ("teacher", "env")),
    "remembers": (
        (SPACE, ACTION),
        variant(ActorOnly, "Remembers", extra_fields={"state": ((4,), torch.float32)}),
        ("Remembers", "memory"),
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_teacher_that_does_not_fit_is_refused(name):
    spaces, cls, message = MISFITS[name]
    with refused(names=message):
        Teacher([cls(SPACE, ACTION)], ActorOnly(*spaces), env_steps=10)
