import sys
import threading
import time
import traceback
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from lightning_rl.buffers import BufferClosed, CircularBuffer, WriterError, allocate_segments
from lightning_rl.rollout.contract import (
    validate,
)
from tests.helpers import through_file
from tests.messages import assert_names, refused


def explode_in_the_env():
    raise KeyError("gripper")


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


def report_failure(buffer):
    try:
        explode_in_the_env()
    except KeyError as error:
        buffer.fail(error)


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


def read(buffer):
    """Take the oldest window [N, T'+1], and so give back the one before."""
    return buffer.take().rollout()


def unread(buffer):
    """How many windows wait to be read."""
    return int(buffer.statistics()["queue_depth"])


@pytest.mark.parametrize("num_steps", [0, -1, T + 1])
def test_a_window_of_an_impossible_length_is_refused(num_steps):
    buffer = make()
    buffer.begin_write()
    with refused(ValueError, names=("num_steps", f"[1, {T}]", num_steps)):
        buffer.commit(num_steps)


def test_overwrite_drops_the_oldest_unread_window_and_counts_its_steps():
    buffer = make(overflow="overwrite")
    writer = Writer(buffer)
    writer.write()
    held = read(buffer)
    for num_steps in (2, 3, 1, 3, 3):
        writer.write(num_steps)
        check(held, first=0)
    assert buffer.statistics()["dropped_steps"] == N * (2 + 3 + 1)
    assert unread(buffer) == 2
    check(read(buffer), first=T + 6)
    check(read(buffer), first=T + 9)
    statistics = buffer.statistics()
    assert statistics["written_steps"] == statistics["read_steps"] + statistics["dropped_steps"]


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
        try:
            for length in lengths:
                writer.write(length)
        finally:
            written.set()

    sys.setswitchinterval(1e-4)  # at 1e-5 the threads wait for the scheduler on a busy machine
    try:
        thread = threading.Thread(target=write, daemon=True)
        thread.start()
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
    assert expected == sum(lengths), "the last window is never dropped"
    statistics = buffer.statistics()
    assert statistics["written_steps"] == N * sum(lengths)
    assert statistics["read_steps"] == seen
    assert statistics["dropped_steps"] == N * sum(lengths) - seen
    assert overflow == "overwrite" or seen == N * sum(lengths)


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


@pytest.mark.parametrize("pending", [True, False])
def test_a_failure_of_the_writer_reaches_the_reader_with_its_traceback(pending):
    buffer = make(timeout_s=60.0)
    if pending:
        thread, outcome = in_thread(partial(read, buffer))
        thread.join(0.05)
        report_failure(buffer)
        thread.join(5)
        error = outcome[0]
    else:
        Writer(buffer).write()
        report_failure(buffer)
        with pytest.raises(WriterError) as caught:
            read(buffer)
        error = caught.value
    assert isinstance(error, WriterError)
    assert str(error) == "The collector failed: KeyError: 'gripper'"
    assert isinstance(error.__cause__, KeyError)
    assert "in explode_in_the_env" in "".join(traceback.format_exception(error))
    with pytest.raises(WriterError):  # and stays so
        read(buffer)
    buffer.close()
    with pytest.raises(WriterError):
        read(buffer)
    with pytest.raises(BufferClosed):
        buffer.begin_write()


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
