"""The house keeps its shape: imports go down, functions stay short, names are documented."""

import ast
import inspect
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, VectorEnv, async_vector_env
from jsonargparse import set_parsing_settings
from jsonargparse._common import parsing_settings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

import lightning_rl.extend
from lightning_rl import SAC, ReplayBuffer
from lightning_rl.envs.gymnasium.workers import OF_GYMNASIUM
from lightning_rl.system.jsonargparse_private import parsing_settings_kept
from lightning_rl.system.lightning_private import (
    OF_LIGHTNING,
    counter_of_steps,
    omit_anonymous,
    skip_signal_exchange,
)
from tests.callbacks import callback
from tests.helpers import train
from tests.slow_cases import SLOW_CASES, is_slow

SOURCE = Path(__file__).parents[1] / "src" / "lightning_rl"
FILES = sorted(SOURCE.rglob("*.py"))

ROOMS = (
    "system functional",
    "rollout",
    "checkpoints",
    "policies",
    "envs optim",
    "buffers compiled",
    "collectors",
    "algorithms",
    "deploy training",
    "cli",
    "extensions",
)
"""Each room imports from rows above its own only, so that rooms form no circle."""

LEVELS = {room: level for level, row in enumerate(ROOMS) for room in row.split()}
OUTSIDE = ("__init__", "__main__", "extend", "kwargs")


def none(offenders, rule=""):
    """Assert that there are no offenders, and list all that there are."""
    offenders = list(offenders)
    assert not offenders, "\n".join([rule, *map(str, offenders)])


def of_file(path):
    return path.relative_to(SOURCE).as_posix()


@cache
def tree(path):
    return ast.parse(path.read_text())


@cache
def nodes(path):
    """All nodes of a file's syntax tree."""
    return list(ast.walk(tree(path)))


def module_of(path):
    parts = ("lightning_rl", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in (*SOURCE.glob("extend/[!_]*.pyi"), *FILES)}


