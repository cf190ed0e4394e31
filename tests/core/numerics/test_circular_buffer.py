import math
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDict

from lightning_rl.buffers import BufferClosed, CircularBuffer, WriterError, allocate_segments
from lightning_rl.rollout.contract import (
    FinalObservationWriter,
    clear_final_observations,
    final_observations,
    time_major,
    validate,
)
from tests.helpers import assert_same, through_file
from tests.messages import assert_names, refused

N, T = 2, 3
OBSERVATION = Dict(
    {"image": Box(0, 255, (2, 2), np.uint8), "state": Box(-np.inf, np.inf, (3,), np.float32)}
)
EXTRA = {"noise": ((4,), torch.float32)}


def make(num_steps=T, max_staleness=1, timeout_s=60.0, extra_fields=EXTRA, **settings):
    spaces = OBSERVATION, Discrete(5)
    segments = allocate_segments(
        max_staleness + 2, *spaces, N, num_steps, extra_fields=extra_fields
    )
    return CircularBuffer(segments, timeout_s=timeout_s, **settings)


def observation_of(step):
    """What the envs show at an env step: no two steps and no two envs alike."""
    numbers = torch.arange(N) * 0.25 + step
    return {
        "image": (torch.arange(4).view(2, 2) + 7 * step).remainder(251).byte().expand(N, 2, 2),
        "state": torch.stack([numbers, -numbers, numbers + 0.5], -1),
    }


def write_observation(slot, step):
    for key, value in observation_of(step).items():
        slot["observation"][key].copy_(value)


def transition_of(step):
    """What follows from the number of an env step: all fields of its slot but the observation."""
    return {
        "reward": torch.arange(N) * 0.25 + step,
        "action": torch.tensor(step % 5),
        "terminated": torch.tensor(step % 2 == 0),
        "truncated": torch.tensor(step % 3 == 0),
        "done": torch.tensor(step % 2 == 0 or step % 3 == 0),
        "policy_version": torch.tensor(step),
        "sample_log_prob": torch.tensor(-step),
        "noise": torch.tensor(2 * step),
    }


class Writer:
    """Writes the env steps 0, 1, 2, ... in place, as a collector does."""

    def __init__(self, buffer, pause=lambda: None):
        self.buffer, self.pause, self.step = buffer, pause, 0

    def write(self, num_steps=T):
        segment = self.buffer.begin_write()
        write_observation(segment.steps[0], self.step)
        for t in range(num_steps):
            for key, value in transition_of(self.step).items():
                segment.steps[t].get(key).copy_(value)
            self.pause()
            self.step += 1
            write_observation(segment.steps[t + 1], self.step)
        self.buffer.commit(num_steps)
        return segment


def check(window, first=None):
    """Assert that a window holds consecutive whole steps, and return the first one's number."""
    validate(window)
    steps = window.batch_size[1] - 1
    begin = int(window["policy_version"][0, 0])
    assert first is None or begin == first
    for t in range(steps):
        for key, value in transition_of(begin + t).items():
            assert (window[key][:, t] == value).all(), (key, t)
    for t in range(steps + 1):  # with the bootstrap slot
        for key, value in observation_of(begin + t).items():
            assert torch.equal(window["observation", key][:, t], value), (key, t)
    for key in ("reward", "policy_version", "sample_log_prob", "action", "noise", "done"):
        assert not window[key][:, -1].any(), f"{key} of the bootstrap slot is padding"
    return begin


def write_with_finals(writer, num_steps=T):
    """Write a window as collectors do, whose episodes end as `transition_of` says."""
    first, segment = writer.step, writer.write(num_steps)
    clear_final_observations(segment.rollout)
    finals = FinalObservationWriter(segment.rollout)
    for t in range(num_steps):
        finals.write(t, observation_of(first + t + 500))


def check_finals(window, first):
    """Assert that a window has true final observations of its own."""
    rows, steps = window["done"].nonzero(as_tuple=True)
    for key, ends in final_observations(window, rows, steps).items():
        for row, t, end in zip(rows.tolist(), steps.tolist(), ends, strict=True):
            assert torch.equal(end, observation_of(first + t + 500)[key][row]), (key, t)
    return len(rows)


def in_thread(target):
    """Run a function in a thread; what it returns or raises lands in the list beside the thread."""
    outcome = []

    def run():
        try:
            outcome.append(target())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def read(buffer):
    """Take the oldest window [N, T'+1], and so give back the one before."""
    return buffer.take().rollout()


def unread(buffer):
    """How many windows wait to be read."""
    return int(buffer.statistics()["queue_depth"])


