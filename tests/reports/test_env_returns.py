"""What an env returns and says: taken, or refused in one message, the same in line and in workers."""

import multiprocessing
import warnings
from contextlib import closing
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lightning_rl import PPO, ActorCritic, RLDataModule, check_env, load_policy
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.envs.infos import InfoReader
from lightning_rl.rollout.allocation import allocate_rollout
from lightning_rl.rollout.contract import map_tree
from lightning_rl.system.errors import ConfigurationError, EnvFaultError
from tests.envs import ScriptedEnv, ScriptedTask
from tests.helpers import fit_in, train
from tests.messages import refused
from tests.reports.odd import BOX, making, odd

SPACES = {
    "box": BOX,
    "box ()": spaces.Box(-1.0, 1.0, (), np.float32),
    "box float64": spaces.Box(-1.0, 1.0, (2,), np.float64),
    "picture": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "int8": spaces.Box(-100, 100, (2,), np.int8),
    "uint16": spaces.Box(0, 65535, (3,), np.uint16),
    "discrete": spaces.Discrete(5),
    "discrete from 3": spaces.Discrete(5, start=3),
    "multi discrete": spaces.MultiDiscrete([3, 4]),
    "binary": spaces.MultiBinary(4),
    "dict": spaces.Dict({"robot.pos": BOX, "keys": spaces.Discrete(3)}),
    "nested": spaces.Dict({"a": spaces.Dict({"b": spaces.Box(-1, 1, ()), "c": BOX})}),
}
REWARDS = {
    "int": (2, 2.0),
    "float32": (np.float32(1.5), 1.5),
    "bool": (True, 1.0),
    "array of one": (np.array([1.5]), 1.5),
    "tensor": (torch.tensor(2.0), 2.0),
    "text": ("1.0", None),
    "None": (None, None),
    "array of two": (np.ones(2), None),
    "list": ([1.0], None),
    "complex": (1j, None),
}
FLAGS = {
    "1": (1, True),
    "numpy": (np.bool_(True), True),
    "array of one": (np.array([True]), True),
    "tensor": (torch.tensor(0), False),
    "text": ("no", None),
    "None": (None, None),
    "2": (2, None),
    "array of two": (np.array([True, False]), None),
}
OBSERVATIONS = {
    "a list": (BOX, [0.0, 0.5, 1.0], True),
    "float64": (BOX, np.zeros(3), True),
    "a tensor": (BOX, torch.zeros(3), True),
    "texts": (BOX, np.array(["1", "2", "3"]), False),
    "complex": (BOX, np.zeros(3, complex), False),
    "ragged": (BOX, [[1.0], [1.0, 2.0], 0.0], False),
    "None": (BOX, {}, False),
    "int64 that fits": (SPACES["picture"], np.full((4, 4, 3), 255, np.int64), True),
    "int64 that wraps": (SPACES["picture"], np.full((4, 4, 3), 256, np.int64), False),
    "negative": (SPACES["picture"], np.full((4, 4, 3), -1, np.int64), False),
    "fractions": (SPACES["int8"], np.array([0.5, 1.5]), False),
    "category 5 of 5": (SPACES["discrete"], 5, False),
    "category in Python": (SPACES["discrete"], 4, True),
    "category below the first": (SPACES["discrete from 3"], np.int64(2), False),
    "another choice's category": (SPACES["multi discrete"], np.array([3, 0]), False),
    "2 of binary": (SPACES["binary"], np.array([0, 1, 2, 0], np.int8), False),
    "no dict": (SPACES["dict"], np.zeros(3, np.float32), False),
    "no key": (SPACES["dict"], {"robot.pos": np.zeros(3, np.float32)}, False),
    "a deep category": (SPACES["dict"], {"robot.pos": np.zeros(3, np.float32), "keys": 3}, False),
}
INFOS = {
    "success 1.0": ({"success": 1.0}, True),
    "is_success of an array": ({"is_success": np.array([1.0])}, True),
    "success None": ({"success": None}, True),
    "success NaN": ({"success": float("nan")}, True),
    "success of two": ({"success": np.array([True, False])}, False),
    "success text": ({"success": "no"}, False),
    "success .7": ({"success": 0.7}, False),
    "success dict": ({"success": {"lift": True}}, False),
    "penalty dict, not announced": ({"penalty": {"collision": 1.0}}, True),
    "penalty text, not announced": ({"penalty": "none"}, True),
    "intervened array, not announced": ({"intervened": np.array([1, 0])}, True),
    "metrics with odd keys": ({"metrics": {"a": 1.0, 3: 4.0}}, True),
    "what cannot be pickled": ({"f": lambda: 1, "final_obs": 3}, True),
}
EVERYWHERE = ("sync", "async")


