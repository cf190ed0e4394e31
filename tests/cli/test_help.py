"""What `--help` prints: all that there is, in sections, and soon."""

import inspect
import os
import re
import resource
import subprocess
import sys

import pytest
from lightning.pytorch import Trainer

from lightning_rl.cli.app import run
from lightning_rl.cli.first_check import CORE
from lightning_rl.cli.help_pages import TITLES
from lightning_rl.cli.names_table import current_table
from lightning_rl.training.trainer import REFUSED, RLTrainer
from tests.commands import rl_cli

pytestmark = pytest.mark.usefixtures("own_directory")


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        run(list(arguments))
    assert stop.value.code in (0, None)
    return capsys.readouterr().out


def options_of(text):
    return re.findall(r"^  (?:-\w(?: \w+)?, )?--([\w.]+)", text, re.M)


@pytest.fixture
def page(capsys):
    return help_of(capsys, "fit", "--help")


def test_it_lists_every_option_but_those_that_are_refused(page):
    listed = options_of(page)
    lightning = set(inspect.signature(Trainer).parameters) - set(REFUSED) - {"default_root_dir"}
    own = set(inspect.signature(RLTrainer.__init__).parameters) - {"kwargs", "self"}
    for name in lightning | own:
        linked = name in ("exp_name", "output_dir", "restore_replay")
        assert (name if linked else f"trainer.{name}") in listed
    for name in REFUSED:
        assert name not in page
    assert len(set(listed)) == len(listed)
    for name in ("data.num_envs", "data.eval_env", "model", "ckpt_path", "config", "trust_code"):
        assert name in listed
    for word in (
        "FSDPStrategy",
        "transformer-engine",
        "XLAAccelerator",
        "RunManifest",
        "``",
        ":class:",
    ):
        assert word not in page
    assert "Linked arguments" not in page
    assert "-->" not in page
    found = re.search(r"--model .*?; one of: (.*?)\)", " ".join(page.split()))
    assert {"BehaviorCloning", "GRPO", "PPO"} <= set(found[1].split(", "))
    assert not {"Algorithm", "OnPolicyAlgorithm"} & set(found[1].split(", "))


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        (["--model.help", "PPO"], ["lightning_rl.PPO\n", "--model.clip_coef CLIP_COEF"]),
        (["--model.help=GRPO"], ["lightning_rl.GRPO\n", "--model.group_size"]),
        (["--model.policy.help", "ActorCritic"], ["--model.policy.hidden_sizes [ITEM,...]"]),
        (["--model.optimizer.help", "AdamW"], ["torch.optim.AdamW", "--model.optimizer.eps"]),
        (["--data.env.help", "PushCube"], ["lightning_rl.PushCube\n", "--data.env.rewards"]),
        (
            ["--data.env.help", "PushCube", "--data.env.action.help", "DeltaPosition"],
            ["--data.env.action.scale"],
        ),
        (["--data.collector.help", "AsyncCollector"], ["--data.collector.max_staleness"]),
        (
            ["--config", "mine.yaml", "--model", "PPO", "--model.help", "PPO", "--data.seed", "1"],
            ["lightning_rl.PPO\n", "--model.clip_coef CLIP_COEF"],
        ),
        (["--data.help"], [f"\n{TITLES['data']}:\n", "--data.num_envs NUM_ENVS"]),
        (["--trainer.help"], ["--trainer.best_metric", "--trainer.devices"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_help_on_a_class_or_a_section_needs_no_config(arguments, holds, capsys):
    for subcommand in ("fit", "validate") if "PPO" in arguments else ("fit",):
        text = help_of(capsys, subcommand, *arguments)
        for words in holds:
            assert words in text
        for hidden in ("observation_space", "optimizer.params", "--exp_name"):
            assert hidden not in text, "what nobody can set"


def test_help_on_a_class_of_ones_own(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from lightning_rl import Algorithm, Policy\n"
        "class Mine(Algorithm):\n"
        "    def __init__(self, policy: Policy, my_coef: float = 1.0, **kwargs):\n"
        "        super().__init__(policy, **kwargs)\n"
    )
    assert "--model.my_coef MY_COEF" in help_of(capsys, "fit", "--model.help", "mine.Mine")


FROM_ITS_START = """
import gymnasium, runpy, sys
env = gymnasium.make_vec("lightning_rl:lightning_rl/PushCube-v0", num_envs=3)  # of a process that imports nothing of ours
print(env.reset(seed=0)[0].shape)
sys.argv = ["rl-cli", "fit", "--help"]
runpy.run_module("lightning_rl", run_name="__main__")
"""


def test_a_new_process_finds_our_envs_and_answers_soon_and_with_its_status():
    """CPU time: other tests run meanwhile. It takes 4 to 6 s, and 14 where nothing is compiled to bytecode yet."""
    command = [sys.executable, "-c", FROM_ITS_START]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 60
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith("(3, 12)\nusage: rl-cli fit")
    refused = rl_cli("fit", "--model.help", "PPPO")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("rl-cli: error: Unknown class 'PPPO' for model: ")


TYPED = [["fit", "--help"], ["sweep", "--help"]]

ANSWERS = """
import contextlib, io, sys, time
from lightning_rl.__main__ import main
for arguments in sys.argv[1:]:
    sys.argv = ["rl-cli", *arguments.split()]
    with contextlib.suppress(SystemExit):
        main()
heavy = {"torch", "lightning", "jsonargparse", "rich"} & set(sys.modules)
print(sorted(heavy), time.process_time(), file=sys.stderr)
"""


def test_a_page_from_the_table_is_the_page_of_the_parser(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "97")
    pages = []
    for arguments in TYPED:
        # Without a cache directory, with a new table, and from the table.
        texts = [
            rl_cli(*arguments, env={"XDG_CACHE_HOME": str(cache)}).stdout
            for cache in ("/proc/none", tmp_path, tmp_path)
        ]
        assert texts[0] == texts[1] == texts[2]
        pages.append(texts[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stored = dict(current_table().pages)
    assert [stored[f"97 {' '.join(arguments)}"] for arguments in TYPED] == pages
    assert len(stored) == len(CORE) + len(TYPED) - 1
    for name in ("PPPO", "lightning_rl.PPO"):  # an error, and what may be own code
        rl_cli("fit", "--model.help", name)
    assert current_table().pages == stored
    command = [sys.executable, "-c", ANSWERS, *map(" ".join, TYPED)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert outcome.stdout == "".join(pages)
    heavy, seconds = outcome.stderr.split()
    assert heavy == "[]"
    assert float(seconds) < 5


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_reader_that_ends_early_leaves_no_traceback(option):
    """`rl-cli --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lightning_rl", option]
    outcome = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=True)
    os.close(writer)
    assert "Traceback" not in outcome.stderr
