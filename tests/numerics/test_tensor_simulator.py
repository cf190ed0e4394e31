"""Simulators of tensors: stand-ins that reset, and say what an episode came to, as the known ones do."""

from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode

from lightning_rl import (
    GRPO,
    PPO,
    ActorCritic,
    ReplayBuffer,
    RslRlVecEnv,
    SquashedActorCritic,
    SyncCollector,
    TensorSimulator,
    TermWrapper,
)
from lightning_rl.extensions.managers import Event, Observation, Reward
from lightning_rl.extensions.managers.actions import Position
from lightning_rl.functional import explained_variance
from lightning_rl.rollout.contract import final_observations
from tests.helpers import last, load, make_collector, train
from tests.messages import refused
from tests.variants import before, variant

LIMIT, EDGE = 5, 2.0


class Simulator:
    """N points on a line: beyond an edge is a failure; the right one a success. Time cuts after 5 steps.

    The group `policy` sees the place, `critic` the time as well.
    """

    single_action_space = Box(-1.0, 1.0, (1,), np.float32)
    device = "cpu"
    unwrapped = property(lambda self: self)

    def __init__(self, num_envs, **metadata):
        self.num_envs, self.metadata = num_envs, {"render_fps": 60, **metadata}
        self.place, self.elapsed = torch.zeros(2, num_envs)
        self.seeds = []

    def observed(self):
        both = torch.stack((self.place, self.elapsed), 1)
        return {"policy": self.place[:, None].double(), "critic": both}

    def begin(self, rows):
        self.place[rows] = torch.linspace(-1, 1, self.num_envs)[rows]
        self.elapsed[rows] = 0

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.begin((options or {}).get("env_idx", slice(None)))
        return self.observed(), {}

    def move(self, action):
        self.place += action[:, 0]
        self.elapsed += 1
        return self.place.abs() > EDGE, self.elapsed >= LIMIT

    def close(self):
        self.closed = True


class IsaacLike(Simulator):
    """Resets within the step; what an episode came to it does not say. Its buffers are written over."""

    max_episode_length = LIMIT

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.buffers = {key: value.clone() for key, value in self.observed().items()}

    def observed(self):
        new = super().observed()
        for key, buffer in getattr(self, "buffers", {}).items():
            new[key] = buffer.copy_(new[key])
        return new

    def reset(self, seed=None, options=None):
        assert seed is None or isinstance(seed, int), "torch.manual_seed would refuse a list"
        return super().reset(seed=seed, options=options)

    def step(self, action):
        terminated, timed_out = self.move(action)
        reward = self.place.clone()
        self.begin(terminated | timed_out)
        return self.observed(), reward, terminated, timed_out, {"log": {"Episode_Reward/x": 1.0}}


class ManiSkillLike(Simulator, gymnasium.vector.VectorEnv):
    """Gives `final_observation` and `final_info`, unless it leaves resets to others."""

    auto_reset, ignore_terminations = True, False

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.spec = gymnasium.envs.registration.EnvSpec("X-v0", max_episode_steps=LIMIT)

    def step(self, action):
        terminated, truncated = self.move(action)
        seen, reward = self.observed(), self.place.clone()
        info = {"success": self.place > EDGE, "elapsed_steps": self.elapsed.clone()}
        if self.ignore_terminations:
            terminated = torch.zeros_like(terminated)
        done = terminated | truncated
        if done.any() and self.auto_reset:
            final, before = seen, info
            seen, info = self.reset(options={"env_idx": done.nonzero().flatten()})
            info |= {"final_observation": final, "_final_observation": done}
            info |= {"final_info": before, "_final_info": done}
        return seen, reward, terminated, truncated, info


