"""Terms of tasks: what each manager computes, when events fire, what is delayed, and what is refused."""

from functools import partial

import gymnasium
import pytest
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict

from lightning_rl import (
    ActionChunk,
    ActorCritic,
    GymnasiumEnv,
    ManagedEnv,
    PushBlocks,
    PushCube,
    Quadruped,
    SyncCollector,
    TermWrapper,
)
from lightning_rl.extensions.managers import Event
from lightning_rl.extensions.managers.actions import (
    Actions,
    DeltaPosition,
    EndEffectorPose,
    Position,
    Velocity,
)
from lightning_rl.extensions.managers.managed_env import TermSettings
from lightning_rl.extensions.managers.term import (
    Curriculum,
    Metric,
    Noise,
    Observation,
    Reward,
    Termination,
)
from lightning_rl.extensions.tasks.base import Pictures
from lightning_rl.system.errors import EnvFaultError
from tests.envs import ScriptedEnv
from tests.helpers import assert_same, make_collector
from tests.messages import refused

GAIN, X = 2.0, {"name": "x"}
PENDULUM = partial(GymnasiumEnv, id="Pendulum-v1")
STEP = Reward("measurement", {"name": "step"}, 0.5)


class Drift(ManagedEnv):
    """x moves by the gain times the action; the parameter is in the state if an event sets it."""

    step_dt, start_size = 0.1, 1

    def __init__(self, num_envs, steps=1000, **terms):
        space = Box(-1, 1, (1,))
        super().__init__(num_envs, space, space, steps, terms=TermSettings(**terms))

    def initial_state(self, uniform):
        return TensorDict({"x": uniform}, [len(uniform)])

    def observe(self, state):
        return state["x"]

    def simulate(self, env):
        gain = env.state.get("gain", torch.tensor(GAIN))
        x = env.state["x"] + gain.reshape(-1, 1) * env.action
        return TensorDict({"x": x}, [env.num_envs])

    def measure(self, env):
        return {"step": (env.state["x"] - env.previous_state["x"])[:, 0]}

    def parameters(self):
        return {"gain": torch.tensor(GAIN)}


def played(env, steps, action=1.0, seed=0):
    """Reset and step by one action; return the first observation and the results of each step."""
    first, _ = env.reset(seed=seed)
    shape = (env.num_envs, *env.single_action_space.shape)
    return first, [env.step(torch.full(shape, float(action))) for _ in range(steps)]


def x_of(env):
    return env.state["x"][:, 0]


def beyond(env, at, entry="x"):
    return env.state[entry][:, 0] > at


@pytest.mark.parametrize(
    ("make", "step_dt"),
    [
        (partial(Drift, rewards={"step": STEP, "alive": Reward("constant")}), 0.1),
        (PushCube, 1 / PushCube.render_fps),
        (partial(TermWrapper, env=PENDULUM, rewards={"env": 2.0}), 1 / 30),
        (Quadruped, 0.05),
    ],
)
def test_rewards_per_second_are_those_of_a_step_times_its_seconds(make, step_dt):
    (*_, plain), (*_, per_second) = (
        played(make(3, rewards_per_second=value), 2)[1] for value in (False, True)
    )
    torch.testing.assert_close(per_second[1], plain[1] * step_dt)
    for name, value in plain[4]["rewards"].items():
        torch.testing.assert_close(per_second[4]["rewards"][name], value * step_dt)
    torch.testing.assert_close(sum(per_second[4]["rewards"].values()), per_second[1])


def test_a_failure_is_no_success():
    ends = {
        "a": Termination(beyond, {"at": 0.0}, "success"),
        "b": Termination(beyond, {"at": 0.0}, "fail"),
    }
    bonus = {"won": Reward("is_success"), "lost": Reward("is_failure", weight=-1.0)}
    _, ((_, reward, terminated, _, info),) = played(Drift(2, terminations=ends, rewards=bonus), 1)
    assert terminated.all()
    assert not info["success"].any()
    assert reward.tolist() == [-1.0, -1.0]


