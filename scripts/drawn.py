"""Draw defects at random from what Cosmic Ray can break (pip install cosmic-ray).

    python scripts/mutations.py --drawn 40 --seed 0 --only functional/ buffers/

draws a file by its lines, a line of it, and an operator that applies there. Operators whose result
is mostly no program (`<<` between floats) are left out.
"""

import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Div|Mod_FloorDiv|Pow_Mul)"
    r"|ReplaceBinaryOperator_BitAnd_BitOr"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Lt_GtE|Gt_LtE)"
    r"|ReplaceComparisonOperator_(Is_IsNot|IsNot_Is)|ReplaceUnaryOperator_(USub_UAdd|Delete_Not)"
    r"|AddNot|Replace(TrueWithFalse|FalseWithTrue|AndWithOr|OrWithAnd|BreakWithContinue)"
    r"|NumberReplacer|ZeroIterationForLoop)$"
)


def drawn(files: Sequence[Path], count: int, seed: int) -> Iterator[tuple[Path, str, str, str]]:
    """Yield defects: a file, a description, a text that stands once in it, and its replacement."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    generator = random.Random(seed)
    operators = [(name, get_operator(name)()) for name in operator_names() if OPERATORS.match(name)]
    lengths = [len(file.read_text().splitlines()) for file in files]

    @cache
    def choices(file: Path) -> dict[int, list[tuple[str, int]]]:
        by_line: dict[int, list[tuple[str, int]]] = {}
        nodes = list(ast_nodes(get_ast(file.read_text())))
        for name, operator in operators:
            places = (place for node in nodes for place in operator.mutation_positions(node))
            for occurrence, (start, _) in enumerate(places):
                by_line.setdefault(start[0], []).append((name, occurrence))
        return by_line

    seen = set()
    while len(seen) < count:
        (file,) = generator.choices(files, lengths)
        content, by_line = file.read_text(), choices(file)
        line = generator.choice(sorted(by_line) or [0])
        name, occurrence = generator.choice(by_line.get(line) or [("", 0)])
        changed = mutate_code(content, get_operator(name)(), occurrence) if name else content
        if changed == content or (file, changed) in seen:
            continue
        seen.add((file, changed))
        yield file, f"{file.name}:{line} {name[5:]}", *difference(content, changed)


def difference(content: str, changed: str) -> tuple[str, str]:
    """Return the lines that differ, with as many around them as make the text stand once."""
    old, new = content.splitlines(keepends=True), changed.splitlines(keepends=True)
    first = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    last = next(i for i, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b)
    while content.count("".join(old[first : len(old) - last])) > 1:
        first = max(first - 1, 0)
        last = max(last - 1, 0)
    return "".join(old[first : len(old) - last]), "".join(new[first : len(new) - last])
