"""The house keeps its shape: imports go down, functions stay short, names are documented."""

import ast
import inspect
import re
import sys
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, VectorEnv, async_vector_env
from jsonargparse import set_parsing_settings
from jsonargparse._common import parsing_settings
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from lightning_rl.envs.gymnasium.workers import OF_GYMNASIUM
from lightning_rl.jsonargparse_private import parsing_settings_kept
from lightning_rl.lightning_private import OF_LIGHTNING, counter_of_steps, skip_signal_exchange
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
    "ray_cluster": 0,
    "runs": 0,
    "plain_yaml": 0,
    "permission": 0,
    "machine": 0,
    "torch_private": 0,
    "lightning_private": 0,
    "jsonargparse_private": 0,
    "tensorboard_private": 0,
    "distributed": 0,
    "rollout": 0,
    "sequences": 0,
    "structured_actions": 0,
    "functional": 0,
    "policies": 1,
    "envs": 2,
    "buffers": 2,
    "optim": 2,
    "collectors": 3,
    "evaluation": 3,
    "acting": 4,
    "offline": 3,
    "data": 4,
    "algorithms": 4,
    "callbacks": 5,
    "checking": 5,
    "reports": 6,
    "trainer": 6,
    "cli": 7,
    "export": 7,
    "loading": 7,
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
    assert sum(len((SOURCE / file).read_text().splitlines()) for file in named) <= 1800