def leaves(rollout):
    """The tensors [N, T'+1, ...] of a rollout."""
    return rollout.exclude("final_observation").flatten_keys(".").values()


def storages(buffer):
    return {value.untyped_storage().data_ptr() for value in leaves(buffer.segments[0].rollout)}


def test_what_a_learner_adds_stays_out_of_the_next_window_of_that_segment():
    buffer = make(max_staleness=0)
    writer = Writer(buffer)
    segment = writer.write()
    window = read(buffer)
    window["advantage"] = torch.ones(N, T + 1)
    window["value"].fill_(7.0)
    window["reward"].fill_(5.0)
    window["policy_version"].fill_(5)
    writer.write()
    check(read(buffer), first=T)
    assert writer.write() is segment
    again = read(buffer)
    assert "advantage" not in again.keys()
    check(again, first=2 * T)


def test_a_partial_window_has_its_own_bootstrap_slot():
    buffer = make()
    writer = Writer(buffer)
    begin = 0
    for num_steps in [3, 3, 3, 1, 2, 3, 3, 1, 1, 2, 3]:  # every slot has been a transition before
        writer.write(num_steps)
        window = read(buffer)
        assert window.batch_size == (N, num_steps + 1)
        assert time_major(window)["reward"].is_contiguous()
        check(window, first=begin)
        begin += num_steps
    assert buffer.statistics()["read_steps"] == N * 25


@pytest.mark.parametrize("num_steps", [0, -1, T + 1])
def test_a_window_of_an_impossible_length_is_refused(num_steps):
    buffer = make()
    buffer.begin_write()
    with refused(ValueError, names=("num_steps", f"[1, {T}]", num_steps)):
        buffer.commit(num_steps)


@pytest.mark.parametrize("overflow", ["block", "overwrite"])
@pytest.mark.parametrize("slow", ["neither", "writer", "reader"])
def test_no_slot_is_torn_lost_or_seen_twice_under_concurrency(overflow, slow):
    windows, interval = 600, sys.getswitchinterval()
    rng = {side: np.random.default_rng(i) for i, side in enumerate(("writer", "reader"))}

    def pause(side):
        if rng[side].random() < (0.2 if slow == side else 0.02):
            time.sleep(rng[side].random() * 3e-4)

    buffer = make(overflow=overflow, timeout_s=0.05)
    writer = Writer(buffer, lambda: pause("writer"))
    lengths = rng["writer"].integers(1, T + 1, windows).tolist()
    written = threading.Event()

    def write():
        for length in lengths:
            writer.write(length)
        written.set()

    sys.setswitchinterval(1e-4)  # at 1e-5 the threads wait for the scheduler on a busy machine
    try:
        thread, outcome = in_thread(write)
        expected, seen = 0, 0
        while not (written.is_set() and not unread(buffer)):
            try:
                window = read(buffer)
            except TimeoutError:
                continue  # the end: the last one was dropped or read in between
            begin = check(window)
            assert unread(buffer) <= 2
            assert begin == expected if overflow == "block" else begin >= expected
            pause("reader")
            check(window, first=begin)  # nobody wrote into it meanwhile
            expected = begin + window.batch_size[1] - 1
            seen += N * (window.batch_size[1] - 1)
        thread.join(5)
    finally:
        sys.setswitchinterval(interval)
        buffer.close()
    assert outcome == [None]
    assert expected == sum(lengths), "the last window is never dropped"
    statistics = buffer.statistics()
    assert statistics["written_steps"] == N * sum(lengths)
    assert statistics["read_steps"] == seen
    assert statistics["dropped_steps"] == N * sum(lengths) - seen
    assert overflow == "overwrite" or seen == N * sum(lengths)


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_a_waiting_side_uses_no_processor_and_wakes_at_once(side):
    buffer = make(max_staleness=0)
    writer = Writer(buffer)
    if side == "writer":
        writer.write()
        writer.write()
        buffer.take()

    def wait():
        begin = time.thread_time()
        buffer.begin_write() if side == "writer" else buffer.take()
        return time.thread_time() - begin, time.perf_counter()

    thread, outcome = in_thread(wait)
    thread.join(0.5)
    assert thread.is_alive()
    woken = time.perf_counter()
    buffer.take() if side == "writer" else writer.write()
    thread.join(30)
    busy, came = outcome[0]
    assert busy < 0.02, "it polls"
    assert came - woken < 5  # 1 ms where the machine has nothing else to do
    assert buffer.statistics()[f"{side}_wait_seconds"] > 0