def test_an_interval_event_fires_in_each_env_at_times_of_its_own():
    seconds = (0.3, 0.5)
    push = {"name": "x", "low": 9, "high": 9, "operation": "add"}
    env = Drift(64, events={"push": Event("randomize", push, "interval", seconds)})
    first, steps = played(env, 30, action=0.0)
    x = torch.stack([first[:, 0], *(step[0][:, 0] for step in steps)], 1)
    fired = x.diff(dim=1) > 1
    assert torch.allclose(x.diff(dim=1)[fired], torch.tensor(9.0))
    assert not fired.all(0).any()
    for row in fired:
        times = torch.cat((torch.tensor([0]), row.nonzero()[:, 0] + 1)).diff()  # steps between
        assert set(times.tolist()) <= {3, 4, 5}
    assert len({tuple(row.tolist()) for row in fired}) > 32


def test_an_interval_event_may_replace_a_parameter_and_fire_at_a_reset_too():
    setting = {"name": "gain", "low": 5.0, "high": 6.0}
    later = Drift(3, events={"gain": Event("randomize", setting, "interval", (0.2, 0.2))})
    played(later, 1, action=0.0)
    assert (later.state["gain"] == GAIN).all()
    later.step(torch.zeros(3, 1))
    assert (later.state["gain"] >= 5.0).all()
    at_once = Drift(3, events={"gain": Event("randomize", setting, "interval", (9.0, 9.0), True)})
    at_once.reset(seed=0)
    assert (at_once.state["gain"] >= 5.0).all()


def test_a_command_is_observed_before_it_is_rewarded_also_at_the_end_of_an_episode():
    draw = Event("randomize", {"name": "gain", "low": 1, "high": 9}, "interval", (0.1, 0.3), True)
    gain = {"policy": {"gain": Observation("entry", {"name": "gain"})}}
    env = Drift(16, steps=4, events={"draw": draw}, observations=gain, rewards={"step": STEP})
    observation, steps = played(env, 12)
    commands = [observation]
    for observation, reward, _, truncated, info in steps:
        torch.testing.assert_close(reward, 0.5 * commands[-1][:, 0])
        followed = torch.where(truncated[:, None], info["final_obs"], observation)
        assert (followed != commands[-1]).any(), "drawn within the step"
        commands.append(observation)


def test_the_bounds_of_a_term_are_those_of_its_group():
    def picture(env):
        return 600.0 * env.uniform(12).reshape(-1, 2, 2, 3) - 300.0

    camera = Observation(picture, clip=(0.0, 255.0), scale=-1 / 255)
    groups = {"camera": {"picture": camera}, "both": {"a": camera, "b": Observation("entry", X)}}
    env = Drift(8, observations=groups)
    space = env.single_observation_space["camera"]
    assert (space.low.min(), space.high.max()) == (-1.0, 0.0)
    observation, _ = env.reset(seed=0)
    assert (observation["camera"].min(), observation["camera"].max()) == (-1.0, 0.0)
    assert not env.single_observation_space["both"].is_bounded()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.uint8])
def test_a_term_alone_in_its_group_has_the_dtype_of_its_space(dtype):
    env = Drift(2, observations={"a": {"x": Observation(lambda env: env.state["x"].to(dtype))}})
    first, ((observation, *_),) = played(env, 1)
    expected = {"uint8": torch.uint8, "float32": torch.float32}
    assert first.dtype == observation.dtype == expected[env.single_observation_space.dtype.name]


class Counting:
    """An event that sets x to a hundredth of the number of its firings, and returns its whole memory."""

    def start(self, env):
        return {"n": torch.zeros(env.num_envs)}

    def __call__(self, env, memory):
        memory = {**memory, "n": memory["n"] + 1}
        return {"x": 0.01 * memory["n"][:, None]}, memory


@pytest.mark.parametrize("at_reset", [False, True])
def test_the_memory_of_an_interval_event_counts_its_firings(at_reset):
    env = Drift(2, events={"count": Event(Counting, {}, "interval", (0.5, 0.5), at_reset)})
    first, steps = played(env, 12, action=0.0)
    x = [100 * observation[0].item() for observation in (first, *(step[0] for step in steps))]
    assert x[5] == pytest.approx(1 + at_reset)
    assert x[9:11] == pytest.approx([1 + at_reset, 2 + at_reset])
    assert not at_reset or x[0] == pytest.approx(1)


