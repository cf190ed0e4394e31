"""What `--help` prints: all that there is, in sections, and soon."""

import subprocess
import sys

import pytest

from lightning_rl.cli.app import run
from lightning_rl.cli.first_check import CORE
from lightning_rl.cli.names_table import current_table
from tests.commands import rl_cli

pytestmark = pytest.mark.usefixtures("own_directory")


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        run(list(arguments))
    assert stop.value.code in (0, None)
    return capsys.readouterr().out


def test_help_on_a_class_of_ones_own(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "from lightning_rl import Algorithm, Policy\n"
        "class Mine(Algorithm):\n"
        "    def __init__(self, policy: Policy, my_coef: float = 1.0, **kwargs):\n"
        "        super().__init__(policy, **kwargs)\n"
    )
    assert "--model.my_coef MY_COEF" in help_of(capsys, "fit", "--model.help", "mine.Mine")


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
