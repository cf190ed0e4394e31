"""The adapter against plain envs stepped by hand, and batched torch envs against their definition."""

import multiprocessing

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from lightning_rl import VectorEnvWrapper
from lightning_rl.envs import GymnasiumEnv, VectorEnv
from lightning_rl.envs.gymnasium import episode_log
from lightning_rl.envs.torch.torch_env import ResetMode
from lightning_rl.rollout.contract import map_tree
from lightning_rl.system.errors import EnvFaultError
from tests.envs import ScriptedEnv, ScriptedTask, ScriptedVector, Walk, draw
from tests.helpers import assert_same, through_file
from tests.messages import refused
from tests.probes import ActionProbe, TimeLimitProbe, ValueProbe
from tests.variants import concrete


def walk(num_envs, max_episode_steps=4):
    """Walk along a line from a random start; fail beyond ±2."""
    return Walk(num_envs, max_episode_steps, edge=2.0, width=3.0)


TORCH_ENVS = {
    "walk": (walk, Box(-1, 1, (1,))),
    "time limit": (TimeLimitProbe, Discrete(2)),
    "value": (lambda n: ValueProbe(n, delay=3), Discrete(2)),
    "action": (ActionProbe, Discrete(2)),
    "continuous": (lambda n: ActionProbe(n, continuous=True), Box(-1, 1, (1,))),
}


TREE = Dict(
    {
        "arm": Dict({"q": Box(-9, 9, (2,), np.float64)}),
        "image": Box(0, 255, (2, 2, 1), np.uint8),
        "goal": Discrete(100),
    }
)
TREE_ACTION = Box(-1, 1, (2,))


def tree():
    """Noisy observations in a nested Dict; episodes of random length, cut after 12 steps."""

    def move(env):
        env.q = 0.9 * env.q + env.action

    def observe(env):
        q, goal = env.q + env.np_random.normal(size=2), int(env.np_random.integers(100))
        return draw(env) | {"arm": {"q": q}, "goal": goal}

    return ScriptedEnv(
        TREE,
        TREE_ACTION,
        begin=lambda env: vars(env).update(q=np.zeros(2)),
        act=move,
        observe=observe,
        reward=lambda env: float(env.q.sum()),
        terminated=lambda env: env.np_random.random() < 0.1,
        length=12,
    )


def counter(ends=None, reuse=False):
    """Observe the steps of this episode and a random start; end where `ends` says, or never."""
    shown = np.zeros(2)

    def begin(env):
        env.state = np.array([0.0, env.np_random.normal()])

    def move(env):
        env.state = env.state + np.array([1.0, 0.01 * env.action])

    def observe(env):
        shown[:] = env.state
        return shown if reuse else env.state

    return ScriptedEnv(
        Box(-np.inf, np.inf, (2,), np.float64),
        begin=begin,
        act=move,
        observe=observe,
        reward=1.0,
        terminated=lambda env: env.age == ends,
    )


IDS = {"Tree-v0": tree, "Counter-v0": counter, "Vector-v0": counter}


@pytest.fixture(autouse=True, scope="module")
def _registered():
    for id, entry_point in IDS.items():
        vector = ScriptedVector if id == "Vector-v0" else None
        gymnasium.register(id, entry_point, vector_entry_point=vector)
    yield
    for id in IDS:
        del gymnasium.registry[id]


def plain(observation):
    """Copy an observation to tensors and dicts of them."""
    return map_tree(torch.clone, observation)


def stacked(observations):
    if isinstance(observations[0], dict):
        return {key: stacked([o[key] for o in observations]) for key in observations[0]}
    return torch.stack([torch.as_tensor(o) for o in observations])


def row(observation, i):
    return map_tree(lambda rows: rows[i], observation)


def play(env, actions):
    """Step through actions [T, N, ...]; return what each step gave, copied."""
    steps = []
    for action in actions:
        *results, info = env.step(action)
        final = plain(info["final_obs"]) if "final_obs" in info else None
        steps.append((*map(plain, results), final))
    return steps


def play_by_hand(make, seeds, actions):
    """The same with plain envs: reset at once where an episode ends; final observations by env."""
    envs = [make() for _ in seeds]
    first = stacked([env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)])
    steps = []
    for action in actions:
        rows, finals = [], {}
        for i, env in enumerate(envs):
            observation, *rest, _ = env.step(action[i])
            if rest[1] or rest[2]:
                finals[i] = stacked([observation])
                observation, _ = env.reset()
            rows.append((observation, *rest))
        observations, *results = zip(*rows, strict=True)
        results = [torch.from_numpy(np.array(values)) for values in results]
        steps.append((stacked(observations), *results, finals))
    return first, steps