def test_after_an_event_at_a_reset_a_start_is_consistent():
    """Its difference from the state before is 0, pictures show it, and no block counts as pushed."""

    def moved(env):
        return {"x": torch.full((env.num_envs, 1), 0.7)}

    change = Observation(lambda env: env.state["x"] - env.previous_state["x"])
    env = Drift(2, events={"m": Event(moved)}, observations={"policy": {"change": change}})
    assert not played(env, 0)[0].any()

    def elsewhere(env):
        return {"cube": torch.full((env.num_envs, 2), 0.5)}

    cubes = PushCube(2, pictures=Pictures(size=24, frames=2), events={"e": Event(elsewhere)})
    pictures, _ = cubes.reset(seed=0)
    assert torch.equal(pictures, cubes._picture(cubes.state).repeat(1, 1, 1, 2))

    def apart(env):
        red, blue = ([[side, 0.3]] * env.num_envs for side in (-0.4, 0.4))
        return {"red": torch.tensor(red), "blue": torch.tensor(blue)}

    blocks = PushBlocks(8, events={"apart": Event(apart)})
    _, ((*_, terminated, _, _),) = played(blocks, 1, action=0.0)
    assert not terminated.any()


def test_two_terms_draw_different_numbers_and_an_env_draws_the_same_among_others():
    setting = {"name": "x", "low": 0.0, "high": 1.0, "operation": "add"}
    push = Event("randomize", setting, "interval", (0.1, 0.1))

    def path(seeds, **events):
        env = Drift(len(seeds), events=events)
        first, steps = played(env, 5, 0.0, seeds)
        return torch.stack([first, *(step[0] for step in steps)])

    alone, among = path([5], a=push), path([3, 5, 8], a=push)
    assert torch.equal(alone[:, 0], among[:, 1])
    both = path([5], a=push, b=push)
    a, b = (path([5], **{name: push}) for name in "ab")
    assert not torch.equal(a.diff(dim=0), b.diff(dim=0))
    torch.testing.assert_close(both.diff(dim=0), a.diff(dim=0) + b.diff(dim=0))


def test_a_level_rises_with_success_at_the_end_of_an_episode_and_stays():
    env = Drift(
        3,
        steps=4,
        terminations={"far": Termination(beyond, {"at": 3.0}, "success")},
        curriculum={"hard": Curriculum("by_success", {"up": 0.25}, start=0.5)},
        rewards={"step": Reward("measurement", {"name": "step"}, level="hard")},
    )
    _, steps = played(env, 5)
    levels = torch.stack([info["metrics"]["hard"] for *_, info in steps])
    assert torch.equal(levels, torch.tensor([[0.5] * 3] * 2 + [[0.75] * 3] * 2 + [[1.0] * 3]))
    torch.testing.assert_close(steps[2][1], torch.full((3,), 0.75 * GAIN))
    env.reset()
    assert (env.step(torch.zeros(3, 1))[-1]["metrics"]["hard"] == 1.0).all()
    env.reset(seed=0)
    assert (env.step(torch.zeros(3, 1))[-1]["metrics"]["hard"] == 0.5).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_level_is_promoted_and_demoted_by_the_mean_of_an_episode(sign):
    params = {"name": "step", "promote": sign * 1.5, "demote": sign * 0.5, "up": 0.25, "down": 0.5}
    env = Drift(3, 4, curriculum={"range": Curriculum("ByMean", params, start=0.5)})
    env.reset(seed=0)
    levels = []
    for _ in range(2):  # two episodes
        for action in (0.2, 0.4, 1.0, 0.4):  # of a mean of .5
            row = torch.tensor([[2.0], [1.0], [0.0]]) * action * sign  # means of 2, 1 and 0
            *_, info = env.step(row)
            levels.append(info["metrics"]["range"])
    assert (levels[3] == 0.5).all(), "within an episode it stays"
    assert levels[4].tolist() == [0.75, 0.5, 0.0]
    env.load_state_dict(env.state_dict())
    *_, info = env.step(torch.zeros(3, 1))
    assert info["metrics"]["range"].tolist() == [1.0, 0.5, 0.0], "within the range"
    with refused(names=("ByMean", "promote", "demote")):
        Drift(1, curriculum={"range": Curriculum("ByMean", params | {"demote": params["promote"]})})


