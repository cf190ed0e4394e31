"""What is read of an instruction: not how much room there is for it, and no token of another model."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict

from lightning_rl import TinyVLA, TransformersBackbone, VLAPolicy
from tests.messages import refused
from tests.numerics.test_vla_loading import CONFIGS

ACTIONS = Box(-1, 1, (2, 2))


def observed(tokens, room, fill=0):
    language = torch.full((1, room), fill)
    language[0, : len(tokens)] = torch.tensor(tokens)
    rgb = torch.full((1, 32, 32, 3), 80, dtype=torch.uint8)
    return TensorDict({"rgb": rgb, "language": language}, [1])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_room_for_an_instruction_changes_nothing(name):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    backbone = TransformersBackbone("hf_config", config=CONFIGS[name])
    backbone.build(observed([5, 9, 11], 3), 4)
    backbone.eval()
    with torch.no_grad():
        slots = [backbone(observed([5, 9, 11], room)).slots for room in (3, 8, 24)]
        other = backbone(observed([5, 9, 12], 8)).slots
    for padded in slots[1:]:
        torch.testing.assert_close(padded, slots[0], rtol=0, atol=1e-5)
    assert (other - slots[0]).abs().max() > 1e-4


def test_padding_is_a_token_of_the_env():
    pytest.importorskip("transformers")
    for settings, fill in (({"padding": 77}, 77), ({"token_offset": 3}, 0)):
        backbone = TransformersBackbone("hf_config", config=CONFIGS["smolvlm"], **settings)
        backbone.build(observed([5, 9], 2), 4)
        backbone.eval()
        with torch.no_grad():
            slots = [backbone(observed([5, 9], room, fill)).slots for room in (2, 9)]
        torch.testing.assert_close(slots[1], slots[0], rtol=0, atol=1e-5)


def backbones():
    yield TinyVLA(vocabulary=512), 512
    yield TransformersBackbone("hf_config", config=CONFIGS["smolvlm"]), 512
    yield TransformersBackbone("hf_config", config=CONFIGS["smolvlm"], token_offset=12), 500


def test_a_token_beyond_the_vocabulary_is_named():
    pytest.importorskip("transformers")
    for backbone, vocabulary in backbones():
        backbone.build(observed([1], 3), 4)
        with refused(names=(f"token {vocabulary}", f"0 to {vocabulary - 1}")):
            backbone(observed([1, vocabulary], 3))
        pictures = Box(0, 255, (32, 32, 3), np.uint8)
        for highest, too_high in ((vocabulary - 1, False), (vocabulary, True)):
            space = Dict({"rgb": pictures, "language": Box(0, highest, (3,), np.int64)})
            if too_high:
                with refused(names=(highest, "vocabulary")):
                    VLAPolicy(space, ACTIONS, backbone)
            else:
                VLAPolicy(space, ACTIONS, backbone)
