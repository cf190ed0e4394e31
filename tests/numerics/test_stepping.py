"""The loop that training, evaluation and recording share, and what it carries: a policy's state."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

from lightning_rl import (
    AsyncCollector,
    Policy,
    PolicyWrapper,
    SyncCollector,
    TorchEnv,
)
from lightning_rl.collectors import EpisodeSettings
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.collectors.loop import FirstEpisodes, run_steps
from lightning_rl.system.errors import ConfigurationError
from tests.helpers import assert_same, make_collector, train

ENDS = 5


class Clock(TorchEnv):
    """Shows how old the episode is; env i ends, by its seed, after 3 to 5 steps."""

    start_size = 1

    def __init__(self, num_envs):
        super().__init__(num_envs, Box(0, 99, (2,)), Discrete(9), ENDS)

    def initial_state(self, uniform):
        ends = 3 + (3 * uniform[:, 0]).floor()
        return TensorDict({"age": torch.zeros_like(ends), "ends": ends}, ends.shape)

    def observe(self, state):
        return torch.stack((state["age"], state["ends"]), 1)

    def transition(self, state, action):
        moved = state.clone()
        moved["age"] += 1
        return moved, action.float(), moved["age"] >= state["ends"], {}


class Counts(Policy):
    """Its state is the number of steps that it has taken in the episode, and its action too."""

    has_critic = False

    def __init__(self, observation_space, action_space):
        super().__init__(observation_space, action_space)
        self.weight = torch.nn.Parameter(torch.zeros(()))

    @property
    def extra_fields(self):
        return {"state": ((2,), torch.float32)}

    def forward(self, td, deterministic=False, generator=None):
        if generator is not None:
            torch.rand((), generator=generator)
        state = td["state"]
        td["action"] = state[:, 0].long()
        td["sample_log_prob"] = torch.zeros(len(td))
        td["next_state"] = state + 1
        return td

    def get_value(self, td):
        raise NotImplementedError

    def evaluate_actions(self, td):
        raise NotImplementedError


class Around(PolicyWrapper):
    def __init__(self, observation_space, action_space):
        super().__init__(Counts(observation_space, action_space))


def policy_for(env, cls=Counts):
    return cls(env.single_observation_space, env.single_action_space)


def check_state(rollout):
    """The state before each step, in the bootstrap slot too, is the age of the episode."""
    age = rollout["observation"][..., :1].expand(*rollout.shape, 2)
    assert torch.equal(rollout["state"], age)
    assert torch.equal(rollout["action"][:, :-1], age[:, :-1, 0].long())


# --- the state of a policy ---


@pytest.mark.parametrize("cls", [Counts, Around])
@pytest.mark.parametrize("reset", [False, True])
def test_a_state_goes_on_from_step_to_step_and_from_rollout_to_rollout(cls, reset):
    env = Clock(4)
    episode_settings = EpisodeSettings(reset_every_rollout=reset)
    collector = make_collector(
        SyncCollector, env, policy_for(env, cls), 7, seed=1, episode_settings=episode_settings
    )
    ages = set()
    for _ in range(4):
        rollout = collector.collect()
        check_state(rollout)
        ages |= set(rollout["state"][:, 0, 0].tolist())
    assert (ages == {0.0}) == reset, "rollouts begin within episodes"


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_state_goes_on_in_the_background(staleness):
    env = Clock(3)
    policy = policy_for(env)
    collector = make_collector(
        AsyncCollector, env, policy, 7, 1, max_staleness=staleness, timeout_s=20
    )
    for _ in range(6):
        check_state(collector.collect())
        policy.version += 1
        collector.publish()
    collector.close()


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_collector_has_the_state(background):
    make = partial(AsyncCollector, max_staleness=0, timeout_s=20) if background else SyncCollector
    make = partial(make_collector, make)
    envs = Clock(4), Clock(4)
    one, other = (make(env, policy_for(env), 7, 1) for env in envs)
    first = one.collect().clone()
    assert first["state"][:, -1].any()
    other.load_state_dict(one.state_dict())
    for collector in (one, other):
        collector.policy.version += 1
        collector.publish()
    expected = one.collect().clone()
    check_state(expected)
    fields = (x.select("state", "action").to_dict() for x in (other.collect(), expected))
    assert_same(*fields)
    for collector in (one, other):
        collector.close()


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_state_goes_on_in_an_evaluation(deterministic):
    env = Clock(5)
    episodes = run_episodes(policy_for(env), env, range(4), deterministic=deterministic)
    assert len({episode["length"] for episode in episodes}) > 1
    for episode in episodes:  # 0 + 1 + 2 + ...
        assert episode["return"] == sum(range(episode["length"]))


@pytest.mark.parametrize(
    ("field", "told"),
    [
        (None, "no 'next_state'; it must be"),
        (torch.zeros(3, 1), "'next_state' as torch.float32 of shape [3, 1]; it must be"),
    ],
)
def test_a_state_that_is_not_as_announced_is_refused(field, told):
    class Forgets(Counts):
        def forward(self, td, deterministic=False, generator=None):
            td = super().forward(td, deterministic, generator).exclude("next_state")
            return td if field is None else td.set("next_state", field)

    env = Clock(3)
    with pytest.raises(ConfigurationError) as error:
        make_collector(SyncCollector, env, policy_for(env, Forgets), 7, seed=1).collect()
    assert str(error.value) == (
        f"Forgets.forward returned {told} torch.float32 of shape [3, 2], as extra_fields declares for 'state': "
        "td.set('next_state', ...), and return td."
    )


# --- the loop ---


class Log:
    """Writes down what it is asked for."""

    def __init__(self):
        self.calls = []

    def before(self, t):
        self.calls.append(("before", t))

    def act(self, t):
        self.calls.append(("act", t))

    def step(self, t):
        self.calls.append(("step", t))
        return {"t": t}


def test_each_step_is_announced_acted_and_taken_and_no_more_than_are_looked_at():
    log = Log()
    for t, info in run_steps(log, log, 9, before=log.before):
        assert info == {"t": t}
        log.calls.append(("look", t))
        if t == 1:
            break
    assert log.calls == [(kind, t) for t in (0, 1) for kind in ("before", "act", "step", "look")]


def test_what_announcing_a_step_raises_ends_the_loop():
    def stop(t):
        if t == 2:
            raise KeyError("enough")

    log = Log()
    with pytest.raises(KeyError, match="enough"):
        list(run_steps(log, log, 9, before=stop))
    assert len(log.calls) == 4


def test_first_episodes_end_by_themselves_or_are_cut():
    env = Clock(4)
    lengths = env.reset(seed=[1, 2, 1, 1])[0][:, 1]

    def play(max_steps):
        playing = FirstEpisodes(env, lambda x, running: torch.zeros(4).long(), [1, 2], max_steps)
        return [
            (playing.counted.tolist(), playing.running.tolist(), playing.reward.shape)
            for _ in playing
        ]

    steps = play(100)
    assert len(steps) == lengths[:2].max()
    for t, (counted, running, shape) in enumerate(steps):
        assert counted == [*(t < lengths[:2]).tolist(), False, False]
        assert running == [*(t + 1 < lengths[:2]).tolist(), False, False]
        assert shape == (4,)
    cut = play(2)
    assert cut[0] == steps[0]
    assert cut[1] == (steps[1][0], [False] * 4, (4,))


# --- what makes a collector ---


class Every(SyncCollector):
    """A collector of somebody's own: it hands out every second rollout."""

    def __init__(self, context, every=1):
        super().__init__(context)
        self.every = every

    def collect(self):
        for _ in range(self.every - 1):
            super().collect()
        return super().collect()


