"""Look at the files of a model before MuJoCo opens them, because anybody may have sent them."""

import html
import itertools
import math
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_rl.extend.errors import require
from lightning_rl.extend.files import open_file

LARGEST_FILE, MOST_FILES, MOST_COPIES, LONGEST_SIDE = 2**26, 1_000, 200_000, 10_000
"""Most bytes of a file of a model, files, copies of an element, and pixels in a row."""

_FILE = re.compile(r"""\bfile\w*\s*=\s*(?:"([^"]{0,4096})"|'([^']{0,4096})')""")
_SIDE = re.compile(
    r"""\b(\w*(?:width|height)|nrow|ncol|nkey|nuser_\w+|shadowsize)\s*=\s*["'][\s+]*(\d{1,20})"""
)
_DIRECTORY = re.compile(r"""\b(?:mesh|texture|asset)dir\s*=\s*["']([^"']{0,4096})["']""")
_MODEL = re.compile(r"<\s*model\b")
_COPIES = re.compile(r"""<replicate\b|</replicate\b|\bcount\s*=\s*["']([\d\s]{1,100})["']""")


def check_files(model: Path) -> None:
    """Refuse a model whose files MuJoCo would wait for, include without end, or copy too often.

    All texts that may name a file are looked at, because MuJoCo opens what it finds under them.

    Raises:
        ConfigurationError: names the file.
    """
    waiting: list[tuple[Path, tuple[Path, ...], bool]] = [(model, (), False)]
    for number in itertools.count():
        if not waiting:
            return
        require(number < MOST_FILES, f"{model} includes more than {MOST_FILES} files.")
        path, above, attaches = waiting.pop()
        with open_file(path, None, LARGEST_FILE) as file:
            text = file.read().decode(errors="replace")
        _check_copies(html.unescape(text), path)
        _check_sides(_SIDE.findall(html.unescape(text)), path)
        folders = [base / name for base in (model.parent, path.parent) for name in _folders(text)]
        # MuJoCo itself refuses a file that `include` elements reach twice, but follows a circle of
        # `model` elements until its stack is full.
        attaches = attaches or _MODEL.search(text) is not None
        # XML may write a name with entities.
        names = {html.unescape(double or single) for double, single in _FILE.findall(text)}
        for name in sorted({*names, *(os.path.basename(name) for name in names)} - {""}):
            # MuJoCo may also drop the folders of a name (`strippath`): look at its last part, too.
            for target in {folder / name for folder in folders if os.path.exists(folder / name)}:
                require(target.is_file(), f"{path} names {target}, which is not a regular file.")
                chain = (*above, path.resolve())
                if target.resolve() in chain:  # perhaps a comment names it, or another of its name
                    require(
                        not attaches,
                        f"{path} includes {target}: it has no end. If another file of this name is "
                        "meant, or a comment names it, give it another name.",
                    )
                    continue
                with target.open("rb") as content:
                    head = content.read(64)
                # A picture's size stands in its first bytes: refuse it before MuJoCo decodes it.
                if head.startswith(b"\x89PNG") and len(head) == 64:
                    width, height = struct.unpack(">II", head[16:24])
                    _check_sides([("width", width), ("height", height)], target)
                if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
                    waiting.append((target, chain, attaches))


def _check_sides(sides: Iterable[tuple[str, Any]], path: Path) -> None:
    for name, size in sides:
        require(
            int(size) <= LONGEST_SIDE,
            f"{path} has {name} {size}; at most {LONGEST_SIDE:,}, for it is held in memory.",
        )


def _folders(text: str) -> list[str]:
    return ["", *map(html.unescape, _DIRECTORY.findall(text))]


def _check_copies(text: str, path: Path) -> None:
    counts = [1]  # of the `replicate` elements that are open
    opens = False
    for token in _COPIES.finditer(text):
        numbers = math.prod(int(number) for number in (token[1] or "1").split())
        if token[0].startswith("</"):
            counts = counts[:-1] or [1]
        elif token[1] is None:
            counts.append(1)
        elif opens:
            counts[-1] = numbers
        opens = token[1] is None and not token[0].startswith("</")
        require(
            math.prod(counts) * (1 if opens else numbers) <= MOST_COPIES,
            f"{path} copies an element more than {MOST_COPIES:,} times.",
        )
