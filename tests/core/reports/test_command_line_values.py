"""What stands in a config or on the command line reaches a run as its writer meant it."""

import json
import os
from math import inf
from typing import Any

import pytest
import yaml
from torch.optim import Adam

from lightning_rl import Algorithm, RLTrainer
from lightning_rl.cli.checking import SECTIONS, check_options
from lightning_rl.system.files import expanded, read_text
from lightning_rl.system.jsonargparse_private import parameters_of
from lightning_rl.system.plain_yaml import dump_yaml, load_yaml
from tests.commands import rl_cli
from tests.messages import refused

TEXTS = ["1.0", "off", "null", "1e3", "0x10", "true", "1_000", "{a: 1}", "- a", "~", "", "5"]

SMALL = """
model:
  class_path: PPO
  init_args:
    policy: {class_path: ActorCritic, init_args: {hidden_sizes: [8]}}
    batch_size: 16
    n_epochs: 1
    normalize_advantage: off
data:
  env:
    class_path: GymnasiumEnv
    init_args: {id: FrozenLake-v1, env_kwargs: {map_name: "4x4", desc: ["SF", "FG"]},
      wrappers: [gymnasium.wrappers.FlattenObservation]}
  num_envs: 1
  buffer_size: 16
  total_env_steps: 3.2e1
  num_eval_episodes: 1
trainer: {accelerator: cpu, enable_progress_bar: false, logger: false}
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    return "small.yaml"


def test_a_text_in_quotes_stays_one_through_reading_and_writing(tmp_path):
    config = {"x": {str(i): text for i, text in enumerate(TEXTS)}, "y": TEXTS, "z": TEXTS}
    kinds = {"x": dict[str, Any], "y": list[Any], "z": Any}
    for _ in range(2):
        (tmp_path / "a.yaml").write_text(dump_yaml(config))
        assert load_yaml(dump_yaml(config)) == config
        assert check_options(["--config", str(tmp_path / "a.yaml")], kinds) == config
    found = check_options(["--z", "{a: 1.0, b: off, c: null, d: '3', e: 1e3}"], kinds)["z"]
    assert found == {"a": 1.0, "b": False, "c": None, "d": "3", "e": 1000.0}
    assert load_yaml("a: 2024-01-01") == {"a": "2024-01-01"}


def test_a_number_that_is_whole_is_so_where_one_is_wanted():
    typed = ["--seed", "1e3", "--x=1e3", "--name", "1e3", "--free", "{x: 1e3}"]
    kinds = {"seed": int | None, "x": float, "name": str, "free": dict[str, Any]}
    found = check_options(typed, kinds)
    assert found == {"seed": 1000, "x": 1000.0, "name": "1e3", "free": {"x": 1000.0}}
    assert isinstance(found["seed"], int)
    assert isinstance(found["free"]["x"], float)
    with refused(names=("seed", "1.5")):
        check_options(["--seed", "1.5"], kinds)


def test_below_a_free_mapping_a_path_says_what_a_mapping_says():
    kinds = {"free": dict[str, Any], "texts": dict[str, str], "any": Any}
    values = {"a": False, "b": 5, "c": "abc", "d": "5", "e": inf, "f": {"g": None}}
    typed = ["a=false", "b=5", "c=abc", "d='5'", "e=.inf", "f.g=null"]
    for name in ("free", "any"):
        assert check_options([f"--{name}.{text}" for text in typed], kinds) == {name: values}
        # Commands pass settings on as JSON, which writes Infinity.
        assert check_options([f"--{name}={json.dumps(values)}"], kinds) == {name: values}
    assert check_options(["--texts.a=5", "--texts.b=off"], kinds)["texts"] == {"a": "5", "b": "off"}
    replaced = ["--free", "{a: {b: 1}}", "--free.a", "name"]
    assert check_options(replaced, kinds) == {"free": {"a": "name"}}
    assert load_yaml(dump_yaml(["NaN", "-Infinity", -inf])) == ["NaN", "-Infinity", -inf]


PPO = ("--model=PPO", "--model.policy=ActorCritic")


def settings_of(*typed, name="optimizer"):
    found = check_options(typed, {"model": Algorithm})["model"]["init_args"]
    return found[name].get("init_args", {})


def test_a_replaced_class_hands_on_what_was_chosen_and_not_its_defaults():
    defaults = {k: v.default for k, v in parameters_of(Adam).items() if k != "params"}
    for settings, typed, handed_on in (
        (defaults | {"eps": 1e-5}, (), {"eps": 1e-5}),
        (defaults, ("--model.optimizer.weight_decay=0",), {"weight_decay": 0.0}),
        ({"weight_decay": 0.0}, (), {"weight_decay": 0.0}),  # chosen: a run writes all
    ):
        optimizer = json.dumps({"class_path": "torch.optim.Adam", "init_args": settings})
        options = (*PPO, f"--model.optimizer={optimizer}", *typed)
        assert settings_of(*options, "--model.optimizer=torch.optim.AdamW") == handed_on


def test_settings_outlast_two_replacements():
    chosen = (*PPO, "--model.policy.hidden_sizes=[7]")
    for between in (("--model.policy=ActorOnly",), ("--model=GRPO",), ("--model=SAC",)):
        found = settings_of(*chosen, *between, *PPO, name="policy")
        assert found == {"hidden_sizes": [7]}, between


def test_settings_before_their_class_are_its_own(tmp_path):
    late = ("--model.optimizer=torch.optim.AdamW",)
    assert settings_of(*PPO, "--model.optimizer.eps=0.1", *late) == {"eps": 0.1}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"model": {"class_path": "PPO"}}))
    for typed in (
        (*PPO, "--model.optimizer.epz=1", *late),
        ("--model.epz=1", f"--config={tmp_path / 'a.yaml'}"),
        ("--model.init_args={epz: 1}", *PPO),
    ):
        with refused(names="epz"):
            settings_of(*typed)
    with refused(names=("data", "'foo'", "YAML")):
        check_options(["--data.num_envs=2", "--data=foo"], SECTIONS)


OFF_OVER_A_CLASS = {
    "--trainer.logger": ("{class_path: CSVLogger, init_args: {save_dir: x}}", "false", False),
    "--trainer.strategy": ("{class_path: DDPStrategy, init_args: {timeout: 5}}", "auto", "auto"),
    "--trainer.profiler": ("{class_path: SimpleProfiler}", "null", None),
}


@pytest.mark.parametrize("flag", OFF_OVER_A_CLASS)
def test_a_text_replaces_a_class(flag):
    before, after, expected = OFF_OVER_A_CLASS[flag]
    found = check_options([flag, before, flag, after], SECTIONS)
    assert found["trainer"] == {flag.rpartition(".")[2]: expected}


@pytest.mark.parametrize("turned_on", ["--trainer.video=true", "--trainer.video=True"])
def test_what_is_turned_on_keeps_its_settings(turned_on):
    for options in ([turned_on, "--trainer.video.fps=5"], ["--trainer.video.fps=5", turned_on]):
        assert check_options(options, SECTIONS) == {"trainer": {"video": {"fps": 5.0}}}
    found = check_options(["--trainer.video.fps=5", "--trainer.video=false"], SECTIONS)
    assert found == {"trainer": {"video": False}}
    for options in (
        ["--trainer.video.fps=5", "--trainer=true"],
        ["--data.num_envs=2", "--data=true"],
    ):
        with refused(names=("YAML", "'true'")):
            check_options(options, SECTIONS)


def test_a_printed_config_trains_in_one_directory_and_resumes(small, tmp_path):
    printed = rl_cli("fit", "--config", small, "--print_config")
    assert "trust_code: false" in printed.stdout
    (tmp_path / "printed.yaml").write_text(printed.stdout)
    home = tmp_path / "home"
    home.mkdir()
    ran = rl_cli(
        *("fit", "--config", "printed.yaml", "--output_dir=~/runs", "--seed_everything", "1e1"),
        env={"HOME": str(home)},
    )
    assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "~").exists()
    run = next((home / "runs").iterdir())
    assert (run / "checkpoints" / "last.ckpt").is_file()
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["data"]["env"]["init_args"]["env_kwargs"]["desc"] == ["SF", "FG"]
    assert saved["data"]["total_env_steps"] == 32
    assert saved["seed_everything"] == 10
    resumed = rl_cli("fit", "--ckpt_path", "~/runs/" + run.name, env={"HOME": str(home)})
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed_everything", "-3"], "seed_everything must lie in [0, 4294967295], got -3."),
        (["--data.total_env_steps", "1.5e0"], "must be a whole number"),
        (["--trainer.default_root_dir", "x"], "set --output_dir or trainer.run_dir"),
        (["--data.env.wrappers+=gymnasium.wrappers.NormalizeReward"], "keeps its own statistics"),
    ],
)
def test_a_value_that_cannot_be_is_one_message(small, options, message):
    ran = rl_cli("fit", "--config", small, *options)
    assert ran.returncode != 0
    assert message in ran.stderr.splitlines()[-1]


def test_a_file_in_another_encoding_is_named(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: é".encode("latin-1"))
    with refused(names=("latin.yaml", "UTF-8", "0xe9")):
        read_text(path)


def test_a_path_in_the_home_directory_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", os.sep + "somewhere")
    assert str(expanded("~/runs")) == os.path.join(os.sep, "somewhere", "runs")
    with refused(names=("~nosuchuser/runs", "HOME")):
        expanded("~nosuchuser/runs")


@pytest.mark.parametrize("place", ["s3://bucket", "$HOME", "${oc.env:HOME}"])
def test_a_path_that_a_library_reads_as_another_place_is_refused(place, tmp_path, monkeypatch):
    """The logger would expand it, and split the run over two directories."""
    monkeypatch.chdir(tmp_path)
    for setting in ("output_dir", "run_dir"):
        with refused(names=(f"{place}/runs", "mount" if "://" in place else "shell")):
            RLTrainer(**{setting: f"{place}/runs"})
    assert not list(tmp_path.iterdir())
