"""LoRA adapters: what they train, settings that do not fit, directories that are damaged."""

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from gymnasium.spaces import Box

from lightning_rl import CustomVLA, LeRobotPolicy, load_vla_model
from lightning_rl.extensions.vla import adapters
from tests.messages import assert_names, refused
from tests.numerics.test_vla_loading import CONFIGS, TEXT

pytest.importorskip("peft")

SMALL = CONFIGS["smolvlm"]
WIDER = SMALL | {"text_config": SMALL["text_config"] | {"hidden_size": 64, "head_dim": 32}}


def model(config=SMALL, **settings):
    return load_vla_model("hf_config", config=config, **settings)


def trained(made):
    return [name for name, one in made.named_parameters() if one.requires_grad]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("adapter") / "mine"
    model(lora={"r": 2}).save_pretrained(directory, save_embedding_layers=False)
    return directory


@pytest.fixture
def copied(saved, tmp_path, monkeypatch):
    """A copy of the adapter, beside which nothing may be asked for on a hub."""
    import peft.utils.save_and_load as hub

    def ask(*args, **kwargs):
        raise AssertionError("asks the hub")

    for name in ("file_exists", "hf_hub_download"):
        monkeypatch.setattr(hub, name, ask)
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(saved, tmp_path / "ad" / "mine")


@pytest.mark.parametrize(
    "pattern",
    [
        "*vision*",
        "model.vision_model.*",
        "model.vision_model.encoder.layers.0.self_attn.q_proj.weight",
    ],
)
def test_freezing_holds_for_what_an_adapter_adds(pattern, saved):
    layer = "vision_model.encoder.layers.0.self_attn.q_proj.lora"
    for settings in ({"lora": {"r": 2}}, {"adapter": str(saved)}):
        everything, some = trained(model(**settings)), trained(model(**settings, freeze=[pattern]))
        assert some
        assert set(some) < set(everything)
        assert any(layer in name for name in everything)
        assert not any(layer in name for name in some)
        whole_tower = not pattern.endswith("weight")
        assert whole_tower == (not any("vision" in name for name in some))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"r": 4, "target_modules": ["q_projx"]}, ("target_modules", "q_projx", "q_proj")),
        ({"r": 4, "target_modules": ["q_proj", "not_there"]}, ("target_modules", "not_there")),
        ({"rank": 4}, ("lora", "'rank'", "'r'")),
        ({"r": 0}, ("lora", "r=0", "at least 1")),
        ({"r": 2.5}, ("lora", "r=2.5")),
        ({"target_modules": "q_proj"}, ("target_modules", "q_proj", "regular expression")),
        ({"target_modules": "*q_proj"}, ("target_modules", "*q_proj", "regular expression")),
        ({"target_modules": ["self_attn"]}, "SmolVLMForConditionalGeneration"),
        ({"lora_dropout": 0.05}, ("lora_dropout=0.05", "eval mode")),
    ],
)
def test_settings_that_do_not_fit_are_one_message(lora, message):
    with refused(names=message) as caught:
        model(lora=lora)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("setting", ["target_modules", "exclude_modules", "rank_pattern"])
def test_a_regular_expression_that_takes_for_ever_is_refused(setting, monkeypatch):
    monkeypatch.setattr(adapters, "LONGEST_MATCH", 0.5)
    expression = r"(\w+\.?)+!"
    lora = {setting: {expression: 4} if setting == "rank_pattern" else expression}
    with refused(names=(setting, "0.5 s")):
        model(lora=lora)


def test_a_regular_expression_is_used():
    names = trained(model(lora={"r": 2, "target_modules": r".*text_model.*\.q_proj"}))
    assert names
    assert all("text_model" in name and "q_proj" in name for name in names)


@pytest.mark.parametrize(
    ("lora", "changes"),
    [
        ({}, False),
        ({"init_lora_weights": "orthogonal"}, False),  # neither factor is zero, but their product
        ({"init_lora_weights": "pissa"}, True),
        ({"init_lora_weights": "olora"}, True),
        ({"use_dora": True}, True),
    ],
)
def test_saved_weights_get_no_new_adapter_that_changes_their_outputs(lora, changes):
    plain, adapted = (
        {f"policy.{key}": value for key, value in each.state_dict().items()}
        for each in (model(), model(lora={"r": 4, **lora}))
    )
    cure = ("init_lora_weights", "use_dora", "trainer.init_from")
    with refused(names=cure) if changes else nullcontext():
        weights, note = adapters.with_fresh_adapter(adapted, plain)
        assert weights.keys() == adapted.keys()
        assert_names(note, "LoRA")


