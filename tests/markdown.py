"""Take the blocks of code out of a page of documentation."""

import re
from typing import NamedTuple


class Block(NamedTuple):
    """What stands between three backticks and the next, and the page."""

    page: str
    language: str
    code: str

    @property
    def file(self) -> str | None:
        """The name of the file that it shows, where its first line says one."""
        found = re.match(r"# (\w+\.(?:py|yaml))\n", self.code)
        return found[1] if found else None

    @property
    def commands(self) -> list[str]:
        """Its lines, less comments, if it is one of commands."""
        lines = self.code.splitlines() if self.language == "bash" else []
        return [line.split("  #")[0].strip() for line in lines if line.strip()]


def blocks(page: str, text: str) -> list[Block]:
    """Return those of a page, in their order."""
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(page, language, code) for language, code in found]
