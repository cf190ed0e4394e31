"""One convention for a gripper's command: 0 close, 1 stay, 2 open."""

import re
from pathlib import Path

from lightning_rl.extensions.algorithms.gripper import CLOSE, OPEN, STAY
from lightning_rl.extensions.teleoperation.devices import _BOX_KEYS

PAGES = Path(__file__).parents[2] / "docs"


def test_the_keyboard_follows_the_convention():
    assert (CLOSE, STAY, OPEN) == (0, 1, 2)
    assert (_BOX_KEYS["c"], _BOX_KEYS["o"]) == ("-3", "+3"), "c lowers the command: it closes"


def test_no_page_says_otherwise():
    wrong = re.compile(r"\b0\b[^.\n]{0,20}\bopens? it|\b2\b[^.\n]{0,20}\bcloses? it|0 open|2 close")
    pages = {page: page.read_text() for page in PAGES.rglob("*.md")}
    assert [page.name for page, text in pages.items() if wrong.search(text)] == []
    assert "0 close, 1 stay, 2 open" in (PAGES / "people.md").read_text()
