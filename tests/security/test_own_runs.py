"""The user's own runs need no `--trust_code true`; what was sent, copied or changed does."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lightning_rl import Algorithm, load_policy
from lightning_rl.checkpoints import own
from lightning_rl.checkpoints.format import CONFIG_KEY, STATE_KEY
from lightning_rl.cli.app import run
from lightning_rl.cli.arguments import is_trusted
from lightning_rl.system.errors import ConfigurationError
from tests.commands import rl_cli
from tests.core.faults.test_trust import SETTINGS
from tests.helpers import load, without

MODULE = """
from pathlib import Path
from importlib.util import find_spec
import {name}_helper, space_of_mine.part
if find_spec("elsewhere_of_mine"):  # no other process has that path
    import elsewhere_of_mine
Path("imported").touch()
from lightning_rl import PPO, ActorCritic
class MyPPO(PPO):
    def __init__(self, policy: "Policy", **kwargs):
        super().__init__(policy, **kwargs)
class MyPolicy(ActorCritic): pass
from lightning_rl import Policy
"""

ELSEWHERE = "../elsewhere/elsewhere_of_mine.py"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Train a run that names own code; return the path of its checkpoint."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    monkeypatch.setenv("LIGHTNING_RL_KEY", str(tmp_path / "home" / "key"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    Path(f"{name}.py").write_text(MODULE.format(name=name))
    Path(f"{name}_helper.py").write_text("x = 1\n")
    for path in (ELSEWHERE, "space_of_mine/part.py"):
        Path(path).parent.mkdir()
        Path(path).write_text("x = 1")
    sys.path.append(str(tmp_path / "elsewhere"))
    config = SETTINGS.replace("lightning_rl.PPO", f"{name}.MyPPO")
    Path("mine.yaml").write_text(config.replace("lightning_rl.ActorCritic", f"{name}.MyPolicy"))
    run(["fit", "--config", "mine.yaml", "--trainer.run_dir", "run"])
    forget(name)
    yield Path("run/checkpoints/last.ckpt").absolute()
    forget(name)


def forget(name):
    """Leave no module of a run, as in a new process."""
    apart = ("elsewhere_of_mine", "space_of_mine", "space_of_mine.part")
    for module in (name, f"{name}_helper", *apart):
        sys.modules.pop(module, None)
    Path("imported").unlink(missing_ok=True)
    own._code_of.cache_clear()


def code_of(checkpoint):
    return next(checkpoint.parents[2].glob("own_*[!r].py"))


def key():
    return Path(os.environ["LIGHTNING_RL_KEY"])


def asks(checkpoint, capsys):
    """Whether all commands and `load_policy` refuse a checkpoint, with the cure, and without an import."""
    forget(name_of_module := next(Path().glob("own_*[!r].py"), Path("x")).stem)
    assert not is_trusted(["--ckpt_path", str(checkpoint)])
    with pytest.raises(SystemExit):
        run(["validate", "--ckpt_path", str(checkpoint)])
    assert "--trust_code true" in capsys.readouterr().err
    for load_it in (load_policy, Algorithm.load_from_checkpoint):
        with pytest.raises(ConfigurationError, match="trust_code=True"):
            load_it(checkpoint)
    return name_of_module not in sys.modules and not Path("imported").exists()


def test_an_own_run_is_resumed_validated_exported_and_loaded_without_a_question(mine, capsys):
    assert key().stat().st_mode & 0o777 == 0o600
    run(["validate", "--ckpt_path", "run"])
    run(["export", "--ckpt_path", "run", "--format", "safetensors", "--path", "policy.safetensors"])
    run(["fit", "--ckpt_path", "run", "--data.total_env_steps", "192"])
    assert "--trust_code" not in capsys.readouterr().out
    load_policy("run")
    Algorithm.load_from_checkpoint(mine)
    assert Path("imported").exists()
    # In a process of its own, too, whose main module is the package's, as `rl-cli` starts it.
    made = rl_cli("fit", "--config", "mine.yaml", "--trainer.run_dir", "other")
    assert "--trust_code" not in made.stdout, made.stdout + made.stderr
    assert rl_cli("validate", "--ckpt_path", "other").returncode == 0
    # An answer of the user counts.
    assert not is_trusted(["--ckpt_path", str(mine), "--trust_code", "false"])


def edit_config(checkpoint, old, new):
    content = load(checkpoint)
    torch.save(content | {CONFIG_KEY: content[CONFIG_KEY].replace(old, new)}, checkpoint)


def edit_signature(checkpoint, **entries):
    content = load(checkpoint)
    content[STATE_KEY][own.SIGNATURE_KEY] |= entries
    torch.save(content, checkpoint)


def append_to(path, text):
    path.write_text(path.read_text() + text)


def a_package_in_its_place(checkpoint):
    code = code_of(checkpoint)
    Path(code.stem).mkdir()
    shutil.copy(code, f"{code.stem}/__init__.py")  # which Python imports before the file


def linked_code(checkpoint):
    code = code_of(checkpoint)
    other = code.rename(code.with_name("other.py"))
    append_to(other, "# other\n")
    code.symlink_to(other)


def linked_key(checkpoint):
    other = key().rename(key().with_name("other"))
    key().symlink_to(other)


def piped_key(checkpoint):
    key().unlink()
    os.mkfifo(key(), 0o600)


ATTACKS = {
    "changed_config": lambda path: edit_config(path, "CartPole-v1", "Acrobot-v1"),
    "other_code_is_claimed": lambda path: edit_signature(path, code={}),
    "swapped": lambda path: edit_config(path, "hidden_sizes", "critic_hidden_sizes"),
    "no_signature": lambda path: torch.save(without(load(path), own.SIGNATURE_KEY), path),
    "odd_signature": lambda path: edit_signature(path, code=torch.zeros(2), hmac="é"),
    "edited_code": lambda path: append_to(code_of(path), "\n# edited\n"),
    "edited_helper": lambda path: append_to(Path(f"{code_of(path).stem}_helper.py"), "y = 2\n"),
    "a_package_in_its_place": a_package_in_its_place,
    "linked_code": linked_code,
    "a_package_of_the_namespace": lambda path: Path("space_of_mine/__init__.py").write_text(
        "open('imported', 'w').close()"
    ),
    "edited_code_elsewhere": lambda path: append_to(Path(ELSEWHERE), "\ny = 2\n"),
    "another_user": lambda path: key().write_bytes(b"k" * own.KEY_BYTES),
    "open_key": lambda path: key().chmod(0o640),
    "open_directory": lambda path: key().parent.chmod(0o777),
    "linked_key": linked_key,
    "short_key": lambda path: key().write_bytes(b""),
    "no_key": lambda path: shutil.rmtree(key().parent),
    "piped_key": piped_key,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_was_sent_or_changed_asks(attack, mine, capsys):
    ATTACKS[attack](mine)
    assert asks(mine, capsys)


def test_a_key_of_another_owner_is_not_read(mine, capsys, monkeypatch):
    monkeypatch.setattr(own.os, "getuid", lambda: 12345)
    assert asks(mine, capsys)


def test_a_run_that_was_copied_to_a_place_with_other_code_asks(mine, capsys, tmp_path, monkeypatch):
    (tmp_path / "sent").mkdir()
    shutil.copytree(mine.parents[1], tmp_path / "sent/run")
    for path in Path().glob("own_*.py"):
        shutil.copy(path, tmp_path / "sent")
    monkeypatch.chdir(tmp_path / "sent")
    sys.path[:] = [entry for entry in sys.path if not entry.endswith("work")]
    assert asks(Path("run/checkpoints/last.ckpt"), capsys)


@pytest.mark.parametrize("place", ["/proc/none/key", "/dev/null/key", ""])
def test_without_a_home_a_run_trains_and_asks_as_before(place, finished_run, monkeypatch):
    monkeypatch.setenv("LIGHTNING_RL_KEY", place)
    if not place:
        monkeypatch.setattr(
            Path, "home", classmethod(lambda cls: (_ for _ in ()).throw(RuntimeError("no home")))
        )
    content = {CONFIG_KEY: "model: {class_path: mine.PPO}", STATE_KEY: {}}
    assert own.signed(content) == content
    assert not own.is_own(content)


def test_a_run_that_trusts_the_code_of_a_directory_is_not_signed(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_RL_KEY", str(tmp_path / "key"))
    for kind, is_signed in (("hf", False), ("class", True)):
        init_args = (
            f"{{kind: {kind}, model_class: only_named_here.VLA, path: sent, trust_code: true}}"
        )
        policy = f"{{class_path: lightning_rl.CustomVLA, init_args: {init_args}}}"
        config = f"model: {{class_path: lightning_rl.PPO, init_args: {{policy: {policy}}}}}"
        content = {CONFIG_KEY: config, STATE_KEY: {}}
        assert (own.SIGNATURE_KEY in own.signed(content)[STATE_KEY]) is is_signed


def test_the_directory_of_an_environment_of_python_holds_code_of_the_user():
    # `python -m venv .` makes the project the prefix of Python.
    assert not any(Path(sys.prefix, "my_env.py").is_relative_to(place) for place in own.INSTALLED)


def test_a_default_run_makes_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_RL_KEY", str(tmp_path / "key"))
    content = {CONFIG_KEY: SETTINGS, STATE_KEY: {}}
    assert own.signed(content) == content
    assert not (tmp_path / "key").exists()
