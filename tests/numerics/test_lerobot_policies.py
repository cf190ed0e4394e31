"""Policies that LeRobot wrote act as LeRobot's own run did, and are refused where they would not."""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from lightning.pytorch import seed_everything
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from lightning_rl import (
    PPO,
    ActionChunk,
    DatasetCollector,
    EpisodeWriter,
    GymnasiumEnv,
    LeRobotPolicy,
    NoisePolicy,
    PushBlocks,
    RealTime,
    ResNet18,
)
from lightning_rl.extensions.export.graph import ActingGraph, ports_of, traced
from lightning_rl.extensions.vla.instructions import InstructionTokenizer
from lightning_rl.extensions.vla.lerobot.directory import read_directory
from lightning_rl.extensions.vla.lerobot.processors import Processors
from lightning_rl.extensions.vla.resnet import IMAGENET
from tests.envs import ScriptedEnv, draw
from tests.golden.make_lerobot import PIXELS, ROWS, TASKS, filled_in, pixels_of, recipes, weights_of
from tests.helpers import (
    assert_same_run,
    fit_in,
    last,
    make_collector,
    make_data,
)
from tests.messages import refused

GOLDEN = Path(__file__).parents[1] / "golden"
RECIPES = recipes()


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Return a function that makes a directory with its weights, once."""
    return filled_in(tmp_path_factory.mktemp("lerobot"))


@pytest.fixture
def broken(place, tmp_path):
    """Return a function that copies a directory, to be broken."""

    def make(name):
        shutil.copytree(place(name), tmp_path / name)
        shutil.copytree(GOLDEN / "tiny_smolvlm", tmp_path / "tiny_smolvlm")
        return tmp_path / name

    return make


def batch_of(name, io, *, planes):
    """The batch of LeRobot's run, with its names; pictures as planes of floats or as bytes."""
    kind, inputs, _, fields, rename = RECIPES[name]
    raw = {new: old for old, new in rename.items()}
    steps = (fields.get("n_obs_steps", 2),) if kind == "diffusion" else ()
    batch = {"task": TASKS}
    for key, shape in inputs:
        there = raw.get(key, key)
        if len(shape) == 3:
            pixels = pixels_of(key, (ROWS, *steps, *shape))
            batch[there] = pixels.float() / 255.0 if planes else pixels.movedim(-3, -1)
        else:
            batch[there] = io[there]
    return batch


def noise_in(io, policy):
    """The noise of LeRobot's run: of a DDPM also that of its steps."""
    if policy.directory.kind == "act":
        return None
    noise = io["noise"]
    if policy.directory.kind == "smolvla":
        return noise[:, : policy.backbone.network.action_steps]
    torch.manual_seed(11)
    more = [torch.randn(noise.shape) for _ in range(policy.backbone.network.noisy_steps)]
    return torch.stack([noise, *more], 1)


@pytest.mark.parametrize("name", RECIPES)
def test_inputs_and_actions_are_those_of_lerobot(name, place, tmp_path):
    """Also after it is saved: the weights and statistics keep their bits."""
    io = load_file(GOLDEN / name / "io.safetensors")
    policy = LeRobotPolicy(path=str(place(name)))
    prepared = policy.prepare(batch_of(name, io, planes=True))
    for key, value in prepared.items():
        value = value[..., ::PIXELS, ::PIXELS] if value.dim() >= 4 else value
        torch.testing.assert_close(value.float(), io[f"prepared.{key}"].float(), rtol=0, atol=1e-6)
    first = policy.backbone.network.obs_steps - 1
    steps = policy.backbone.network.action_steps
    noise = noise_in(io, policy)
    action = policy.predict(batch_of(name, io, planes=False), noise)
    wanted = io["action"][:, first : first + steps]
    torch.testing.assert_close(action, wanted, rtol=0, atol=1e-5)
    policy.save_directory(str(tmp_path / "saved"))
    for file in sorted(place(name).iterdir()):
        again = tmp_path / "saved" / file.name
        if file.suffix == ".json":
            assert json.loads(file.read_text()) == json.loads(again.read_text())
        else:
            old, new = load_file(file), load_file(again)
            assert old.keys() == new.keys()
            assert all(torch.equal(old[key], new[key]) for key in old), file.name


BIAS = "model.action_head.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda w: w.pop(BIAS), f"1 missing: {BIAS}", id="missing"),
        pytest.param(lambda w: w.update(more=torch.ones(1)), "1 unexpected: more", id="additional"),
        pytest.param(
            lambda w: w.update({BIAS: torch.ones(4)}),
            f"another shape: {BIAS}",
            id="of another shape",
        ),
        pytest.param(lambda w: w[BIAS].fill_(torch.nan), "backbone", id="not a number"),
    ],
)
def test_a_wrong_weight_is_refused(change, message, broken):
    path = broken("act")
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")
    with refused(names=message):
        LeRobotPolicy(path=str(path))


