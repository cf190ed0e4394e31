"""What is found and answered before torch is imported: names on a command line and help, by a table of the shipped classes."""

import copy
import json
import random
import subprocess
import sys

import pytest
import yaml

from lightning_rl.cli import first_check as module
from lightning_rl.cli.app import run
from lightning_rl.cli.checking import check_run
from lightning_rl.cli.completion import completion
from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.cli.first_check import CORE, first_check
from lightning_rl.cli.listing import list_names
from lightning_rl.cli.names_table import Table, current_table, write_table
from lightning_rl.system.errors import ConfigurationError
from tests.commands import rl_cli


@pytest.fixture(scope="module")
def names():
    return json.loads(json.dumps(list_names()))


@pytest.fixture(autouse=True)
def known(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(module, "current_table", lambda: Table("", **names))


def refused(*typed):
    with pytest.raises(ConfigurationError) as error:
        first_check(typed)
    return str(error.value)


@pytest.mark.parametrize(
    ("typed", "holds"),
    {
        "ftt": ["ftt", "close matches: fit"],
        "train": ["train", "fit"],
        "ppo.yaml": ["fit --config ppo.yaml"],
        "fit --config pppo.yaml": ["pppo.yaml", "close matches: ppo.yaml"],
        "fit --config broken.yaml": ["broken.yaml", "not valid YAML", "line 1"],
        "fit --ckpt_path nope.ckpt": ["nope.ckpt", "last or best"],
        "validate --ckpt_path last": ["last.ckpt", "outputs"],
        "fit --config ppo.yaml --model PPPO": ["PPPO", "close matches: PPO"],
        "fit --config ppo.yaml --model.policy.memory LSTMM": ["LSTMM", "GRU, LSTM"],
        "fit --config ppo.yaml --model.clip_coeff 1": ["clip_coeff", "PPO", "model.clip_coef"],
        "fit --config ppo.yaml --trainer.video.num_env 1": [
            "num_env",
            "VideoSettings",
            "trainer.video.num_envs",
        ],
        "fit --config ppo.yaml --model.optimizer Adam --model.optimizer.epz 1": [
            "epz",
            "Adam",
            "eps",
        ],
        "fit --config ppo.yaml --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitr x": [
            "monitr",
            "monitor",
        ],
        "record --pth demos": ["--pth", "path"],
    }.items(),
)
def test_a_wrong_name_is_reported_with_the_right_one(typed, holds, tmp_path):
    (tmp_path / "broken.yaml").write_text("model: {class_path: PPO\ndata: [")
    message = refused(*typed.split())
    for words in holds:
        assert words in message


def test_the_table_is_made_anew_when_the_package_changes(tmp_path, monkeypatch, names):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert current_table() is None
    write_table(names)
    assert current_table().classes == names["classes"]
    monkeypatch.setattr("lightning_rl.cli.names_table.version", lambda name: "9.9")
    assert current_table() is None
    (file,) = (tmp_path / "cache").rglob("names-*.json")
    file.write_text("{")
    assert current_table() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    write_table(names)  # a directory that cannot be written costs the table, not the run
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "~")  # no home, as for a user id without a name in a container
    write_table(names)
    assert current_table() is None


def test_own_classes_are_left_to_the_full_check(tmp_path):
    fit = ["fit", "--config", "ppo.yaml"]
    first_check([*fit, "--model", "my_mod.Mine", "--model.my_setting", "1"])
    first_check([*fit, "--model", "my_mod.PPO", "--model.my_setting", "1"])
    # `my_mod` may define `MyPolicy`, whose bare name then counts.
    first_check([*fit, "--data.env", "my_mod.Mine", "--model.policy", "MyPolicy"])
    first_check(["fit", "--model.help", "PPPO"])
    first_check(["sweep", "--config", "ppo.yaml", "--sweep.seeds", "5"])
    first_check([*fit, "--ckpt_path", "null"])
    assert "clip_coeff" in refused(*fit, "--data.env", "my_mod.Mine", "--model.clip_coeff", "1")


def mutated(content, chance):
    """A copy of a config in which one mapping has changed: a name, a value, a class, or what is left out."""
    content = copy.deepcopy(content)
    places = []

    def visit(node):
        if isinstance(node, dict) and node:
            places.append(node)
        children = node.values() if isinstance(node, dict) else node
        for child in children if isinstance(node, dict | list) else ():
            visit(child)

    visit(content)
    classes = ["PPO", "SAC", "ActorCritic", "LSTM", "GymnasiumEnv"]
    classes += ["torch.optim.Adam", "lightning_rl.PPO", "my_mod.Mine"]
    values = [None, True, "true", "", 3, "x.yaml", "Adam"]
    values += [[], {}, ["Adam"], {"a": 1}, {"class_path": "PPO"}]
    names = ["clip_coef", "num_envs", "wrong", "path", "class_path"]
    place = chance.choice(places)
    key = chance.choice(list(place))
    match chance.randrange(5):
        case 0:
            place[chance.choice(names)] = place.pop(key)
        case 1:
            place[key] = chance.choice(values)
        case 2:
            del place[key]
        case 3:
            place["class_path"] = chance.choice(classes)
        case 4:
            settings = chance.choice([{}, {"size": 3}])
            place[key] = {"class_path": chance.choice(classes), "init_args": settings}
    return content


def is_accepted(check, arguments):
    try:
        check(arguments)
    except (ConfigurationError, SystemExit):
        return False
    return True


@pytest.mark.parametrize("name", shipped_configs())
def test_it_never_refuses_what_the_full_check_accepts(name, tmp_path):
    path = shipped_configs()[name]
    first_check(["fit", "--config", str(path)])
    content = yaml.safe_load(path.read_text())
    chance = random.Random(name)
    for _ in range(8):
        changed = tmp_path / "changed.yaml"
        changed.write_text(yaml.safe_dump(mutated(content, chance)))
        arguments = ["fit", f"--config={changed}"]
        if not is_accepted(first_check, arguments):
            assert not is_accepted(check_run, arguments), changed.read_text()


ASK = """
. ./completion.sh
ask() { COMP_WORDS=("${@:1:$#-1}"); _rl_cli rl-cli "${@: -1}" "${@: -2:1}"; echo "${COMPREPLY[@]}"; }
ask rl-cli re
ask rl-cli fit --model.clip_c
ask rl-cli fit --config td
ask rl-cli fit --model SA
ask rl-cli label --su
"""


def test_words_are_completed(names, tmp_path):
    (tmp_path / "completion.sh").write_text(completion("bash", Table("", **names)))
    answers = subprocess.run(
        ["bash", "-c", ASK], capture_output=True, text=True, check=True, timeout=60
    )
    assert answers.stdout.splitlines() == [
        "report record recap",
        "--model.clip_coef",
        "td3.yaml",
        "SAC",
        "--success",
    ]
    assert completion("zsh", Table("", **names)).startswith("autoload -U +X compinit")


def test_help_on_a_class_of_ones_own(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from lightning_rl import Algorithm, Policy\n"
        "class Mine(Algorithm):\n"
        "    def __init__(self, policy: Policy, my_coef: float = 1.0, **kwargs):\n"
        "        super().__init__(policy, **kwargs)\n"
    )
    with pytest.raises(SystemExit) as stop:
        run(["fit", "--model.help", "mine.Mine"])
    assert stop.value.code in (0, None)
    assert "--model.my_coef MY_COEF" in capsys.readouterr().out


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
