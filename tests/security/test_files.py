"""Files that were sent: checkpoints, adapters, policies, robots and sweeps, in hostile forms."""

import io
import json
import os
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from lightning_rl.checkpoints.format import read_checkpoint
from lightning_rl.extensions.vla.weight_files import load_weights
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.tensors import load_tensors
from tests.security.watch import nothing_happens

GOLDEN = Path(__file__).parents[1] / "golden"


def archive(path, compression=zipfile.ZIP_DEFLATED):
    """Write a file of torch.save again, with compressed records."""
    saved = io.BytesIO()
    torch.save({"lightning_rl": {"schema": 5}, "state_dict": {"w": torch.zeros(2**20)}}, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(path, "w", compression) as target:
        for record in source.infolist():
            target.writestr(record.filename, source.read(record))


def overlapping(path):
    """Let ten records of an archive be the same bytes."""
    archive(path, zipfile.ZIP_STORED)
    with zipfile.ZipFile(path, "a") as target:
        largest = max(target.infolist(), key=lambda record: record.file_size)
        for i in range(10):
            copy = zipfile.ZipInfo(f"archive/data/{i + 100}")
            copy.header_offset, copy.CRC = largest.header_offset, largest.CRC
            copy.file_size = copy.compress_size = largest.file_size
            target.filelist.append(copy)
        target._didModify = True


FORMS = {
    "deflated": archive,
    "bzip2": lambda path: archive(path, zipfile.ZIP_BZIP2),
    "lzma": lambda path: archive(path, zipfile.ZIP_LZMA),
    "overlapping": overlapping,
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_takes_no_more_memory_than_its_file_and_no_time_to_open(form, tmp_path):
    path = tmp_path / "sent.ckpt"
    FORMS[form](path)
    readers = [read_checkpoint, load_weights]
    if path.is_file():
        readers.append(lambda path: read_checkpoint(path, verify=False))
        with pytest.raises(ValueError, match="compressed or overlap"):
            load_tensors(path)
    for reader in readers:
        with nothing_happens(), pytest.raises(ConfigurationError, match=r"sent\.ckpt"):
            reader(path)


def test_a_file_of_torch_is_read_as_before(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("a.pt", "old.pt"):
        assert torch.equal(load_weights(tmp_path / name)["w"], torch.ones(3))


ELSEWHERE = ["{victim}", "../victim", "..", "", ".", "a/victim", "\x00", 5, ["victim"], None]


@pytest.mark.parametrize("name", ELSEWHERE, ids=repr)
def test_a_policy_of_lerobot_names_plain_files_and_writes_nowhere_else(name, tmp_path):
    pytest.importorskip("safetensors")
    from lightning_rl import LeRobotPolicy
    from tests.golden.make_lerobot import fill

    victim = tmp_path / "victim"
    victim.write_text("mine")
    sent = tmp_path / "sent"
    fill(GOLDEN / "act", sent)
    settings = sent / "policy_preprocessor.json"
    content = json.loads(settings.read_text())
    for step in content["steps"]:
        if "state_file" in step:
            shutil.copy(sent / step["state_file"], sent / "victim")
            step["state_file"] = name.format(victim=victim) if isinstance(name, str) else name
    settings.write_text(json.dumps(content))
    with nothing_happens(), pytest.raises(ConfigurationError, match=r"state_file|missing"):
        LeRobotPolicy(path=str(sent)).save_directory(str(tmp_path / "exported"))
    assert victim.read_text() == "mine"


HUB = {"tokenizer_name_or_path": "owner/repo", "tokenizer_kwargs": {"trust_remote_code": True}}
PROMPT = {"num_virtual_tokens": 2, "prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "x"}
LORA = {"peft_type": "LORA", "target_modules": ["q_proj"]}
ADAPTERS = {
    "prompt tuning": {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", **PROMPT, **HUB},
    "xlora": {"peft_type": "XLORA", "task_type": "CAUSAL_LM", "adapters": {"0": "owner/repo"}},
    "p tuning": {"peft_type": "P_TUNING", "num_virtual_tokens": 10**7, "encoder_hidden_size": 8},
    "cpt": {"peft_type": "CPT", "cpt_token_ids": [0], "cpt_mask": [1], **HUB},
    "a list": {"peft_type": ["LORA"]},
    "lower case": {"peft_type": "lora"},
    "none": {"r": 2},
    "megatron": LORA | {"megatron_config": {"a": 1}, "megatron_core": "evilmod"},
    "megatron among transformers": LORA | {"megatron_core": "transformers.evilmod"},
    "loftq": LORA | {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
    "eva": LORA | {"init_lora_weights": "eva"},
    "copies of layers": LORA | {"layer_replication": [[0, 10**6]]},
    "arrow": LORA | {"arrow_config": {"top_k": 1}},
    "huge": LORA | {"r": 10**9},
    "huge by name": LORA | {"rank_pattern": {"q_proj": 10**9}},
    "odd ranks": LORA | {"rank_pattern": [1]},
    "unknown": LORA | {"evil": 1},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_lora_by_a_list_of_settings_and_asks_no_hub(name, tmp_path):
    pytest.importorskip("peft")
    from safetensors.torch import save_file

    from lightning_rl import load_vla_model
    from tests.numerics.test_vla_loading import CONFIGS

    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTERS[name]))
    (tmp_path / "evilmod.py").write_text("x = 1\n")
    lora = {key: value for key, value in ADAPTERS[name].items() if key != "peft_type"}
    with nothing_happens():
        with pytest.raises(ConfigurationError, match=r"adapter_config\.json"):
            load_vla_model("hf_config", config=CONFIGS["smolvlm"], adapter=str(tmp_path))
        if ADAPTERS[name].get("peft_type") == "LORA":
            with pytest.raises(ConfigurationError, match="lora"):
                load_vla_model("hf_config", config=CONFIGS["smolvlm"], lora=lora)


BODY = '<worldbody><body><joint name="j"/><geom size=".1"/></body></worldbody>'
BODY += '<actuator><motor joint="j"/></actuator>'


def replicated(*counts):
    opened = "".join(f'<replicate count="{count}">' for count in counts)
    geom = '<geom size=".1"/>'
    return f"<worldbody>{opened}{geom}{'</replicate>' * len(counts)}</worldbody>"


ROBOTS = {
    "a pipe is included": '<include file="pipe"/>' + BODY,
    "a pipe in single quotes": "<include file = 'pipe'/>" + BODY,
    "a pipe by an entity": '<include file="&#112;ipe"/>' + BODY,
    "a pipe behind a sign": '<asset><mesh name="a>b" file="pipe.obj"/></asset>' + BODY,
    "a pipe in the directory of meshes": '<compiler meshdir="deep"/><asset><mesh name="m" file="p.obj"/></asset>' + BODY,
    "a pipe of a side of a cube": '<asset><texture name="t" type="cube" fileright="pipe"/></asset>' + BODY,
    "a pipe of an included file": '<include file="within.xml"/>' + BODY,
    "a device": '<include file="/dev/zero"/>' + BODY,
    "itself": '<asset><model name="m" file="sent.xml"/></asset>' + BODY,
    "each other": '<asset><model name="m" file="other.xml"/></asset>' + BODY,
    "each other by another name": '<asset>< model name="m" file="back.xml"/></asset>' + BODY,
    "itself included": '<include file="sent.xml"/>' + BODY,
    "a pipe between texts that are no comment": '<custom><text name="a" data="<!--"/></custom><include file="pipe"/>' + BODY + '<custom><text name="b" data="-->"/></custom>',
    "copies": replicated(10**8),
    "copies of copies": replicated(1000, 1000, 1000),
    "copies by an entity": replicated("1&#48;0000000"),
    "a grid": '<worldbody><flexcomp name="f" type="grid" count="2000 2000 100" dim="3"/></worldbody>',
    "no time": '<option timestep="0"/>' + BODY,
    "time backwards": '<option timestep="-1"/>' + BODY,
    "no number": '<option timestep="nan"/>' + BODY,
    "endless": '<option timestep="inf"/>' + BODY,
    "hardly any time": '<option timestep="1e-300"/>' + BODY,
    "much memory": '<size memory="6G"/>' + BODY,
    "a field of 10^10": '<asset><hfield name="h" nrow="100000" ncol="100000" size="1 1 1 1"/></asset>' + BODY,
    "a texture of 10^10": '<asset><texture name="t" type="2d" builtin="flat" width="100000" height="100000"/></asset>' + BODY,
    "a picture of 10^10": '<asset><texture name="t" type="2d" file="large.png"/></asset>' + BODY,
    "numbers of the user": '<size nuser_body="2000000000"/>' + BODY,
    "keyframes": '<size nkey="2000000000"/>' + BODY,
    "a plugin": '<extension><plugin plugin="evilmod.so"/></extension>' + BODY,
    "no xml": "\x00",
    "nothing": "",
}  # fmt: skip


@pytest.mark.parametrize("name", ROBOTS)
def test_a_robot_is_read_soon_or_refused_with_one_message(name, tmp_path):
    pytest.importorskip("mujoco")
    from lightning_rl import MujocoEnv

    (tmp_path / "deep").mkdir()
    for pipe in ("pipe", "pipe.obj", "deep/p.obj"):
        os.mkfifo(tmp_path / pipe)
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 100_000, 100_000)
    (tmp_path / "large.png").write_bytes(header + bytes(100))
    (tmp_path / "within.xml").write_text('<mujoco><include file="pipe"/></mujoco>')
    back = '<mujoco><asset><model name="m" file="sent.xml"/></asset></mujoco>'
    (tmp_path / "other.xml").write_text(back)
    (tmp_path / "back.xml").write_text('<mujoco><include file="sent.xml"/></mujoco>')
    sent = tmp_path / "sent.xml"
    sent.write_text(f"<mujoco>{ROBOTS[name]}</mujoco>" if ROBOTS[name] else "")
    with nothing_happens(), pytest.raises(ConfigurationError):
        MujocoEnv(2, str(sent))


def test_files_of_a_robot_that_are_files_are_read(tmp_path):
    pytest.importorskip("mujoco")
    from lightning_rl import MujocoEnv

    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/arm.xml").write_text(f"<mujoco>{replicated(10, 10)}</mujoco>")
    sent = tmp_path / "sent.xml"
    sent.write_text(f'<mujoco><include file="parts/arm.xml"/>{BODY}</mujoco>')
    assert MujocoEnv(2, str(sent)).num_envs == 2


def test_files_that_are_named_like_those_above_them_are_read(tmp_path):
    """They, and a comment that names a file above, were taken for a circle."""
    pytest.importorskip("mujoco")
    from lightning_rl import MujocoEnv

    for folder in ("task", "common"):
        (tmp_path / folder).mkdir()
    floor = '<!-- see <include file="../task/scene.xml"/> --><worldbody><light/></worldbody>'
    (tmp_path / "common/scene.xml").write_text(f"<mujoco>{floor}</mujoco>")
    sent = tmp_path / "task/scene.xml"
    sent.write_text(f'<mujoco><include file="../common/scene.xml"/>{BODY}</mujoco>')
    assert MujocoEnv(1, str(sent)).layout.model.nlight == 1


@pytest.mark.parametrize("setting", ["seeds", "trials", "jobs"])
def test_a_sweep_of_a_billion_is_refused_before_it_is_listed(setting, tmp_path):
    from tests.reports.test_hostile_runs import resumed, swept

    directory = swept(tmp_path)
    kept = directory / "sweep.yaml"
    content = yaml.safe_load(kept.read_text())
    more = {"search": "random"} if setting == "trials" else {}
    kept.write_text(yaml.safe_dump(content | more | {setting: 10**9}))
    with pytest.raises(ConfigurationError, match=rf"sweep\.{setting} must .* got 1000000000"):
        resumed(directory)


SPAN = {"q01": [0, 0], "q99": [1, 1]}
STATISTICS = {
    "beyond all floats": ({"action": SPAN | {"q01": [10**400, 0]}}, None),
    "no numbers": ({"action": SPAN | {"q01": {"class_path": "evilmod.x"}}}, None),
    "another size": ({"action": SPAN | {"q01": [0] * 10**5}}, None),
    "not finite": ({"action": SPAN | {"q99": [1, 1e308]}}, None),
    "features of text": ({"action": SPAN}, {"features": "action"}),
    "a feature of null": ({"action": SPAN}, {"features": {"action": None}}),
    "deep": ('{"action": ' * 10**5, None),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_of_a_policy_are_numbers_or_refused(name, tmp_path):
    from lightning_rl.extensions.vla.statistics import read_action_bounds

    content, info = STATISTICS[name]
    (tmp_path / "meta").mkdir()
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "meta/stats.json").write_text(text)
    if info is not None:
        (tmp_path / "meta/info.json").write_text(json.dumps(info))
    with nothing_happens(), pytest.raises(ConfigurationError) as caught:
        read_action_bounds(str(tmp_path), None, 2, ("x", "y"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("input_features", "observation.state", "shape"), []),
        (("chunk_size",), -1),
        (("n_action_steps",), -1),
        (("n_heads",), -1),
        (("dim_feedforward",), -1),
        (("dim_model",), 10**18),
        (("chunk_size",), 10**15),
    ],
)
def test_numbers_of_a_policy_of_lerobot_that_make_none_are_one_message(path, value, tmp_path):
    pytest.importorskip("safetensors")
    from lightning_rl import LeRobotPolicy
    from tests.core.reports.test_forged_states import forged
    from tests.golden.make_lerobot import fill

    fill(GOLDEN / "act", tmp_path / "sent")
    settings = tmp_path / "sent/config.json"
    settings.write_text(json.dumps(forged(json.loads(settings.read_text()), path, value)))
    with pytest.raises(ConfigurationError, match="sent") as caught:
        LeRobotPolicy(path=str(tmp_path / "sent"))
    assert "\n" not in str(caught.value)
