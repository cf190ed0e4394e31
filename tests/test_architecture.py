"""The house keeps its shape: imports go down, functions stay short, names are documented."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[1] / "src" / "lightning_rl"
FILES = sorted(SOURCE.rglob("*.py"))

LEVELS = {
    "errors": 0,
    "construction": 0,
    "kept_config": 0,
    "checkpoint_format": 0,
    "files": 0,
    "phases": 0,
    "quick_help": 0,
    "registration": 0,
    "arguments": 6,
    "process": 0,
    "machine": 0,
    "torch_private": 0,
    "distributed": 0,
    "rollout": 0,
    "runs": 0,
    "config_files": 0,
    "parsing": 0,
    "permission": 0,
    "functional": 0,
    "policies": 1,
    "envs": 2,
    "buffers": 2,
    "optim": 2,
    "collectors": 3,
    "evaluation": 3,
    "data": 4,
    "algorithms": 4,
    "callbacks": 5,
    "trainer": 6,
    "trust": 6,
    "loading": 6,
    "messages": 6,
    "help_pages": 6,
    "cli": 6,
    "__main__": 7,
    "__init__": 7,
}
"""The floor of every room (design: imports only go down)."""

APART = {("data", "algorithms"), ("algorithms", "data")}


UPWARD = {("algorithms/base.py", "loading")}
"""Imports that go up, inside a function: `load_from_checkpoint` is Lightning's name, and what it makes
again is made of all that lies above."""


def room(path):
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path):
    """Yield the rooms that a file imports, at its top level or inside functions."""
    file = str(path.relative_to(SOURCE))
    for other in imported(path):
        if (file, other) not in UPWARD:
            yield other


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("lightning_rl.")
        ):
            yield node.module.split(".")[1]
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("lightning_rl."):
                    yield name.name.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_only_go_down(path):
    here = room(path)
    for other in imports(path):
        assert LEVELS[other] <= LEVELS[here], f"{here} must not import {other}"
        assert (here, other) not in APART, f"{here} and {other} meet in callbacks and cli only"


@pytest.mark.parametrize(("file", "other"), UPWARD)
def test_an_import_that_goes_up_is_made_at_the_call_alone(file, other):
    assert other in imported(SOURCE / file)
    tree = ast.parse((SOURCE / file).read_text())
    at_the_top = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert f"lightning_rl.{other}" not in at_the_top


def test_rooms_do_not_import_each_other_in_a_circle():
    graph = {}
    for path in FILES:
        if path.name != "__init__.py" or path.parent != SOURCE:
            graph.setdefault(room(path), set()).update(set(imports(path)) - {room(path)})

    def visit(node, trail):
        assert node not in trail, " -> ".join([*trail, node])
        for following in graph.get(node, ()):
            visit(following, [*trail, node])

    for node in graph:
        visit(node, [])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_functions_stay_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_what_is_public_is_documented(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a file says in its first line what one does there"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


def test_folders_only_re_export():
    for path in SOURCE.rglob("*/__init__.py"):
        for node in ast.parse(path.read_text()).body:
            assert isinstance(node, (ast.Expr, ast.ImportFrom, ast.Assign)), path


def test_every_public_name_can_be_imported():
    import lightning_rl

    for name in lightning_rl.__all__:
        assert getattr(lightning_rl, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = lightning_rl.Nothing


def test_the_table_of_pairs_names_tests_that_are_there():
    tests = Path(__file__).parent
    table = (tests / "README.md").read_text().split("## Where features meet")[1]
    defined = "\n".join(path.read_text() for path in tests.rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)(?:\[[^]]*\])?`", table):
        assert f"def {name}(" in defined or name.endswith("_py"), name
    for file in re.findall(r"`(\w+/test_\w+\.py)`", table):
        assert (tests / file).is_file(), file
    grid, legend = table.split("| | test |")
    assert len(re.findall(r"^\| \*\*", grid, re.M)) == 9, "a row for each feature but the last"
    for code in set(re.findall(r"\b[A-Z]\d\b", grid)):
        assert re.search(rf"\b{code}\b", legend), code


PRIVATE = SOURCE / "torch_private.py"


def private_names():
    """What the one file imports of torch, by module."""
    for node in ast.walk(ast.parse(PRIVATE.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("torch"):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize(("module", "name"), sorted(private_names()))
def test_torch_has_what_is_used_of_its_private_parts(module, name):
    assert hasattr(import_module(module), name), (
        f"torch {torch.__version__} has no {module}.{name}, which {PRIVATE.name} imports"
    )


def test_torch_has_the_private_attributes_that_are_used():
    optimizer = torch.optim.SGD([torch.zeros(1)])
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        assert hasattr(optimizer, name), f"torch {torch.__version__}: Optimizer has no {name}"
    assert hasattr(torch.distributed.ProcessGroup, "_get_backend"), "ProcessGroup._get_backend"


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path != PRIVATE],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_private_parts_of_torch_are_imported_by_one_file_alone(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            assert "._" not in node.module, node.module
            assert "experimental" not in node.module, node.module
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            assert not re.match("_[a-z]", node.attr), f"torch.{node.attr}"
