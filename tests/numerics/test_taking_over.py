"""Somebody takes over: what they do is executed, stored and counted, whoever they are and whatever else goes on."""

import queue
import threading
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from lightning_rl import (
    GRPO,
    PPO,
    ActionChunk,
    GymnasiumEnv,
    Intervention,
    InterventionDecision,
    InterventionSource,
    ReplayBuffer,
    SyncCollector,
)
from lightning_rl.envs.infos import report_intervention
from lightning_rl.extensions.teleoperation import intervention
from lightning_rl.extensions.teleoperation.intervention import Pace
from lightning_rl.rollout.contract import next_observations
from lightning_rl.rollout.structured_actions import flat_actions
from tests.core.equivalence.test_resume import TWO_ENVS, assert_resumes
from tests.envs import ScriptedEnv, ScriptedVector
from tests.helpers import (
    assert_same,
    make_collector,
    make_data,
    make_ppo,
    policy_for,
    scalars,
    train,
)
from tests.messages import refused
from tests.persons import ScriptedSource
from tests.variants import before, variant

LENGTH, MARK = 7, 0.5
SHOWN, ACTION = Box(-9, 9, (3,)), Box(-1, 1, (2,))


def shows(**script):
    """An env that shows its age and the action that was executed; the reward is the first number of that."""
    return ScriptedEnv(
        SHOWN,
        ACTION,
        observe=lambda env: np.array([env.age, *np.resize(env.action, 2)], np.float32),
        reward=lambda env: float(env.action[0]),
        **{"length": LENGTH} | script,
    )


def by_itself(info=lambda env: {}, **script):
    """A script of its own takes over at each third step, and it says so in the words of gym-hil."""

    def act(env):
        env.taken = env.age % 3 == 0
        env.action = np.full(2, MARK, np.float32) if env.taken else env.action

    def said(env):
        return {"is_intervention": env.taken, "teleop_action": env.action} | info(env)

    return shows(act=act, info=said, **script)


def in_batches(num_envs=1, **kwargs):
    return ScriptedVector(num_envs, by_itself, masks=False)


def held_on():
    metadata = {"reports_interventions": True}
    return shows(info=lambda env: {"intervened": env.age == 1}, metadata=metadata)


gymnasium.register("Scripted-v0", ScriptedEnv)
gymnasium.register("Shows-v0", shows)
gymnasium.register("ByItself-v0", by_itself, vector_entry_point=in_batches)
gymnasium.register("HeldOn-v0", held_on)

GYM_HIL = {"executed_action_key": "teleop_action", "intervened_key": "is_intervention"}


class Person(InterventionSource):
    """Takes over now and then for a while, drawn by a generator of its own; what it does bears its mark."""

    def __init__(self, chance=0.2, most=4):
        self.chance, self.most = chance, most
        self.draw, self.left = np.random.default_rng(0), 0

    def reset(self, seed):
        self.left = 0
        if seed is not None:
            self.draw = np.random.default_rng(seed)

    def poll(self, observation):
        if self.left == 0 and self.draw.random() < self.chance:
            self.left = int(self.draw.integers(1, self.most + 1))
        if self.left == 0:
            return InterventionDecision()
        self.left -= 1
        return InterventionDecision(np.array([MARK, self.draw.uniform(-1, 1)]))

    def state_dict(self):
        return {"left": self.left, "draw": dict(self.draw.bit_generator.state)}

    def load_state_dict(self, state):
        self.left = state["left"]
        self.draw = np.random.default_rng()
        self.draw.bit_generator.state = state["draw"]


class Schedule(InterventionSource):
    """Takes over in every second and third of four episodes, and says of each how it ended."""

    schedules = ({}, {1: 1, 3: 3}, {0: 2}, {})
    episode = -1

    def reset(self, seed):
        self.episode += 1

    def poll(self, observation):
        age, stretches = int(observation[0]), self.schedules[self.episode % 4]
        taken = any(begin <= age < begin + length for begin, length in stretches.items())
        event = ("failure", "success", "failure", "success")[self.episode % 4]
        return InterventionDecision(
            [MARK, 0.0] if taken else None, event if age == LENGTH - 1 else None
        )


