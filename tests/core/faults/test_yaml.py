"""YAML in which a key stands twice is refused wherever it is read: the last one would win, unsaid."""

from pathlib import Path

import pytest
import torch
import yaml

from lightning_rl.checkpoints.format import CONFIG_KEY
from lightning_rl.cli.parsing import merge_options
from lightning_rl.system.plain_yaml import read_yaml
from tests.helpers import error_of, last, load, train
from tests.messages import assert_names

CONFIG = """\
seed_everything: 3
model:
  class_path: PPO
  init_args:
    policy: {class_path: ActorCritic, init_args: {hidden_sizes: [16]}}
    batch_size: 32
data:
  env: {class_path: GymnasiumEnv, init_args: {id: CartPole-v1}}
  num_envs: 4
  buffer_size: 16
  total_env_steps: 64
  num_eval_episodes: 1
trainer: {accelerator: cpu, enable_progress_bar: false, logger: false}
"""


pytestmark = pytest.mark.usefixtures("own_directory")


def refusal_of(capsys, *arguments):
    error = error_of(capsys, *arguments, alone=True)
    assert not Path("outputs").exists(), "nothing was begun"
    return error


@pytest.mark.parametrize(
    ("change", "path", "lines"),
    [
        (
            ("  num_envs: 4\n", "  num_envs: 4\n  num_envs: 8\n"),
            "data.num_envs",
            "9 and again in line 10",
        ),
        (
            ("{id: CartPole-v1}", "{id: CartPole-v1, id: Acrobot-v1}"),
            "data.env.init_args.id",
            "8, twice",
        ),
    ],
)
def test_in_a_config_file(change, path, lines, capsys):
    Path("a.yaml").write_text(CONFIG.replace(*change))
    error = refusal_of(capsys, "fit", "--config", "a.yaml")
    assert_names(error, "a.yaml", f"'{path}'", f"line {lines}")


def test_in_a_file_that_a_config_names(capsys):
    Path("parts").mkdir()
    Path("parts/env.yaml").write_text("class_path: GymnasiumEnv\ninit_args:\n  id: A\n  id: B\n")
    before, after = CONFIG.split("{class_path: GymnasiumEnv, init_args: {id: CartPole-v1}}")
    Path("parts/a.yaml").write_text(f"{before}env.yaml{after}")
    error = refusal_of(capsys, "fit", "--config", "parts/a.yaml")
    assert_names(error, "parts/env.yaml", "'init_args.id'", "line 3", "line 4")


@pytest.mark.parametrize("form", ["--data.env {}", "--data.env={}"])
def test_on_the_command_line(form, capsys):
    Path("a.yaml").write_text(CONFIG)
    env = "{class_path: GymnasiumEnv, init_args: {id: CartPole-v1, id: Acrobot-v1}}"
    option, separator, value = form.format(env).partition(form[len("--data.env")])
    given = [form.format(env)] if separator == "=" else [option, value]
    error = refusal_of(capsys, "fit", "--config", "a.yaml", *given)
    assert_names(error, "--data.env", "'init_args.id'", "line 1")


@pytest.mark.parametrize("trust", ["false", "true"])
def test_in_the_configuration_of_a_checkpoint(trust, tmp_path, capsys):
    train(tmp_path / "run", data={"total_env_steps": 64})
    content = load(last(tmp_path / "run"))
    torch.save(content | {CONFIG_KEY: CONFIG + "data: {}\n"}, "a.ckpt")
    error = refusal_of(capsys, "validate", "--ckpt_path", "a.ckpt", "--trust_code", trust)
    assert_names(error, "a.ckpt", "'data'", "line 7", "line 14")


def test_what_repeats_nothing_is_taken():
    """Anchors, merges whose keys are overridden, alike keys of different mappings."""
    text = "a: &a {x: 1}\nb: {<<: *a, x: 2}\nc: [{x: 1}, {x: 2}]\nd: {<<: *a, <<: *a}\n"
    assert yaml.safe_load(text)["b"] == {"x": 2}
    read_yaml(text, "it")
    merge_options(["--y", "a" * 5000 + ".yaml", "--z=", "--trainer.a=b=c"])
