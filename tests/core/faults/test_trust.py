"""A checkpoint is data: what its configuration names is not imported, let alone run."""

import os
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_rl import Algorithm, load_policy
from lightning_rl.checkpoints.format import CONFIG_KEY
from lightning_rl.checkpoints.trust import CheckedConfig, checked_config
from lightning_rl.cli.app import run
from lightning_rl.cli.arguments import is_trusted
from tests.callbacks import fail
from tests.helpers import error_of, load
from tests.messages import assert_names, refused

SETTINGS = """
seed_everything: 3
exp_name: run
output_dir: outputs
model:
  class_path: lightning_rl.PPO
  init_args:
    policy: {class_path: lightning_rl.ActorCritic, init_args: {hidden_sizes: [16]}}
    batch_size: 32
data:
  env: {class_path: lightning_rl.GymnasiumEnv, init_args: {id: CartPole-v1}}
  num_envs: 4
  buffer_size: 16
  total_env_steps: 128
  iterations_per_epoch: 3
  num_eval_episodes: 1
trainer: {accelerator: cpu, enable_progress_bar: false, logger: false}
"""

MODULE = """
from pathlib import Path
Path("{name}_was_imported").touch()
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from lightning_rl import PPO, GymnasiumEnv
gymnasium.register("{name}-v0", CartPoleEnv, max_episode_steps=20)
class MyPPO(PPO):
    def __init__(self, policy: "Policy", **kwargs):
        super().__init__(policy, **kwargs)
class MyEnv(GymnasiumEnv): pass
class MyWrapper(gymnasium.Wrapper): pass
from lightning_rl import Policy
"""


@pytest.fixture
def checkpoint(trained, elsewhere, monkeypatch):
    """Return what writes a checkpoint with changed settings, beside a module of the user's."""
    monkeypatch.setattr(os, "system", fail(AssertionError("a command was run")))
    name = f"mine_{elsewhere.name}".replace("-", "_")
    Path(f"{name}.py").write_text(MODULE.format(name=name))

    def write(changes=None):
        torch.save(trained | {CONFIG_KEY: settings(changes or {})}, "policy.ckpt")
        return name

    yield write
    sys.modules.pop(name, None)


def settings(changes):
    """Return SETTINGS as YAML, with other values at some paths."""
    config = yaml.safe_load(SETTINGS)
    for path, value in changes.items():
        place = config
        *parents, key = path.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = value
    return yaml.safe_dump(config)


def refusal_of(capsys, command, *options):
    arguments = ["--ckpt_path", "policy.ckpt", *options]
    if command == "fit":
        arguments += ["--data.total_env_steps", "192"]
    error = error_of(capsys, command, *arguments, alone=True)
    assert "--trust_code true" in error
    return error


GADGET = {"class_path": "os.system", "init_args": {"command": "touch pwned"}}
POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "pwned"]}}
ENV = "data.env.init_args"

NAMES = [
    ("model", GADGET),
    ("model", POPEN),
    ("model.init_args.policy", POPEN),
    ("model.init_args.optimizer", "os.system"),
    ("model.init_args.optimizer", {"class_path": "torch.hub.load"}),
    ("model.init_args.optimizer", {"class_path": "torch.optim.lr_scheduler.StepLR"}),
    ("model.init_args.optimizer", {"class_path": "lightning_rl.cli.app.run"}),
    ("data.env", GADGET),
    ("data.env", "os.system"),
    ("data.env", {"class_path": "lightning_rl.cli.app.RLCLI", "init_args": {"args": ["fit"]}}),
    ("data.env", {"class_path": "lightning_rl.cli.app.os.system"}),
    (f"{ENV}.env_kwargs", {"x": GADGET}),
    (f"{ENV}.env_kwargs", {"x": "os.system"}),
    (f"{ENV}.env_kwargs", {"x": "{class_path: os.system, init_args: {command: touch pwned}}"}),
    (f"{ENV}.wrappers", [{"class_path": "subprocess.Popen"}]),
    (f"{ENV}.wrappers", ["os.system"]),
    (
        f"{ENV}.wrappers",
        [{"class_path": "gymnasium.wrappers.TransformReward", "init_args": {"func": "os.system"}}],
    ),
    (f"{ENV}.wrappers", [{"class_path": "gymnasium.wrappers.RecordVideo"}]),
    (f"{ENV}.wrappers", [{"class_path": "gymnasium.wrappers.rendering.RecordVideo"}]),
    ("data.env", {"class_path": "lightning_rl.GymnasiumEnv", "dict_kwargs": {"x": POPEN}}),
    ("data.collector", {"class_path": "lightning_rl.SyncCollector", "init_args": GADGET}),
    ("data.replay", {"class_path": "lightning_rl.ReplayBuffer", "init_args": GADGET}),
    ("data.replay", {"class_path": "my_module.Ring"}),
    ("data.env.init_args.id", "os:CartPole-v1"),
    ("data.env.init_args.id", "ALE/Pong-v5"),
    ("data.env.init_args.id", "NobodyKnows-v0"),
    ("data.env.class_path", "lightning_rl.envs.gymnasium.adapter.GymnasiumEnv"),
    # The parser reads texts again: quotes, and mappings in them.
    (f"{ENV}.wrappers", ["'os.system'"]),
    (f"{ENV}.model", "os.system"),
    (f"{ENV}.model", "'os.system'"),
    (f"{ENV}.model", GADGET),
    (f"{ENV}.names", "'os.system'"),
    (f"{ENV}.names", '"os.\\x73ystem"'),
    (f"{ENV}.names", "[os.system]"),
    (f"{ENV}.wrappers", [{"class_path": "gymnasium.wrappers.ArrayConversion"}]),
]