def test_levels_of_another_number_of_envs_are_named_when_they_begin_anew():
    params = {"name": "step", "promote": 1.5, "demote": 0.5}
    states = []
    for count in (3, 2):
        env = Drift(count, 4, curriculum={"range": Curriculum("ByMean", params)})
        policy = ActorCritic(env.single_observation_space, env.single_action_space)
        collector = make_collector(SyncCollector, env, policy, 4, seed=1)
        if states:
            with refused(UserWarning, names=("3 envs", "episodes", "curriculum/range")):
                collector.load_state_dict(*states)
        collector.collect()
        states.append(collector.state_dict())


def test_a_level_is_counted_by_its_own_steps_in_a_random_first_episode():
    params = {"name": "step", "promote": 1.0, "demote": -1.0}
    env = Drift(8, 20, curriculum={"range": Curriculum("ByMean", params)})
    env.randomize_first_episodes(20)
    env.reset(seed=0)
    for _ in range(20):
        env.step(torch.full((8, 1), 0.6))
    *_, info = env.step(torch.full((8, 1), 0.6))
    assert (info["metrics"]["range"] == 0.1).all(), "a mean of 1.2 in each first episode"


def test_history_delay_noise_clip_and_scale_of_observations():
    terms = {
        "old": Observation("task_observation", delay=(2, 2)),
        "last": Observation("task_observation", history=3),
        "clipped": Observation("task_observation", clip=(0.0, 3.0), scale=10.0),
    }
    env = Drift(2, observations={"policy": terms})
    assert env.single_observation_space.shape == (5,)
    first, steps = played(env, 3)
    x0 = env.reset(seed=0)[0][:, 1]
    assert torch.equal(first, torch.stack((x0, x0, x0, x0, 10 * x0), 1))
    expected = [x0, x0, x0 + 2, x0 + 4, torch.full_like(x0, 30.0)]
    torch.testing.assert_close(steps[1][0], torch.stack(expected, 1))
    torch.testing.assert_close(steps[2][0][:, 0], x0 + 2)


@pytest.mark.parametrize("kind", ["std", "uniform"])
def test_noise_has_its_size_and_a_bias_stays_within_an_episode(kind):
    terms = {
        "each": Observation("task_observation", noise=Noise(**{kind: 0.5})),
        "bias": Observation("task_observation", noise=Noise(**{kind: 0.5}, per_episode=True)),
    }
    env = Drift(2000, observations={"a": terms})
    first, steps = played(env, 2, action=0.0)
    noise = torch.stack([first, *(step[0] for step in steps)]) - env.state["x"]
    deviation = 0.5 if kind == "std" else 0.5 / 3**0.5
    torch.testing.assert_close(noise.std((0, 1)), torch.full((2,), deviation), atol=0.02, rtol=0)
    torch.testing.assert_close(noise.mean((0, 1)), torch.zeros(2), atol=0.03, rtol=0)
    assert torch.allclose(noise[0, :, 1], noise[2, :, 1], atol=1e-6)
    each = noise[:, :, 0]
    assert abs(torch.corrcoef(each[:2])[0, 1]) < 0.1
    assert kind == "std" or each.abs().max() <= 0.5


