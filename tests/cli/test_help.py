"""What `--help` prints: all that there is, in sections, and soon."""

import inspect
import os
import re
import resource
import subprocess
import sys
from importlib.metadata import version

import pytest
from lightning.pytorch import Trainer

from lightning_rl.cli import quick_help
from lightning_rl.cli.app import RLCLI, run
from lightning_rl.cli.help_pages import TITLES
from lightning_rl.training.trainer import REFUSED, RLTrainer
from tests.commands import rl_cli


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


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


def test_the_sections_stand_in_order_ours_first(page):
    places = [page.index(f"\n{title}:\n") for title in TITLES.values()]
    assert places == sorted(places)
    last = page[places[-1] :]
    own = inspect.signature(RLTrainer).parameters
    listed = [name.removeprefix("trainer.") for name in options_of(last)]
    assert {"devices", "strategy", "precision", "max_steps"} <= set(listed)
    assert not [name for name in listed if name in own]
    assert "--trainer.best_metric" in page[: places[-1]]


def test_it_lists_every_option_but_those_that_are_refused(page):
    listed = options_of(page)
    lightning = set(inspect.signature(Trainer).parameters) - set(REFUSED) - {"default_root_dir"}
    for name in (lightning | set(inspect.signature(RLTrainer).parameters)) - {"kwargs"}:
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


def test_each_section_alone_is_what_the_whole_page_has(capsys, page):
    text = help_of(capsys, "fit", "--data.help")
    section = text[text.index(f"{TITLES['data']}:") :].strip()
    assert section in page
    assert "--model" not in section


def test_help_on_a_class_of_ones_own(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from lightning_rl import Algorithm, Policy\n"
        "class Mine(Algorithm):\n"
        "    def __init__(self, policy: Policy, my_coef: float = 1.0, **kwargs):\n"
        "        super().__init__(policy, **kwargs)\n"
    )
    assert "--model.my_coef MY_COEF" in help_of(capsys, "fit", "--model.help", "mine.Mine")
    assert not quick_help.can_be_quick(["--model.help", "mine.Mine"])


HELP = [
    ["--help"],
    ["--model.help", "PPO"],
    ["--model.policy.help", "VLAPolicy"],
    ["--data.env.help", "GymnasiumEnv"],
    ["--data.help"],
]


SAY_HELP = f"""
import contextlib
from lightning_rl.cli.app import run
for arguments in {HELP!r}:
    with contextlib.suppress(SystemExit):
        run(["fit", *arguments])
"""

SAY_HELP_QUICKLY = f"""
import sys
from lightning_rl.cli import quick_help
quick_help.leave_out_the_rest()
{SAY_HELP}
loaded = [n for n in sys.modules if n.startswith(("torch._dynamo.", "torch._inductor."))]
assert not loaded, loaded
assert "transformers" not in sys.modules
"""


def test_help_leaves_out_what_quick_help_names_and_says_the_same(tmp_path):
    command = [sys.executable, "-c", SAY_HELP_QUICKLY]
    quick = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    tried = {name: version(name) for name in ("torch", "lightning", "torchmetrics")}
    why = f"quick_help.py leaves out what these need: {tried}: {quick.stderr}"
    assert quick.returncode == 0, why
    (tmp_path / "help.py").write_text(SAY_HELP)
    whole = rl_cli(program=tmp_path / "help.py")
    assert whole.returncode == 0, whole.stderr
    assert quick.stdout == whole.stdout
    assert quick.stdout.count("lightning_rl.") > 3


def test_what_help_leaves_out_it_can_take_in_where_it_has_to(tmp_path, monkeypatch):
    """A library that needs what is left out makes help late, and not wrong."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if not os.environ.get('LIGHTNING_RL_WHOLE_IMPORTS'):\n"
        "    from lightning_rl.cli import quick_help\n"
        "    quick_help.LEFT_OUT = (*quick_help.LEFT_OUT, 'tensordict')\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "lightning_rl", "fit", "--model.help", "PPO"]
    outcome = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert outcome.returncode == 0
    assert outcome.stderr == ""
    assert outcome.stdout.startswith("lightning_rl.PPO\n")


def test_the_command_answers_soon_and_with_its_status():
    """CPU time: other tests run meanwhile. It takes some 2 s, and with all imports 5 to 6."""
    for arguments, status in ((["--help"], 0), (["--model.help", "PPPO"], 2)):
        command = [sys.executable, "-m", "lightning_rl", "fit", *arguments]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert outcome.returncode == status, outcome.stderr
        assert after.ru_utime - before.ru_utime < 10
        assert outcome.stdout.startswith("usage: rl-cli fit") is (status == 0)
        assert (outcome.stderr == "") is (status == 0)
    assert outcome.stderr.startswith("rl-cli: error: Unknown class 'PPPO' for model: ")


@pytest.mark.parametrize(
    ("options", "quick"),
    [
        (["--help"], True),
        (["--model.help", "PPO"], True),
        (["--model.help=lightning_rl.PPO", "--model.policy.help", "ActorOnly"], True),
        (["--model.help", "mine.PPO"], False),
        (["--config", "ppo.yaml", "--help"], False),
        (["--help", "--config=ppo.yaml"], False),
    ],
)
def test_help_is_quick_where_it_concerns_nothing_of_others(options, quick, monkeypatch):
    assert quick_help.asks_for_help(options)
    assert quick_help.can_be_quick(options) is quick
    monkeypatch.setenv(quick_help.SWITCH, "1")
    assert not quick_help.can_be_quick(options)


def test_a_run_is_no_request_for_help():
    assert not quick_help.asks_for_help(["--config", "ppo.yaml", "--exp_name", "x.help"])
    assert not hasattr(RLCLI, "help")


def test_help_on_a_replay_lists_what_can_be_set(capsys):
    text = help_of(capsys, "fit", "--data.replay.help", "ReplayBuffer")
    assert [name for name in options_of(text) if name.startswith("data.replay.")] == [
        "data.replay.capacity",
        "data.replay.storage",
    ]
