"""Remote collectors die, raise, hang and answer in any order: no rollout is too old, used twice or lost in silence."""

import random
from collections import Counter

import pytest

from lightning_rl import ConfigurationError
from lightning_rl.buffers import ReadInterrupted, WriterError
from lightning_rl.extensions.remote.remote import (
    MOST_SENT,
    Answer,
    RemoteCollectors,
    RemoteSettings,
)
from tests.messages import refused
from tests.variants import after, before

pytestmark = pytest.mark.filterwarnings("ignore:Collector . failed, and is replaced")


class StandIn:
    """A cluster in which time passes only where somebody waits, and whose collectors fail by a draw."""

    def __init__(self, draw, failing=0.0, longest=20.0):
        self.draw, self.failing, self.longest = draw, failing, longest
        self.now = 0.0
        self.handles = 0
        self.live = set()
        self.due = {}  # request: (time, answer)
        self.begun = []  # (rollout, version of the weights, handle)
        self.published = Counter()
        self.starts = []

    def _request(self, answer):
        fate = self.draw.random()
        at = self.now + self.draw.uniform(0.01, self.longest)
        if fate < self.failing / 2:
            answer = Answer(None, self.draw.choice([RuntimeError("killed"), KeyError("raised")]))
        elif fate < self.failing:
            at = float("inf")  # hangs
        request = object()
        self.due[request] = at, answer
        return request

    def start(self, index, seed, state):
        self.handles += 1
        self.live.add(self.handles)
        self.starts.append((index, seed, state))
        return self.handles, self._request(Answer(state or ("state", index, seed, 0)))

    def collect(self, handle, version):
        assert handle in self.live, "asked a collector that was ended"
        number = len(self.begun)
        self.begun.append((number, version, handle))
        return self._request(Answer((number, ("state behind", number))))

    def publish(self, handle, version):
        assert handle in self.live
        self.published[version] += 1

    def wait_for_answers(self, requests, timeout_s):
        soonest = min((self.due[one][0] for one in requests), default=float("inf"))
        self.now = max(self.now, min(soonest, self.now + timeout_s))
        came = [one for one in requests if self.due[one][0] <= self.now]
        return [(one, self.due.pop(one)[1]) for one in came]

    def kill(self, handle):
        self.live.discard(handle)


def remote(
    cluster, count, max_staleness, overflow="block", min_healthy=0, timeout_s=60.0, version=0
):
    rules = RemoteSettings(max_staleness, overflow, min_healthy, timeout_s, 1.0)
    seeds = lambda index, generation: 1000 * index + generation  # noqa: E731
    return RemoteCollectors(cluster, count, seeds, rules, version, lambda: cluster.now)


def under_way(collectors):
    return sum(one.status in ("collecting", "done") for one in collectors.remotes)


@pytest.mark.parametrize("overflow", ["block", "overwrite"])
def test_a_thousand_schedules_never_exceed_the_bound_and_account_for_every_rollout(overflow):
    for schedule in range(500):
        draw = random.Random(schedule)
        failing = draw.choice([0.0, 0.0, 0.1, 0.4])
        cluster = StandIn(draw, failing, longest=draw.choice([1.0, 20.0]))
        count, bound, version = draw.randint(1, 6), draw.randint(0, 5), draw.randint(0, 9)
        collectors = remote(cluster, count, bound, overflow, timeout_s=10_000.0, version=version)
        # A hang is noticed after the time in which a rollout may come.
        collectors.settings.timeout_s = 60.0 if failing else 10_000.0
        trained, dropped = [], 0
        for _ in range(draw.randint(5, 40)):
            try:
                taken = collectors.take()
            except TimeoutError:  # all of them starting, and each start hangs
                assert failing
                break
            if version - taken.version > bound:
                assert overflow == "overwrite"
                dropped += 1
                collectors.skip()
                continue
            trained.append(taken.value)
            cluster.now += draw.choice([0.0, 0.1, 30.0])
            version += 1
            collectors.publish(version)
        assert len(set(trained)) == len(trained), "a rollout was trained on twice"
        counts = collectors.counts
        assert counts.begun == len(cluster.begun)
        assert counts.begun == len(trained) + dropped + counts.lost + under_way(collectors)
        assert counts.taken == len(trained) + dropped
        assert under_way(collectors) <= count
        assert len(cluster.live) <= count, "a collector that was replaced still lives"
        if not failing:
            assert counts.lost == counts.restarts == 0
        if overflow == "block":
            assert under_way(collectors) <= bound + 1


