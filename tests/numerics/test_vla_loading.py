"""Loading vision-language models of transformers: what comes in, what is refused, what trains."""

import json
import pickle
import warnings
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lightning_rl import GRPO, PPO, TransformersBackbone, load_policy, load_vla_model
from lightning_rl.algorithms.reference import ReferencePolicy
from lightning_rl.cli.app import run as run_cli
from lightning_rl.extensions.vla.loading import recompute_activations
from tests.algorithms import with_first_ratios
from tests.helpers import assert_same, assert_same_run, last
from tests.messages import refused
from tests.numerics.test_vla import data_module, fit, make_env, make_policy

LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TEXT = LAYERS | {"vocab_size": 512, "num_key_value_heads": 1, "head_dim": 16}
VISION = LAYERS | {"image_size": 32, "patch_size": 8}
PROJECTION = {"projection_dim": 32}
CONFIGS = {
    "smolvlm": {
        "model_type": "smolvlm", "text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION,
        "image_token_id": 500, "scale_factor": 2, "pad_token_id": 0,
    },
    "paligemma": {
        "model_type": "paligemma", "text_config": TEXT | {"model_type": "gemma"}, "image_token_index": 500, **PROJECTION,
        "vision_config": VISION | PROJECTION | {"model_type": "siglip_vision_model"},
    },
    "llava": {
        "model_type": "llava", "text_config": TEXT | {"model_type": "llama"}, "image_token_index": 500,
        "vision_config": VISION | PROJECTION | {"model_type": "clip_vision_model"},
        "vision_feature_select_strategy": "default",
    },
}  # fmt: skip


class Small(nn.Linear):
    """A class of the user's own."""

    def __init__(self, size=3):
        super().__init__(size, 2)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Write one model of each family, of 70,000 to 80,000 random weights, to a directory."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = load_vla_model("hf_config", config=config)
        model.save_pretrained(root / name)
        statistics = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
        (root / name / "preprocessor_config.json").write_text(json.dumps(statistics))
    return root


def policy_of(directories, name, env=None, head="token", level="token", **kwargs):
    torch.manual_seed(1)
    backbone = TransformersBackbone("hf", str(directories / name), **kwargs)
    return make_policy(env, backbone=backbone, head=head, log_prob_level=level)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("head", ["token", "gaussian"])