def test_a_cut_file_of_weights_is_refused(broken):
    path = broken("act")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with refused(names=("model.safetensors", "damaged")):
        LeRobotPolicy(path=str(path))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("act", {"temporal_ensemble_coeff": 0.01}, "temporal_ensemble_coeff: 0.01"),
        ("act", {"vision_backbon": "resnet18"}, ("'vision_backbon'", "vision_backbone")),
        ("act", {"dim_model": "wide"}, ("dim_model", "'wide'", "int")),
        ("act_cameras", {"vision_backbone": "resnet50"}, "resnet18, resnet34"),
        (
            "act_cameras",
            {"replace_final_stride_with_dilation": True},
            "replace_final_stride_with_dilation: true",
        ),
        ("diffusion", {"horizon": 18}, ("horizon=18", "4")),
        ("smolvla", {"rtc_config": {"enabled": True}}, "rtc_config"),
        ("smolvla", {"vlm_model_name": "HuggingFaceTB/SmolVLM2"}, "language_model"),
        ("smolvla", {"type": "pi0"}, ("'pi0'", "act, diffusion, smolvla")),
    ],
)
def test_an_option_that_is_not_done_is_refused_by_name(name, overrides, message, place):
    path = place(name) if "cameras" not in name else GOLDEN / name  # without its weights
    with refused(names=message):
        LeRobotPolicy(path=str(path), overrides=overrides)


@pytest.mark.parametrize("name", ["act", "diffusion", "smolvla"])
def test_numbers_out_of_bounds_are_one_message_before_memory_is_allocated(name, place):
    path = place(name)
    for field, value in json.loads((path / "config.json").read_text()).items():
        for other in (10**10, -5, math.nan) if type(value) in (int, float) else ():
            if not field.startswith(("optimizer_", "scheduler_", "dropout", "kl_", "drop_")):
                with refused(names=(field, other)):
                    LeRobotPolicy(path=str(path), overrides={field: other})
    wide = {"observation.state": {"type": "STATE", "shape": [10**5, 10**5]}}
    with refused(names=("input_features", 10**5)):
        LeRobotPolicy(path=str(path), overrides={"input_features": wide})


def change_steps(path, change, file="policy_preprocessor.json"):
    content = json.loads((path / file).read_text())
    change(content["steps"])
    (path / file).write_text(json.dumps(content))


def relative(path):
    config = {"enabled": True, "exclude_joints": [], "action_names": None}
    step = {"registry_name": "relative_actions_processor", "config": config}
    change_steps(path, lambda steps: steps.insert(2, step))


def unknown_step(path):
    step = {"registry_name": "clip_processor", "config": {}}
    change_steps(path, lambda steps: steps.append(step), "policy_postprocessor.json")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (relative, ("relative_actions_processor", "enabled: true")),
        (unknown_step, "'clip_processor'"),
        (lambda path: (path / "policy_postprocessor.json").unlink(), "policy_postprocessor.json"),
    ],
)
def test_processors_that_are_not_done_are_refused(spoil, message, broken):
    path = broken("act")
    spoil(path)
    with refused(names=message):
        LeRobotPolicy(path=str(path))


def test_statistics_of_a_dataset_replace_those_of_the_directory(place, tmp_path):
    statistics = {
        "observation.state": {"mean": [1.0] * 4, "std": [2.0] * 4},
        "action": {"mean": [0.5] * 3, "std": [0.1, 0.2, 0.0]},
    }
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "stats.json").write_text(json.dumps(statistics))
    policy = LeRobotPolicy(path=str(place("act")), dataset_stats=str(tmp_path))
    batch = {
        "observation.state": torch.ones(1, 4),
        "observation.environment_state": torch.ones(1, 6),
    }
    assert (policy.prepare(batch)["observation.state"] == 0).all()
    low, high = Processors(read_directory(str(place("act"))), str(tmp_path)).action_bounds()
    torch.testing.assert_close(high[:2], torch.tensor([0.6, 0.7]))
    assert (low < high).all(), "an action that never changed keeps a width"
    action = policy.predict(batch)
    assert (action[..., 2] - 0.5).abs().max() < 1e-4
    policy.save_directory(str(tmp_path / "saved"))
    again = LeRobotPolicy(path=str(tmp_path / "saved"))
    torch.testing.assert_close(again.predict(batch), action, rtol=0, atol=1e-6)


