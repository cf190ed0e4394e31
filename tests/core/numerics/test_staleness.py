"""Background collection keeps its bound, its order and its versions, and stale data is weighed as the formulas say."""

import math
import random
import threading
import time
import traceback
from functools import partial
from itertools import product, repeat
from types import SimpleNamespace
from unittest.mock import MagicMock

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.nn.utils import prune

from lightning_rl import (
    GRPO,
    PPO,
    ActorCritic,
    ActorOnly,
    AsyncCollector,
    OffPolicyAlgorithm,
    SlowPolicy,
)
from lightning_rl.algorithms.off_policy_correction import OffPolicyCorrection
from lightning_rl.algorithms.rollout_evaluation import log_prob_of
from lightning_rl.buffers import ReadInterrupted, WriterError
from lightning_rl.collectors import SyncCollector
from lightning_rl.collectors.weights import acting_copy
from lightning_rl.envs import VectorEnv
from lightning_rl.policies.acting import NumpyActor
from lightning_rl.policies.actors import StepwiseActor
from lightning_rl.system.phases import no_phases
from tests.callbacks import callback
from tests.envs import NUMBER
from tests.helpers import make_collector, make_data, make_ppo, train
from tests.messages import refused
from tests.policies import ScriptedPolicy
from tests.variants import variant


class Delay:
    """Sleeps at random, mostly not at all; at worst about as long as a rollout and an update take."""

    def __init__(self, seed, worst_ms=0.4):
        self.random = random.Random(seed)
        self.worst = worst_ms / 1000

    def __call__(self):
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * self.worst)


class Counting(VectorEnv):
    """Shows how many steps it has made, and pays 1; episodes of `length` steps, or an error at one step.

    It keeps by how many steps it was ahead of a learner, which has `trained` on so many.
    """

    device = torch.device("cpu")
    single_observation_space = NUMBER
    single_action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, delay=lambda: None, length=10**9, num_envs=1, raises_at=None):
        self.delay, self.length, self.num_envs, self.raises_at = delay, length, num_envs, raises_at
        self.steps, self.trained, self.ahead = 0, lambda: 0, 0
        self.ones, self.never = torch.ones(num_envs), torch.zeros(num_envs, dtype=torch.bool)

    def reset(self, seed=None, options=None):
        return self._observe(), {}

    def step(self, action):
        if self.steps + 1 == self.raises_at:
            raise OSError("the motor is on fire")
        self.delay()
        self.steps += 1
        self.ahead = max(self.ahead, self.num_envs * self.steps - self.trained())
        ends = self.steps % self.length == 0
        info = {"final_obs": self._observe()} if ends else {}
        return self._observe(), self.ones, ~self.never if ends else self.never, self.never, info

    def _observe(self):
        return torch.full((self.num_envs, 1), float(self.steps))

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        return self._observe()


class WeightPolicy(ScriptedPolicy):
    """Its action is the first and the last of its weights, all of which equal its version."""

    def __init__(self, delay=lambda: None):
        super().__init__(NUMBER, Counting.single_action_space, None)
        self.first = torch.nn.Parameter(torch.zeros(1))
        self.last = torch.nn.Parameter(torch.zeros(1))
        self.delay = delay

    def forward(self, td, deterministic=False, generator=None):
        first = self.first.detach().clone()
        self.delay()  # newer weights that came in here would tear the action
        action = torch.stack([first, self.last.detach()], -1).expand(*td.batch_size, 2)
        td.set("action", action, inplace=True)
        return td.set("sample_log_prob", -action[:, 0], inplace=True)

    def set_weights(self, value):
        with torch.no_grad():
            self.first.fill_(float(value))
            self.last.fill_(float(value))

    def learn(self):
        """Become the next version."""
        self.version += 1
        self.set_weights(self.version)


