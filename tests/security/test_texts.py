"""Texts in a checkpoint that was sent: every setting of every class that it may name x hostile forms."""

import re
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from lightning_rl.checkpoints.registry import CLASSES, NAMES, OTHER_TEXTS, STATISTICS_FILES, TEXTS
from lightning_rl.checkpoints.trust import CURE, Inspection, checked_config
from lightning_rl.extensions.managers.term import function_of
from lightning_rl.system.declared import parts_of
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.jsonargparse_private import parameters_of
from lightning_rl.system.plain_yaml import load_yaml
from lightning_rl.system.texts import imported, is_import_path
from tests.core.faults.test_trust import SETTINGS
from tests.messages import refused
from tests.security.watch import nothing_happens

IMPORTS = [
    *("evilmod.x", "evilmod.x!", "evilmod.x y", "evilmod..x", "evilmod.é-", ".evilmod.x"),
    *("evilmod.", "evilmod:x", "evilmod:Env-v0", "evilmod.x\n", " evilmod.x", "'evilmod.x'"),
    '"evilmod.x"',
    *("[evilmod.x]", "{class_path: evilmod.x}", "!!python/name:evilmod.x", '"evilmod\\x2ex"'),
]
PLACES = [
    *("file:///etc/passwd", "http://127.0.0.1:9/x", "hf://owner/x", "owner/repo", "\\\\host\\x"),
    *("owner/repo@v1:kernel", "/etc/passwd", "../evilmod.txt", "~/evilmod.txt", "${HOME}", "$HOME"),
    *("evilmod.yaml", "evilmod.yml", "evilmod.ckpt"),
]


