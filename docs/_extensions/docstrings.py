"""Have Sphinx read the docstrings of this package as they are written.

They are plain text: `name` is code, and a link where there is such a name; an indented paragraph
is a formula; a star or a bar means itself.
"""

import re
from importlib import import_module
from types import BuiltinMethodType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain, PyXRefRole
from sphinx.errors import PycodeError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import inspect
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

import lightning_rl
from lightning_rl.system.construction import Configurable, NamedSettings
from lightning_rl.system.hooks import ChecksHooks

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Reward terms):$")
HIDDEN = (Configurable, NamedSettings, ChecksHooks)
ATTRIBUTES = ("attribute", "data", "property")
KEPT: dict[str, list[str]] = {}
BY_LAST_PART: dict[Any, dict[str, list[str]]] = {}
NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*(\(\))?")


def setup(app: Sphinx) -> dict[str, Any]:
    """Add what `docs/conf.py` names."""
    app.add_domain(Domain, override=True)
    app.add_role("name", name_role)
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", keep_attribute, priority=600)
    app.connect("autodoc-process-signature", constructor_signature)
    app.connect("autodoc-skip-member", leave_out)
    app.connect("autodoc-process-bases", leave_out_bases)
    app.connect("missing-reference", find_name)
    ModuleAnalyzer.for_module = staticmethod(analyse_ours)
    return {"parallel_read_safe": True}


def analyse_ours(name: str, analyse: Any = ModuleAnalyzer.for_module) -> ModuleAnalyzer:
    """Refuse the source of others, of which nothing is shown: it is longer than ours."""
    if name.split(".")[0] != "lightning_rl":
        raise PycodeError(f"{name} is of others")
    analyser: ModuleAnalyzer = analyse(name)
    return analyser


class Domain(PythonDomain):
    """Look up a name only if an object ends with it: Sphinx compares it with all objects."""

    def find_obj(
        self,
        env: Any,
        modname: str | None,
        classname: str | None,
        name: str,
        type: str | None,
        searchmode: int = 0,
    ) -> list[tuple[str, Any]]:
        if not _ending_as(self, name.removesuffix("()")):
            return []
        return super().find_obj(env, modname, classname, name, type, searchmode)


def read_docstring(
    app: Sphinx, kind: str, name: str, what: object, options: object, lines: list[str]
) -> None:
    """Turn plain text into reStructuredText, and say where a name is imported from."""
    lines[:] = _one_by_one(lines)
    sections = next((i for i, line in enumerate(lines) if SECTION.match(line)), len(lines))
    text: list[str] = []
    formula = False
    for i, line in enumerate(lines):
        if i < sections and line.startswith("    ") and not lines[i - 1].strip() and not formula:
            above = next(earlier for earlier in reversed(lines[:i]) if earlier.strip())
            if not above.startswith(("- ", "  ")):
                formula = True
                text += [".. code-block:: text", ""]
        if line.strip() and not line.startswith("    "):
            formula = False
        text.append(line if formula else _escaped(line))
    if kind in ("class", "function", "exception"):
        text[1:1] = ["", f"``from {_imported_from(name)} import {name.split('.')[-1]}``"]
    elif kind in ATTRIBUTES:
        KEPT[name], text = text, [""]
    lines[:] = text


def keep_attribute(
    app: Sphinx, kind: str, name: str, what: object, options: object, lines: list[str]
) -> None:
    """Take up an attribute's docstring: napoleon would take what is before a colon for a type."""
    if kind in ATTRIBUTES:
        lines[:] = KEPT.pop(name)


