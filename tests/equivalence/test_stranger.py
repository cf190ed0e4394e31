"""Extensions of a stranger, each in a file outside of the package, meet the rest: compiled, resumed, in the background.

Two ranks: `test_extensions_of_a_stranger_keep_ranks_equal` of test_ddp.py.
"""

import re
import sys
from pathlib import Path

import pytest
import torch

from lightning_rl.cli.app import run
from tests.helpers import assert_same, assert_same_run, error_of, last, load
from tests.messages import assert_names
from tests.stranger import FOLDER, RUNS, write_config


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("my_lab")]:
        del sys.modules[name]


def fit(name, config, *options):
    run(["fit", "--config", config, "--exp_name", name, "--output_dir", name, *options])
    (directory,) = Path(name).iterdir()
    return directory


def weights(directory):
    return load(last(directory))["state_dict"]


@pytest.mark.parametrize("name", RUNS)
def test_it_resumes_bit_for_bit_and_follows_itself_compiled(name, lab, traced_only):
    """And in the background without lag it is what it is in the foreground."""
    config = write_config(name)
    whole, half = fit("whole", config), fit("half", config, "--trainer.max_steps", "4")
    run(["fit", "--ckpt_path", str(half), "--trainer.max_steps", "-1", "--trust_code", "true"])
    assert_same_run(whole, half)
    compiled = weights(fit("compiled", config, "--model.compile", "true"))
    torch.testing.assert_close(compiled, weights(whole), rtol=1e-3, atol=1e-4)
    if name not in ("collector", "reader"):
        collector = {"class_path": "AsyncCollector", "init_args": {"max_staleness": 0}}
        background = fit("background", write_config(name, data={"collector": collector}))
        assert_same(weights(background), weights(whole))


def test_a_subcommand_trains_with_two_seeds(lab, capsys):
    config = write_config("on-policy")
    run(["my_lab.seeds.train", "--config", config, "--output_dir", "runs", "--seeds", "3", "4"])
    first, second = sorted(Path("runs").iterdir())
    whole = fit("whole", config, "--seed_everything", "3")
    assert_same(weights(first), weights(whole))
    name = "policy.actor.0.weight"
    assert not torch.equal(weights(first)[name], weights(second)[name])


@pytest.mark.parametrize(
    "path", ["my_lab.seeds.trian", "my_lab.none.train", "my_lab.seeds.OPTIONS"]
)
def test_a_subcommand_that_is_not_there_is_named(path, lab, capsys):
    assert_names(error_of(capsys, path, "--config", "on_policy.yaml", status=2), path)


def test_it_uses_public_names_alone():
    allowed = re.compile(r"lightning_rl(\.functional|\.extend(\.\w+)?)?")
    for path in (FOLDER / "my_lab").glob("*.py"):
        text = path.read_text()
        for module in re.findall(r"^(?:from|import) (lightning_rl\S*)", text, re.M):
            assert allowed.fullmatch(module), f"{path.name} imports {module}"
        hooks = re.findall(r"def (_[a-z]\w*)", text)
        assert set(hooks) <= {"_log_prob"}, f"{path.name} overrides {hooks}"
        assert len(text.splitlines()) <= 80
