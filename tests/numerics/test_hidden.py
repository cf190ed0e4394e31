"""Entries of an observation that are hidden from the policy."""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from lightning_rl.extensions.wrappers.hide import PartialObservation
from tests.envs import ScriptedEnv
from tests.messages import refused


@pytest.mark.parametrize("entries", [[1, 3], [-1, 1]])
def test_what_is_left_is_what_the_others_were(entries):
    plain = gymnasium.make("CartPole-v1")
    hidden = PartialObservation(gymnasium.make("CartPole-v1"), entries)
    seen, left = plain.reset(seed=1)[0], hidden.reset(seed=1)[0]
    np.testing.assert_array_equal(left, seen[[0, 2]])
    seen, left = plain.step(1)[0], hidden.step(1)[0]
    np.testing.assert_array_equal(left, seen[[0, 2]])
    assert hidden.observation_space.contains(left)
    space = plain.observation_space
    assert hidden.observation_space == Box(space.low[[0, 2]], space.high[[0, 2]])


@pytest.mark.parametrize("entries", [[], [4], [-5], [1, -3], [0, 1, 2, 3]])
def test_entries_that_are_not_there_or_all_of_them_are_refused(entries):
    with refused(names=("PartialObservation", "entries", "0 to 3")):
        PartialObservation(gymnasium.make("CartPole-v1"), entries)


def test_what_is_not_flat_is_refused():
    with refused(names=("PartialObservation", "Box", "gymnasium.wrappers.FlattenObservation")):
        PartialObservation(ScriptedEnv(Box(0, 1, (2, 2))), [0])