def test_an_adapter_is_read_as_it_was_saved(copied):
    from safetensors.torch import load_file

    file = copied / "adapter_config.json"  # of a training with dropout, elsewhere
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_dropout": 0.5}))
    made, weights = model(adapter="ad/mine"), load_file(copied / "adapter_model.safetensors")
    own = made.state_dict()
    for key, value in weights.items():
        assert torch.equal(own[key.replace(".weight", ".default.weight")], value), key
    assert all("lora" in name for name in trained(made))
    assert not any(
        isinstance(layer, torch.nn.Dropout) and layer.p == 0.5 for layer in made.modules()
    )


def no_weights(directory):
    (directory / "adapter_model.safetensors").unlink()


def cut_weights(directory):
    file = directory / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:200])


def cut_settings(directory):
    (directory / "adapter_config.json").write_text('{"peft_type": "LO')


def other_settings(directory):
    (directory / "adapter_config.json").write_text("[]")


def unknown_kind(directory):
    settings = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(settings | {"peft_type": "NEW"}))


def fewer_weights(directory):
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "adapter_model.safetensors")
    weights.pop(next(iter(weights)))
    save_file(weights, directory / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_weights, ("ad/mine", "weights", "downloaded")),
        (cut_weights, "adapter_model.safetensors"),
        (cut_settings, "adapter_config.json"),
        (other_settings, ("adapter_config.json", "mapping")),
        (unknown_kind, ("adapter_config.json", "peft_type: 'NEW'", "LORA")),
        (fewer_weights, ("weights", "ad/mine", "1 missing")),
    ],
)
def test_a_damaged_directory_is_one_message_and_no_hub_is_asked(damage, message, copied):
    damage(copied)
    with refused(names=message) as caught:
        model(adapter="ad/mine")
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_model_is_one_message(saved):
    with refused(names=("mine", "lora_A", "lora_B")) as caught:
        model(WIDER, adapter=str(saved))
    assert len(str(caught.value)) < 1000


def test_a_directory_of_a_model_is_never_completed_by_a_hub(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {}

    class AskedError(Exception):
        pass

    def load(path, **settings):
        asked.update(settings)
        raise AskedError

    import transformers

    monkeypatch.setattr(transformers.AutoModelForImageTextToText, "from_pretrained", load)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "config.json").write_text(json.dumps(SMALL))
    with pytest.raises(AskedError):
        load_vla_model("hf", "owner/name", allow_download=True)
    assert asked["local_files_only"] is True
    shutil.copy(saved / "adapter_config.json", tmp_path / "owner" / "name")
    with refused(names=("owner/name", "transformers", "adapter")):
        load_vla_model("hf", "owner/name")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "smolvml"}, ("transformers", "smolvml")),
        (
            SMALL | {"text_config": {"model_type": "llama", "hidden_size": "wide"}},
            ("transformers", "wide"),
        ),
        ({"model_type": "llama", **TEXT}, ("transformers", "AutoModelForImageTextToText")),
    ],
)
def test_a_configuration_that_makes_no_model_is_one_message(config, message):
    with refused(names=message) as caught:
        model(config)
    assert len(str(caught.value)) < 400


def test_a_damaged_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "smol')
    with refused(names="config.json"):
        load_vla_model("hf_config", str(tmp_path))
    settings = {"model_config": {"in_features": 2, "out_features": 2}, "trust_code": True}
    with refused(names=("Linear", "gradient_checkpointing")):
        load_vla_model(
            "class", model_class="torch.nn.Linear", gradient_checkpointing=True, **settings
        )


BOX = Box(-1, 1, (2,))


def lerobot(path):
    return LeRobotPolicy(path=str(path))


def custom(path):
    sizes = {"in_features": 2, "out_features": 2}
    return CustomVLA(
        BOX, BOX, model_path=str(path), model_class="torch.nn.Linear", model_config=sizes
    )


@pytest.mark.parametrize("base", [None, "lerobot/smolvla_base"])
@pytest.mark.parametrize("read", [lerobot, custom])
def test_a_directory_of_an_adapter_is_refused_as_a_whole_policy(read, base, tmp_path):
    settings = {"peft_type": "LORA"} | ({} if base is None else {"base_model_name_or_path": base})
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"type": "smolvla"}')
    with refused(names=(tmp_path, "adapter", base or "another model", "merge_and_unload")):
        read(tmp_path)


def test_weights_that_transformers_would_unpickle_are_refused_with_the_cure(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    torch.save(model().state_dict(), tmp_path / "pytorch_model.bin")
    with refused(names=(tmp_path, ".safetensors", "save_pretrained")) as caught:
        load_vla_model("hf", str(tmp_path))
    assert "strict" not in str(caught.value)