def test_a_collector_of_ones_own_gets_all_in_its_context(tmp_path):
    data = {"collector": partial(Every, every=2), "total_env_steps": 128, "num_eval_episodes": 1}
    trainer = {"limit_val_batches": 0, "profiler": "simple"}
    contexts = []

    class Kept(Every):
        def collect(self):
            contexts.append(self.context)
            return super().collect()

    data["collector"] = partial(Kept, every=2)
    module, datamodule, trainer = train(tmp_path, data=data, trainer=trainer)
    context = contexts[0]
    assert module.env_steps == 128
    assert context.policy is module.policy
    assert context.num_steps == datamodule.buffer_size
    assert context.episode_settings is module.episode_settings
    assert context.phase == trainer.profiler.profile


def test_a_collector_has_the_plan_and_the_timer_from_the_start():
    env = Clock(2)
    times = []

    def phase(name):
        times.append(name)
        return np.errstate()  # some context

    episode_settings = EpisodeSettings(first_episode_only=True)
    collector = make_collector(
        SyncCollector,
        env,
        policy_for(env),
        9,
        seed=1,
        episode_settings=episode_settings,
        phase=phase,
    )
    steps = collector.collect().batch_size[1] - 1
    assert steps < 9
    assert times == ["inference", *["inference", "env"] * steps, "inference"]