def lerobot_arm(action_size=3, camera=False):
    """Numbers, with a camera a picture, and a task in words; the reward is the first number of the action."""
    spaces = {"agent_pos": Box(-1, 1, (4,), np.float64)}
    if camera:
        spaces["top"] = Box(0, 255, (64, 96, 3), np.uint8)
    else:
        spaces["environment_state"] = Box(-1, 1, (6,), np.float32)
    return ScriptedEnv(
        gymnasium.spaces.Dict(spaces),
        Box(-3.0, 3.0, (action_size,), np.float32),
        observe=draw,
        reward=lambda env: float(env.action[0]),
        length=16,
        task_text="push the block",
    )


gymnasium.register("tests/LeRobotArm-v0", lerobot_arm)


def arm(chunk, wrappers=(), **settings):
    """A factory of chunked envs."""
    wrapped = {"env_kwargs": settings, "wrappers": list(wrappers)}
    inner = partial(GymnasiumEnv, id="tests/LeRobotArm-v0", **wrapped)
    return partial(ActionChunk, env=inner, chunk_size=chunk)


def fit(run_dir, factory, policy, *, data=None, max_epochs=-1, ckpt_path=None):
    """Train a policy for two iterations, each an epoch."""
    seed_everything(3)
    steps = 2 * 8 * factory.keywords["chunk_size"]
    counts = {"num_envs": 2, "buffer_size": 4, "total_env_steps": steps}
    data = make_data(factory, iterations_per_epoch=1, **counts, **(data or {}))
    module = PPO(policy(data.observation_space, data.action_space), n_epochs=1, batch_size=4)
    fit_in(run_dir, module, data, ckpt_path=ckpt_path, max_epochs=max_epochs)
    return module


def assert_resumes_exactly(tmp_path, *run):
    whole = fit(tmp_path / "whole", *run)
    fit(tmp_path / "cut", *run, max_epochs=1)
    fit(tmp_path / "cut", *run, ckpt_path=last(tmp_path / "cut"))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    return whole


def push_blocks(num_envs):
    return ActionChunk(num_envs, PushBlocks, chunk_size=4)


def test_a_smolvla_is_trained_with_lora_resumed_exactly_and_written_back(place, tmp_path):
    """`scripts/lerobot_policies.py` does it by the command line, and LeRobot opens the result."""
    pytest.importorskip("peft")
    path = str(place("smolvla"))
    factory = partial(ActionChunk, env=PushBlocks, chunk_size=4)
    policy = partial(LeRobotPolicy, path=path, lora={"r": 2})
    trained = assert_resumes_exactly(tmp_path, factory, policy).policy
    assert not trained.blocks, "refused by fsdp: its layers are called in parts"
    trained.save_directory(str(tmp_path / "saved"))
    written = load_file(tmp_path / "saved" / "model.safetensors")
    begun = load_file(f"{path}/model.safetensors")
    assert written.keys() == begun.keys()
    changed = {name for name in written if not torch.equal(written[name], begun[name])}
    assert any("lm_expert.layers.1.self_attn.q_proj" in name for name in changed), "merged"
    assert not [name for name in changed if ".vlm." in name], "train_expert_only"
    with refused(names="saved"):
        trained.save_directory(str(tmp_path / "saved"))
    again = trained.read_saved(str(tmp_path / "saved"))
    td = TensorDict({"observation": example_of(trained)}, [1])
    with torch.no_grad():
        wanted, found = (one(td.copy(), deterministic=True)["action"] for one in (trained, again))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["act", "diffusion"])
def test_an_act_and_a_diffusion_are_graphs(name, place):
    policy = LeRobotPolicy(path=str(place(name)))
    graph = ActingGraph(policy, ports_of(policy))
    inputs = {name: torch.randn_like(one) for name, one in graph.examples(5).items()}
    found = traced(graph).module()(inputs)["action"]
    torch.testing.assert_close(found, graph(inputs)["action"], rtol=0, atol=1e-6)


def test_noise_steers_a_diffusion_that_reads_several_observations(place, tmp_path):
    """Directly, PPO refuses it: it has no log-prob."""
    stack = partial(gymnasium.wrappers.FrameStackObservation, stack_size=2, padding_type="reset")
    fast = {"noise_scheduler_type": "DDIM", "num_inference_steps": 2}
    base = partial(LeRobotPolicy, path=str(place("diffusion")), overrides=fast)
    steering = partial(NoisePolicy, base=base)
    assert_resumes_exactly(tmp_path, arm(4, [stack]), steering)
    with refused(names=("PPO", "LeRobotPolicy", "critic")):
        fit(tmp_path / "direct", arm(4, [stack]), base)
    with refused(
        names=("'agent_pos'", "gymnasium.wrappers.FrameStackObservation", "stack_size: 2")
    ):
        fit(tmp_path / "one", arm(4), base)
    made = base()
    td = TensorDict({"observation": example_of(made)}, [1])
    with refused(names=("diffusion policy", "class_path: NoisePolicy")):
        made.evaluate_actions(td)