def helped(num_envs, source=None, id="Shows-v0", vectorization="sync", **kwargs):
    wrapper = partial(Intervention, source=Person() if source is None else source, **kwargs)
    return GymnasiumEnv(num_envs, id, vectorization=vectorization, wrappers=[wrapper])


OFTEN_HELPED = partial(helped, source=Person(0.5, 9))

GRIPPER = Discrete(3, start=1)


@pytest.mark.parametrize("space", [Tuple([ACTION, GRIPPER]), Dict(arm=ACTION, gripper=GRIPPER)])
def test_parts_that_were_executed_as_they_were_chosen_are_no_intervention(space):
    """All steps counted as interventions, so that PPO learnt nothing, or numpy raised."""
    chosen, other = (
        flat_actions(space).unflatten(np.array([0.5, -0.25, gripper])) for gripper in (1, 2)
    )

    def said(env):
        return {"teleop_action": deepcopy(env.action) if env.age == 1 else other}

    env = GymnasiumEnv(
        *(1, "Scripted-v0", {"action_space": space, "info": said}),
        executed_action_key="teleop_action",
    )
    env.reset(seed=1)
    infos = [env.step(torch.tensor([[0.5, -0.25, 1.0]]))[-1] for _ in range(2)]
    assert [info["intervened"].item() for info in infos] == [False, True]
    assert infos[1]["executed_action"].tolist() == [[0.5, -0.25, 2.0]]
    for executed in (chosen, other):  # as the recorder and chunks ask
        report = report_intervention({"executed_action": deepcopy(executed)}, chosen, False)
        assert report["intervened"] == (executed is other)


def collected(env, steps=24, times=1):
    collector = make_collector(SyncCollector, env, policy_for(env), steps, seed=1)
    for _ in range(times):
        rollout = collector.collect()
    env.close()
    return rollout


@pytest.mark.parametrize("vectorization", ["sync", "async", "vector_entry_point"])
def test_an_env_says_it_under_names_of_its_own(vectorization):
    env = GymnasiumEnv(3, "ByItself-v0", vectorization=vectorization, **GYM_HIL)
    assert env.reports_interventions
    rollout = collected(env, times=2)
    taken = rollout["observation"][:, :-1, 0] % 3 == 2
    assert torch.equal(rollout["intervened"][:, :-1], taken)
    assert not rollout["intervened"][:, -1].any()
    assert torch.equal(rollout["executed_action"][:, :-1], next_observations(rollout)[..., 1:])
    assert (rollout["executed_action"][:, :-1][taken] == MARK).all()


def test_an_env_that_says_nothing_was_not_intervened_in():
    rollout = collected(GymnasiumEnv(2, "Shows-v0", **GYM_HIL))
    assert not rollout["intervened"].any()
    told = rollout["action"][:, :-1].clamp(-1, 1)
    assert torch.equal(rollout["executed_action"][:, :-1], told)


def test_nobody_undoes_by_their_no_what_another_one_did():
    """LeRobot #3227: the env's default, False, overwrote the flag of whoever had taken over."""
    always = lambda observation: [-MARK, 0.25] if observation[0] == 1 else None  # noqa: E731
    wrappers = [partial(Intervention, source=always)]
    env = GymnasiumEnv(2, "ByItself-v0", wrappers=wrappers, **GYM_HIL)
    rollout = collected(env)
    age = rollout["observation"][:, :-1, 0]
    outside, inside = age == 1, age % 3 == 2
    assert torch.equal(rollout["intervened"][:, :-1], outside | inside)
    executed = rollout["executed_action"][:, :-1]
    assert torch.equal(executed, next_observations(rollout)[..., 1:]), (
        "the one nearest to the env acts"
    )
    assert (executed[outside] == torch.tensor([-MARK, 0.25])).all()
    assert (executed[inside] == MARK).all()


