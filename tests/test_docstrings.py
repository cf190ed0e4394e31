"""Docstrings say shapes, errors and sources, and the API reference is built of all of them."""

import ast
import inspect
import re
from fnmatch import fnmatch
from functools import cache
from importlib import import_module
from inspect import cleandoc
from itertools import pairwise
from types import ModuleType

from lightning_rl import functional
from tests.test_architecture import FILES, MODULES, SOURCE, module_of, nodes, none, of_file, tree

DOCS = SOURCE.parents[1] / "docs"

INTERNAL = """
    *__init__.py __main__.py cli/* extend/* kwargs.py algorithms/check*s.py extensions/*command.py
    system/[!efms]* system/moved.py system/s[!h]* system/files.py checkpoints/[!bl]* compiled/[!cs]*
    compiled/cuda_graphs.py buffers/columns.py buffers/replay_files.py buffers/replay_sequences.py
    buffers/waiting.py buffers/ring_files.py buffers/transition_ring.py
    policies/description.py policies/acting.py policies/precision.py
    training/callbacks/computing.py training/callbacks/typed.py
    envs/chunk_wrapper.py envs/torch/counter_random.py envs/watch.py envs/hanging.py
    envs/gymnasium/[!ad]*
    extensions/sweeps/* extensions/videos/film.py extensions/simulators/simulator_events.py
    extensions/mujoco/locomotion.py extensions/mujoco/rendering.py extensions/mujoco/threads.py
    extensions/mujoco/warp.py extensions/managers/events.py extensions/managers/observations.py
    extensions/managers/outcome.py extensions/datasets/directory.py extensions/datasets/joining.py
    extensions/datasets/lerobot_format.py extensions/datasets/lerobot_reader.py
    extensions/datasets/episode_files.py extensions/datasets/pictures.py
    extensions/datasets/statistics.py extensions/datasets/tables.py
"""
"""Files of which the reference has no page. A file that is not among these has to be on one."""

PUBLIC = [
    path for path in FILES if not any(fnmatch(of_file(path), one) for one in INTERNAL.split())
]

TENSOR = re.compile(r"(Tensor|TensorDict|np\.ndarray)( \| None)?$")
SHAPE = re.compile(r"\[[^\]`']*\]")
HELPERS = {"require": "ConfigurationError"}
"""Functions that raise for their caller; of `check_range` any number out of range is refused."""

NOT_SAID = {"NotImplementedError", "StopIteration", "AssertionError"}


def is_public(name):
    return not name.startswith("_") or name == "__call__"


@cache
def functions():
    """List (file and name, function, docstring, whether it owes none) of all public functions."""
    return [
        (f"{of_file(path)}: {name}", *rest) for path in PUBLIC for name, *rest in _functions(path)
    ]


def _functions(path):
    """Yield (name, function, docstring, whether it owes none) of all that is public in a file.

    What overrides owes none, nor does a protocol, which says in one sentence what it is about.
    """
    module = import_module(module_of(path))
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef) and is_public(node.name):
            yield node.name, node, ast.get_docstring(node) or "", False
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            cls = getattr(module, node.name)
            # A mixin overrides methods of the other bases of its subclasses.
            bases = {base for kind in (cls, *cls.__subclasses__()) for base in kind.__mro__} - {cls}
            for method in node.body:
                if not isinstance(method, ast.FunctionDef):
                    continue
                name, text = f"{node.name}.{method.name}", ast.get_docstring(method) or ""
                if method.name in ("__init__", "__post_init__"):
                    yield node.name, method, ast.get_docstring(node) or "", False
                elif is_public(method.name):
                    inherited = any(method.name in vars(base) for base in bases)
                    yield name, method, text, inherited or getattr(cls, "_is_protocol", False)


def section(text, name):
    """The lines of a section of a docstring, or nothing."""
    found = re.search(rf"^{name}:\n((?:    .*(?:\n|$)|\n)*)", text, re.M)
    return found[1] if found else ""


def entries(text, name):
    """What a section says of each name."""
    said, names = {}, []
    for line in section(text, name).splitlines():
        if found := re.match(r"    (\*{0,2}\w+(?:, \w+)*): ?(.*)", line):
            names = [one.strip("* ") for one in found[1].split(",")]
            said |= dict.fromkeys(names, found[2])
        else:
            said |= {one: f"{said[one]} {line.strip()}" for one in names}
    return said


def without_shape(function, text):
    """Name the tensors, arguments or what is returned, of which a docstring gives no shape."""
    said, introduction = entries(text, "Args"), re.split(r"^(?:Args|Raises):$", text, flags=re.M)[0]
    arguments = function.args
    tensors = [
        argument.arg
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if argument.annotation and TENSOR.match(ast.unparse(argument.annotation))
    ]
    unnamed = [name for name in tensors if name not in said]
    yield from (name for name in tensors if name in said and not SHAPE.search(said[name]))
    yield from unnamed[len(SHAPE.findall(introduction)) :]
    if function.returns and ast.unparse(function.returns) == "Tensor" and not SHAPE.search(text):
        yield "what it returns"


def raised(node):
    """Name the exceptions that a function raises itself, and does not catch itself."""
    caught = set()
    if isinstance(node, ast.Try):
        handled = [handler.type for handler in node.handlers if handler.type]
        caught = {
            name.id for one in handled for name in ast.walk(one) if isinstance(name, ast.Name)
        }
        for child in node.body:
            yield from (name for name in raised(child) if name not in caught)
        rest = [*node.handlers, *node.orelse, *node.finalbody]
    else:
        rest = ast.iter_child_nodes(node)
    if isinstance(node, ast.Raise) and node.exc is not None:
        what = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        name = ast.unparse(what).split(".")[-1]
        if name[0].isupper() and name not in NOT_SAID:
            yield name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in HELPERS:
        yield HELPERS[node.func.id]
    for child in rest:
        if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield from raised(child)