def test_the_table_of_pairs_names_tests_that_are_there():
    tests = Path(__file__).parent
    table = (tests / "README.md").read_text().split("## Where features meet")[1]
    defined = "\n".join(path.read_text() for path in tests.rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)(?:\[[^]]*\])?`", table):
        assert f"def {name}(" in defined or name.endswith("_py"), name
    for file in re.findall(r"`(\w+/test_\w+\.py)`", table):
        assert (tests / file).is_file(), file
    grid, legend = table.split("| | test |")
    assert len(re.findall(r"^\| \*\*", grid, re.M)) == 12, "a row for each feature but the last"
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
    module = torch.nn.Module()
    owners = {
        optimizer: ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        torch.distributed.ProcessGroup: ("_get_backend",),
        torch.Tensor: ("_version",),
        module: ("_buffers", "_modules", "_non_persistent_buffers_set"),
        torch.ops.aten: ("_local_scalar_dense",),
    }
    for owner, names in owners.items():
        for name in names:
            assert hasattr(owner, name), f"torch {torch.__version__}: {owner} has no {name}"


PRIVATE_PARTS = {
    "torch_private.py": "torch",
    "lightning_private.py": "lightning",
    "jsonargparse_private.py": "jsonargparse",
    "tensorboard_private.py": "tensorboard",
    "envs/gymnasium/workers.py": "gymnasium",
    "envs/gymnasium/mujoco_bindings.py": "mujoco",
    "cli/help_pages.py": "argparse",
}
"""Of each dependency, the one file that may use what is private to it."""

OPEN = {
    "sys._current_frames": "Python documents both",
    "os._exit": "Python documents both",
    "constructed._construction": "the package's own, in the file that sets it",
}
"""Attributes that look private and may be read anywhere."""

FOR_SUBCLASSES = {
    "policies/wrapper.py": {"_save_to_state_dict", "_load_from_state_dict"},
    "cli/help_pages.py": {"_get_help_string", "_format_action_invocation"},
    "envs/gymnasium/workers.py": set(OF_GYMNASIUM),
}
"""What is private to a class of a dependency and used in one derived from it. torch documents its two."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_what_is_private_to_a_dependency_is_used_in_one_file(path):
    file = str(path.relative_to(SOURCE))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(re.match("_[a-zA-Z]", name) for name in names):
                assert node.module.split(".")[0] == PRIVATE_PARTS.get(file), ast.unparse(node)
            assert "experimental" not in names or file == "torch_private.py", ast.unparse(node)
        if isinstance(node, ast.Attribute) and re.match("_[a-zA-Z]", node.attr):
            owner = ast.unparse(node.value)
            allowed = owner in ("self", "cls", "super()") or ast.unparse(node) in OPEN
            allowed |= node.attr == "_replace"  # of a named tuple, which documents it
            assert allowed or file in PRIVATE_PARTS, ast.unparse(node)


def is_private(name):
    return re.match("_[a-zA-Z]", name)


def private_names_of(cls):
    """What a class has, or gives its instances, under a private name."""
    source = inspect.getsource(cls)
    return {name for name in (*vars(cls), *re.findall(r"self\.(_\w+)", source)) if name[1:2] != "_"}


def foreign_bases(cls):
    """Those that are written in Python by others, but for the most general."""
    for base in cls.__mro__:
        home = base.__module__.partition(".")[0]
        if home not in ("lightning_rl", "builtins", "abc", "typing", "enum", "collections"):
            yield base


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_class_uses_nothing_private_of_the_classes_of_others_that_it_derives_from(path):
    file = str(path.relative_to(SOURCE))
    if file.startswith("__") or file == "lightning_private.py":
        return
    module = import_module(module_of(path))
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            used = {
                one.attr
                for one in ast.walk(node)
                if isinstance(one, ast.Attribute)
                and is_private(one.attr)
                and ast.unparse(one.value) in ("self", "super()", "cls")
            }
            used |= {
                one.name
                for one in node.body
                if isinstance(one, ast.FunctionDef) and is_private(one.name)
            }
            for base in foreign_bases(getattr(module, node.name)):
                shared = used & private_names_of(base)
                assert shared <= FOR_SUBCLASSES.get(file, set()), f"{node.name}: {base.__name__}"


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path, names in OF_LIGHTNING.items() for name in names],
)
def test_lightning_has_the_private_attributes_that_are_used(path, name):
    """As its classes define them, or their constructors set them."""
    module, _, cls = path.rpartition(".")
    owner = getattr(import_module(module), cls)
    known = set().union(*(private_names_of(base) for base in owner.__mro__ if base is not object))
    public = set(re.findall(r"self\.(\w+)", inspect.getsource(owner)))
    assert name in known | public, f"lightning {version('lightning')}: {cls} has no {name}"


def test_lightning_counts_by_the_object_that_is_told_of_an_iteration():
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    trainer.strategy.connect(LightningModule())
    trainer.lightning_module.automatic_optimization = False
    counter_of_steps(trainer).increment_ready()
    counter_of_steps(trainer).increment_completed()
    assert trainer.global_step == 1


def test_lightning_asks_for_a_signal_by_the_method_that_is_put_off():
    """Where Lightning's loop calls another one, the exchange would take place all the same."""
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._broadcast_sigterm_tensor()" in source
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    skip_signal_exchange(trainer)
    assert trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor() is None


@pytest.mark.parametrize("name", [*OF_GYMNASIUM, "_async_worker"])
def test_gymnasium_has_the_private_attributes_that_are_used(name):
    known = private_names_of(AsyncVectorEnv) | private_names_of(VectorEnv)
    known |= set(vars(async_vector_env))
    assert name in known, f"gymnasium {version('gymnasium')} has no {name}"


def test_jsonargparse_takes_back_what_was_set():
    """By the object in which it keeps it; where that is another one, nothing would be taken back."""
    before = dict(parsing_settings)
    with parsing_settings_kept():
        set_parsing_settings(validate_defaults=not before["validate_defaults"])
        assert parsing_settings != before
    assert parsing_settings == before


@pytest.fixture
def mutations(monkeypatch):
    monkeypatch.syspath_prepend(SOURCE.parents[1] / "scripts")
    return import_module("mutations")


def test_every_defect_of_the_mutations_can_still_be_made(mutations):
    for mutation in mutations.MUTATIONS:
        broken = mutations.applied(mutation, (SOURCE / mutation.file).read_text())
        ast.parse(broken)
        for file in mutation.tests.split():
            assert (SOURCE.parents[1] / "tests" / file).is_file(), f"{mutation.defect}: {file}"
    defects = {mutation.defect for mutation in mutations.MUTATIONS}
    assert len(defects) == len(mutations.MUTATIONS) >= 40


def test_every_package_has_a_defect_among_the_mutations(mutations):
    found = {mutation.package for mutation in mutations.MUTATIONS}
    packages = {path.parent.relative_to(SOURCE).as_posix() for path in FILES} - {"."}
    assert packages <= found
