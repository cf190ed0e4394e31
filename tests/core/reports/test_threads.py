"""Initial weights do not depend on the number of threads: QR adds in another order for each."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from lightning_rl import GRU, LSTM, ActorCritic, DictEncoder, NatureCNN

SPACES = {"numbers": Box(-1, 1, (7,), np.float32), "picture": Box(0, 255, (3, 48, 48), np.uint8)}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("space", "settings"),
    [
        (SPACES["numbers"], {"hidden_sizes": (256, 256)}),
        (SPACES["numbers"], {"memory": lambda size: LSTM(size, 64)}),
        (SPACES["numbers"], {"memory": lambda size: GRU(size, 64)}),
        (SPACES["picture"], {"encoder": NatureCNN}),
        (Dict(SPACES), {"encoder": DictEncoder}),
    ],
    ids=["perceptron", "lstm", "gru", "pictures", "dict"],
)
def test_a_policy_that_is_built_before_the_trainer_equals_the_next_one(space, settings):
    built = {}
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        torch.manual_seed(1)
        built[count] = ActorCritic(space, Discrete(3), **settings).state_dict()
        assert torch.get_num_threads() == count
    for count in (1, 4):
        different = [k for k, v in built[2].items() if not torch.equal(v, built[count][k])]
        assert different == []