def files_imported(path):
    """Yield the files behind the imports of a file, those for type checking and in functions too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (MODULES[name.name] for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            home = MODULES[node.module]
            for name in node.names:
                yield MODULES.get(f"{node.module}.{name.name}") or where_defined(home, name.name)


def where_defined(home, name):
    """The file of a name: that which a folder or a stub re-exports it from."""
    stub = home.with_suffix(".pyi")
    if stub.exists() or home.name == "__init__.py":
        for node in tree(stub if stub.exists() else home).body:
            names = {one.name for one in node.names} if isinstance(node, ast.ImportFrom) else ()
            if name in names and node.module in MODULES:
                return where_defined(MODULES[node.module], name)
    return home


def name_of(path):
    return path.relative_to(SOURCE).with_suffix("").as_posix()


def rooms_imported():
    """Yield (file, imported file) of each import from another room."""
    for path in FILES:
        for other in {name_of(imported) for imported in files_imported(path)}:
            here = name_of(path)
            rooms = here.split("/")[0], other.split("/")[0]
            if rooms[0] != rooms[1] and not {*rooms} & {*OUTSIDE}:
                yield here, other


def test_imports_only_go_down():
    """At the top of a file or inside functions; folders re-export what lies in them."""
    assert {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in FILES} == {
        *LEVELS,
        *OUTSIDE,
    }
    none(
        f"{here} imports {other}"
        for here, other in rooms_imported()
        if LEVELS[other.split("/")[0]] >= LEVELS[here.split("/")[0]]
    )


def extension_of(path):
    """The extension that a file belongs to; None for the core."""
    parts = path.relative_to(SOURCE).parts
    return parts[1] if parts[0] == "extensions" and len(parts) > 2 else None


def test_the_core_imports_no_extension():
    """It names them by import path: in the stubs, and in the tables of `system/extensions.py`."""
    none(
        f"{of_file(path)} imports {of_file(imported)}"
        for path in FILES
        if extension_of(path) is None
        for imported in files_imported(path)
        if imported.relative_to(SOURCE).parts[0] in ("extensions", "extend")
    )


TIERS = ("lightning_rl", "lightning_rl.functional", "lightning_rl.extend", "lightning_rl.kwargs")
MOST_NAMES_FOR_EXTENSIONS = 134


def test_extensions_import_the_core_by_its_public_names_alone():
    """So an outsider can write any of them."""
    none(
        f"{of_file(path)} imports {node.module}"
        for path in FILES
        if path.relative_to(SOURCE).parts[0] == "extensions"
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom)
        and f"{node.module}".startswith("lightning_rl.")
        and not node.module.startswith(("lightning_rl.extend.", "lightning_rl.extensions."))
        and node.module not in TIERS
    )


def test_each_name_for_extensions_is_used_by_two_or_explained():
    page = (SOURCE.parents[1] / "docs/extending.md").read_text()
    extensions_by_name = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (extension := extension_of(path)):
                for name in node.names:
                    full = f"{node.module}.{name.name}"
                    extensions_by_name.setdefault(full, set()).add(extension)
    roles = [import_module(f"lightning_rl.extend.{role}") for role in lightning_rl.extend.ROLES]
    names = [f"{role.__name__}.{name}" for role in roles for name in role.__all__]
    none(
        name
        for name in names
        if len(extensions_by_name.get(name, ())) < 2
        and f"`{name.rpartition('.')[2]}`" not in page
        and ".ranks." not in name
    )
    assert len(names) <= MOST_NAMES_FOR_EXTENSIONS
    for role in roles:
        for name in role.__all__:
            getattr(role, name)


def test_tests_of_the_core_import_no_extension():
    """Else `.ci/run` fails after all other tests: it runs them where there are no extensions."""
    none(
        f"{path.name} imports {name}"
        for path in sorted((Path(__file__).parent / "core").rglob("*.py"))
        for name in re.findall(
            r"^\s*(?:from|import) (lightning_rl\.extensions\S*|tests\.(?:cli|equivalence|faults|learning|"
            r"numerics|reports|security)\b\S*)",
            path.read_text(),
            re.M,
        )
    )


NEEDS = {
    "algorithms": "datasets vla",
    "checks": "videos",
    "datasets": "teleoperation vla wrappers",
    "export": "vla",
    "judging": "algorithms",
    "motions": "managers mujoco transfer",
    "mujoco": "managers tasks",
    "recap": "algorithms checks datasets",
    "robots": "teleoperation",
    "simulators": "managers",
    "sweeps": "reports",
    "tasks": "algorithms managers teleoperation",
    "transfer": "algorithms datasets managers mujoco",
}
"""Extensions that an extension imports: without one of these it does not work, either."""


def test_extensions_need_few_others_and_form_no_circle():
    graph = {}
    for path in FILES:
        if extension := extension_of(path):
            others = {extension_of(imported) for imported in files_imported(path)}
            graph.setdefault(extension, set()).update(others - {None, extension})
    assert graph == {name: set(NEEDS.get(name, "").split()) for name in graph}
    TopologicalSorter(graph).prepare()  # raises a CycleError, which names the extensions


def test_files_do_not_import_each_other_in_a_circle():
    """Nor for type checking: what needs each other belongs into one file."""
    graph = {}
    for path in FILES:
        if path.name != "__init__.py":
            graph[of_file(path)] = {of_file(other) for other in files_imported(path)} - {
                of_file(path)
            }
    TopologicalSorter(graph).prepare()  # raises a CycleError, which names the files


def test_functions_stay_short():
    long = [
        f"{of_file(path)}: {node.name}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60
    ]
    none(long)


def test_all_is_printed_by_tell():
    """A `print` fails once `| tee` has ended, and ends a run that could save itself."""
    apart = {"system/output.py", "__main__.py"}  # `tell` itself; what is printed before any import
    printing = {"print", "sys.stdout.write", "sys.stderr.write"}
    offenders = [
        f"{of_file(path)}:{node.lineno}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in printing
    ]
    none([one for one in offenders if one.split(":")[0] not in apart])


def test_no_docstring_only_refers():
    """An override needs none; one that says more says it in a sentence of its own."""
    referring = [
        f"{of_file(path)}: {node.name}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and re.match(r"See [`\w]+[^.;:,]*\.?$", ast.get_docstring(node) or "")
    ]
    none(referring)


def test_folders_only_re_export():
    allowed = (ast.Expr, ast.ImportFrom, ast.Assign)
    folders = SOURCE.rglob("*/__init__.py")
    bad = [p for p in folders if not all(isinstance(node, allowed) for node in tree(p).body)]
    none(bad)


def test_every_public_name_can_be_imported():
    import lightning_rl

    for name in lightning_rl.__all__:
        assert getattr(lightning_rl, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = lightning_rl.Nothing


READING_SET = re.compile(r"^\| `([\w/]+\.py)` \|", re.M)


def trace_iteration(run_dir, **settings):
    """Train eagerly, and list (file, function) of each call in the third iteration, callbacks apart."""
    entered = []

    def note(frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCE) and file.name != "__init__.py":
            entered.append((str(file.relative_to(SOURCE)), frame.f_code.co_name))

    def trace(trainer, *args):
        if trainer.global_step in (2, 3):
            sys.setprofile(note if trainer.global_step == 2 else None)

    quiet = {"logger": False, "enable_checkpointing": False, "limit_val_batches": 0}
    settings["model"] = {"compile": False, **settings["model"]}
    train(run_dir, trainer={"callbacks": [callback(on_train_batch_end=trace)], **quiet}, **settings)
    return [call for call in entered if not call[0].startswith("training/callbacks/")]


def assert_short(entered, most_files, most_lines):
    files = {file for file, _ in entered}
    assert len(files) <= most_files, sorted(files)
    lines = [line for file in files for line in (SOURCE / file).read_text().splitlines()]
    assert sum(not line.lstrip().startswith("#") for line in lines) <= most_lines


def test_an_iteration_of_sac_goes_through_few_files(tmp_path):
    data = {"replay": ReplayBuffer}
    model = {"algorithm": SAC, "updates_per_env_step": 0.1}
    entered = trace_iteration(tmp_path, env="Pendulum-v1", data=data, model=model)
    assert ("algorithms/sac.py", "alpha_loss") in entered
    assert_short(entered, 29, 7_833)


def test_a_minibatch_goes_through_the_files_that_readme_names(tmp_path):
    """One PPO iteration on CartPole: a reader has to open few files, in few jumps."""
    entered = trace_iteration(tmp_path, model={"n_epochs": 4, "batch_size": 16})
    assert_short(entered, 25, 6_744)

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


PRIVATE = SOURCE / "system/torch_private.py"


def test_torch_has_what_is_used_of_its_private_parts():
    missing = [
        f"{node.module}.{alias.name}"
        for node in nodes(PRIVATE)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("torch")
        for alias in node.names
        if not hasattr(import_module(node.module), alias.name)
    ]
    none(missing, f"torch {torch.__version__} lacks what {PRIVATE.name} imports")


def test_torch_has_the_private_attributes_that_are_used():
    optimizer = torch.optim.SGD([torch.zeros(1)])
    module = torch.nn.Module()
    owners = {
        optimizer: ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        torch.distributed.ProcessGroup: ("_get_backend",),
        torch.Tensor: ("_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
        module: (
            "_buffers",
            "_modules",
            "_non_persistent_buffers_set",
            "_forward_hooks",
            "_forward_pre_hooks",
        ),
        torch.ops.aten: ("_local_scalar_dense",),
    }
    for owner, names in owners.items():
        for name in names:
            assert hasattr(owner, name), f"torch {torch.__version__}: {owner} has no {name}"


PRIVATE_PARTS = {
    "system/torch_private.py": "torch",
    "system/lightning_private.py": "lightning",
    "system/jsonargparse_private.py": "jsonargparse",
    "system/tensorboard_private.py": "tensorboard",
    "envs/gymnasium/workers.py": "gymnasium",
    "envs/gymnasium/mujoco_bindings.py": "mujoco",
    "cli/help_pages.py": "argparse",
}
"""Of each dependency, the one file that may use what is private to it."""

FOR_SUBCLASSES = {
    "policies/wrapper.py": {"_save_to_state_dict", "_load_from_state_dict"},
    "cli/help_pages.py": {"_get_help_string", "_format_action_invocation"},
    "envs/gymnasium/workers.py": set(OF_GYMNASIUM),
    "extensions/fsdp/strategy.py": {"_data_parallel_size"},
}
"""What is private to a class of a dependency and used in one derived from it. torch documents its two."""


def private_uses(path):
    """Yield the private names that a file imports without being the one file for them.

    ruff's SLF001 finds private attributes; pyproject.toml lists the same files.
    """
    file = of_file(path)
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            private = any(re.match("_[a-zA-Z]", name) for name in names)
            if private and node.module.split(".")[0] != PRIVATE_PARTS.get(file):
                yield f"{file}: {ast.unparse(node)}"
            if "experimental" in names and file != "system/torch_private.py":
                yield f"{file}: {ast.unparse(node)}"


def test_what_is_private_to_a_dependency_is_used_in_one_file():
    none([use for path in FILES for use in private_uses(path)])


def is_private(name):
    return re.match("_[a-zA-Z]", name)


@cache
def private_names_of(cls):
    """What a class has, or gives its instances, under a private name."""
    source = inspect.getsource(cls)
    return {name for name in (*vars(cls), *re.findall(r"self\.(_\w+)", source)) if name[1:2] != "_"}


def foreign_bases(cls):
    """Those that are written in Python by others, but for the most general."""
    for base in cls.__mro__:
        home = base.__module__.partition(".")[0]
        general = home in ("lightning_rl", "builtins", "abc", "typing", "enum", "collections")
        if not general and base.__module__ != "torch._C":
            yield base


def private_members_used(node):
    """The private attributes of itself that a class uses, and the private methods it defines."""
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and is_private(one.attr):
            if ast.unparse(one.value) in ("self", "super()", "cls"):
                yield one.attr
        elif one in node.body and isinstance(one, ast.FunctionDef) and is_private(one.name):
            yield one.name


def test_a_class_uses_nothing_private_of_the_classes_of_others_that_it_derives_from():
    offenders = []
    for path in FILES:
        file = of_file(path)
        if file.startswith("__") or file == "system/lightning_private.py":
            continue
        module = import_module(module_of(path))
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                used = set(private_members_used(node)) - FOR_SUBCLASSES.get(file, set())
                for base in foreign_bases(getattr(module, node.name)):
                    shared = used & private_names_of(base)
                    offenders += [f"{file}: {node.name}: {base.__name__}.{one}" for one in shared]
    none(offenders)


def test_lightning_has_the_private_attributes_that_are_used():
    """As its classes define them, or their constructors set them."""
    missing = []
    for path, names in OF_LIGHTNING.items():
        module, _, cls = path.rpartition(".")
        owner = getattr(import_module(module), cls)
        known = set(re.findall(r"self\.(\w+)", inspect.getsource(owner)))
        known |= {name for base in owner.__mro__[:-1] for name in private_names_of(base)}
        missing += [f"{cls}.{name}" for name in names if name not in known]
    none(missing, f"lightning {version('lightning')}")


def test_lightning_counts_by_the_object_that_is_told_of_an_iteration():
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    trainer.strategy.connect(LightningModule())
    trainer.lightning_module.automatic_optimization = False
    counter_of_steps(trainer).increment_ready()
    counter_of_steps(trainer).increment_completed()
    assert trainer.global_step == 1


def test_wandb_gets_no_setting_that_it_warns_of():
    logger = object.__new__(WandbLogger)  # its constructor needs wandb
    logger._wandb_init = {"anonymous": None, "project": "arms"}
    omit_anonymous(logger)
    assert logger._wandb_init == {"project": "arms"}


def test_lightning_asks_for_a_signal_by_the_method_that_is_put_off():
    """Where Lightning's loop calls another one, the exchange would take place all the same."""
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._broadcast_sigterm_tensor()" in source
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    skip_signal_exchange(trainer)
    assert trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor() is None