def assert_equals_by_hand(env, make, seeds, actions):
    """Compare an adapter with plain envs."""
    first, expected = play_by_hand(make, seeds, actions.numpy())
    assert_same(plain(env.reset(seed=list(seeds))[0]), first)
    ended = 0
    for step, by_hand in zip(play(env, actions), expected, strict=True):
        assert_same(step[:4], by_hand[:4])
        for i, final in by_hand[4].items():
            assert_same(row(step[4], i), row(final, 0))
            ended += 1
    assert ended > 0
    env.close()
    return expected


def random_actions(space, steps, count, seed=0):
    space.seed(seed)
    return torch.from_numpy(
        np.stack([[space.sample() for _ in range(count)] for _ in range(steps)])
    )


def test_pendulum_is_truncated_after_200_steps_with_its_final_observation():
    env = GymnasiumEnv(2, "Pendulum-v1")
    actions = random_actions(env.single_action_space, 405, 2)
    steps = assert_equals_by_hand(env, lambda: gymnasium.make("Pendulum-v1"), (3, 9), actions)
    cut = [t for t, step in enumerate(steps) if step[3].any()]
    assert cut == [199, 399]
    assert not any(step[2].any() for step in steps)


def test_a_tree_of_observations():
    env = GymnasiumEnv(3, "Tree-v0")
    actions = random_actions(TREE_ACTION, 60, 3)
    steps = assert_equals_by_hand(env, lambda: gymnasium.make("Tree-v0"), (1, 2, 3), actions)
    assert any(step[2].any() for step in steps)
    assert any(step[3].any() for step in steps)


def test_final_observations_of_an_env_that_reuses_its_array():
    env = GymnasiumEnv(2, "Counter-v0", env_kwargs={"ends": 4, "reuse": True})
    env.reset(seed=0)
    final = play(env, torch.zeros(4, 2, dtype=torch.int64))[-1][4]
    env.close()
    assert final[:, 0].tolist() == [4.0, 4.0]


def test_async_equals_sync_and_leaves_no_process_behind():
    before = {process.pid for process in multiprocessing.active_children()}
    actions = random_actions(TREE_ACTION, 40, 2)
    results = []
    for vectorization in ("sync", "async"):
        env = GymnasiumEnv(2, "Tree-v0", vectorization=vectorization)
        first = plain(env.reset(seed=5)[0])
        results.append((first, play(env, actions)))
        workers = [p for p in multiprocessing.active_children() if p.pid not in before]
        assert len(workers) == (2 if vectorization == "async" else 0)
        env.close()
        env.close()
        assert not any(process.is_alive() for process in workers)
    (first, sync), (other, parallel) = results
    assert_same(first, other)
    finals = 0
    for a, b in zip(sync, parallel, strict=True):
        assert_same(list(a[:4]), list(b[:4]))
        for i in (a[2] | a[3]).nonzero().flatten().tolist():
            assert_same(row(a[4], i), row(b[4], i))
            finals += 1
    assert finals > 2


def test_a_vector_entry_point_that_resets_a_step_late_is_refused():
    with refused(names=("'CartPole-v1'", "NEXT_STEP", "vectorization: sync or async")):
        GymnasiumEnv(2, "CartPole-v1", vectorization="vector_entry_point")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "CartPol-v1"}, ("'CartPol-v1'", "CartPole-v1")),
        ({"id": "cartpole-v1"}, ("close matches", "CartPole-v1")),
        ({"id": "CartPole-v1", "num_envs": 0}, ("num_envs", "at least 1", "0")),
        ({"id": "CartPole-v1", "env_kwargs": {"gravitas": 1}}, "gravitas"),
        ({"id": "no_such_module:Env-v0"}, "'no_such_module'"),
        ({"id": "Tree-v0", "vectorization": "vector_entry_point"}, "vector entry point"),
        (
            {"id": "Vector-v0", "vectorization": "vector_entry_point", "wrappers": [max]},
            ("wrappers", "vectorization", "sync or async"),
        ),
    ],
)
def test_an_env_that_cannot_be_made_says_why(arguments, message):
    with refused(names=message):
        GymnasiumEnv(**{"num_envs": 2} | arguments)