def unsaid_errors(function, text):
    said = entries(text, "Raises")
    return sorted({name for one in function.body for name in raised(one)} - said.keys())


def test_each_tensor_has_its_shape():
    """An override has the shapes of what it overrides."""
    lacking = [
        f"{name}: {', '.join(missing)}"
        for name, function, text, overrides in functions()
        if not overrides and (missing := list(without_shape(function, text)))
    ]
    none(lacking, "no [shape] of these")


def test_what_is_raised_is_said():
    lacking = [
        f"{name}: {', '.join(missing)}"
        for name, function, text, overrides in functions()
        if (text or not overrides) and (missing := unsaid_errors(function, text))
    ]
    none(lacking, "no `Raises:` of these")


def arguments_of(node, cls):
    """The arguments of a function, or of the constructor of a class."""
    if cls is not None:
        return {*inspect.signature(cls.__init__).parameters}
    return {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}


def attributes_of(cls):
    """The names of a class, and those that its methods and its bases' methods assign."""
    names = {*dir(cls), *(name for base in cls.__mro__ for name in inspect.get_annotations(base))}
    for base in cls.__mro__:
        for node in nodes(MODULES[base.__module__]) if base.__module__ in MODULES else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Call) and "register_buffer" in ast.unparse(node.func):
                names.add(ast.unparse(node.args[0]).strip("'"))
    return names


def inherited_arguments(cls):
    """The arguments that the bases of a class document; the signature lists those of `kwargs`."""
    texts = [base.__doc__ for base in cls.__mro__[1:] if base.__doc__] if cls is not None else []
    return {"self", "kwargs", *(name for text in texts for name in entries(cleandoc(text), "Args"))}


def test_the_sections_of_arguments_and_attributes_are_those_of_the_code():
    offenders = []
    for path in FILES:
        for node in nodes(path):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or not ast.get_docstring(node):
                continue
            cls = getattr(import_module(module_of(path)), node.name, None)
            cls = cls if isinstance(node, ast.ClassDef) else None
            text, where = ast.get_docstring(node), f"{of_file(path)}: {node.name}"
            if section(text, "Args"):
                said, arguments = {*entries(text, "Args")}, arguments_of(node, cls)
                behind = inspect.signature(cls).parameters.keys() if cls is not None else set()
                surplus = said - arguments - behind
                offenders += [f"{where} has no argument {name}" for name in surplus]
                if cls is None or "__init__" in vars(cls):
                    lacking = arguments - said - inherited_arguments(cls) - {"cls"}
                    offenders += [f"{where} does not document {name}" for name in lacking]
            if section(text, "Attributes"):
                surplus = entries(text, "Attributes").keys() - attributes_of(cls)
                offenders += [f"{where} has no attribute {name}" for name in surplus]
    none(offenders)


def test_all_but_overrides_are_documented():
    none([name for name, _, text, overrides in functions() if not text and not overrides])


def constants_without_docstring(path):
    for node, after in pairwise([*tree(path).body, None]):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                yield from (ast.unparse(name) for name in names if is_public(ast.unparse(name)))


def test_constants_are_documented():
    """Else they are not in the reference, or should begin with an underscore."""
    found = [f"{of_file(p)}: {name}" for p in PUBLIC for name in constants_without_docstring(p)]
    none(found)


def names_in(package):
    """The names that a room hands on."""
    found = vars(package).items()
    return [name for name, value in found if name[0] != "_" and not isinstance(value, ModuleType)]


def test_functions_of_tensors_name_their_source():
    """By author and year."""
    year = re.compile(r"\b(19|20)\d\d\b")
    none([n for n in names_in(functional) if not year.search(getattr(functional, n).__doc__)])


def test_the_audit_finds_what_is_missing():
    source = '''
def bad(x: Tensor, y: Tensor | None, n: int) -> Tensor:
    """Do it to x [N].

    Args:
        x: values.
        y: more of
            them, [N].
    """
    require(n, "")
    try:
        raise KeyError(n)
    except KeyError:
        raise ValueError(n) from None
'''
    (function,) = ast.parse(source).body
    text = ast.get_docstring(function)
    assert list(without_shape(function, text)) == ["x"]
    assert unsaid_errors(function, text) == ["ConfigurationError", "ValueError"]
    text += "\n\nRaises:\n    ValueError: always.\n    ConfigurationError: for no n."
    assert unsaid_errors(function, text) == []


def defined_in(path):
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (ast.unparse(target) for target in node.targets)


def modules_in_the_reference():
    pages = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    return re.findall(r"^\.\. automodule:: (\S+)$", pages, re.M)


def test_every_public_name_is_in_the_reference():
    """By its module, whose names all are: a module that is added has to be put on a page."""
    listed = modules_in_the_reference()
    assert sorted(listed) == sorted(module_of(path) for path in PUBLIC)
    defined = {name for path in PUBLIC for name in defined_in(path)}
    for package in ("lightning_rl", *(module_of(p) for p in FILES if p.name == "__init__.py")):
        home = import_module(package)
        for name in getattr(home, "__all__", names_in(home)):
            assert name in defined, f"{package}.{name} is in no module of the reference"


def test_every_page_of_the_reference_is_in_its_list():
    pages = {page.stem for page in (DOCS / "api").glob("*.md")}
    index = (DOCS / "api" / "index.md").read_text()
    assert pages - {"index"} == set(index.split("maxdepth: 1\n")[1].split("```")[0].split())