def test_actions_in_two_units_are_refused():
    bounds = {"min_action": np.float32(0), "max_action": np.float32(1)}
    rescale = partial(gymnasium.wrappers.RescaleAction, **bounds)
    wrappers = [partial(Intervention, source=Person()), rescale]
    spaces = "Box(0.0, 1.0, (2,), float32)", "Box(-1.0, 1.0, (2,), float32)"
    with refused(names=("RescaleAction", *spaces, "Intervention")):
        GymnasiumEnv(1, "Shows-v0", wrappers=wrappers)
    GymnasiumEnv(1, "Shows-v0", wrappers=wrappers[::-1]).close()


def check(rollout):
    """What was executed is what the next observation shows; it bears the mark where somebody took over, and only there."""
    taken = rollout["intervened"][:, :-1]
    executed, told = (rollout[key][:, :-1].clamp(-1, 1) for key in ("executed_action", "action"))
    assert torch.equal(executed, next_observations(rollout)[..., 1:])
    assert (executed[taken][:, 0] == MARK).all()
    assert torch.equal(executed[~taken], told[~taken])
    assert (told[taken] != executed[taken]).any(1).all()
    return int(taken.sum())


def test_over_a_thousand_schedules_the_counts_add_up_in_rollouts_charts_and_replay():
    env = helped(1000)
    collector = make_collector(SyncCollector, env, policy_for(env), 15, seed=1)
    spaces = (env.single_observation_space, env.single_action_space)
    replay = ReplayBuffer(*spaces, 1000, capacity=1000 * 45)
    seen, rates = [], []
    for _ in range(3):
        rollout = collector.collect()
        seen.append(check(rollout))
        rates.append(collector.metrics()["intervention/rate"])
        replay.extend(rollout)
    assert rates == pytest.approx([count / 15_000 for count in seen])
    assert all(0.1 < rate < 0.6 for rate in rates)
    batch = next(iter(replay.batches(1, 20_000, n_steps=1, gamma=0.9)))
    taken = batch["intervened"]
    assert torch.equal(batch["next_observation"][:, 1:], batch["action"]), "executed, not told"
    assert (batch["action"][taken][:, 0] == MARK).all()
    assert float(taken.float().mean()) == pytest.approx(sum(seen) / 45_000, abs=0.02)
    stored = replay.ring.columns[("intervened",)]
    assert int(stored.sum()) == sum(seen)
    env.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_episode_ends_as_somebody_says(vectorization):
    ends = {1: "success", 2: "failure", 3: "rerecord"}

    def judge(source, observation):
        event = ends.get(source.episode + 1) if observation[0] == 2 else None
        return [MARK, 0.0] if event else None, event

    env = helped(2, ScriptedSource(judge), vectorization=vectorization)
    rollout = collected(env, 3 * 3 + LENGTH)[:, :-1]
    ended = rollout["done"][0].nonzero().flatten().tolist()
    assert ended == [2, 5, 8, 15]
    for key, at in {"terminated": [2, 5], "truncated": [8, 15], "success": [2]}.items():
        for row in rollout[key]:
            assert row.nonzero().flatten().tolist() == at, key
    assert (rollout["reward"][:, ended[:3]] == torch.tensor([1.0, MARK, MARK])).all()
    assert rollout["intervened"].nonzero().tolist() == [[n, t] for n in (0, 1) for t in (2, 5, 8)]