def test_actions_side_by_side_drive_joints_of_their_own():
    def inverse(env, change):
        return torch.cat((change, -change[:, :1]), 1)

    terms = {
        "arm": EndEffectorPose(inverse, size=3, scale=0.5, clip=1.0, drives=["arm_*"]),
        "wheels": Velocity([1.0, 2.0], drives=["left", "right"]),
        "hand": DeltaPosition(0.1, clip=2.0, drives=["hand"]),
    }
    drives = ["left", "arm_0", "arm_1", "hand", "arm_2", "arm_3", "right"]
    actions = Actions(terms, drives, "Robot")
    assert actions.space.high.tolist() == [1.0] * 3 + [torch.inf] * 2 + [2.0]
    action = torch.tensor([[0.2, 4.0, -0.4, 1.0, 1.0, 3.0]])
    arm, wheels, hand = actions.targets(None, action, torch.arange(7.0)[None])
    assert (arm.kind, arm.columns) == ("position", [1, 2, 4, 5])
    torch.testing.assert_close(arm.target, torch.tensor([[0.1, 0.5, -0.2, -0.1]]))
    assert (wheels.kind, wheels.columns) == ("velocity", [0, 6])
    assert wheels.target.tolist() == [[1.0, 2.0]]
    torch.testing.assert_close(hand.target, torch.tensor([[3.2]]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            lambda: Actions({"a": Position(drives=["lef"])}, ["left", "right"], "Robot"),
            ("Robot", "'lef'", "left, right", "close matches: left"),
            id="a drive that is not there",
        ),
        pytest.param(
            lambda: Actions(
                {"a": Position(), "b": Position(drives=["right"])}, ["left", "right"], "R"
            ),
            "the actions 'a' and 'b' both drive right",
            id="a drive of two",
        ),
        pytest.param(
            lambda: Drift(1, rewards={"fast": Reward(weight=1.0)}),
            ("Drift", "'fast'", "`term`"),
            id="a term without a function",
        ),
        pytest.param(
            lambda: Drift(1, terminations={"far": Termination(beyond)}),
            ("Drift", "'far' of terminations", "at", "`params`"),
            id="a parameter that is missing",
        ),
        pytest.param(
            lambda: Drift(
                1, events={"e": Event("randomize", {"name": "gian", "low": 0, "high": 1})}
            ),
            ("Drift", "'gian'", "x, gain", "close matches: gain"),
            id="an entry that is not there",
        ),
        pytest.param(
            lambda: Drift(1, rewards={"x": Reward(x_of, level="hard")}),
            ("Drift", "'x'", "'hard'"),
            id="a level that is not there",
        ),
        pytest.param(
            lambda: TermWrapper(1, PENDULUM, action=DeltaPosition()),
            ("DeltaPosition", "allowed: Position"),
            id="an action that needs the state",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_construction(make, message):
    with refused(names=message):
        make()


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        pytest.param(
            {"rewards": {"x": Reward(lambda env: env.state["x"])}},
            ("'x' of rewards", "torch.float32 [2, 1]", "[2]"),
            id="a reward of another shape",
        ),
        pytest.param(
            {"terminations": {"x": Termination(x_of)}},
            ("'x' of terminations", "[2]", "torch.bool"),
            id="an end that is a number",
        ),
    ],
)
def test_a_term_that_returns_something_else_is_named(terms, message):
    with refused(EnvFaultError, names=message):
        played(Drift(2, **terms), 1)


def test_an_event_that_returns_another_entry_is_named():
    with refused(EnvFaultError, names=("'e' of events", "'y'", "x, gain")):
        Drift(2, events={"e": Event(lambda env: {"y": env.state["x"]})})


@pytest.mark.parametrize(
    "settings",
    [{"mode": "startup"}, {"mode": "reset"}, {"mode": "interval", "every_s": (0.1, 0.1)}],
    ids=lambda settings: settings["mode"],
)
def test_an_event_returns_entries_of_the_form_of_the_state_and_may_be_more_precise(settings):
    """Another shape was broadcast, and another dtype ended the run at the first end."""

    def drift(name, size, dtype):
        def event(env):
            return {name: torch.ones(env.num_envs, *size, dtype=dtype)}

        return Drift(2, steps=3, events={"e": Event(event, **settings)})

    for name, size, dtype, forms in [
        ("x", (2,), torch.float32, ("[1, 2]", "[1, 1]")),
        ("x", (1,), torch.int64, ("torch.int64", "torch.float32")),
        ("gain", (1,), torch.float32, ("[1, 1]", "[1]")),
    ]:
        with refused(EnvFaultError, names=("'e' of events", f"'{name}'", *forms)):
            drift(name, size, dtype)
    env = drift("x", (1,), torch.float64)
    played(env, 4)
    assert env.state["x"].dtype == torch.float32


