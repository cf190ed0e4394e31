"""The house keeps its shape: imports go down, functions stay short, names are documented."""

import ast
import re
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from tests.helpers import train

SOURCE = Path(__file__).parents[1] / "src" / "lightning_rl"
FILES = sorted(SOURCE.rglob("*.py"))

LEVELS = {
    "errors": 0,
    "construction": 0,
    "checkpoint_format": 0,
    "files": 0,
    "phases": 0,
    "process": 0,
    "registration": 0,
    "runs": 0,
    "permission": 0,
    "machine": 0,
    "torch_private": 0,
    "distributed": 0,
    "rollout": 0,
    "functional": 0,
    "policies": 1,
    "envs": 2,
    "buffers": 2,
    "optim": 2,
    "collectors": 3,
    "evaluation": 3,
    "offline": 3,
    "data": 4,
    "algorithms": 4,
    "callbacks": 5,
    "trainer": 6,
    "cli": 7,
    "loading": 8,
    "__main__": 8,
    "__init__": 8,
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


def module_of(path):
    parts = ("lightning_rl", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def files_imported(path):
    """Yield the files behind the imports of a file, those for type checking and in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (MODULES[name.name] for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            home = MODULES[node.module]
            for name in node.names:
                yield MODULES.get(f"{node.module}.{name.name}") or where_defined(home, name.name)


def where_defined(home, name):
    """The file of a name: that which a folder re-exports it from."""
    if home.name == "__init__.py" and home.parent != SOURCE:
        for node in ast.parse(home.read_text()).body:
            if isinstance(node, ast.ImportFrom) and name in {one.name for one in node.names}:
                return where_defined(MODULES[node.module], name)
    return home


def test_files_do_not_import_each_other_in_a_circle():
    """Nor for type checking: what needs each other belongs into one file."""
    graph = {}
    for path in FILES:
        if path.name != "__init__.py":
            file = str(path.relative_to(SOURCE))
            upward = {SOURCE / f"{other}.py" for one, other in UPWARD if one == file}
            graph[path] = set(files_imported(path)) - upward - {path}
    done = set()

    def visit(path, trail):
        names = [str(one.relative_to(SOURCE)) for one in (*trail, path)]
        assert path not in trail, " -> ".join(names)
        if path not in done:
            for following in graph.get(path, ()):
                visit(following, [*trail, path])
            done.add(path)

    for path in graph:
        visit(path, [])


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


def test_no_docstring_only_refers():
    """An override needs none; one that says more says it in a sentence of its own."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = ast.get_docstring(node) or ""
                assert not re.match(r"See [`\w]+[^.;:,]*\.?$", text), f"{path.name}: {node.name}"


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


READING_SET = re.compile(r"^\| `([\w/]+\.py)` \|", re.M)

LOOKED_UP = re.compile(
    r"^( *)(?:Args|Attributes|Raises|Returns):\n(?:(?:\1 +.*)?\n)*?(?=\1\S)", re.M
)
"""Sections of docstrings, which the API reference is made of: one who reads skips them."""


def lines_to_read(file):
    return len(LOOKED_UP.sub("", (SOURCE / file).read_text()).splitlines())


def test_a_minibatch_goes_through_the_files_that_readme_names(tmp_path):
    """Traced: one eager PPO iteration on CartPole, of which a reader has to open few files, in few jumps."""
    entered = []

    def note(frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCE) and file.name != "__init__.py":
            entered.append((str(file.relative_to(SOURCE)), frame.f_code.co_name))

    class Tracer(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step in (2, 3):
                sys.setprofile(note if trainer.global_step == 2 else None)

    model = {"n_epochs": 4, "batch_size": 16, "compile": False}
    quiet = {"logger": False, "enable_checkpointing": False, "limit_val_batches": 0}
    train(tmp_path, model=model, trainer={"callbacks": [Tracer()], **quiet})
    files = [file for file, _ in entered if not file.startswith("callbacks/")]
    assert len(set(files)) <= 26, sorted(set(files))

    losses = [i for i, call in enumerate(entered) if call == ("algorithms/ppo.py", "loss")]
    minibatch = [file for file, _ in entered[losses[4] : losses[5]]]
    assert sum(one != other for one, other in pairwise(minibatch)) <= 12
    named = READING_SET.findall((SOURCE.parents[1] / "README.md").read_text())
    assert set(minibatch) <= set(named)
    assert len(named) <= 10
    assert sum(map(lines_to_read, named)) <= 1660


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
