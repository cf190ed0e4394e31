"""Docstrings, comments, messages and pages are in plain English: few phrases that hide their subject."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PUZZLING = re.compile(
    r"\b(?:whoever|whatever|somebody|nobody|where (?:it|they|none|nothing|some)|those of|that of"
    r"|the ones? that|tak(?:es?|ing) up|sa(?:ys?|id) of|as (?:it is|they are)|at once|beside|anew"
    r"|alike|shall|thereby|has come to|go(?:es|ing)? on|gone on|from (?:here|there) on)\b",
    re.IGNORECASE,
)
ALLOWED = {  # the phrase is right in these files
    ("extensions/checks/checking.py", "takes up"): "an episode takes up to N steps: a bound",
    ("extensions/remote/ray.py", "as it is"): "as soon as it is certain: a time",
}
MOST_PER_1000 = 0.5


def texts(path):
    """Yield (line, text) of what a person reads in a file."""
    source = path.read_text()
    if path.suffix == ".md":
        for part in re.split(r"```.*?```", source, flags=re.DOTALL):
            yield from ((0, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)) for line in part.splitlines())
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_what_a_person_reads_is_plain():
    words, found = 0, []
    for path in [*ROOT.glob("src/**/*.py"), ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for line, text in texts(path):
            words += len(text.split())
            for hit in PUZZLING.findall(text):
                if not any(path.match(f"*/{name}") and hit == one for name, one in ALLOWED):
                    found.append(f"{path.relative_to(ROOT)}:{line}: {hit}")
    assert 1000 * len(found) <= MOST_PER_1000 * words, "\n".join(found)