def test_a_queue_holds_until_it_hands_back_and_loses_no_event():
    items = queue.Queue()
    env = Intervention(shows(), items)
    env.reset()
    act = np.zeros(2, np.float32)

    def step():
        observation, _, terminated, _, info = env.step(act)
        return observation[1:].tolist(), info["intervened"], terminated

    assert step() == ([0, 0], False, False)
    for item in ([0.1, 0.1], [0.25, 0.5]):
        items.put(item)
    assert step() == ([0.25, 0.5], True, False), "the newest one"
    assert step() == ([0.25, 0.5], True, False), "until it is handed back"
    items.put("success")
    items.put(None)
    assert step() == ([0, 0], False, True), "an event beside it"
    items.put([1, 1])
    assert step() == ([1, 1], True, False)
    items.put("success")
    env.reset()
    assert step() == ([0, 0], False, False), (
        "an episode begins with nobody taking over, and no event"
    )
    items.put("sucess")
    with refused(names=("'sucess'", "success, failure, rerecord")):
        step()


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        (Box(-1, 1, (2,)), [1, 2, 3], "[1, 2, 3], which is not in Box(-1.0, 1.0, (2,), float32)"),
        (Discrete(3), 3, "3, which is not in Discrete(3)"),
    ],
)
def test_an_action_that_the_env_cannot_take_is_refused(space, action, message):
    inner = shows()
    inner.action_space = space
    env = Intervention(inner, lambda observation: action)
    env.reset()
    with refused(names=("ScriptedIntervention", message, "None")):
        env.step(space.sample())


def test_what_is_no_source_is_refused():
    with refused(names=("3", "Keyboard", "Gamepad", "SpaceMouse", "queue.Queue")):
        Intervention(shows(), 3)


def scrambling(algorithm):
    """A class that is given nonsense where somebody took over, and must not care."""

    # What somebody earned is no matter to PPO; GRPO's groups are compared by it.
    nonsense = ("reward",) if algorithm is PPO else ()

    def spoil(module, rollout, batch_idx):
        taken = rollout["intervened"].clone()
        for key in ("action", "sample_log_prob", *nonsense):
            rollout[key][taken] = torch.randn_like(rollout[key][taken])
        assert taken[:, :-1].any()

    return before(algorithm, training_step=spoil)


LEARNERS = {
    "PPO": {"algorithm": PPO},
    "PPO, of the rollout": {"algorithm": PPO, "normalize_advantage": "rollout"},
    "GRPO": {"algorithm": GRPO, "group_size": 2, "mode": "step", "truncate_at_first_done": False},
}


@pytest.mark.parametrize("name", LEARNERS)
def test_the_gradient_of_a_step_that_somebody_took_over_is_nil(name, tmp_path, monkeypatch):
    """Bit for bit the same update, whatever the step holds."""
    monkeypatch.setattr("lightning_rl.algorithms.on_policy.check_first_ratio", lambda *args: True)
    run = {"env": helped, "data": {"total_env_steps": 64, "iterations_per_epoch": 1}}
    settings = LEARNERS[name]
    seen, *_ = train(tmp_path / "seen", **run, model=settings)
    blind, *_ = train(
        tmp_path / "blind", **run, model=settings | {"algorithm": scrambling(settings["algorithm"])}
    )
    assert_same(seen.state_dict(), blind.state_dict())


@pytest.mark.parametrize("name", LEARNERS)
def test_compiled_it_follows_the_eager_run(name, tmp_path, traced_only):
    """What is left out makes minibatches of many sizes."""
    run = {"env": OFTEN_HELPED, "data": {"total_env_steps": 128}}
    eager, compiled = (
        train(tmp_path / str(how), **run, model=LEARNERS[name] | {"compile": how})[0].state_dict()
        for how in (False, True)
    )
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", [PPO, GRPO])
def test_where_somebody_does_everything_nothing_is_learnt(algorithm, tmp_path):
    everything = partial(helped, source=lambda observation: [MARK, 0.0])
    data = {"total_env_steps": 128, "iterations_per_epoch": 1}
    size = {"group_size": 2} if algorithm is GRPO else {}
    module, *_ = train(tmp_path, env=everything, data=data, model={"algorithm": algorithm, **size})
    assert module.optimizer_steps == 0
    assert module.env_steps >= 128