def test_gymnasium_has_the_private_attributes_that_are_used():
    known = private_names_of(AsyncVectorEnv) | private_names_of(VectorEnv)
    known |= set(vars(async_vector_env))
    assert {*OF_GYMNASIUM, "_async_worker"} <= known, f"gymnasium {version('gymnasium')}"


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
    packages = {path.parent.relative_to(SOURCE).as_posix() for path in FILES} - {
        ".",
        "extend",
        "extensions",
    }
    assert packages <= found


def test_the_slow_cases_and_the_quick_ones_that_protect_the_same_are_there():
    offenders = []
    for slow, protector in SLOW_CASES.items():
        file, _, test = slow.partition("::")
        quick = slow.split("[")[0] + protector if protector.startswith("[") else protector
        quick = quick if "::" in quick else f"{file}::{quick}"
        for name in (slow, quick):
            home, _, function = name.split("[")[0].partition("::")
            if f"def {function}(" not in (SOURCE.parents[1] / "tests" / home).read_text():
                offenders.append(name)
        if is_slow(quick):
            offenders.append(f"{quick} is slow too")
        if "[" not in test and parametrised(SOURCE.parents[1] / "tests" / file, test):
            offenders.append(f"{slow} has cases, and none of them is named")
    none(offenders)


def parametrised(path, function):
    (found,) = (
        node
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    return any("parametrize" in ast.unparse(one) for one in found.decorator_list)


SHELF = "algorithms arms callbacks envs goal_envs persons policies probes remote variants"
"""Files of fakes that several tests share; see tests/README.md."""

MOST_HELPER_CLASSES = 150


def test_fakes_are_made_of_those_on_the_shelf():
    tests = Path(__file__).parent
    classes = [
        f"{path.relative_to(tests)}: {node.name}"
        for path in sorted(tests.rglob("*.py"))
        if path.relative_to(tests).with_suffix("").as_posix() not in SHELF.split()
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    ]
    rule = f"{len(classes)} classes stand beside tests, of at most {MOST_HELPER_CLASSES}: use the shelf"
    none(classes if len(classes) > MOST_HELPER_CLASSES else [], rule)


SENTENCE = re.compile(r"(?:\b[a-z]+ ){3}[a-z]+\b")
"""Four words of a sentence; the names of a list have commas between them."""

ASSERTED = re.compile(r"\b(str\(|err|error|stderr|caplog|readouterr|message|refus\w+|warned)\b")
WHOLE_MESSAGES = {"reports/test_messages.py", "reports/test_faulty_settings.py"}


def asserted_messages(tree):
    """Yield the texts that a test file expects in errors, warnings and what was printed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            names = [
                *node.args[1:],
                *(k.value for k in node.keywords if k.arg in ("match", "names")),
            ]
            if name in ("pytest.raises", "pytest.warns", "refused", "assert_names"):
                yield from ((text, node) for argument in names for text in ast.walk(argument))
            elif name.endswith((".startswith", ".endswith")) and ASSERTED.search(name):
                yield from ((text, node) for argument in node.args for text in ast.walk(argument))
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.Eq):
            sides = [node.left, *node.comparators]
            if any(ASSERTED.search(ast.unparse(side)) for side in sides):
                yield from ((side, node) for side in sides)
                yield from ((text, node) for side in sides for text in getattr(side, "values", ()))


def test_messages_are_asserted_by_what_they_name():
    """Rewording a message breaks one test at most: tests/messages.py."""
    offenders = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        place = path.relative_to(Path(__file__).parent).as_posix()
        source = path.read_text() if place not in WHOLE_MESSAGES else ""
        offenders += [
            f"{place}:{node.lineno} {text.value}"
            for text, node in asserted_messages(ast.parse(source))
            if isinstance(text, ast.Constant) and isinstance(text.value, str)
            # A text that stands twice in the file is what the test itself raises.
            if SENTENCE.search(text.value) and source.count(text.value) < 2
        ]
    none(offenders, "Assert what a message names, not its sentence:")