def example_of(policy):
    sample = policy.observation_space.sample()
    return {key: torch.tensor(value)[None] for key, value in sample.items()}


@pytest.mark.parametrize(
    ("name", "factory", "settings", "message"),
    [
        ("act", arm(4), {}, ("8 actions", "4")),
        ("act", arm(8, action_size=2), {}, "3 numbers"),
        ("act", arm(8), {"keys": {"observation.state": "top"}}, "keys: {observation.state: KEY}"),
        ("act", arm(8), {"keys": {"observation.stat": "top"}}, "close matches: observation.state"),
        ("act", arm(8), {"freeze": ["*visual*"]}, "*visual*"),
        ("smolvla", push_blocks, {"log_std_init": -1.0}, "log_std_init"),
        (
            "smolvla",
            arm(4, action_size=2, camera=True),
            {"keys": {"observation.state": "agent_pos"}},
            "[2]",
        ),
    ],
)
def test_spaces_and_settings_that_do_not_fit_are_refused(name, factory, settings, message, place):
    env = factory(1)
    spaces = env.single_observation_space, env.single_action_space
    with refused(names=message):
        LeRobotPolicy(*spaces, path=str(place(name)), **settings)


def test_a_dataset_whose_tasks_are_words_is_cloned_with_the_tokens_of_the_directory(
    place, tmp_path
):
    """And an env's instruction has the same tokens, with the new line that LeRobot adds."""
    tokenizer = str(place("smolvla"))
    action, picture = Box(-1, 1, (2,), np.float32), Box(0, 255, (64, 64, 3), np.uint8)
    space = gymnasium.spaces.Dict({"proprio": action, "rgb": picture})
    writer = EpisodeWriter(tmp_path / "data", space, action, fps=10, pictures="png")
    for task in TASKS:
        for step in range(4):
            writer.add(space.sample(), action.sample(), 0.0, step == 3, False, task=task)
        writer.end_episode(space.sample())
    writer.finalise()
    env = push_blocks(2)
    policy = LeRobotPolicy(env.single_observation_space, env.single_action_space, path=tokenizer)
    settings = {"path": str(tmp_path / "data"), "tokenizer": tokenizer}
    collector = make_collector(DatasetCollector, env, policy, 4, 0, **settings)
    rollout = collector.collect()
    tokens = rollout["observation", "language"][:, 0]
    wanted = policy.prepare(
        {
            "observation.state": torch.zeros(2, 2),
            "observation.images.top": torch.zeros(2, 3, 64, 64),
            "task": TASKS,
        }
    )
    length = wanted["observation.language.tokens"].shape[1]
    assert torch.equal(tokens[:, :length], wanted["observation.language.tokens"])
    assert (tokens[:, length:] == 0).all()
    instruction = InstructionTokenizer(tokenizer, 8)(TASKS[0])
    assert instruction.tolist()[:length] == tokens[0, :length].tolist()
    with refused(names=("tokenizer", "rl-cli label")):
        make_collector(DatasetCollector, env, policy, 4, 0, tokenizer=tokenizer)


