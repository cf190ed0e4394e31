"""The plug-in for LeRobot acts as `load_policy`; LeRobot itself is run by scripts/lerobot_plugin.py."""

import sys
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from torch import nn

from lightning_rl import GRU, ActionChunk, DictEncoder, GymnasiumEnv, load_policy
from lightning_rl.cli.app import run
from tests.envs import ScriptedEnv
from tests.helpers import last, train
from tests.variants import variant

pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")

NUMBERS = Box(-np.inf, np.inf, (3,))
PLUGIN = Path(__file__).parents[2] / "plugins/lerobot_policy_lightning_rl/src"
SEEN = Dict({"agent_pos": NUMBERS, "pixels": Box(0, 255, (36, 36, 3), np.uint8)})
COMMANDS = Box(-2, 2, (2,))
CONFIG = make_dataclass(  # what the plug-in uses of LeRobot's config
    "PreTrainedConfig",
    [("device", str, "cpu")],
    namespace={"register_subclass": classmethod(lambda cls, name: lambda settings: settings)},
)


def keep_config(policy, config):
    nn.Module.__init__(policy)
    policy.config = config


POLICY = variant(nn.Module, __init__=keep_config)  # what the plug-in uses of LeRobot's policy


@pytest.fixture
def plugin(monkeypatch):
    for name, parts in {
        "lerobot": {},
        "lerobot.configs": {},
        "lerobot.configs.policies": {"PreTrainedConfig": CONFIG},
        "lerobot.policies": {},
        "lerobot.policies.pretrained": {"PreTrainedPolicy": POLICY},
    }.items():
        module = ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(PLUGIN))
    import lerobot_policy_lightning_rl.modeling_lightning_rl as modeling

    yield modeling
    for name in [name for name in sys.modules if name.startswith("lerobot_policy_lightning_rl")]:
        del sys.modules[name]


def drawn(generator, *rows):
    picture = generator.integers(0, 256, (*rows, *SEEN["pixels"].shape), dtype=np.uint8)
    return {"agent_pos": generator.normal(size=(*rows, 3)).astype(np.float32), "pixels": picture}


scene = partial(ScriptedEnv, SEEN, COMMANDS, observe=lambda env: drawn(env.np_random), length=5)
gymnasium.register("tests/Scene-v0", scene)


def as_lerobot(observation):
    """Return a batch as LeRobot's processing makes it: pictures [N, C, H, W] in [0, 1]."""
    picture = torch.from_numpy(observation["pixels"]).movedim(-1, -3).contiguous().float() / 255
    state = torch.tensor(observation["agent_pos"])
    return {"observation.state": state, "observation.image": picture}


KINDS = {
    "picture": ("tests/Scene-v0", {"encoder": DictEncoder}),
    "memory": ("tests/Scene-v0", {"ignore_keys": ["pixels"], "memory": partial(GRU, size=4)}),
    "chunk": (
        partial(ActionChunk, env=partial(GymnasiumEnv, id="tests/Scene-v0"), chunk_size=3),
        {"ignore_keys": ["pixels"]},
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    env, policy = KINDS[request.param]
    train(directory, env=env, policy=policy, data={"total_env_steps": 64})
    return request.param, directory


@pytest.mark.parametrize("form", ["checkpoint", "safetensors", "onnx"])
def test_the_plugin_acts_as_load_policy(plugin, trained, form, tmp_path):
    kind, directory = trained
    path = last(directory)
    if form != "checkpoint":
        path = tmp_path / f"policy.{form}"
        words = ["--ckpt_path", str(last(directory)), "--path", str(path), "--format", form]
        run(["export", *words, "--trust_code", "true"])
    config = plugin.LightningRLConfig(file=path.name)
    policy = plugin.LightningRLPolicy.from_pretrained(path.parent, config=config)
    ours, generator = load_policy(last(directory)), np.random.default_rng(4)
    for _ in range(2):
        policy.reset()
        ours.reset()
        for step in range(6):
            observation = drawn(generator, 2)
            action = policy.select_action(as_lerobot(observation)).numpy()
            if kind != "chunk":
                expected = ours.act(observation)
            elif step % 3 == 0:
                chunk = ours.act(observation)
            expected = chunk[:, step % 3] if kind == "chunk" else expected
            tolerance = 1e-5 if form == "onnx" else 0
            np.testing.assert_allclose(action, expected, rtol=0, atol=tolerance)
    pictures = ["observation.image"] if kind == "picture" else []
    assert [leaf.key for leaf in policy.leaves] == ["observation.state", *pictures]


def test_what_is_missing_is_named(plugin, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"lerobot_policy_lightning_rl RUN DIRECTORY"):
        plugin.LightningRLPolicy.from_pretrained(tmp_path, config=plugin.LightningRLConfig())
    env, settings = KINDS["picture"]
    train(tmp_path, env=env, policy=settings, data={"total_env_steps": 64})
    config = plugin.LightningRLConfig(file="last.ckpt")
    policy = plugin.LightningRLPolicy.from_pretrained(tmp_path / "checkpoints", config=config)
    elsewhere = plugin.LightningRLConfig(file=str(tmp_path / "checkpoints" / "last.ckpt"))
    with pytest.raises(FileNotFoundError):  # a config that was sent opens no other file
        plugin.LightningRLPolicy.from_pretrained(tmp_path, config=elsewhere)
    with pytest.raises(NotImplementedError, match="rl-cli fit"):
        policy.get_optim_params()
    batch = as_lerobot(drawn(np.random.default_rng(0), 1))
    with pytest.raises(KeyError, match=r"observation\.image.*observation\.state"):
        policy.select_action({"observation.state": batch["observation.state"]})
