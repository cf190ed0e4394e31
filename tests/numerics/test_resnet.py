"""Residual networks read the weights of others; features of frozen ones are computed once per frame."""

import math
from functools import partial
from itertools import pairwise

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.nn import functional as F

from lightning_rl import (
    EncodedObservations,
    EpisodeWriter,
    FrozenEncoder,
    GymnasiumEnv,
    MixedReplay,
    NatureCNN,
    ResNet10,
    SpatialEmbedding,
    SquashedActorCritic,
    SyncCollector,
    read_episodes,
)
from lightning_rl.extensions.vla.resnet import IMAGENET
from tests.envs import ScriptedEnv, draw
from tests.helpers import make_collector
from tests.messages import refused


@pytest.mark.parametrize(("size", "infix"), [(64, ""), (45, ".conv")])  # the newest is .conv
def test_resnet10_reads_the_weights_of_hil_serl_and_computes_what_it_does(size, infix, tmp_path):
    """Padding `SAME` of JAX, and GroupNorm of 4 groups."""
    torch.manual_seed(0)
    weights = {"embedder.0.weight": 0.1 * torch.randn(64, 3, 7, 7)}
    weights |= {"embedder.1.weight": torch.rand(64), "embedder.1.bias": torch.rand(64)}
    for i, (before, after) in enumerate(pairwise([64, 64, 128, 256, 512])):
        for name, shape in {
            "conv1": (before, 3),
            "conv2": (after, 3),
            "shortcut.0": (before, 1),
        }.items():
            if before != after or "shortcut" not in name:
                value = torch.randn(after, shape[0], shape[1], shape[1]) / shape[0] ** 0.5
                weights[f"encoder.stages.{i}.{name}{infix}.weight"] = value
                norm = f"encoder.stages.{i}.{name.replace('conv', 'norm').replace('t.0', 't.1')}"
                weights |= {f"{norm}.weight": torch.rand(after), f"{norm}.bias": torch.rand(after)}
    torch.save(weights, tmp_path / "resnet10.pt")

    def padded(x, kernel, stride, value=0.0):
        sides = []
        for side in x.shape[:-3:-1]:
            total = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
            sides += [total // 2, total - total // 2]
        return F.pad(x, sides, value=value)

    def layer(x, name, stride):
        own = weights[f"{name}{infix}.weight"]
        norm = name.replace("conv", "norm").replace("shortcut.0", "shortcut.1")
        x = F.conv2d(padded(x, own.shape[-1], stride), own, stride=stride)
        return F.group_norm(x, 4, weights[f"{norm}.weight"], weights[f"{norm}.bias"])

    picture = torch.randint(256, (2, size, size, 3), dtype=torch.uint8)
    mean, std = (torch.tensor(numbers) for numbers in IMAGENET)
    x = ((picture / 255 - mean) / std).movedim(-1, 1)
    x = F.conv2d(x, weights["embedder.0.weight"], stride=2, padding=3)
    x = F.group_norm(x, 4, weights["embedder.1.weight"], weights["embedder.1.bias"]).relu()
    x = F.max_pool2d(padded(x, 3, 2, -torch.inf), 3, 2)
    for i in range(4):
        stage, stride = f"encoder.stages.{i}", 2 if i else 1
        hidden = layer(layer(x, f"{stage}.conv1", stride).relu(), f"{stage}.conv2", 1)
        x = (hidden + (layer(x, f"{stage}.shortcut.0", stride) if i else x)).relu()
    space = spaces.Box(0, 255, (size, size, 3), np.uint8)
    encoder = ResNet10(space, weights=str(tmp_path), frozen=True, pool="none")
    assert encoder.size == x[0].numel()
    torch.testing.assert_close(encoder(picture), x.flatten(1), rtol=1e-4, atol=1e-4)
    mean_of_planes = ResNet10(space, weights=str(tmp_path))
    torch.testing.assert_close(mean_of_planes(picture), x.mean((2, 3)), rtol=1e-4, atol=1e-4)
    assert not any(p.requires_grad for p in encoder.parameters())
    assert all(p.requires_grad for p in mean_of_planes.parameters())


def test_what_a_residual_network_cannot_read_is_refused(tmp_path):
    space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    with refused(names=("ResNet10", "weights", "frozen: false")):
        ResNet10(space, frozen=True)
    with refused(names=("SpatialEmbedding", "512", "(700,)", "pool: none")):
        SpatialEmbedding(spaces.Box(-1, 1, (700,)))
    with refused(names=("ResNet10", "1 channels", "ImpalaCNN")):
        ResNet10(spaces.Box(0, 255, (64, 64), np.uint8))


def test_sums_over_places_are_those_of_the_definition():
    encoder = SpatialEmbedding(spaces.Box(-1, 1, (512 * 4,)), size=5, sums=2)
    planes = torch.randn(3, 512, 2, 2)
    sums = (planes.flatten(2)[..., None] * encoder.kernel).sum(2)  # [3, 512, 2]
    wanted = encoder.layers(sums.flatten(1))
    torch.testing.assert_close(encoder(planes.flatten(1)), wanted)
    assert wanted.abs().max() < 1.0


CAMERA = spaces.Box(0, 255, (12, 12, 3), np.uint8)


def two_cameras():
    """Two pictures and a number; an episode has four steps."""
    state = spaces.Box(-1, 1, (2,))
    space = spaces.Dict({"front": CAMERA, "wrist": CAMERA, "state": state})
    return ScriptedEnv(space, state, observe=draw, reward=lambda env: float(env.action[0]))


gymnasium.register("tests/TwoCameras-v0", two_cameras, max_episode_steps=4)


def test_demonstrations_of_pictures_are_encoded_as_they_are_read(tmp_path):
    """Both cameras by one network, once per frame; the replay holds features of both kinds of steps."""
    pytest.importorskip("pyarrow", reason="datasets: pip install -e '.[data]'")
    make = partial(NatureCNN, size=6, channels=(4, 4), kernels=(3, 3), strides=(2, 2))
    torch.save(make(CAMERA).state_dict(), tmp_path / "weights.pt")
    encoder = partial(FrozenEncoder, encoder=make, weights=tmp_path / "weights.pt")

    def seen(num_envs):
        plain = partial(GymnasiumEnv, id="tests/TwoCameras-v0")
        return EncodedObservations(num_envs, plain, encoder, key=["front", "wrist"])

    space = seen(1).single_observation_space
    assert space["front"].encoder is space["wrist"].encoder
    env = gymnasium.make("tests/TwoCameras-v0")
    writer = EpisodeWriter(tmp_path / "shown", env.observation_space, env.action_space, 30, pictures="png")  # fmt: skip
    shown = [env.reset(seed=5)[0]]
    for _ in range(4):
        action = env.action_space.sample()
        shown.append(env.step(action)[0])
        writer.add(shown[-2], action, 1.0, False, len(shown) == 5)
    writer.end_episode(shown[-1])
    writer.finalise()
    (episode,) = read_episodes(tmp_path / "shown", observation_space=space)
    for key in ("front", "wrist"):
        pictures = torch.stack([torch.as_tensor(one[key]) for one in shown])
        assert torch.equal(episode.observation[key], space[key].encoder(pictures))
    assert torch.equal(episode.observation["state"], torch.stack([torch.as_tensor(one["state"]) for one in shown]))  # fmt: skip
    space_of_actions = seen(1).single_action_space
    policy = SquashedActorCritic(space, space_of_actions, (8,))
    rollout = make_collector(SyncCollector, seen(2), policy, 8, 1).collect()
    path = str(tmp_path / "shown")
    replay = MixedReplay(space, space_of_actions, 2, demonstrations=path, online_ratio=0.25)
    replay.extend(rollout)
    assert (len(replay.online), len(replay.offline)) == (16, 4)
    (batch,) = replay.batches(1, 64)
    for name in ("observation", "next_observation"):
        same = (batch[name, "state"][:, None] == episode.observation["state"]).all(2)  # [64, 5]
        assert same.any(1).tolist() == 16 * [False] + 48 * [True]
        step = same[16:].int().argmax(1)
        for key in ("front", "wrist"):
            assert torch.equal(batch[name, key][16:], episode.observation[key][step])