def test_a_time_out_says_who_waited_for_whom_and_can_be_retried():
    buffer = make(max_staleness=0, timeout_s=0.02)
    with refused(TimeoutError, names=("0.02 s", "begun", "3 steps of 2 envs", "timeout_s")):
        buffer.take()
    writer = Writer(buffer, lambda: time.sleep(0.1))
    thread, _ = in_thread(writer.write)
    thread.join(0.05)
    with refused(TimeoutError, names=("0.02 s", "writing", "3 steps of 2 envs", "timeout_s")):
        buffer.take()
    thread.join(5)
    check(read(buffer), first=0)


def test_a_wait_without_limit_is_possible():
    buffer = make(timeout_s=math.inf)
    thread, outcome = in_thread(partial(read, buffer))
    thread.join(0.05)
    Writer(buffer).write()
    thread.join(5)
    check(outcome[0], first=0)


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_close_wakes_a_waiting_side(side):
    buffer = make(max_staleness=0, timeout_s=60.0)
    if side == "writer":
        writer = Writer(buffer)
        writer.write()
        writer.write()
    thread, outcome = in_thread(buffer.begin_write if side == "writer" else buffer.take)
    thread.join(0.05)
    assert thread.is_alive()
    buffer.close()
    buffer.close()
    thread.join(5)
    assert isinstance(outcome[0], BufferClosed)


def test_the_first_failure_counts_and_a_stopped_writer_is_none():
    buffer = make()
    buffer.close()
    buffer.fail(BufferClosed("stopped"))
    with pytest.raises(BufferClosed):
        read(buffer)
    buffer.fail(OSError("camera"))
    buffer.fail(OSError("later"))
    with refused(WriterError, names="OSError: camera"):
        read(buffer)


def test_a_segment_is_written_by_one_writer_at_a_time():
    buffer = make()
    with refused(RuntimeError, names="begin_write()"):
        buffer.commit(1)
    buffer.begin_write()
    with refused(RuntimeError, names=("Segment 0", "commit()", "begin_write()")):
        buffer.begin_write()


def test_a_restored_buffer_goes_on_as_the_saved_one():
    buffer = make(max_staleness=3)
    writer = Writer(buffer)
    for num_steps in (3, 2, 3, 1, 3):
        write_with_finals(writer, num_steps)
        if writer.step == 3:
            read(buffer)
    state = through_file(buffer.state_dict())
    assert len(state["windows"]) == 4
    assert all(
        value.untyped_storage().data_ptr() not in storages(buffer)
        for window in buffer.state_dict()["windows"]
        for value in TensorDict(window).flatten_keys(".").values()
    ), "the state is a copy"

    restored = make(max_staleness=4)
    restored.load_state_dict(state)
    assert_same(through_file(restored.state_dict()), state)
    assert unread(restored) == 4
    writer.buffer = restored
    writer.write(2)  # its slot 0 is the end of the last restored window
    begin = 3
    ends = 0
    for num_steps in (2, 3, 1, 3):
        check(window := read(restored), first=begin)
        ends += check_finals(window, first=begin)
        begin += num_steps
    assert ends == 12
    check(read(restored), first=begin)
    statistics = restored.statistics()
    assert statistics["written_steps"] == statistics["read_steps"] == N * 14
    assert statistics["dropped_steps"] == 0


def test_windows_that_do_not_fit_a_changed_buffer_are_counted():
    buffer = make()
    writer = Writer(buffer)
    for num_steps in (3, 1, 2):
        writer.write(num_steps)
    state = through_file(buffer.state_dict())

    shorter = make(num_steps=2)
    with refused(UserWarning, names=("2 envs and 3 steps", "2 envs and 2 steps", "num_envs")):
        shorter.load_state_dict(state)
    assert shorter.statistics()["dropped_steps"] == N * 3
    check(read(shorter), first=3)

    plainer = make(extra_fields={})
    with refused(UserWarning, names=("'noise'", "extra_fields")) as warned:
        plainer.load_state_dict(state)
    assert_names(str(warned[0].message), "'noise'", "([4], torch.float32)", "extra_fields")
    assert plainer.statistics()["dropped_steps"] == N * 6

    smaller = make(max_staleness=0)
    smaller.load_state_dict(state)
    assert smaller.statistics()["dropped_steps"] == N * 3
    check(read(smaller), first=3)
    check(read(smaller), first=4)


def test_a_state_is_not_loaded_into_a_buffer_in_use():
    buffer = make()
    state = through_file(buffer.state_dict())
    Writer(buffer).write()
    with refused(RuntimeError, names="begin_write()"):
        buffer.load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overflow": "drop"}, ("overflow", "'block'", "'overwrite'", "'drop'")),
        ({"timeout_s": 0.0}, ("timeout_s", "0.0")),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with refused(names=message):
        make(**settings)