def turned(env):
    return (env.state["observation"] - env.previous_state["observation"]).abs().sum(1)


def pendulum(num_envs, **more):
    high = {"at": 0.9, "entry": "observation"}
    noisy = Observation("task_observation", noise=Noise(std=0.1), history=2, delay=(0, 2))
    settings = {
        "rewards": {"env": 0.5, "turned": Reward(turned)},
        "metrics": {"turned": Metric(turned)},
        "observations": {"policy": {"own": noisy}},
        "terminations": {"high": Termination(beyond, high, "success")},
        "action": Position(2.0, clip=1.0),
    }
    return TermWrapper(num_envs, PENDULUM, **settings | more)


def test_around_an_env_terms_see_its_observations_and_ends_are_before_the_reset():
    env = pendulum(3, observations=None)
    plain = GymnasiumEnv(3, id="Pendulum-v1")
    (before, _), (theirs, _) = env.reset(seed=4), plain.reset(seed=4)
    assert torch.equal(before, theirs)
    before = before.clone()
    ends = 0
    for _ in range(40):
        action = torch.rand(3, 1) * 2 - 1
        now, reward, terminated, _, info = env.step(action)
        last = info.get("final_obs", now).where(terminated[:, None], now)
        assert torch.equal(terminated, last[:, 0] > 0.9)
        assert torch.equal(info["success"], terminated)
        change = (last - before).abs().sum(1)
        torch.testing.assert_close(info["rewards"]["turned"], change)
        torch.testing.assert_close(reward, info["rewards"]["env"] + change)
        if not ends:  # from then on, the plain env is in another episode
            _, whole, *_ = plain.step(2 * action)
            torch.testing.assert_close(info["rewards"]["env"], 0.5 * whole)
        ends += int(terminated.sum())
        before = now.clone()
    assert ends


def test_around_an_env_memories_and_queues_are_saved_bit_for_bit():
    one, other = pendulum(3), pendulum(3)
    one.reset(seed=4)
    other.reset(seed=9)
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(60, 3, 1, generator=generator) * 2 - 1
    for action in actions[:30]:
        last, *_ = one.step(action)
    assert torch.equal(other.load_state_dict(one.state_dict()), last)
    for action in actions[30:]:
        a, b = one.step(action), other.step(action)
        assert_same(a[:4], b[:4])
        assert_same(a[4]["rewards"], b[4]["rewards"])


def test_around_an_env_drawn_ends_are_resumed():
    def drawn(env):
        return env.uniform(1)[:, 0] < 0.1

    def make():
        return TermWrapper(3, PENDULUM, terminations={"drawn": Termination(drawn)})

    env, resumed = make(), make()
    env.reset(seed=4)
    for _ in range(30):
        env.step(torch.zeros(3, 1))
    resumed.load_state_dict(env.state_dict())
    for _ in range(30):
        assert_same(env.step(torch.zeros(3, 1))[:4], resumed.step(torch.zeros(3, 1))[:4])


@pytest.mark.parametrize("key", ["success", "is_success"])
def test_around_an_env_its_success_counts_unless_a_term_says_failure(key):
    def last(env, ends):
        return env.elapsed >= (3 if ends else 99)

    def ended(ends):
        make = partial(
            ScriptedEnv, Box(-9, 9, (1,)), info=lambda env: {key: env.age == 3}, length=3
        )
        gymnasium.register(f"Successful-{key}-{ends}-v0", make)
        terms = {end: Termination(last, {"ends": end == ends}, end) for end in ("success", "fail")}
        env = TermWrapper(
            1, partial(GymnasiumEnv, id=f"Successful-{key}-{ends}-v0"), terminations=terms
        )
        env.reset(seed=0)
        *_, info = [env.step(torch.zeros(1, dtype=torch.int64)) for _ in range(3)][-1]
        return bool(info["success"])

    assert ended("none")
    assert not ended("fail")


def test_rewards_around_chunks_are_refused():
    chunks = partial(ActionChunk, env=PENDULUM)
    with refused(names=("TermWrapper", "rewards", "ActionChunk")):
        TermWrapper(2, chunks, rewards={"env": -1.0})
