"""A Gymnasium env of pictures and an instruction becomes one that a VLA acts in."""

import json
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict

from lightning_rl import ActionChunk, GymnasiumEnv, SyncCollector, VLAObservation, VLAPolicy
from lightning_rl.cli.app import run as run_cli
from lightning_rl.extensions.vla.statistics import read_action_bounds
from tests.helpers import make_collector
from tests.messages import refused

PICTURE = Box(0, 255, (16, 16, 3), np.uint8)


class Kitchen(gymnasium.Env):
    """Two cameras, a state, and a text that changes from episode to episode."""

    metadata = {"render_modes": []}  # noqa: RUF012

    observation_space = Dict(
        pixels=Dict(top=PICTURE, wrist=PICTURE),
        agent_pos=Box(-1, 1, (2,), np.float64),
        channels_first=Box(0, 255, (3, 16, 16), np.uint8),
        depth=Dict(
            metres=Box(0, np.inf, (16, 16), np.float64),
            column=Box(0, 4, (16, 16, 1)),
            millimetres=Box(0, 65535, (16, 16), np.uint16),
            small=Box(0, 4, (8, 8)),
        ),
    )
    action_space = Box(-1, 1, (2,))
    count = -1

    def _observation(self):
        top, wrist = (np.full((16, 16, 3), self.steps + k, np.uint8) for k in (0, 1))
        metres = np.full((16, 16), 0.75 + self.steps)
        metres[0, :4] = np.nan, np.inf, -np.inf, -1
        depth = {
            "metres": metres,
            "column": np.full((16, 16, 1), 0.5, np.float32),
            "millimetres": np.full((16, 16), 1250, np.uint16),
            "small": np.ones((8, 8), np.float32),
        }
        state = np.array([self.steps, self.count]) / 10
        pictures = {"top": top, "wrist": wrist}
        first = np.moveaxis(top, -1, 0)
        return {"pixels": pictures, "agent_pos": state, "channels_first": first, "depth": depth}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.steps = self.count + 1, 0
        self.task = ("open it", "close it now")[self.count % 2]
        return self._observation(), {"instruction": self.task}

    def step(self, action):
        self.steps += 1
        return self._observation(), float(action[0]), self.steps == 5, False, {"success": True}


gymnasium.register("VLAKitchen-v0", entry_point=Kitchen)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<unk>", "open", "close", "it", "now"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("tokenizer")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>")
    wrapped.save_pretrained(path)
    return str(path)


def wrapped(**settings):
    return VLAObservation(Kitchen(), **{"rgb": "pixels/top", "proprio": "agent_pos"} | settings)


@pytest.mark.parametrize("where", ["instruction", "task"])
def test_an_instruction_is_tokenised_once_an_episode(where, tokenizer):
    """From the info of reset, and from an attribute."""
    env = wrapped(instruction=where, tokenizer=tokenizer, length=4)
    for expected in ([2, 4, 0, 0], [3, 4, 5, 0]):
        observation, _ = env.reset(seed=0)
        assert env.observation_space.contains(observation)
        tokens = observation["language"]
        assert tokens.tolist() == expected
        assert env.step(np.zeros(2))[0]["language"] is tokens
    assert observation["proprio"].dtype == np.float32


def test_cameras_are_stacked_and_parts_renamed():
    env = wrapped(rgb=["pixels/top", "pixels/wrist"])
    observation, _ = env.reset()
    assert env.observation_space.contains(observation)
    assert observation["rgb"].shape == (2, 16, 16, 3)
    assert observation["rgb"][:, 0, 0, 0].tolist() == [0, 1]
    assert set(observation) == {"rgb", "proprio"}


def test_depth_is_in_metres_and_0_where_nothing_was_measured():
    env = wrapped(depth=["depth/metres", "depth/column", "depth/millimetres"])
    env.reset()
    observation, *_ = env.step(np.zeros(2))
    assert env.observation_space.contains(observation)
    depth = observation["depth"]
    assert depth.dtype == np.float32
    assert depth.shape == (3, 16, 16)
    assert depth[0, 0, :5].tolist() == [0, 0, 0, 0, 1.75]
    assert depth[1:, 3, 3].tolist() == [0.5, 1.25]
    assert env.observation_space["depth"].high.max() == np.inf
    alone = wrapped(depth="depth/millimetres")
    assert alone.reset()[0]["depth"].shape == (16, 16)
    assert alone.observation_space["depth"].high.max() == np.float32(65.535)
    several = wrapped(depth=["depth/column"])
    assert several.reset()[0]["depth"].shape == (1, 16, 16)


def test_a_picture_that_is_no_depth_is_refused():
    with refused(names=("depth", "pixels/top", "(16, 16, 3), uint8", "[H, W, 1]", "rgb")):
        wrapped(depth=["depth/metres", "pixels/top"])
    with refused(names=("depth/small", "[H, W]")):
        wrapped(depth=["depth/metres", "depth/small"])
    with refused(names=("'depth/metre'", "Kitchen", "close matches")):
        wrapped(depth="depth/metre")


def in_chunks(**settings):
    wrap = partial(VLAObservation, rgb="pixels/top", proprio="agent_pos", **settings)
    return ActionChunk(2, partial(GymnasiumEnv, id="VLAKitchen-v0", wrappers=[wrap]), 2)