def test_a_return_goes_on_with_the_value_of_what_the_policy_had_come_to():
    taken_at = 4
    env = helped(2, lambda observation: [MARK, 0.0] if observation[0] >= taken_at else None)
    data = make_data(lambda n: helped(n))
    module = make_ppo(data, gamma=0.9, gae_lambda=0.8, normalize_advantage="off")
    rollout = make_collector(SyncCollector, env, policy_for(env), LENGTH, seed=1).collect()
    rollout["value"] = torch.randn(2, LENGTH + 1)
    module.add_advantages(rollout)
    reward, value = rollout["reward"], rollout["value"]
    expected = torch.zeros(2)
    for t in reversed(range(taken_at)):
        following = 0.0 if t + 1 == taken_at else 0.9 * 0.8 * expected
        expected = reward[:, t] + 0.9 * value[:, t + 1] - value[:, t] + following
        torch.testing.assert_close(rollout["advantage"][:, t], expected)
    data.close()
    env.close()


def test_a_group_compares_with_a_return_that_somebody_helped_to_and_learns_none_of_it():
    data = make_data(
        partial(helped, source=lambda observation: [MARK, 0.0] if observation[0] == 3 else None)
    )
    rollout = collected(data.new_env(), LENGTH)
    for mode, counted in {"step": [4, 5, 6], "trajectory": []}.items():
        module = make_ppo(data, algorithm=GRPO, group_size=2, mode=mode)
        mask = module.add_advantages(rollout)
        assert [row.nonzero().flatten().tolist() for row in mask] == [counted] * 4
    data.close()


HELPED = {
    "in turn": (OFTEN_HELPED, {}),
    "in workers": (partial(OFTEN_HELPED, vectorization="async"), TWO_ENVS),
    "in chunks": (partial(ActionChunk, env=OFTEN_HELPED, chunk_size=2), {"total_env_steps": 640}),
}


@pytest.mark.parametrize("how", HELPED)
def test_a_run_resumes_exactly_in_the_middle_of_an_intervention(how, tmp_path):
    env, data = HELPED[how]
    assert_resumes(tmp_path, 3, env=env, data=data)


def test_what_a_person_has_done_of_an_episode_is_done_again():
    """They are not asked anew; what they do next is theirs."""
    items = queue.Queue()
    env, again = helped(1, items), helped(1, queue.Queue())
    one = make_collector(SyncCollector, env, policy_for(env), 4, seed=1)
    other = make_collector(SyncCollector, again, policy_for(again), 4, seed=1)
    items.put([MARK, 0.125])
    first = one.collect()
    assert first["intervened"][:, :-1].all()
    other.load_state_dict(one.state_dict())
    items.put(None)
    assert torch.equal(one.collect()["observation"][:, 0], other.collect()["observation"][:, 0])


def test_with_other_wrappers_episodes_restart():
    env, again = helped(1), GymnasiumEnv(1, "Shows-v0", **GYM_HIL)
    one, other = (make_collector(SyncCollector, e, policy_for(e), 4, seed=1) for e in (env, again))
    one.collect()
    with refused(UserWarning, names="Intervention"):
        other.load_state_dict(one.state_dict())


def test_an_evaluation_is_free_of_interventions_and_says_so(tmp_path):
    opened = []
    once = variant(
        Person,
        open=lambda source, env: opened.append(threading.current_thread().name),
        __deepcopy__=lambda source, memo: type(source)(source.chance, source.most),
    )
    env = partial(helped, source=once(0.9), fps=1e6)
    module, *_ = train(tmp_path, env=env, data={"num_envs": 1, "buffer_size": 64})
    assert len(opened) == 1, "that of the training alone"
    assert module.evaluation["intervened_steps"] == 0
    charts = scalars(tmp_path)
    assert {value for _, value in charts["eval/intervened_steps"]} == {0.0}
    assert charts["intervention/rate"][-1][1] > 0.5


def test_a_pace_is_kept_and_what_it_missed_is_counted(monkeypatch):
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(round(seconds, 6))
        now[0] += seconds

    monkeypatch.setattr(
        intervention, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)
    )
    pace = Pace(10)
    pace.wait()
    for worked in (0.03, 0.0, 0.25, 0.04):
        now[0] += worked
        pace.wait()
    assert slept == [0.07, 0.1, 0.01], "late by a tick and a half, and then on the old ones"
    assert pace.missed == 1
    Pace(None).wait()
    with refused(names=("fps", "0")):
        Pace(0)