def consume(collector, policy, rollouts, delay=lambda: None):
    """Train on some rollouts; return the steps, versions, actions, log-probs and lags of them all, in order."""
    seen = {"steps": [], "versions": [], "actions": [], "log_probs": [], "lags": []}
    for _ in range(rollouts):
        rollout = collector.collect()
        delay()  # a torn slot would show
        now = rollout[:, :-1]
        seen["steps"] += now["observation"].flatten().long().tolist()
        seen["versions"] += now["policy_version"].flatten().tolist()
        seen["actions"] += now["action"][0].tolist()
        seen["log_probs"] += now["sample_log_prob"].flatten().tolist()
        seen["lags"].append(int(policy.version) - int(now["policy_version"].min()))
        policy.learn()
        collector.publish()
        delay()
    return seen


@pytest.mark.parametrize("schedules", [160, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_schedules_keep_bound_order_and_versions(schedules):
    lags, swaps, before = {0: set(), 1: set(), 2: set(), 3: set()}, 0, threading.active_count()
    for seed in range(schedules):
        staleness, steps, rollouts = seed % 4, 2, 6
        env, policy = Counting(Delay(seed)), WeightPolicy(Delay(seed + 1))
        collector = make_collector(
            AsyncCollector, env, policy, steps, seed, max_staleness=staleness, timeout_s=20
        )
        try:
            seen = consume(collector, policy, rollouts, Delay(seed + 2, worst_ms=2.0))
            counters = collector._buffer.statistics()
        finally:
            collector.close()
        assert max(seen["lags"]) <= staleness, seed
        assert seen["steps"] == list(range(steps * rollouts)), "once each, in order, none lost"
        assert seen["actions"] == [[version] * 2 for version in seen["versions"]], seed
        assert seen["log_probs"] == [-version for version in seen["versions"]], seed
        assert seen["versions"] == sorted(seen["versions"]), seed
        assert counters["read_steps"] == steps * rollouts
        assert counters["dropped_steps"] == 0
        lags[staleness] |= set(seen["lags"])
        pairs = zip(seen["versions"][::2], seen["versions"][1::2], strict=True)
        swaps += sum(a != b for a, b in pairs)
    assert all(lags[bound] == set(range(bound + 1)) for bound in lags), "every lag has occurred"
    assert swaps > 20, "weights were swapped in the middle of many a rollout"
    assert threading.active_count() <= before


class VersionActor(ActorOnly):
    """A linear policy whose mean is twice its version: once by a weight, once by a bias."""

    acts_as_perceptron = True

    def __init__(self):
        super().__init__(NUMBER, Counting.single_action_space, (), log_std_bounds=(-5.0, 2.0))
        self.learn(0)

    def learn(self, to=None):
        with torch.no_grad():
            self.version.add_(1) if to is None else self.version.fill_(to)
            layer = self.actor[0]
            layer.weight.fill_(float(self.version))
            layer.bias.fill_(float(self.version))
            self.distribution.log_std.fill_(-4.0)


@pytest.mark.parametrize(
    ("kind", "actor"), [(VersionActor, NumpyActor), (variant(VersionActor), StepwiseActor)]
)
def test_weights_and_log_probs_are_those_of_the_version(kind, actor):
    policy, swaps = kind(), 0
    ones = variant(Counting, _observe=lambda env: torch.ones(1, 1))
    collector = make_collector(
        AsyncCollector, ones(Delay(1, 2.0)), policy, 8, 1, max_staleness=1, timeout_s=20
    )
    assert isinstance(collector._loop._writers[0].actor, actor)
    delay = Delay(3, 10.0)
    try:
        for _ in range(60):
            now = collector.collect()[:, :-1].clone()
            versions = now["policy_version"][0]
            swaps += int((versions[1:] != versions[:-1]).any())
            offset = now["action"][0] - 2.0 * versions[:, None]
            assert offset.abs().max() < 0.3, "noise of standard deviation exp(-4)"
            normal = torch.distributions.Normal(2.0 * versions[:, None].float(), np.exp(-4.0))
            expected = normal.log_prob(now["action"][0]).sum(1)
            torch.testing.assert_close(now["sample_log_prob"][0], expected, rtol=1e-3, atol=1e-2)
            policy.learn()
            collector.publish()
            delay()
    finally:
        collector.close()
    assert swaps > 5


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_overwriting_counts_exactly_what_it_drops(max_staleness):
    env, policy = Counting(Delay(1, 0.2), length=7), WeightPolicy(Delay(3))
    collector = make_collector(
        AsyncCollector,
        env,
        policy,
        4,
        1,
        max_staleness=max_staleness,
        overflow="overwrite",
        timeout_s=20,
    )
    try:
        seen = consume(collector, policy, 40, Delay(2, 8.0))
        steps, dropped = seen["steps"], collector.metrics()["async/dropped_steps"]
    finally:
        collector.close()
    assert steps == sorted(set(steps)), "in order, none twice"
    assert seen["actions"] == [[version] * 2 for version in seen["versions"]]
    assert dropped >= steps[-1] + 1 - len(steps) > 0
    waiting = collector._buffer.statistics()["queue_depth"] * 4
    counters = collector._buffer.statistics()
    read = counters["read_steps"] - collector._stale_steps
    assert read == len(steps) == 160
    assert counters["written_steps"] == read + waiting + collector.metrics()["async/dropped_steps"]
    assert max(seen["lags"]) <= max_staleness
    # An episode of which a part was dropped is in no average.
    assert set(collector.statistics.lengths) == {7}
    assert set(collector.statistics.returns) == {7.0}


class Updates(OffPolicyAlgorithm):
    """An update sets the weights to how many there have been; everything else is as in any run.

    It is also the trainer and the data module of that run: what an algorithm asks them for.
    """

    def __init__(self, delay=lambda: None, each=lambda: None, **settings):
        super().__init__(WeightPolicy(), batch_size=4, random_env_steps=0, **settings)
        self.delay, self.each = delay, each
        self.run = SimpleNamespace(datamodule=self)
        self.trainer = self.run
        self._learner = SimpleNamespace(
            iterations=None,
            phase=no_phases,
            check_trained=lambda: None,
            set_learning_rates=lambda *_: None,
            learning_rates=dict,
            finish_iteration=lambda _: [one.statistics.close() for one in self.objectives.values()],
        )
        self.seen, self.collector = [], None

    data = property(lambda self: self)
    replay = MagicMock(batches=lambda count, size, **_: repeat(TensorDict({}, [size]), count))
    replay.__len__.return_value = 10**6

    def configure_objectives(self):
        return [self.objective(None)]

    def _metrics_of_iteration(self, reported):
        return {}

    def publish(self):
        self.collector.publish()

    def training_step(self, rollout, batch_idx):
        for _ in self.minibatches(rollout):
            self.each()
            self.objectives[""].statistics.add(["loss"], torch.zeros(1))
            self.policy.set_weights(self.updates_done)
        self.delay()
        self.finish_iteration(rollout)

    def learn(self, env, collector, env_steps):
        """Train until so many env steps are trained on, and see that nobody is ahead by too much."""
        self.collector, before = collector, self.env_steps
        rollout_steps = env.num_envs * collector.num_steps
        env.trained = lambda: int(self.policy.version) * rollout_steps
        largest = (collector.max_staleness + 1) * rollout_steps
        while self.env_steps < env_steps:
            rollout = collector.collect()
            assert self.staleness(rollout) <= collector.max_staleness
            self.seen += rollout[0, :-1]["observation"].flatten().long().tolist()
            actions = rollout[0, :-1]["action"]
            assert (actions[:, 0] == actions[:, 1]).all(), "nobody acts by half of an update"
            assert (actions <= self.updates_done).all()
            assert (actions.diff(dim=0) >= 0).all()
            self.training_step(rollout, 0)
            due = (self.env_steps - self.learning_starts) * self.updates_per_env_step
            assert self.updates_done == max(0, math.floor(due))
            assert env.ahead <= largest, "the thread has waited"
        assert self.env_steps > before


@pytest.mark.parametrize("schedules", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_whoever_is_ahead_waits_and_an_env_step_has_its_updates(schedules):
    """To the end, through an interruption, a crash, and a resumption at some moment of the run."""
    ends, threads = set(), threading.active_count()
    for seed in range(schedules):
        pick = random.Random(seed)
        utd, lag = pick.choice([4.0, 0.25]), pick.randrange(3)
        steps, end = pick.choice([2, 5]), ("end", "stop", "crash", "interrupt")[seed % 4]
        settings = {"updates_per_env_step": utd, "publish_every_updates": pick.randint(1, 9)}
        settings["learning_starts"] = pick.randint(0, 60)
        num_envs, total = (8, 120) if utd > 1 else (32, 480)
        module = Updates(Delay(seed, 0.1 * steps), **settings)
        raises_at = pick.randint(1, 9) if end == "crash" else None
        env = Counting(Delay(seed + 1, 0.1), num_envs=num_envs, raises_at=raises_at)
        settings = {"num_steps": steps, "seed": seed, "max_staleness": lag, "timeout_s": 20}
        begin = partial(make_collector, AsyncCollector, **settings)
        collector = begin(env, module.policy)
        until = {"end": total, "stop": pick.randrange(40, total)}.get(end, 10**9)
        timer = threading.Timer(0.002, collector.interrupt) if end == "interrupt" else None
        try:
            if timer:
                timer.start()
            module.learn(env, collector, until)
        except (WriterError, ReadInterrupted) as error:
            ends.add(type(error))
        finally:
            collector.close()
        if end != "crash":
            state = collector.state_dict()
            env = Counting(Delay(seed + 2, 0.1), num_envs=num_envs)
            collector = begin(env, module.policy)
            collector.load_state_dict(state)
            try:
                module.learn(env, collector, max(total, module.env_steps + 40))
            finally:
                collector.close()
            assert module.seen == list(range(len(module.seen))), "each step once"
            ratio = module.updates_done / (module.env_steps - module.learning_starts)
            assert ratio == pytest.approx(utd, rel=0.01)
    assert ends == {WriterError, ReadInterrupted}
    assert threading.active_count() <= threads + 1  # the last timer


@pytest.mark.parametrize("every", [10, 1000])
def test_who_acts_gets_newer_weights_between_two_env_steps_of_a_long_iteration(every):
    """An iteration of 120 updates takes as long as a rollout of 30 steps."""
    module = Updates(each=lambda: time.sleep(0.0003), updates_per_env_step=4.0, publish_every_updates=every)  # fmt: skip
    env = Counting(lambda: time.sleep(0.001))
    collector = make_collector(
        AsyncCollector, env, module.policy, 30, 1, max_staleness=1, timeout_s=20
    )
    module.collector, acted = collector, []
    try:
        for _ in range(4):
            rollout = collector.collect()
            acted.append(rollout[0, :-1].select("action", "policy_version").clone())
            assert module.staleness(rollout) <= 1
            module.training_step(rollout, 0)
    finally:
        collector.close()
    # The third is collected while the second is trained on, whose updates are 105 to 224.
    weights, versions = acted[2]["action"][:, 0], acted[2]["policy_version"]
    within = weights[weights < 224]
    assert set((within - 104).tolist()) <= set(range(0, 120, every))
    assert len(within.unique()) >= (4 if every == 10 else 1)
    assert (versions[: len(within)] == 1).all(), "complete updates, as max_staleness counts them"


def stale_rollout(data, module, lag, change=0.0):
    """Return a rollout that a policy `lag` updates ago, and some weights away, has collected."""
    rollout = make_collector(SyncCollector, data._env, module.policy, 16, 1).collect()
    module.policy.version += lag
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter.add_(change * torch.randn(parameter.shape))
    return rollout


def gradients(module, rollout, correction):
    """Return the gradient of the first update on a whole rollout, and the scalars of the staleness."""
    module.correction = OffPolicyCorrection(correction or "bypass", 2.0)
    module.may_be_stale = correction is not None
    scalars = module.correction.add_fields(module.policy, rollout) if correction else {}
    if not isinstance(module, GRPO):
        module.evaluate_values(rollout)
    module.add_advantages(rollout)
    minibatch = next(module.minibatches(rollout, module.fields))
    module.policy.zero_grad()
    loss, stats = module.loss(module.prepare(minibatch))
    loss.backward()
    grads = [p.grad.clone() for p in module.policy.parameters() if p.grad is not None]
    return grads, stats, scalars


def module_for(algorithm):
    torch.manual_seed(1)
    data = make_data("Pendulum-v1")
    kwargs = {"algorithm": GRPO, "group_size": 4} if algorithm == "GRPO" else {}
    return data, make_ppo(data, batch_size=64, **kwargs)


CASES = [
    *(("PPO", correction) for correction in ("decoupled", "loglinear", "vtrace", "bypass")),
    *(("GRPO", correction) for correction in ("decoupled", "loglinear", "bypass")),
]


@pytest.mark.parametrize(("algorithm", "correction"), CASES)
def test_without_lag_every_correction_is_the_plain_update(algorithm, correction):
    data, module = module_for(algorithm)
    rollout = stale_rollout(data, module, lag=0)
    plain, plain_stats, none = gradients(module, rollout.clone(), None)
    active, stats, scalars = gradients(module, rollout.clone(), correction)
    assert none == {}
    assert scalars["async/staleness_max"] == 0
    assert any(grad.abs().max() > 1e-3 for grad in plain)
    # v-trace sums the same deltas in another order
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-5} if correction == "vtrace" else {"rtol": 1e-5, "atol": 1e-7}
    )
    torch.testing.assert_close(active, plain, **tolerance)
    torch.testing.assert_close(stats["approx_kl"], plain_stats["approx_kl"])


@pytest.mark.parametrize("correction", ["decoupled", "loglinear"])
def test_stale_samples_beyond_the_cap_are_left_out_of_the_kl_to_the_reference_too(correction):
    torch.manual_seed(1)
    data = make_data("Pendulum-v1")
    module = make_ppo(data, algorithm=GRPO, group_size=4, batch_size=64, kl_coef=1.0)
    rollout = stale_rollout(data, module, lag=1, change=0.1)
    module.correction = OffPolicyCorrection(correction, 1.0)
    module.correction.add_fields(module.policy, rollout)
    rollout["reference_log_prob"] = torch.zeros_like(rollout["sample_log_prob"])
    log_prob = log_prob_of(module.policy, rollout).flatten()
    samples = rollout[:, :-1].clone().flatten()
    proximal = module.correction.proximal(log_prob, samples)
    beyond = proximal > samples["sample_log_prob"]
    assert 0 < beyond.sum() < beyond.numel()
    penalty = module.correction.kl_penalty(log_prob, samples)
    assert penalty[beyond].eq(0).all()
    assert penalty[~beyond].ne(0).all()


def test_the_kl_of_an_action_in_parts_is_that_of_all_of_them_together():
    """Two parts that each move by the same log ratio: reported was that of one part."""
    samples = TensorDict(
        {"sample_log_prob": torch.zeros(5, 2), "executed": torch.ones(5, 2).bool()}, [5]
    )
    samples["executed"][4, 1] = False
    samples.update({key: torch.ones(5) for key in ("advantage", "return", "weight")})
    new = {"sample_log_prob": torch.full((5, 2), 0.3), "entropy": torch.zeros(5, 2)}
    evaluated = TensorDict(new | {"value": torch.zeros(5)}, [5])
    for algorithm, joint_ratio in product((PPO, GRPO), (False, True)):
        module = make_ppo(make_data(), algorithm=algorithm)
        module.policy.evaluate_actions = lambda _: evaluated
        module.correction = OffPolicyCorrection("bypass", 2.0, joint_ratio=joint_ratio)
        _, scalars = module.loss(samples)
        both, one = (math.expm1(x) - x for x in (0.6, 0.3))
        assert float(scalars["approx_kl"]) == pytest.approx((4 * both + one) / 5, rel=1e-5)


def test_fields_say_which_policy_is_which():
    data, module = module_for("PPO")
    rollout = stale_rollout(data, module, lag=2, change=0.05)
    rollout["policy_version"][:, 8:16] += 1  # newer weights in the middle of it
    _, _, scalars = gradients(module, rollout, "decoupled")
    proximal = rollout["proximal_log_prob"][:, :-1]
    torch.testing.assert_close(proximal, log_prob_of(module.policy, rollout))
    assert not torch.allclose(proximal, rollout["sample_log_prob"][:, :-1])
    assert (scalars["async/staleness_mean"], scalars["async/staleness_max"]) == (1.5, 2.0)
    gradients(module, rollout, "loglinear")
    assert rollout["lag"][0, :-1].tolist() == [2.0] * 8 + [1.0] * 8


def test_a_rollout_staler_than_promised_is_refused(tmp_path):
    """The rule of admission is watched, not trusted."""

    eager = variant(AsyncCollector, _may_begin=lambda collector, version: True)
    with refused(RuntimeError, names=("updates", "1")):
        train(tmp_path, data={"collector": partial(eager, max_staleness=1)}, trainer=SLOW_UPDATES)


def test_a_policy_that_cannot_be_copied_names_the_tensor_and_the_cure():
    data = make_data()
    policy = ActorCritic(data.observation_space, data.action_space, (8,))
    prune.identity(policy.actor[0], "weight")
    with refused(names=("ActorCritic", "actor.0.weight", "nn.utils.parametrizations")):
        acting_copy(policy, torch.device("cpu"))


def test_an_error_of_the_thread_comes_with_its_traceback():
    def step(env, action):
        raise ZeroDivisionError("the env is broken")

    collector = make_collector(AsyncCollector, variant(Counting, step=step)(), WeightPolicy(), 4, 1)
    with refused(WriterError, names="ZeroDivisionError") as caught:
        collector.collect()
    frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
    assert frames[-1].name == "step"
    assert frames[-1].filename == __file__
    collector.close()


SLOW_UPDATES = {"callbacks": [callback(on_train_batch_start=lambda *_: time.sleep(0.1))]}
"""The learner is the slower side."""


def test_a_slow_policy_is_the_one_inside_but_later(monkeypatch):
    data = make_data()
    spaces = (data.observation_space, data.action_space)
    torch.manual_seed(1)
    quick = ActorOnly(*spaces, (8,))
    torch.manual_seed(1)
    slow = SlowPolicy(*spaces, lambda *s: ActorOnly(*s, (8,)), delay_ms=5)
    waited = []
    monkeypatch.setattr("lightning_rl.policies.slow.time.sleep", waited.append)
    rollouts = [
        make_collector(SyncCollector, make_data()._env, p, 6, 1).collect() for p in (quick, slow)
    ]
    assert all((rollouts[0][k] == rollouts[1][k]).all() for k in ("action", "sample_log_prob"))
    assert waited == [0.005] * 6
    assert not slow.has_critic
    waited.clear()
    slow.evaluate_actions(rollouts[1][:, :-1].flatten())
    slow.get_value(rollouts[1][:, :-1].flatten())
    assert waited == []
    with refused(names=("delay_ms", "at least 0", "-1")):
        SlowPolicy(*spaces, ActorOnly, delay_ms=-1)