@pytest.mark.parametrize(
    ("id", "error", "cure"),
    [
        ("HalfCheetah-v5", "mujoco is not installed", "pip install -e '.[mujoco]'"),
        ("LunarLander-v3", "Box2D is not installed", "pip install 'gymnasium[box2d]'"),
        ("CartPole-v1", "No module named 'ale_py'", "pip install 'gymnasium[atari]'"),
        ("Tree-v0", "frobnicate is not installed", "frobnicate"),
    ],
)
def test_a_missing_package_names_the_cure(id, error, cure, monkeypatch):
    def fail(*args, **kwargs):
        raise gymnasium.error.DependencyNotInstalled(error)

    monkeypatch.setattr(gymnasium, "make", fail)
    with refused(names=(f"'{id}'", cure)):
        GymnasiumEnv(2, id)


def go_on_exactly(id, before, after, *, count=3, **kwargs):
    """Assert that an env that was saved after `before` steps goes on like one that was not."""
    env, other = (GymnasiumEnv(count, id, **kwargs) for _ in range(2))
    env.reset(seed=21)
    actions = random_actions(env.single_action_space, before + after, count)
    observations = play(env, actions[:before])
    state = env.state_dict()
    whole = play(env, actions[before:])
    restored = plain(other.load_state_dict(through_file(state)))
    if observations:
        assert_same(restored, observations[-1][0])
    resumed = play(other, actions[before:])
    env.close()
    other.close()
    assert any((step[2] | step[3]).any() for step in whole)
    assert_same(without_meaningless_rows(resumed), without_meaningless_rows(whole))


def without_meaningless_rows(steps):
    result = []
    for *results, final in steps:
        ended = (results[2] | results[3]).nonzero().flatten().tolist()
        result.append([*results, [row(final, i) for i in ended]])
    return result


@pytest.mark.parametrize("before", [0, 11, 12])
def test_a_tree_env_goes_on_exactly(before):
    go_on_exactly("Tree-v0", before, 30)


def test_an_async_env_goes_on_exactly():
    go_on_exactly("Tree-v0", 17, 20, count=2, vectorization="async")


@pytest.mark.parametrize("before", [1023, 1024, 2100])
def test_long_episodes_go_on_exactly(before):
    """The actions that no episode needs any more are dropped now and then, and only those."""

    def make():
        env = GymnasiumEnv(2, "Counter-v0")
        env.reset(seed=0)
        return env

    actions = random_actions(Discrete(2), before + 1030, 2)
    env, whole = make(), make()
    play(env, actions[:before])
    other = GymnasiumEnv(2, "Counter-v0")
    other.load_state_dict(env.state_dict())
    play(other, actions[before:])  # long enough for the log to be shortened after the restoration
    play(whole, actions)
    assert_same(other.state_dict(), whole.state_dict())
    episodes = whole.state_dict()["episodes"]
    assert [len(episode["actions"]) for episode in episodes] == [before + 1030] * 2
    for finished in (env, other, whole):
        finished.close()


def test_an_episode_too_long_to_keep_is_not_saved(monkeypatch):
    monkeypatch.setattr(episode_log, "MAX_REPLAY_STEPS", 100)
    env = GymnasiumEnv(2, "Counter-v0")
    env.reset(seed=0)
    play(env, torch.zeros(1100, 2, dtype=torch.int64))
    assert env.state_dict() is None
    env.close()


def walk(num_envs, max_episode_steps=4):
    """Walk along a line from a random start; fail beyond ±2."""
    return Walk(num_envs, max_episode_steps, edge=2.0, width=3.0)


def test_a_torch_env_walks_fails_runs_out_of_time_and_resets_at_once():
    env = walk(6)
    x, elapsed = plain(env.reset(seed=0)[0]), torch.zeros(6, dtype=torch.int64)
    actions = torch.randn(60, 6, 1, generator=torch.Generator().manual_seed(1))
    kinds = set()
    for action, step in zip(actions, play(env, actions), strict=True):
        observation, reward, terminated, truncated, final = step
        moved, elapsed = x + action, elapsed + 1
        assert torch.equal(final, moved)
        assert torch.equal(reward, moved[:, 0])
        assert torch.equal(terminated, moved[:, 0].abs() > 2)
        assert torch.equal(truncated, elapsed == 4)
        done = terminated | truncated
        assert torch.equal(observation[~done], moved[~done])
        assert (observation[done] != moved[done]).all()
        x, elapsed = observation, torch.where(done, 0, elapsed)
        kinds |= set(zip(terminated.tolist(), truncated.tolist(), strict=True))
    assert {(False, False), (True, False), (False, True)} <= kinds