@pytest.mark.parametrize(("key", "value"), NAMES)
def test_what_names_other_code_is_refused(key, value):
    with refused(names=("policy.ckpt", "--trust_code true")):
        checked_config(settings({key: value}), Path("policy.ckpt"))


# `load_from_checkpoint` makes the model: the rest of a configuration is not looked at.
@pytest.mark.parametrize(("key", "value"), [case for case in NAMES if case[0].startswith("model")])
def test_python_refuses_it_too(key, value, trained, elsewhere, monkeypatch):
    monkeypatch.setattr(os, "system", fail(AssertionError("a command was run")))
    torch.save(trained | {CONFIG_KEY: settings({key: value})}, "policy.ckpt")
    with refused(names=("policy.ckpt", "trust_code=True")):
        Algorithm.load_from_checkpoint("policy.ckpt")
    assert [path.name for path in Path().iterdir()] == ["policy.ckpt"]


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("config", "other.yaml"),
        ("trust_code", True),
        ("model", "model.yaml"),
        ("data", {"env.init_args.id": "mine:Env-v0"}),
        ("trainer", [1]),
    ],
)
def test_what_would_lead_elsewhere_is_refused(section, value):
    with refused(names=("policy.ckpt", section, "--trust_code true")):
        checked_config(settings({section: value}), Path("policy.ckpt"))


def test_the_address_of_a_cluster_is_left_out_and_told():
    """Whoever answers there runs code of theirs here: that is for who resumes to say."""
    init_args = {"num_collectors": 2, "address": "node0:6379"}
    collector = {"class_path": "lightning_rl.RayCollector", "init_args": init_args}
    checked = checked_config(settings({"data.collector": collector}), Path("policy.ckpt"))
    kept = yaml.safe_load(checked.config)["data"]["collector"]
    assert kept["init_args"] == {"num_collectors": 2}
    assert checked.left_out == {"data.collector.address": "node0:6379"}


def test_what_the_package_and_the_libraries_offer_is_allowed():
    clip = {"class_path": "gymnasium.wrappers.ClipReward", "init_args": {"max_reward": 1}}
    changes = {
        "model.init_args.optimizer": {"class_path": "torch.optim.AdamW"},
        f"{ENV}.wrappers": [clip],
        f"{ENV}.env_kwargs": {"xml_file": "hopper.xml", "render_mode": "rgb_array"},
        f"{ENV}.model": "my_arm.xml",
        "trainer.run_dir": "/somewhere/else",
    }
    config = yaml.safe_load(settings(changes))
    checked = yaml.safe_load(checked_config(settings(changes), Path("policy.ckpt")).config)
    # Where a run writes is not for a file to say.
    del config["trainer"]["run_dir"], config["output_dir"]
    assert checked == config


@pytest.mark.parametrize("command", ["validate", "fit"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", POPEN),
        ("model.class_path", "{name}.MyPPO"),
        ("data.env.init_args.id", "{name}:{name}-v0"),
        ("data.env.init_args.wrappers", ["{name}.MyWrapper"]),
    ],
)
def test_commands_refuse_it_before_anything_is_imported(key, value, command, checkpoint, capsys):
    name = checkpoint()
    filled = yaml.safe_load(yaml.safe_dump(value).replace("{name}", name))
    checkpoint({key: filled})
    error = refusal_of(capsys, command)
    assert key in error
    assert name not in sys.modules
    assert {path.name for path in Path().iterdir()} == {"policy.ckpt", f"{name}.py"}