def cases():
    """Yield name, arguments of `Odd`, and whether it is taken, of each kind of return."""
    for name, space in SPACES.items():
        yield f"space {name}", {"observed": space}, True
    for after in (0, 3):
        for name, (reward, number) in REWARDS.items():
            yield f"reward {name}, {after}", {"reward": reward, "after": after}, number is not None
        for field in ("terminated", "truncated"):
            for name, (flag, value) in FLAGS.items():
                yield f"{field} {name}, {after}", {field: flag, "after": after}, value is not None
        for name, (space, obs, good) in OBSERVATIONS.items():
            yield f"obs {name}, {after}", {"observed": space, "obs": obs, "after": after}, good
        for name, (info, good) in INFOS.items():
            yield f"info {name}, {after}", {"info": info, "after": after}, good
    for name, (space, obs, good) in OBSERVATIONS.items():
        yield f"first {name}", {"observed": space, "first": obs}, good


CASES = list(cases())


def played(vectorization, kwargs, steps=9):
    """Return what came of some steps, as plain lists, or the message of a refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with closing(odd(vectorization, **kwargs)) as env:
            space = env.single_observation_space
            rollout = allocate_rollout(space, env.single_action_space, 1, steps)
            stepper = env.rollout_stepper(rollout)
            try:
                rows = [map_tree(lambda x: x.tolist(), env.reset(seed=1)[0])]
                infos = [sorted(stepper.step(t)) for t in range(steps)]
            except EnvFaultError as error:
                return str(error)
            kept = ("reward", "terminated", "truncated", "observation")
            fields = rollout.select(*kept)[:, :steps].to_dict()
            return rows, infos, map_tree(lambda x: x.tolist(), _plain(fields))


def _plain(tree):
    return {k: _plain(v) if isinstance(v, dict) else v for k, v in tree.items()}


def test_a_spawned_worker_does_what_one_in_line_does(monkeypatch):
    """As on macOS and Windows: the worker imports the module that the id names."""
    before = multiprocessing.get_start_method()
    monkeypatch.setattr("tests.reports.odd.ID", "tests.reports.odd:tests/Odd-v0")
    kwargs = {"observed": SPACES["nested"], "reward": np.array([1.5])}
    try:
        multiprocessing.set_start_method("spawn", force=True)
        came = played("async", kwargs)
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert came == played("sync", kwargs)
    assert not isinstance(came, str), came


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_kind_of_return_is_taken_or_refused_alike_in_line_and_in_workers(step):
    """Workers are forks, of which 130 take ten seconds."""
    assert len(CASES) > 130
    for name, kwargs, good in CASES[::step]:
        one, other = (played(way, kwargs) for way in EVERYWHERE)
        assert one == other, name
        assert isinstance(one, str) is not good, (name, one)


def test_in_line_every_kind_of_return_is_taken_or_refused_in_one_message():
    for name, kwargs, good in CASES:
        came = played("sync", kwargs)
        assert isinstance(came, str) is not good, (name, came)
        assert good or came.startswith("Env 'tests/Odd-v0' "), came


FOR_AN_ENCODER = ("picture", "discrete", "discrete from 3", "multi discrete", "dict")
"""Spaces that a perceptron refuses by name."""


@pytest.mark.parametrize("name", SPACES)
def test_an_observed_space_is_checked_evaluated_resumed_and_loaded(name, tmp_path):
    make = making(observed=SPACES[name])
    found = check_env(make, num_envs=2, seconds=0.1)
    assert not [finding for finding in found if finding.level == "error"]
    with closing(make(1)) as env, closing(make(1)) as resumed:
        env.reset(seed=1)
        env.step(torch.zeros(1, dtype=torch.int64))
        assert len(resumed.load_state_dict(env.state_dict())) == 1
    data = RLDataModule(make, num_envs=2, buffer_size=8, total_env_steps=32, num_eval_episodes=1)
    if name in FOR_AN_ENCODER:
        with pytest.raises(ConfigurationError, match=r"NatureCNN|FlattenObservation"):
            ActorCritic(data.observation_space, data.action_space)
        return
    policy = ActorCritic(data.observation_space, data.action_space, hidden_sizes=[4])
    fit_in(tmp_path, PPO(policy, batch_size=16, n_epochs=1), data)
    with closing(make(1)) as env:
        assert run_episodes(policy, env, [3])[0]["length"] == 7
        loaded = load_policy(tmp_path / "checkpoints" / "last.ckpt")
        assert loaded.act(env.single_observation_space.sample()) in (0, 1)


@pytest.mark.parametrize("vectorization", EVERYWHERE)
def test_a_number_comes_as_it_was_said(vectorization):
    for name in ("int", "array of one", "tensor"):
        reward, number = REWARDS[name]
        with closing(odd(vectorization, reward=reward)) as env:
            env.reset(seed=1)
            assert env.step(torch.zeros(1, dtype=torch.int64))[1].tolist() == [number]


@pytest.mark.parametrize("vectorization", EVERYWHERE)
def test_what_is_left_out_of_metrics_is_warned_of_once(vectorization):
    info = {"metrics": {"speed": 1.0, "name": "walker"}, "rewards": [1.0, 2.0]}
    with closing(odd(vectorization, info=info)) as env:
        env.reset(seed=1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                told = env.step(torch.zeros(1, dtype=torch.int64))[4]
    assert list(told["metrics"]) == ["speed"]
    assert sorted(str(one.message).split("'")[3] for one in said) == ["metrics.name", "rewards"]


def test_infos_of_batched_envs_are_read_by_the_same_table():
    reader = InfoReader("X", 2, penalty=True)
    done = np.zeros(2, bool)
    assert reader.read_arrays({"success": np.array([1, 0])}, done)["success"].tolist() == [1, 0]
    for bad in (np.array(["a", "b"]), np.array([0.5, 1]), True, np.zeros(3), np.array([{}, None])):
        with refused(EnvFaultError, names=("X", "info['success']")):
            reader.read_arrays({"success": bad}, done)
    for bad in (np.array([np.nan, 1]), np.array([np.inf, 1]), [{}, {}]):
        with pytest.raises(EnvFaultError, match=r"finite|numbers"):
            reader.read_arrays({"penalty": bad}, done)


def odd_task(num_envs, **odd):
    """Make a task of which some answers are odd."""

    def move(env, state, action):
        action.fill_(7.0)
        zeros = torch.zeros(len(action))
        told = {"reward": zeros, "terminated": zeros.bool(), "info": {}} | odd
        return {}, told["reward"], told["terminated"], dict(told["info"])

    def observe(state):
        return odd.get("obs", state["x"].expand(-1, 3).clone())

    return ScriptedTask(
        num_envs, lambda uniform: {"x": uniform}, move, observe=observe, observation_space=BOX
    )


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"reward": torch.zeros(2, 1)}, ("reward", "[2, 1]", "[2]")),
        ({"terminated": torch.zeros(2)}, "terminated"),
        ({"info": {"success": torch.ones(2)}}, "info success"),
        ({"info": {"success": [True, False]}}, "info success"),
        ({"info": {"metrics": {"a": 1.0}}}, "info metrics.a"),
    ],
)
def test_a_torch_env_is_held_to_the_same_table(odd, message):
    env = odd_task(2, **odd)
    env.reset(seed=1)
    with refused(EnvFaultError, names=message):
        env.step(torch.zeros(2, 1))


def test_nothing_that_an_env_writes_into_its_action_reaches_a_rollout():
    env = odd_task(2)
    rollout = allocate_rollout(env.single_observation_space, env.single_action_space, 2, 3)
    stepper = env.rollout_stepper(rollout)
    env.reset(seed=1)
    for t in range(3):
        stepper.step(t)
    assert (rollout["action"] == 0).all()


SHARED = np.zeros(2, np.float64)


def writes(as_dict=False, dtype=np.float64):
    """Writes into its action, and shows one array that all of these envs share."""

    def begin(env):
        env.x = float(env.np_random.uniform())

    def act(env):
        assert env.action.dtype == env.action_space.dtype
        env.x += 0.01 * float(env.action[0])
        env.action[:] = 1.0

    def show(env):
        SHARED[:] = env.x
        return {"a": SHARED} if as_dict else SHARED

    box = spaces.Box(-2, 2, (2,), np.float64)
    space = spaces.Dict({"a": box}) if as_dict else box
    return ScriptedEnv(space, spaces.Box(-1, 1, (1,), dtype), begin=begin, act=act, observe=show)


gymnasium.register("tests/Writes-v0", writes, max_episode_steps=30)


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_env_may_write_into_what_it_was_given_and_what_it_returned(as_dict, dtype):
    from lightning_rl import GymnasiumEnv

    kwargs = {"as_dict": as_dict, "dtype": dtype}
    env, other = (GymnasiumEnv(2, "tests/Writes-v0", env_kwargs=kwargs) for _ in range(2))
    given = torch.full((2, 1), 0.5)
    env.reset(seed=1)
    for _ in range(3):
        observation = env.step(given)[0]
    seen = observation["a"] if as_dict else observation
    assert given.tolist() == [[0.5], [0.5]]
    assert seen[0, 0] != seen[1, 0]  # each row is its own
    state = env.state_dict()
    assert (state["episodes"][0]["actions"] == 0.5).all()
    restored = other.load_state_dict(state)
    assert torch.equal(restored["a"] if as_dict else restored, seen)
    assert (other.state_dict()["episodes"][0]["actions"] == 0.5).all()


@pytest.mark.parametrize(
    ("name", "value", "default", "when"),
    [
        *(("dtype", torch.float64, torch.float32, when) for when in ("import", "begin", "act")),
        *(("device", torch.device("meta"), "cpu", when) for when in ("import", "begin", "act")),
    ],
)
def test_an_env_that_changes_torchs_defaults_changes_no_run(tmp_path, when, name, value, default):
    set_default, get_default = (getattr(torch, f"{verb}_default_{name}") for verb in ("set", "get"))

    def change(env=None):
        set_default(value)

    gymnasium.register("Plain-v0", partial(ScriptedEnv, length=5))
    expected = train(tmp_path / "plain", env="Plain-v0")[0].state_dict()
    changed = partial(ScriptedEnv, length=5, **({} if when == "import" else {when: change}))
    gymnasium.register("Changed-v0", changed)
    try:
        if when == "import":
            change()
        with refused(UserWarning, names=(str(value), f"torch.set_default_{name}", f"{name}=")):
            module = train(tmp_path / "changed", env="Changed-v0")[0]
        assert get_default() == (torch.device(default) if name == "device" else default)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(expected[key], value) for key, value in module.state_dict().items())