class Late(Simulator):
    """Resets in the step after an end, whose action does nothing; what it says of that step is nonsense."""

    max_episode_length = LIMIT

    def __init__(self, num_envs):
        super().__init__(num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)
        self.late = torch.zeros(num_envs, dtype=torch.bool)

    def reset(self, *, seed=None, options=None):
        self.late[:] = False
        return super().reset(seed=seed, options=options)

    def step(self, action):
        late = self.late
        terminated, truncated = self.move(torch.where(late[:, None], 0, action))
        self.begin(late)
        reward = torch.where(late, -1e6, self.place)
        self.late = (terminated | truncated) & ~late
        info = {"success": (self.place > EDGE) & ~late}
        return self.observed(), reward, terminated | late, truncated, info


def collected(make, steps=12, **settings):
    """A rollout [3, T+1] of a fixed series of actions."""
    env = TensorSimulator(3, make, **settings)
    policy = ActorCritic(env.single_observation_space, env.single_action_space)
    collector = make_collector(SyncCollector, env, policy, steps, seed=1)
    torch.manual_seed(4)
    return collector.collect(), env


KINDS = {
    "ManiSkill": (ManiSkillLike, {"seeds": "each"}),
    "ManiSkill, reset by us": (variant(ManiSkillLike, auto_reset=False), {"resets": "by_index"}),
    "Isaac": (IsaacLike, {"missing_final": "last_observation"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_it_returns_is_what_the_contract_says(name):
    """Each next observation follows from the place before, over resets, and each end has its true observation."""
    make, settings = KINDS[name]
    rollout, env = collected(make, **settings)
    seen, action = rollout["observation"], rollout["action"]
    place, elapsed = seen["critic"].unbind(-1)
    assert torch.equal(seen["policy"][..., 0], place), "groups are keys, floats are float32"
    moved = place[:, :-1] + action[:, :-1, 0].clamp(-1, 1)
    done = rollout["done"][:, :-1]
    begins = torch.linspace(-1, 1, 3)[:, None].expand_as(moved)
    torch.testing.assert_close(place[:, 1:], torch.where(done, begins, moved))
    assert torch.equal(elapsed[:, 1:], torch.where(done, 0, elapsed[:, :-1] + 1))
    torch.testing.assert_close(rollout["reward"][:, :-1], moved)
    assert torch.equal(rollout["terminated"][:, :-1], moved.abs() > EDGE)
    assert torch.equal(rollout["truncated"][:, :-1], elapsed[:, :-1] == LIMIT - 1)
    assert rollout["truncated"].any()
    rows, steps = (rollout["truncated"] & ~rollout["terminated"])[:, :-1].nonzero(as_tuple=True)
    final = final_observations(rollout, rows, steps)["critic"]
    if name == "Isaac":
        assert torch.equal(final, seen["critic"][rows, steps]), "the last one before the step"
    else:
        torch.testing.assert_close(final[:, 0], moved[rows, steps])
        assert (final[:, 1] == LIMIT).all()
        assert torch.equal(rollout["success"][:, :-1], moved > EDGE), "from before the reset"
    assert env.max_episode_steps == LIMIT
    assert env.render_fps == 60


@pytest.mark.parametrize(
    ("space", "clip_action", "taken"),
    [
        (Box(-1.0, 1.0, (2,), np.float32), True, [1.0, -0.5]),
        (Box(np.array([-np.inf, 0.0]), np.inf, dtype=np.float64), True, [2.7, 0.0]),
        (Box(-1.0, 1.0, (2,), np.float32), False, [2.7, -0.5]),
        (Box(-np.inf, np.inf, (2,), np.float32), True, [2.7, -0.5]),
    ],
)
def test_actions_are_clipped_to_the_bounds_that_there_are(space, clip_action, taken):
    class Taking(ManiSkillLike):
        single_action_space = space

        def move(self, action):
            self.taken = action
            return super().move(action)

    env = TensorSimulator(3, Taking, clip_action=clip_action)
    action = torch.tensor([[2.7, -0.5]]).expand(3, 2)
    env.step(action)
    assert torch.equal(env.simulator.taken, torch.tensor([taken]).expand(3, 2))
    assert (env.simulator.taken is action) == (taken == [2.7, -0.5]), "no work without bounds"


def test_floats_have_the_announced_bounds_of_their_shape():
    announced = Dict({"policy": Box(-EDGE, EDGE, (1,)), "critic": Box(0.0, 1.0, (5,))})

    class Announcing(ManiSkillLike):
        single_observation_space = announced

    space = TensorSimulator(3, Announcing).single_observation_space
    assert space["policy"] == announced["policy"]
    assert space["critic"] == Box(-np.inf, np.inf, (2,))


def late(num_envs):
    return TensorSimulator(num_envs, Late, resets="a_step_late")


def test_ppo_learns_from_no_such_step_and_counts_none(tmp_path):
    def keep(module, rollout, batch_idx):
        module.rollout, module.learnt = rollout, 0

    def count(module, minibatch):
        module.learnt += len(minibatch)

    settings = {"algorithm": before(PPO, training_step=keep, loss=count), "normalize_reward": True}
    settings |= {"normalize_advantage": "rollout", "n_epochs": 1, "batch_size": 8}
    policy = {"normalize_observation": True, "actor_keys": ["critic"], "ignore_keys": ["policy"]}
    module, *_ = train(tmp_path, env=late, policy=policy, model=settings)
    padding = module.rollout["padding"][:, :-1]
    assert padding.any()
    assert module.learnt == int((~padding).sum()), "each other step once"
    assert module.env_steps == int(module.policy.normalizer.count)
    assert int(module.reward_normalizer.count) == module.env_steps
    advantage = module.rollout["advantage"][:, :-1][~padding]
    assert advantage.mean().abs() < 1e-5
    judged = (module.rollout[key][:, :-1][~padding] for key in ("value", "return"))
    explained = float(explained_variance(*judged))
    assert module.metrics["train/explained_variance"] == pytest.approx(explained, abs=1e-6)
    lengths = load(last(tmp_path))["RLDataModule"]["collectors"][0]["statistics"]["lengths"]
    assert max(lengths) <= LIMIT, "an episode has as many steps as were steps"


def test_a_replay_draws_no_such_step():
    rollout, env = collected(Late, steps=24, resets="a_step_late")
    replay = ReplayBuffer(env.single_observation_space, env.single_action_space, 3, capacity=300)
    replay.extend(rollout)
    for batch in replay.batches(20, 32):
        moved = batch["observation", "policy"] + batch["action"].clamp(-1, 1)
        torch.testing.assert_close(batch["next_observation", "policy"], moved)


def test_terms_begin_again_with_an_episode_that_begins_late():
    history = {"policy": {"both": Observation("entry", {"name": "critic"}, history=2)}}
    rewards = {"env": None, "alive": Reward("constant")}
    simulator = partial(TensorSimulator, make=Late, resets="a_step_late")
    env = TermWrapper(3, simulator, observations=history, rewards=rewards)
    env.reset(seed=1)
    for _ in range(3 * LIMIT):
        observation, reward, *_, info = env.step(torch.zeros(3, 1))
        late, newest = info["padding"], observation.unflatten(1, (2, -1))[:, 1]
        assert torch.equal(reward, (~late).float())
        assert torch.equal(observation[late], newest[late].repeat(1, 2))
        assert torch.equal(env.elapsed[late], torch.zeros_like(env.elapsed[late]))


def test_a_rollout_keeps_entries_of_its_infos():
    env = TensorSimulator(3, ManiSkillLike, seeds="each")
    env.record_info({"elapsed_steps": ()})
    policy = ActorCritic(env.single_observation_space, env.single_action_space)
    rollout = make_collector(SyncCollector, env, policy, LIMIT, seed=1).collect()
    last = LIMIT - 1  # of an episode that took all its time
    assert rollout["info/elapsed_steps"][:, last].max() == LIMIT


def test_a_memory_and_a_late_reset_do_not_go_together():
    remembers = variant(ActorCritic, "Remembers", extra_fields={"state": ((4,), torch.float32)})

    env = late(3)
    policy = remembers(env.single_observation_space, env.single_action_space)
    with refused(names=("TensorSimulator", "Remembers")):
        make_collector(SyncCollector, env, policy, 4, seed=1)


def test_a_time_out_that_it_does_not_explain_is_an_error_that_says_what_to_do():
    with refused(names=("IsaacLike", "env", "final_obs", "missing_final: last_observation")):
        collected(IsaacLike)


def another_mode(num_envs):
    env = ManiSkillLike(num_envs)
    env.metadata["autoreset_mode"] = AutoresetMode.NEXT_STEP
    return env


def test_a_space_of_another_library_and_reports_from_elsewhere_are_taken():
    """As mjlab's: bounds are numbers or tensors."""

    def report(simulator, info):
        return {"rewards": {"place": simulator.place.clone()}, "fail": simulator.place > EDGE}

    box = SimpleNamespace(shape=(1,), low=-2.0, high=torch.tensor([2.0]))
    settings = {"missing_final": "last_observation", "report": report}
    env = TensorSimulator(3, variant(IsaacLike, single_action_space=box), **settings)
    assert env.single_action_space == Box(-2.0, 2.0, (1,), np.float32)
    env.reset()
    *_, info = env.step(torch.full((3, 1), 0.5))
    assert info["rewards"]["place"].tolist() == [-0.5, 0.5, 1.5]
    assert info["fail"].tolist() == [False] * 3


class Walker:
    """An env for rsl_rl; only a wrapped env knows its rate, as Isaac Lab's for rsl_rl."""

    num_actions, device = 1, "cpu"

    def __init__(self, num_envs, **inner):
        self.num_envs, self.unwrapped = num_envs, SimpleNamespace(**inner)

    def get_observations(self):
        return torch.zeros(self.num_envs, 1)

    def step(self, action):
        zeros = torch.zeros(self.num_envs)
        return zeros[:, None], zeros + 1, zeros.bool(), {}


def walking(num_envs, **inner):
    return TensorSimulator(num_envs, lambda n: RslRlVecEnv(Walker(n, **inner)))


def test_actions_without_bounds_are_refused_with_cures_that_a_simulator_has():
    def actor(env):
        return SquashedActorCritic(env.single_observation_space, env.single_action_space)

    with refused(names=("inf", "TermWrapper", "{class_path: Position", "action_bound")):
        actor(walking(2))
    wrapped = TermWrapper(2, walking, action=Position(scale=3.0, clip=1.0))
    bounded = TensorSimulator(2, lambda n: RslRlVecEnv(Walker(n), action_bound=1.0))
    for env in (wrapped, bounded):
        assert env.single_action_space == Box(-1.0, 1.0, (1,))
        actor(env)


EACH_SECOND = Event(lambda env: env.simulator.env.seen.append(1), mode="interval", every_s=(1, 1))


@pytest.mark.parametrize(
    "inner", [{"step_dt": 0.2, "dt": 0.1}, {"dt": 0.2}, {"metadata": {"render_fps": 5}, "dt": 0.1}]
)
def test_the_rate_and_the_metadata_are_those_of_the_env_within(inner):
    env = walking(2, **inner)
    assert env.known_fps == env.metadata["render_fps"] == 5
    env.simulator.env.seen = []
    env.add_events({"each": EACH_SECOND})
    env.reset(seed=1)
    paid = TermWrapper(2, partial(walking, **inner), rewards={"env": 1.0}, rewards_per_second=True)
    paid.reset(seed=1)
    for _ in range(11):
        _, reward, *_ = paid.step(torch.zeros(2, 1))
        env.step(torch.zeros(2, 1))
    assert len(env.simulator.env.seen) == 2
    torch.testing.assert_close(reward, torch.full((2,), 0.2))
    named = walking(2, metadata={"joint_names": ["hip"], "render_fps": 30})
    assert (named.known_fps, named.metadata["joint_names"]) == (30, ["hip"])


def test_seconds_of_an_env_without_a_rate_are_refused():
    with refused(names=("'each'", "metadata = {'render_fps'", "step_dt")):
        walking(2).add_events({"each": EACH_SECOND})
    with refused(names=("TermWrapper around TensorSimulator", "rewards_per_second", "render_fps")):
        TermWrapper(2, walking, rewards_per_second=True)


def shift(env, by):
    env.simulator.place[env.rows] += by


def test_events_change_the_simulator_at_the_start_after_resets_and_at_intervals():
    env = TensorSimulator(3, ManiSkillLike, seeds="each")
    seen_rows = []
    write_down = lambda env: seen_rows.append(env.rows.nonzero().flatten().tolist())  # noqa: E731
    every = Event(write_down, mode="interval", every_s=(2 / 60, 2 / 60))
    once, each = Event(shift, {"by": 0.5}, mode="startup"), Event(shift, {"by": -0.25})
    env.add_events({"once": once, "each": each, "every": every})
    env.reset(seed=1)
    assert env.simulator.place.tolist() == [-0.75, 0.25, 1.25]
    env.reset(seed=1)
    assert env.simulator.place.tolist() == [-1.25, -0.25, 0.75]
    stay = torch.zeros(3, 1)
    for _ in range(4):
        env.step(stay)
    assert seen_rows == [[0, 1, 2]]  # two steps after the reset
    seen, *_, info = env.step(stay)  # the time is over, and the next episode begins
    assert seen["policy"].flatten().tolist() == [-1.0, 0.0, 1.0]  # before the event
    assert env.simulator.place.tolist() == [-1.25, -0.25, 0.75]
    assert info["final_obs"]["policy"].flatten().tolist() == [-1.25, -0.25, 0.75]


def test_an_event_of_a_simulator_that_returns_something_or_cannot_fire_is_refused():
    env = TensorSimulator(3, ManiSkillLike, seeds="each")
    env.add_events({"e": Event("randomize", {"name": "x", "low": 0, "high": 1})})
    with refused(names=("SimulatorEvents", "'x'")):
        env.reset(seed=1)
    env.add_events({"e": Event(lambda env: {})})
    with refused(names=("ManiSkillLike", "'e' of events", "env.simulator", "env.rows")):
        env.reset(seed=1)
    late_env = TensorSimulator(3, Late, resets="a_step_late")
    with refused(names=("Late", "e")):
        late_env.add_events({"e": Event(shift, {"by": 1.0})})


REFUSED = {
    "no bounds": (
        variant(IsaacLike, "NoBounds", single_action_space=(1,)),
        ("NoBounds", "action space (1,)", "low, high"),
    ),
    "next-step": (another_mode, ("AutoresetMode.NEXT_STEP", "resets", "by_itself", "a_step_late")),
    "another number": (lambda n: ManiSkillLike(n + 1), ("simulator", "4 envs", "3")),
    "no simulator": (
        lambda n: SimpleNamespace(unwrapped=None, num_envs=3, device="cpu"),
        ("SimpleNamespace", "single_action_space"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_simulator_is_refused(name):
    make, message = REFUSED[name]
    with refused(names=message):
        TensorSimulator(3, make)


def simulated(num_envs):
    return TensorSimulator(num_envs, IsaacLike, missing_final="last_observation")


def test_groups_of_equal_starts_are_refused_where_there_is_one_seed(tmp_path):
    with refused(names=("2 members", "TensorSimulator", "reset")):
        train(tmp_path, env=simulated, model={"algorithm": GRPO, "group_size": 2})


def test_it_draws_its_envs_one_by_one_or_says_that_it_does_not():
    env = TensorSimulator(3, ManiSkillLike)
    env.simulator.render = lambda: torch.arange(3)[:, None, None, None].expand(3, 4, 5, 3).byte()
    assert env.render([2, 0])[:, 0, 0, 0].tolist() == [2, 0]
    env.simulator.render = lambda: np.zeros((4, 5, 3))
    assert env.render([0]).shape == (1, 4, 5, 3), "one picture shows all envs"
    env.simulator.render = lambda: np.zeros((4, 5))
    with refused(names=("ManiSkillLike", "render()", "rgb_array")):
        env.render([0])
    env.close()
    assert env.simulator.closed