@pytest.mark.parametrize("command", ["validate", "fit"])
@pytest.mark.parametrize("key", ["model.class_path", "data.env.init_args.id"])
def test_whoever_trusts_it_gets_it(key, command, checkpoint):
    name = checkpoint()
    checkpoint({key: f"{name}.MyPPO" if key.startswith("model") else f"{name}:{name}-v0"})
    more = ["--data.total_env_steps", "192"] if command == "fit" else []
    run([command, "--ckpt_path", "policy.ckpt", "--trust_code", "true", *more])
    assert name in sys.modules


def test_of_two_answers_to_whether_it_is_trusted_the_last_one_counts(checkpoint, capsys):
    """As the parser has it of every option."""
    name = checkpoint()
    checkpoint({"model.class_path": f"{name}.MyPPO"})
    yes, no = ["--trust_code", "true"], ["--trust_code", "false"]
    assert "model.class_path" in refusal_of(capsys, "validate", *yes, *no)
    assert name not in sys.modules
    run(["validate", "--ckpt_path", "policy.ckpt", *no, *yes])
    assert name in sys.modules
    from_checkpoint = ["export", "--ckpt_path", "policy.ckpt"]  # a command with a parser of its own
    assert is_trusted([*from_checkpoint, *no, *yes])
    assert not is_trusted([*from_checkpoint, *yes, *no])


def test_what_the_user_types_is_trusted(checkpoint, capsys):
    name = checkpoint()
    run(["validate", "--ckpt_path", "policy.ckpt", "--data.env.id", f"{name}:{name}-v0"])
    assert name in sys.modules
    run(["validate", "--ckpt_path", "policy.ckpt", "--model", f"{name}.MyPPO"])
    Path("mine.yaml").write_text(SETTINGS.replace("lightning_rl.PPO", f"{name}.MyPPO"))
    run(["validate", "--ckpt_path", "policy.ckpt", "--config", "mine.yaml"])


def test_an_env_that_another_package_registered_is_refused(checkpoint, capsys):
    import gymnasium

    gymnasium.register("Foreign-v3", "os:system")
    try:
        for spelling in ("Foreign-v3", "Foreign"):
            checkpoint({"data.env.init_args.id": spelling})
            assert f"names '{spelling}'" in refusal_of(capsys, "validate")
    finally:
        del gymnasium.registry["Foreign-v3"]


def test_the_parser_is_locked_too(checkpoint, capsys, monkeypatch):
    """What should slip past the first look meets a parser that imports nothing else."""
    name = checkpoint()
    checkpoint({"model.class_path": f"{name}.MyPPO"})
    blind = CheckedConfig(load(Path("policy.ckpt"))[CONFIG_KEY], {}, {})
    monkeypatch.setattr("lightning_rl.cli.arguments.checked_config", lambda text, path: blind)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    with pytest.raises(SystemExit):
        run(["validate", "--ckpt_path", "policy.ckpt"])
    assert_names(capsys.readouterr().err, f"'{name}.MyPPO'", "model")
    assert name not in sys.modules


def test_python_makes_nothing_that_is_not_in_the_table(checkpoint, monkeypatch):
    name = checkpoint()
    monkeypatch.setattr(
        "lightning_rl.checkpoints.building.checked_config", lambda *args: CheckedConfig("", {}, {})
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    for key in ("model.class_path", "model.init_args.policy.class_path"):
        checkpoint({key: f"{name}.MyPPO"})
        with refused(names=(f"'{name}.MyPPO'", "checkpoint", "policy=...")):
            Algorithm.load_from_checkpoint("policy.ckpt")
        assert name not in sys.modules


def test_a_file_in_the_working_directory_is_no_module_for_a_checkpoint(checkpoint):
    """EnvPoolEnv is ours, and imports envpool: not one that came along with the checkpoint."""
    checkpoint()
    run(["validate", "--ckpt_path", "policy.ckpt"])
    assert str(Path.cwd()) not in sys.path
    assert os.getcwd() not in sys.path


def test_a_function_in_the_place_of_a_class_is_not_called_where_it_is_trusted(trained, elsewhere):
    config = yaml.safe_load(trained[CONFIG_KEY])
    config["model"]["init_args"]["policy"] = GADGET
    torch.save(trained | {CONFIG_KEY: yaml.safe_dump(config)}, "policy.ckpt")
    for construction in (load_policy, Algorithm.load_from_checkpoint):
        with refused(names=("policy.ckpt", "'os.system'", "model.policy")):
            construction("policy.ckpt", trust_code=True)
    assert not os.path.exists("pwned")