def constructor_signature(
    app: Sphinx,
    kind: str,
    name: str,
    what: Any,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Give a class the signature of its `__init__`, where `Configurable` has a `__new__`."""
    if kind == "class" and issubclass(what, Configurable):
        own = inspect.signature(what.__init__, bound_method=True)
        signature = inspect.stringify_signature(own, show_annotation=False)
    return signature, returns


def _one_by_one(lines: list[str]) -> list[str]:
    """Give each of `a, b: both of them` an entry of its own."""
    result: list[str] = []
    i = 0
    while i < len(lines):
        together = re.match(r"    (\w+(?:, \w+)+): ?(.*)", lines[i])
        end = i + 1
        while together and end < len(lines) and lines[end].startswith("        "):
            end += 1
        if together is None:
            result.append(lines[i])
        else:
            for name in together[1].split(", "):
                result += [f"    {name}: {together[2]}", *lines[i + 1 : end]]
        i = end
    return result


def _escaped(line: str) -> str:
    """Escape what means something in reStructuredText, outside of `code`."""
    line = re.sub(r"^(    \w+: \w{1,2})\.", r"\1\\.", line)  # else "N." begins a list
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(
        part if i % 2 else re.sub(r"(\*|\||(?<=\w)_(?!\w))", r"\\\1", part)
        for i, part in enumerate(parts)
    )


def _imported_from(name: str) -> str:
    """Return the shortest module that a name is imported from."""
    *path, last = name.split(".")
    for depth in range(1, len(path)):
        home = ".".join(path[:depth])
        module = import_module(home)
        if last in getattr(module, "__all__", vars(module)):
            return home
    return ".".join(path)


def leave_out(
    app: Sphinx, kind: str, name: str, what: object, skip: bool, options: object
) -> bool | None:
    """Leave out bound methods that a module has imported: they do not know where they are from."""
    return True if isinstance(what, BuiltinMethodType) else None


def leave_out_bases(
    app: Sphinx, name: str, what: object, options: object, bases: list[type]
) -> None:
    """Leave out bases that nobody else subclasses."""
    bases[:] = [
        base for base in bases if base not in HIDDEN and not base.__name__.startswith("_")
    ] or [object]


def name_role(
    role: str,
    rawtext: str,
    text: str,
    lineno: int,
    inliner: Any,
    options: Any = None,
    content: Any = (),
):
    """Set `text` as code, with a link where it is a name of the package."""
    if NAME.fullmatch(text):
        return PyXRefRole(warn_dangling=False)("py:obj", rawtext, text, lineno, inliner)
    return [nodes.literal(rawtext, text)], []


def find_name(app: Sphinx, env: Any, node: Any, content: nodes.Element) -> nodes.Element | None:
    """Find what a docstring names without its module, if there is one such; else link nothing."""
    if node.get("refdomain") != "py" or node["reftype"] != "obj":
        return None
    target, domain = node["reftarget"], env.domains["py"]
    found = [name for name in _ending_as(domain, target) if name.endswith(f".{target}")]
    if len(found) != 1 or (target.islower() and "." not in target):
        return content
    entry = domain.objects[found[0]]
    return make_refnode(
        app.builder, node["refdoc"], entry.docname, entry.node_id, content, found[0]
    )


def _ending_as(domain: Any, target: str) -> list[str]:
    """Return the names of objects that have the last part of a name; all are known by then."""
    if domain not in BY_LAST_PART:
        names: dict[str, list[str]] = {}
        for name in domain.objects:
            names.setdefault(name.rpartition(".")[2], []).append(name)
        BY_LAST_PART[domain] = names
    return BY_LAST_PART[domain].get(target.rpartition(".")[2], [])


class PublicNames(SphinxDirective):
    """List what `lightning_rl` exports, each with the first line of its docstring."""

    def run(self) -> list[nodes.Node]:
        names = sorted(lightning_rl.__all__, key=str.lower)
        lines = []
        for name in names:
            public = getattr(lightning_rl, name)
            first = (public.__doc__ or "").splitlines()[0]
            lines += [f":py:obj:`~{public.__module__}.{name}`", f"    {_escaped(first)}"]
        return self.parse_text_to_nodes("\n".join(lines))