def test_a_loaded_model_gives_the_same_log_prob_in_any_batch(name, head, directories):
    env = make_env(12)
    policy = policy_of(directories, name, env, head)
    td = policy.get_action(TensorDict({"observation": env.reset(seed=0)[0]}, [12]))
    with torch.no_grad():
        for size in (1, 5, 12):
            new = [policy.evaluate_actions(part)["sample_log_prob"] for part in td.split(size)]
            torch.testing.assert_close(torch.cat(new), td["sample_log_prob"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_loaded_is_what_was_saved_and_it_sees_and_reads(name, directories):
    env = make_env(4)
    policy = policy_of(directories, name, env)
    torch.manual_seed(0)
    saved = load_vla_model("hf_config", config=CONFIGS[name])
    assert_same(saved.state_dict(), policy.backbone.model.state_dict())
    observation = env.reset(seed=0)[0]
    with torch.no_grad():
        slots = policy.features(TensorDict({"observation": observation}, [4])).slots
        for key in ("rgb", "language", "proprio"):
            other = observation.clone()
            other[key] = other[key].roll(1, 0)
            changed = policy.features(TensorDict({"observation": other}, [4])).slots
            assert (changed - slots).abs().max() > 1e-4, key
    assert policy.backbone.pixel_mean.flatten().tolist() == pytest.approx([0.5, 0.4, 0.3])


def test_pixels_are_scaled_as_the_directory_says(directories):
    backbone = TransformersBackbone("hf", str(directories / "smolvlm"))
    picture = torch.tensor([0, 102, 255], dtype=torch.uint8).expand(1, 32, 32, 3)
    found = backbone._pixels(picture)[0, 0, :, 0, 0]
    torch.testing.assert_close(found, torch.tensor([(0 - 0.5) / 0.2, 0.0, (1 - 0.3) / 0.4]))


def test_padding_is_the_language_models_and_changes_no_output():
    """SmolVLM's config has two padding tokens, one of them beyond its vocabulary."""
    text = CONFIGS["smolvlm"]["text_config"] | {"pad_token_id": 2}
    config = CONFIGS["smolvlm"] | {"text_config": text, "pad_token_id": 128002}
    backbone = TransformersBackbone("hf_config", config=config)
    assert (backbone.padding, backbone.placeholder) == (2, 2)
    top_level = CONFIGS["smolvlm"] | {"pad_token_id": 7}
    assert TransformersBackbone("hf_config", config=top_level).padding == 7
    with refused(names=("padding", "128002", "511")):
        TransformersBackbone("hf_config", config=config, padding=128002)


def test_bins_are_the_tokens_of_the_model_in_their_order():
    """OpenVLA's lowest bin is the last token before the padding of its vocabulary (openvla #267)."""
    slots = torch.randn(2, 3, 32)
    make = partial(TransformersBackbone, "hf_config", config=CONFIGS["smolvlm"])
    backbone = make(bin_tokens=[499, 495])
    weight = backbone.model.get_output_embeddings().weight
    expected = slots @ weight[[499, 498, 497, 496, 495]].T
    torch.testing.assert_close(backbone.token_head(5)(slots), expected)
    by_default = make()
    last_ones = by_default.model.get_output_embeddings().weight[-5:]
    torch.testing.assert_close(by_default.token_head(5)(slots), slots @ last_ones.T)
    with refused(names=("bin_tokens", "5", "num_bins", "6")):
        backbone.token_head(6)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("algorithm", [PPO, GRPO])
def test_every_family_takes_steps_from_a_first_ratio_of_one(name, algorithm, directories, tmp_path):
    policy = policy_of(directories, name)
    before = [p.clone() for p in policy.backbone.model.parameters()]
    grouped = {"group_size": 4, "kl_coef": 0.1} if algorithm is GRPO else {}
    watched = with_first_ratios(algorithm)
    module = watched(policy, n_epochs=2, batch_size=16, ent_coef=0.01, **grouped)
    fit(tmp_path, module, data_module(iterations=1), enable_checkpointing=False)
    assert max(first.abs().max() for first in module.firsts) < 1e-5
    after = policy.backbone.model.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_exported_as_weights_its_adapter_lies_beside_as_peft_writes_it(directories, tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("safetensors", reason="the extra `export` is not installed")
    policy = policy_of(directories, "smolvlm", lora={"r": 4})
    fit(tmp_path, PPO(policy, n_epochs=1, batch_size=16), data_module(iterations=1))
    path = tmp_path / "arm.safetensors"
    with pytest.raises(SystemExit):
        run_cli(["export", "--ckpt_path", str(last(tmp_path)), "--format", "onnx"])
    run_cli(
        ["export", "--ckpt_path", str(last(tmp_path)), "--format=safetensors", f"--path={path}"]
    )
    report = json.loads((tmp_path / "arm.safetensors.parity.json").read_text())
    assert (report["observations"], report["actions"]["action"]["equal"]) == (1, 1.0)
    found = load_policy(path).module.state_dict()
    assert_same(dict(found), dict(policy.state_dict()))
    again = policy_of(directories, "smolvlm", adapter=str(tmp_path / "arm.adapter"))
    for name, own in policy.backbone.model.named_parameters():
        if "lora_" in name:
            assert torch.equal(again.backbone.model.get_parameter(name), own), name


def test_the_reference_of_a_fresh_adapter_is_the_model_with_the_adapter_off(directories):
    pytest.importorskip("peft")
    policy = policy_of(directories, "smolvlm", lora={"r": 4})
    env = make_env(6)
    td = policy.get_action(TensorDict({"observation": env.reset(seed=0)[0]}, [6]))
    reference = ReferencePolicy(policy)
    adapter = {n: p for n, p in policy.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for parameter in adapter.values():
            parameter.add_(0.3)
        moved = policy.evaluate_actions(td)["sample_log_prob"]
        with policy.backbone.model.disable_adapter():
            off = policy.evaluate_actions(td)["sample_log_prob"]
    assert (moved - off).abs().max() > 1e-3
    torch.testing.assert_close(reference.evaluate_actions(td)["sample_log_prob"], off)
    kept, whole = (sum(p.numel() for p in m.parameters()) for m in (reference, policy))
    assert kept < whole / 3


def test_a_run_with_lora_resumes_exactly(directories, tmp_path):
    pytest.importorskip("peft")

    def run(name, **kwargs):
        policy = policy_of(directories, "smolvlm", head="flow", lora={"r": 4})
        module = PPO(policy, n_epochs=1, batch_size=16)
        fit(tmp_path / name, module, data_module(iterations=4, epochs=2), **kwargs)

    run("whole")
    run("cut", max_epochs=1)
    run("cut", ckpt_path=last(tmp_path / "cut"))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_frozen_parameters_stay_and_bf16_gives_float32_log_probs(directories):
    env = make_env(3)
    policy = policy_of(directories, "llava", env, freeze=["*vision*"], dtype="bfloat16")
    frozen = [n for n, p in policy.named_parameters() if not p.requires_grad]
    assert frozen
    assert all("vision" in name for name in frozen)
    td = policy.get_action(TensorDict({"observation": env.reset(seed=0)[0]}, [3]))
    assert td["sample_log_prob"].dtype == torch.float32


def test_trained_weights_in_bfloat16_are_warned_of_and_those_below_an_adapter_are_not(directories):
    pytest.importorskip("peft")
    whole, adapted = (
        PPO(policy_of(directories, "smolvlm", dtype="bfloat16", **settings))
        for settings in ({}, {"lora": {"r": 2}})
    )
    with refused(UserWarning, names=("torch.bfloat16", "float32", "bf16-mixed", "lora")):
        whole.configure_optimizers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted.configure_optimizers()


def test_gradient_checkpointing_computes_again_in_eval_mode_and_changes_no_gradient(directories):
    env = make_env(3)
    gradients, calls = [], []
    for checkpointing in (False, True):
        policy = policy_of(directories, "smolvlm", env, gradient_checkpointing=checkpointing)
        policy.put_in_eval_mode()
        layer = policy.backbone.model.model.text_model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *_: calls.append(checkpointing))  # noqa: B023
        td = TensorDict({"observation": env.reset(seed=0)[0]}, [3])
        policy.get_action(td, deterministic=True)
        policy.evaluate_actions(td)["sample_log_prob"].sum().backward()
        gradients.append([p.grad for p in policy.parameters() if p.grad is not None])
    assert (calls.count(False), calls.count(True)) == (2, 3)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_a_model_that_says_that_it_cannot_compute_again_is_refused():
    model = torch.nn.Linear(1, 1)
    model.gradient_checkpointing_enable = print
    model.supports_gradient_checkpointing = False  # as transformers does
    with refused(names=("Linear", "gradient_checkpointing")):
        recompute_activations(model)


def test_weights_that_do_not_fit_are_refused_with_their_names(directories, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    for file in (directories / "smolvlm").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    missing, misshapen = sorted(k for k in weights if k.endswith("q_proj.weight"))[:2]
    del weights[missing]
    weights[misshapen] = weights[misshapen][:3].clone()
    weights["surplus"] = torch.zeros(2)
    safetensors.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refused(
        names=(missing, misshapen, "surplus", "1 missing", "1 unexpected", "1 of another shape")
    ):
        load_vla_model("hf", str(tmp_path))
    with refused(UserWarning, names=("1 missing", "1 unexpected", "1 of another shape", "surplus")):
        load_vla_model("hf", str(tmp_path), strict=False)


def test_what_is_unsafe_or_missing_is_refused(directories, tmp_path):
    smol = directories / "smolvlm"
    with refused(names=("someone/some-model", "allow_download: true")):
        load_vla_model("hf", "someone/some-model")
    with refused(names=("'*visoin*'", "freeze")):
        load_vla_model("hf", str(smol), freeze=["*visoin*"])
    with refused(names=("adapter_config.json", "lora")):
        load_vla_model("hf", str(smol), adapter=str(tmp_path))
    (tmp_path / "bare").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / file).write_bytes((smol / file).read_bytes())
    with refused(names=("bare", "preprocessor_config.json", "image_mean")):
        TransformersBackbone("hf", str(tmp_path / "bare"))
    given = TransformersBackbone(
        "hf", str(tmp_path / "bare"), image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    assert given.pixel_std.flatten().tolist() == [0.5] * 3
    (tmp_path / "bare" / "model.safetensors").unlink()
    torch.save({}, tmp_path / "bare" / "pytorch_model.bin")
    with refused(names=("bare", "model.safetensors", "save_pretrained")):
        load_vla_model("hf", str(tmp_path / "bare"))


class Harm:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_class_comes_from_allowed_places_and_its_weights_are_only_tensors(tmp_path):
    path = "tests.numerics.test_vla_loading.Small"
    with refused(names=("Small", "trust_code: true")):
        load_vla_model("class", model_class=path)
    torch.save({"module." + k: v for k, v in Small().state_dict().items()}, tmp_path / "w.pt")
    model = load_vla_model(
        "class", str(tmp_path / "w.pt"), model_class=path, trust_code=True, freeze=["bias"]
    )
    assert torch.equal(model.weight, torch.load(tmp_path / "w.pt")["module.weight"])
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["weight"]
    with refused(names=("w.pt", "1 of another shape", "strict: false")):
        load_vla_model(
            "class",
            str(tmp_path / "w.pt"),
            model_class=path,
            model_config={"size": 4},
            trust_code=True,
        )
    with (tmp_path / "evil.pt").open("wb") as file:
        pickle.dump({"state_dict": Harm(tmp_path / "harmed")}, file)
    torch.save({"weight": Harm(tmp_path / "harmed")}, tmp_path / "evil2.pt")
    for name in ("evil.pt", "evil2.pt"):
        with refused(names=(name, "damaged")):
            load_vla_model("class", str(tmp_path / name), model_class=path, trust_code=True)
    assert not (tmp_path / "harmed").exists()
    with refused(names=("none.pt", ".safetensors")):
        load_vla_model("class", "none.pt", model_class=path, trust_code=True)
    with refused(names=("kind", "class, hf or hf_config", "'hub'")):
        load_vla_model("hub")
