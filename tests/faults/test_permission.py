"""Trust is the caller's to give: no key in a checkpoint allows code or downloads."""

import json
from pathlib import Path

import pytest
import torch

from lightning_rl import PPO
from lightning_rl.checkpoints.format import CONFIG_KEY
from lightning_rl.cli.app import run
from lightning_rl.system.errors import ConfigurationError
from tests.faults.test_locks import placed
from tests.messages import assert_names

MODEL = """
from pathlib import Path
Path(MARK).touch()
from transformers import PretrainedConfig, PreTrainedModel
class Config(PretrainedConfig):
    model_type = "of-others"
class Model(PreTrainedModel):
    config_class = Config
"""


@pytest.fixture
def directory(elsewhere):
    """Make the directory of a model that brings code of its own, which leaves a mark."""
    pytest.importorskip("transformers")
    directory = elsewhere / "downloaded"
    directory.mkdir()
    (directory / "code.py").write_text(MODEL.replace("MARK", repr(str(Path("ran").absolute()))))
    auto_map = {"AutoConfig": "code.Config", "AutoModelForImageTextToText": "code.Model"}
    config = {"model_type": "of-others", "auto_map": auto_map}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(MEANS))
    return directory


MEANS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SETS = (
    "The configuration in policy.ckpt sets {}: true at "
    "model.init_args.policy.init_args.backbone.init_args. A checkpoint is data: it cannot allow "
    "code or downloads, and nothing was run or downloaded. "
)
IN_PYTHON = SETS + (
    "Pass trust_code=True if you trust its source, or pass the object yourself: policy=..."
)


def forge(trained, **backbone):
    named = {"class_path": "lightning_rl.TransformersBackbone", "init_args": backbone}
    torch.save(trained | {CONFIG_KEY: placed("backbone", named)}, "policy.ckpt")


@pytest.mark.parametrize("command", ["validate", "fit"])
def test_code_that_comes_with_a_model_does_not_run(command, directory, trained, capsys):
    forge(trained, path=str(directory), trust_code=True)
    with pytest.raises(SystemExit) as stop:
        run([command, "--ckpt_path", "policy.ckpt"])
    assert stop.value.code == 1
    assert_names(
        capsys.readouterr().err.splitlines()[-1],
        "rl-cli: error:",
        SETS.format("trust_code"),
        "--trust_code true",
        "--config",
    )
    assert not Path("ran").exists()


def test_nor_does_it_run_or_is_downloaded_in_python(directory, trained):
    forge(trained, path=str(directory), trust_code=True)
    with pytest.raises(ConfigurationError) as refusal:
        PPO.load_from_checkpoint("policy.ckpt")
    assert str(refusal.value).endswith(IN_PYTHON.format("trust_code"))
    forge(trained, path="someone/model", allow_download=True, **MEANS)
    with pytest.raises(ConfigurationError) as refusal:
        PPO.load_from_checkpoint("policy.ckpt")
    assert str(refusal.value).endswith(IN_PYTHON.format("allow_download"))
    assert not Path("ran").exists()


def test_nothing_is_downloaded(trained, elsewhere, capsys):
    pytest.importorskip("transformers")
    forge(trained, path="someone/model", allow_download=True, **MEANS)
    with pytest.raises(SystemExit):
        run(["validate", "--ckpt_path", "policy.ckpt"])
    assert SETS.format("allow_download") in capsys.readouterr().err


def test_whoever_trusts_the_checkpoint_allows_it(directory, trained, capsys):
    """It gets as far as the code, which brings no weights."""
    forge(trained, path=str(directory), trust_code=True)
    with pytest.raises(SystemExit):
        run(["validate", "--ckpt_path", "policy.ckpt", "--trust_code", "true"])
    assert Path("ran").exists()