def test_resnet18_reads_the_weights_of_hugging_face_timm_and_torchvision(tmp_path):
    """timm and torchvision have the same names; Hugging Face's own network is the reference."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic"
    )
    theirs = transformers.ResNetForImageClassification(config).eval()
    weights = weights_of({k: list(v.shape) for k, v in theirs.state_dict().items()})
    theirs.load_state_dict(weights)
    save_file(weights, tmp_path / "model.safetensors")
    space = Box(0, 255, (48, 40, 3), np.uint8)
    ours = ResNet18(space, weights=str(tmp_path)).eval()
    picture = torch.tensor(space.sample())[None]
    pixels = picture.movedim(-1, 1) / 255.0
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in IMAGENET)
    with torch.no_grad():
        wanted = theirs.resnet((pixels - mean) / std).pooler_output.flatten(1)
        torch.testing.assert_close(ours(picture), wanted, rtol=1e-4, atol=1e-4)
    named = {f"{k}": v for k, v in ours.layers[1].state_dict().items()}
    named |= {"fc.weight": torch.ones(1), "bn1.num_batches_tracked": torch.zeros(())}
    save_file(named, tmp_path / "torchvision.safetensors")
    again = ResNet18(space, weights=str(tmp_path / "torchvision.safetensors"))
    with torch.no_grad():
        assert torch.equal(again(picture), ours(picture))
    named.pop("layer4.1.conv2.weight")
    save_file(named, tmp_path / "torchvision.safetensors")
    with refused(names=("1 missing", "layer4.1.conv2.weight")):
        ResNet18(space, weights=str(tmp_path / "torchvision.safetensors"))


@pytest.mark.parametrize("trained", ["expert", "all, bfloat16", "adapters"])
def test_activations_of_a_smolvla_are_computed_again_and_change_no_gradient(trained, place):
    if trained == "adapters":
        pytest.importorskip("peft")
    own = {"lora": {"r": 2}} if trained == "adapters" else {}
    if trained != "expert":
        own["overrides"] = {"train_expert_only": False, "freeze_vision_encoder": False}
    env, calls, gradients = push_blocks(3), [], []
    space, observation = env.single_observation_space, env.reset(seed=0)[0]
    for again in (False, True):
        torch.manual_seed(5)
        path = str(place("smolvla"))
        policy = LeRobotPolicy(
            space, env.single_action_space, path, gradient_checkpointing=again, **own
        )
        policy.put_in_eval_mode()
        vlm, expert = policy.backbone.network.vlm, policy.head.expert
        blocks = {"expert": expert.lm_expert.layers[1].mlp}
        if trained != "expert":
            blocks["text"] = vlm.model.text_model.layers[0].mlp
            blocks["vision"] = vlm.model.vision_model.encoder.layers[0].mlp
        for name, block in blocks.items():
            note = partial(lambda key, *_: calls.append(key), (name, again))
            block.register_forward_pre_hook(note)
        td = TensorDict({"observation": observation}, [3])
        with torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in trained):
            td = policy.get_action(td, generator=torch.Generator().manual_seed(0))
            calls.clear() if not again else None
            before = len(calls)
            policy.evaluate_actions(td)["sample_log_prob"].sum().backward()
        counts = {name: sum(key == (name, again) for key in calls[before:]) for name in blocks}
        gradients.append((counts, {n: p.grad for n, p in policy.named_parameters()}))
    (once, plain), (twice, recomputed) = gradients
    assert twice == {name: 2 * count for name, count in once.items()}
    for name, gradient in plain.items():
        assert (gradient is None) == (recomputed[name] is None)
        if gradient is not None:
            torch.testing.assert_close(
                recomputed[name], gradient, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(("name", "size"), [("smolvla", 4), ("diffusion", 4)])
def test_a_directory_acts_in_real_time(name, size, place):
    """A DDPM here: its noise is drawn in every step."""
    overrides = {} if name == "smolvla" else {"num_inference_steps": 5, "clip_sample_range": 3.0}
    own = {"path": str(place(name)), "overrides": overrides}
    plain = LeRobotPolicy(**own)
    assert plain.head.chunk_size == size
    distances = []
    observation = {
        key: value.expand(3, *value.shape[1:]) for key, value in example_of(plain).items()
    }
    for weight in (0.0, 5.0):
        settings = RealTime(1, 1, max_guidance_weight=weight)
        policy = LeRobotPolicy(**own, real_time=settings)
        td = TensorDict({"observation": observation}, [3])
        with torch.no_grad():
            first = policy(td.copy(), generator=torch.Generator().manual_seed(0))
            expected = plain(td.copy(), generator=torch.Generator().manual_seed(0))["action"]
            assert torch.equal(first["action"], expected)
            old = first["next_state"][:, :-2].view_as(expected)
            td["state"] = first["next_state"]
            chunk = policy(td, deterministic=True)
        assert torch.equal(chunk["action"][:, 0], old[:, 1])
        distances.append((chunk["action"][:, 1:3] - old[:, 2:]).abs().mean())
    assert distances[1] < distances[0]
    if name == "smolvla":
        assert "conditioned" in policy.head.real_time_methods
        with torch.no_grad():
            td = policy(td, generator=torch.Generator().manual_seed(1))
        again = policy.evaluate_actions(td)["sample_log_prob"]
        torch.testing.assert_close(again, td["sample_log_prob"], rtol=0, atol=1e-4)
        again.sum().backward()
        assert all(p.grad is not None for p in policy.head.expert.parameters())


def test_an_act_skips_in_real_time(place):
    with refused(names=("real_time.method: guided", "skip")):
        LeRobotPolicy(path=str(place("act")), real_time=RealTime(4, 2))
    LeRobotPolicy(path=str(place("act")), real_time=RealTime(4, 2, "skip"))