def test_of_many_collectors_each_gets_the_newest_weights_in_its_turn():
    last_sent = Counter()

    def never_answer(cluster, request, handle, version):
        cluster.due[request] = float("inf"), None

    def count(cluster, handle, version):
        last_sent[handle] += 1

    cluster = after(before(StandIn, publish=count), collect=never_answer)(
        random.Random(0), longest=1.0
    )
    collectors = remote(cluster, 20, 20, timeout_s=1000.0)
    while under_way(collectors) < 20:
        collectors.poll(1.0)
    for _ in range(3):
        collectors.publish(0)
    assert cluster.published[0] == 3 * MOST_SENT == 24
    assert len(last_sent) == 20, "each of them within three publications"


def test_who_fails_is_replaced_after_a_back_off_that_doubles_by_one_with_other_seeds():
    def fail(cluster, request, handle, version):
        cluster.due[request] = cluster.now, Answer(None, RuntimeError("killed"))

    cluster = after(StandIn, collect=fail)(random.Random(0), longest=0.02)
    collectors = remote(cluster, 1, 0, timeout_s=40.0)
    with refused(TimeoutError, names=("1 collectors", "timeout_s", "RuntimeError: killed")):
        collectors.take()
    seeds = [seed for _, seed, _ in cluster.starts]
    assert seeds == [0, 1, 2, 3, 4, 5]  # after 0, 1, 3, 7, 15 and 31 s
    assert all(state is None for *_, state in cluster.starts)
    assert collectors.counts.lost == len(cluster.begun)


def refuse(cluster, started, *arguments):
    """Let the collector not be made as it is configured."""
    cluster.due[started[1]] = cluster.now, Answer(None, ConfigurationError("no such env there"))


def test_what_keeps_a_collector_from_starting_ends_the_run_before_its_first_rollout_in_one_message(
    recwarn,
):
    cluster = after(StandIn, start=refuse)(random.Random(0))
    with refused(names="no such env there"):
        remote(cluster, 3, 3, min_healthy=0).take()
    assert not recwarn
    assert not cluster.begun
    assert len(cluster.live) == 2, "the others are ended with the run"


def test_below_min_healthy_the_run_ends_with_the_cause():
    cluster = StandIn(random.Random(1), failing=1.0)
    collectors = remote(cluster, 3, 3, min_healthy=2, timeout_s=30.0)
    with refused(
        WriterError, names=("1 of 3 collectors", "min_healthy", "2", "KeyError")
    ) as caught:
        collectors.take()
    assert caught.value.__cause__ is not None


def test_one_that_hangs_is_ended_and_the_others_go_on():
    def hang(cluster, request, handle, version):
        if len(cluster.begun) == 1:
            cluster.due[request] = float("inf"), None

    cluster = after(StandIn, collect=hang)(random.Random(0), longest=1.0)
    collectors = remote(cluster, 2, 2, min_healthy=1, timeout_s=30.0)
    for version in range(1, 20):
        collectors.take()
        collectors.publish(version)
    assert collectors.counts.lost == collectors.counts.restarts == 1
    assert collectors.alive == 2


def test_who_is_interrupted_gets_what_is_there_and_then_waits_no_more():
    cluster = StandIn(random.Random(0), longest=1.0)
    collectors = remote(cluster, 1, 1)
    collectors.poll(5.0)
    collectors.poll(5.0)
    collectors.interrupted = True
    assert collectors.take().value == 0
    with pytest.raises(ReadInterrupted):
        collectors.take()


def test_a_saved_state_is_what_the_rollout_under_way_began_with_and_goes_to_the_same_collector():
    cluster = StandIn(random.Random(0), longest=1.0)
    collectors = remote(cluster, 2, 2)
    latest = {}
    for version in range(1, 9):
        taken = collectors.take()
        latest[taken.origin] = ("state behind", taken.value)
        collectors.publish(version)
    saved = collectors.state_dict(lambda state: state)
    assert [one["loop"] for one in saved] == [latest[0], latest[1]]
    resumed = StandIn(random.Random(0))
    others = remote(resumed, 2, 2, version=8)
    others.load_state_dict(saved)
    others.poll(0.0)
    assert resumed.starts == [(0, 0, latest[0]), (1, 1000, latest[1])]


def test_collectors_whose_processes_never_start_do_not_make_the_learner_wait_for_ever():
    cluster = StandIn(random.Random(0), longest=1.0)
    collectors = remote(cluster, 2, 2, timeout_s=5.0)
    collectors.take()
    cluster.failing = 2.0
    with refused(TimeoutError, names=("5 s", "timeout_s")):
        for _ in range(3):
            collectors.take()
            collectors.publish(collectors.version + 1)
    assert cluster.now < 1000