@pytest.fixture(autouse=True)
def beside_the_senders_files(tmp_path, monkeypatch):
    for name in ("evilmod.py", "evilmod.txt", "evilmod.yaml", "evilmod.yml"):
        (tmp_path / name).write_text("x = print\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def accepted(key, text):
    """Whether a checkpoint may give a text, and whether the text is then listed as a file."""
    inspection = Inspection(Path("sent.ckpt"), CURE)
    try:
        inspection.at("place", key, text)
    except ConfigurationError:
        return False, False
    return True, bool(inspection.reads)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_no_setting_takes_a_text_that_leads_to_code_or_elsewhere(name):
    parameters = parameters_of(imported(name))
    with nothing_happens():
        for key in parameters:
            for text in (*IMPORTS, *PLACES):
                taken, listed = accepted(key, text)
                if not taken or listed or key in STATISTICS_FILES:
                    continue  # a file of statistics is read for a new policy only
                assert key in TEXTS, (key, text)
                assert not is_import_path(text.strip("\n '\"")), (key, text)
    for key, parameter in parameters.items():
        kinds = str(parameter.annotation)
        makes = "Callable" in kinds and "str" not in kinds
        assert not (key in TEXTS and makes), f"{key} is built from its text: it cannot be free"


def test_what_the_check_takes_for_a_robots_file_its_reader_does_not_import():
    pytest.importorskip("mujoco")
    from lightning_rl.extensions.mujoco.model import read_spec

    files = [f"evilmod.x{end}" for end in (".xml", ".XML", ".urdf")]
    with nothing_happens():
        for text in (*IMPORTS, *PLACES, *files):
            if accepted("env_model", text)[0]:
                with refused(names=text):
                    read_spec(text)
        # A text of neither kind is not imported by the reader alone.
        for text in ("evilmod.x!", "evilmod.x y", "evilmod..x", "evilmod.é-", "evilmod."):
            for reader in (read_spec, lambda term: function_of(term, "term")):
                with pytest.raises(ConfigurationError):
                    reader(text)
            with refused(ValueError, names=text):
                imported(text)


@pytest.mark.parametrize("value", [b"evilmod.x", {"evilmod.x"}, {1: 2}, {"a.b": 1}], ids=str)
def test_a_value_that_is_none_of_yaml_is_refused(value):
    with pytest.raises(ConfigurationError):
        Inspection(Path("sent.ckpt"), CURE).at("place", "env_kwargs", value)


SPOTS = [
    ("data.collector", {"class_path": "lightning_rl.RayCollector", "dict_kwargs": {"address": "n"}}),
    ("data.env.init_args.env_kwargs", {"robot": "evilmod.Arm", "address": "auto"}),
    ("data.env.init_args.env_kwargs", {"mapping": {"deep": [["evilmod.x"]]}}),
    ("data.env.init_args.wrappers", [{"class_path": "lightning_rl.Intervention", "init_args": {"source": "evilmod.x"}}]),
    ("data.env", {"class_path": "lightning_rl.TensorSimulator", "init_args": {"make": "evilmod.x"}}),
    ("data.replay", {"class_path": "lightning_rl.ReplayBuffer", "init_args": {"goals": "evilmod.x"}}),
    ("data.events", {"push": {"term": "evilmod.x"}}),
    ("data.events", {"push": {"term": "print"}}),
    ("model.init_args.policy.init_args.activation", "evilmod.x"),
    ("model.init_args.optimizer", "evilmod.yaml"),
    ("exp_name", "../../evilmod"),
    ("exp_name", ".."),
    ("seed_everything", "evilmod.x"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), SPOTS)
def test_hostile_texts_are_refused_wherever_they_stand(path, value):
    config = yaml.safe_load(SETTINGS)
    *above, last = path.split(".")
    place = config
    for name in above:
        place = place.setdefault(name, {})
    place[last] = value
    with nothing_happens(), pytest.raises(ConfigurationError, match="--trust_code true"):
        checked_config(yaml.safe_dump(config), Path("sent.ckpt"))


@pytest.mark.parametrize("text", ["!!bool x", "2024-99-99T", "&a [*a]", "&a {b: *a}", '!!int ""'])
def test_yaml_within_a_text_is_bounded_and_fails_in_one_way(text):
    """The parser reads texts of any type as YAML again."""
    with suppress(yaml.YAMLError):
        assert load_yaml(text) == text
    config = yaml.safe_load(SETTINGS)
    config["model"].setdefault("init_args", {})["learning_rate"] = text
    with nothing_happens(), suppress(ConfigurationError):
        checked_config(yaml.safe_dump(config), Path("sent.ckpt"))


HUB = [
    ("attn_implementation", "flash_attention_2"),  # without the package, it comes from a hub
    ("_attn_implementation", "owner/kernel"),
    ("attn_implementation", {"text_config": "owner/kernel@v1:fn"}),
    ("experts_implementation", "owner/kernel"),
    ("quantization_config", {"quant_method": "mxfp4"}),
    ("use_pretrained_backbone", True),
    ("auto_map", {"AutoConfig": "evilmod.x"}),
    ("use_kernels", True),
]


@pytest.mark.parametrize(("key", "value"), HUB)
def test_a_model_asks_no_hub_by_a_checkpoint_or_by_its_directory(key, value, tmp_path):
    pytest.importorskip("transformers")
    import json

    from lightning_rl import load_vla_model
    from tests.numerics.test_vla_loading import CONFIGS

    for config in (
        CONFIGS["smolvlm"] | {key: value},
        CONFIGS["smolvlm"] | {"vision_config": {key: value}},
    ):
        backbone = {
            "class_path": "lightning_rl.TransformersBackbone",
            "init_args": {"config": config},
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        with nothing_happens():
            with pytest.raises(ConfigurationError, match=rf"sets {key}: .* at place.*config"):
                Inspection(Path("sent.ckpt"), CURE).at("place", "backbone", backbone)
            for kind in ("hf", "hf_config"):
                with pytest.raises(ConfigurationError, match=rf"sets {key}: "):
                    load_vla_model(kind, str(tmp_path))


def test_docs_security_lists_the_form_of_each_text():
    page = Path(__file__).parents[2].joinpath("docs/security.md").read_text()
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", page, re.M)
    listed = {key: form for keys, form in rows for key in re.findall(r"`([^`]+)`", keys)}
    names = {"model" if key == "env_model" else key: one.form for key, one in TEXTS.items()}
    assert {key: listed.get(key) for key in names} == names
    assert f"| all other settings | {OTHER_TEXTS.form} |" in page


def test_each_setting_that_takes_a_function_takes_no_text_or_a_class_of_the_table():
    """A function is found by importing a text: by the parser, or by `SavedRun`."""
    for name in NAMES:
        for key, parameter in parameters_of(imported(name)).items():
            parts = parts_of(parameter.annotation)
            if parts.families or "Callable" in str(parameter.annotation):
                assert key in {*CLASSES, "encoders", "actions"} or not accepted(key, "evilmod.x")[0]


def test_terms_of_robots_that_a_checkpoint_may_name_are_there_and_no_others():
    may_be_named = TEXTS["term"].fits
    for name in may_be_named.__self__:
        module, _, term = name.rpartition(".")
        assert not module or callable(getattr(import_module(module), term))
    assert not may_be_named("lightning_rl.extensions.mujoco.quadruped.ant")