def test_a_policy_sees_the_depth_that_the_rollout_keeps():
    env = in_chunks(depth="depth/metres")
    policy = VLAPolicy(env.single_observation_space, env.single_action_space)
    rollout = make_collector(SyncCollector, env, policy, 6, seed=1).collect()
    depth = rollout["observation"]["depth"]
    assert depth.dtype == torch.float32
    steps = (rollout["observation"]["proprio"][..., 0] * 10).round()
    assert torch.equal(depth[..., 5, 5], 0.75 + steps)
    assert (depth[..., 0, :4] == 0).all()
    td = rollout[:, 0].select("observation").clone()
    with torch.no_grad():
        seen = policy.features(td).slots
        td["observation"]["depth"][..., 4:8, 4:8] += 1.0
        assert (policy.features(td).slots - seen).abs().max() > 1e-4
    env = in_chunks(depth="depth/small")
    with refused(names=("TinyVLA", "[16, 16]", "[8, 8]")):
        VLAPolicy(env.single_observation_space, env.single_action_space)


def test_what_is_not_there_is_named(tokenizer, tmp_path):
    with refused(names=("'pixels/topp'", "Kitchen", "close matches: top")):
        wrapped(rgb="pixels/topp")
    for name in ("agent_pos", "channels_first"):
        with refused(names=(f"rgb: {name}", "uint8 [H, W, 3]")):
            wrapped(rgb=name)
    with refused(names=("'wish'", "Kitchen")):
        wrapped(instruction="wish", tokenizer=tokenizer).reset()
    with refused(names=("'open it'", "2 tokens", "length=1")):
        wrapped(instruction="task", tokenizer=tokenizer, length=1).reset()
    with refused(names=("tokenizer", "None", "tokenizer.json")):
        wrapped(instruction="task")
    with refused(names="tokenizer"):
        wrapped(instruction="task", tokenizer=str(tmp_path))


def test_a_vla_trains_in_chunks_in_a_gymnasium_env_from_the_command_line(
    tokenizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    wrapper = {
        "class_path": "VLAObservation",
        "init_args": {
            "rgb": ["pixels/top", "pixels/wrist"],
            "proprio": "agent_pos",
            "depth": ["depth/metres", "depth/millimetres"],
            "instruction": "instruction",
            "tokenizer": tokenizer,
        },
    }
    env = {
        "class_path": "ActionChunk",
        "init_args": {
            "chunk_size": 3,
            "env": {
                "class_path": "GymnasiumEnv",
                "init_args": {"id": "VLAKitchen-v0", "wrappers": [wrapper]},
            },
        },
    }
    config = {"data": {"env": env}, "model": {"init_args": {"batch_size": 16, "n_epochs": 1}}}
    (tmp_path / "more.json").write_text(json.dumps(config))
    small = ["--data.num_envs", "4", "--data.total_env_steps", "200"]
    small += ["--data.num_eval_episodes", "2"]
    run_cli(["fit", "--config", "vla_ppo.yaml", "--config", "more.json", *small])
    with pytest.raises(SystemExit):  # the id is of a module of the user's own
        run_cli(["validate", "--ckpt_path", "last"])
    run_cli(["validate", "--ckpt_path", "last", "--trust_code", "true"])


@pytest.mark.parametrize(
    "content",
    [
        {"q01": [-2, 0], "q99": [2, 4], "mean": [0, 0]},
        {"action": {"q01": [-2, 0], "q99": [2, 4]}, "state": {}},
        {"bridge": {"action": {"min": [-2, 0], "max": [2, 4]}, "num": 3}},
    ],
)
def test_action_statistics_say_what_one_stands_for(content, tmp_path):
    path = tmp_path / "dataset_statistics.json"
    path.write_text(json.dumps(content))
    low, high = read_action_bounds(str(path), None, 2)
    assert (low.tolist(), high.tolist()) == ([-2, 0], [2, 4])
    space = Dict(rgb=PICTURE)
    policy = VLAPolicy(space, Box(-1, 1, (3, 2)), num_bins=3, action_statistics=str(path))
    unit = torch.tensor([[-1.0, -1, 0, 0, 1, 1]])
    assert policy.head.to_action(unit).tolist() == [[[-2, 0], [0, 2], [2, 4]]]
    torch.testing.assert_close(policy.head.to_unit(policy.head.to_action(unit)), unit)
    with refused(names=("dataset_statistics.json", "2 numbers", "1")):
        VLAPolicy(space, Box(-2, 2, (3, 1)), action_statistics=str(path))


def test_statistics_that_are_missing_or_of_something_else_are_refused(tmp_path):
    with refused(names=("nowhere.json", "statistics")):
        read_action_bounds("nowhere.json", None, 2)
    path = tmp_path / "s.json"
    for content, message in {
        "{": "s.json",
        '{"state": {}, "mean": [0]}': ("q01 and q99", "min and max", "state"),
        '{"q01": [1, 3], "q99": [1, 2]}': ("s.json", "q01", "q99", "[1]"),
    }.items():
        path.write_text(content)
        with refused(names=message):
            read_action_bounds(str(path), None, 2)