@pytest.mark.parametrize("make", [walk, ValueProbe])
def test_a_start_depends_on_its_seed_alone(make):
    seeds = [5, 9, 2, 14]
    together = plain(make(4).reset(seed=seeds)[0])
    for i, seed in enumerate(seeds):
        assert torch.equal(plain(make(1).reset(seed=[seed])[0])[0], together[i])
    assert torch.equal(plain(make(4).reset(seed=seeds[::-1])[0]), together.flip(0))
    assert torch.equal(plain(make(3).reset(seed=7)[0]), plain(make(3).reset(seed=[7, 8, 9])[0]))


def test_starts_differ_between_envs_and_episodes():
    env = walk(3, max_episode_steps=1)
    first = plain(env.reset(seed=0)[0])
    starts = torch.stack([first, *(step[0] for step in play(env, torch.zeros(20, 3, 1)))])
    assert len(starts.unique()) == 63


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: walk(0), ("num_envs", "at least 1", "0")),
        (lambda: walk(2, max_episode_steps=0), ("max_episode_steps", "at least 1", "0")),
        (lambda: walk(2).reset(seed=[1, 2, 3]), ("2 seeds", "3")),
    ],
)
def test_a_torch_env_refuses_what_makes_no_sense(make, message):
    with refused(names=message):
        make()


@pytest.mark.parametrize("mode", [ResetMode.ROWS, ResetMode.WHERE, None])
@pytest.mark.parametrize(
    ("value", "forms"),
    [
        (torch.zeros(2, 1, dtype=torch.float64), ("torch.float64", "torch.float32")),
        (torch.zeros(2, 3), ("[3]", "[1]")),
    ],
)
def test_an_entry_of_another_form_than_at_its_start_is_named(mode, value, forms):
    """It was broadcast or promoted, or ended the run with an error of torch at the first end."""

    def move(env, state, action):
        return ({"x": value},)

    env = ScriptedTask(2, lambda uniform: {"x": uniform}, move, steps=1)
    env.reset(seed=0)
    with refused(EnvFaultError, names=("ScriptedTask", "'x'", *forms)):
        if mode is None:  # within a chunk
            env.advance(torch.zeros(2, 1), torch.ones(2, dtype=torch.bool))
        env.reset_mode = mode
        env.step(torch.zeros(2, 1))


@pytest.mark.parametrize("name", TORCH_ENVS)
def test_a_torch_env_goes_on_exactly(name):
    make, space = TORCH_ENVS[name]
    env, other = make(3), make(3)
    env.reset(seed=0)
    actions = random_actions(space, 40, 3)
    before = play(env, actions[:13])
    state = through_file(env.state_dict())
    other.reset(seed=99)
    assert_same(plain(other.load_state_dict(state)), before[-1][0])
    assert_same(play(other, actions[13:]), play(env, actions[13:]))


def test_a_wrapper_answers_as_the_env_in_it():
    """For all that `VectorEnv` has, so that nothing of it can be forgotten where it grows."""
    env = ValueProbe(2)
    env.reports_penalty, env.render_fps, env.metadata = True, 7.0, {"joint_names": ["a"]}
    wrapped = concrete(VectorEnvWrapper)(env)
    for name in VectorEnv.__annotations__ | {"extra_fields": None, "goals": None}:
        assert getattr(wrapped, name) == getattr(env, name)
    methods = {
        name for name, value in vars(VectorEnv).items() if callable(value) and name[0] != "_"
    }
    # Which steps the wrapper itself: what it changes would not be in the env's own rollouts.
    assert methods - vars(VectorEnvWrapper).keys() == {"rollout_stepper"}
    called = []
    for name in methods - {"rollout_stepper"}:
        setattr(env, name, lambda *args, name=name: called.append((name, args)))
        arguments = {
            "reset": (3, {"x": 1}),
            "step": (0,),
            "seeds_of": (3,),
            "render": ([1],),
            "load_state_dict": ({},),
            "add_events": ({},),
            "record_info": ({},),
        }
        getattr(wrapped, name)(*arguments.get(name, ()))
        assert called.pop() == (name, arguments.get(name, ()))
