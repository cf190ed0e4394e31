"""Link a page to lines of the source, by names that a build looks up.

    {src}`lightning_rl.functional.gae`                    to a module, class, function or method
    {src}`PPO.loss <lightning_rl.PPO.loss>`               under another title
    {src}`lightning_rl.PPO.loss#clip_value_loss`          to the first line of it that holds a text

A name or a text that is gone is a warning, which ends a build with `-W`: no link goes to a line
that says something else by now. Each entry of the API reference has such a link, too. The source of
each module that is linked to becomes a page.
"""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.docutils import ReferenceRole
from sphinx.util.typing import ExtensionMetadata

logger = logging.getLogger(__name__)

FOLDER = "_code"
"""Where the pages of source lie in the site."""

HAVE_SOURCE = ("class", "exception", "function", "method", "property")
"""The kinds of entries of the API reference that a link to the source is given."""


class SourceRole(ReferenceRole):
    """The role `src`: its target is an object of the package, and may name a text in it."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Make the link, or warn."""
        name, _, text = self.target.partition("#")
        title = self.title if self.has_explicit_title else name.removeprefix("lightning_rl.")
        names_it = name.endswith(title) or title.endswith(".py")
        shown = nodes.literal(title, title) if names_it else nodes.inline(title, title)
        try:
            module, line = find(name, text)
        except LookupError as error:
            logger.warning("src: %s", error, location=self.get_location())
            return [shown], []
        return [link_to(self.env, module, line, shown)], []


def link_to(env: BuildEnvironment, module: ModuleType, line: int, shown: nodes.Node) -> nodes.Node:
    """Return a link of the page that is read, to a line of the source of a module."""
    depth = env.current_document.docname.count("/")
    page = f"{'../' * depth}{FOLDER}/{module.__name__.replace('.', '/')}.html"
    linked_modules(env).add(module.__name__)
    env.note_dependency(inspect.getfile(module))  # or a later build keeps old lines
    return nodes.reference("", "", shown, internal=True, refuri=f"{page}#L-{line}")


def link_entries(app: Sphinx, doctree: nodes.document) -> None:
    """Link each class, function, method and property of the API reference to its source."""
    for signature in doctree.findall(addnodes.desc_signature):
        if signature.parent["objtype"] in HAVE_SOURCE:
            module, line = find(f"{signature['module']}.{signature['fullname']}")
            shown = nodes.inline("", "[source]", classes=["viewcode-link"])
            signature += link_to(app.env, module, line, shown)


def find(name: str, text: str = "") -> tuple[ModuleType, int]:
    """Return the module of an object and the line where it begins, or where a text in it stands.

    Args:
        name: a dotted path that begins with a module.
        text: part of a line of its source; empty for its beginning.

    Raises:
        LookupError: where there is no such object, or no such text in it.
    """
    found: Any = None
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = inspect.getattr_static(found, part, None) or getattr(found, part, None)
        break
    if found is None:
        raise LookupError(f"there is no {name}")
    inner = (getattr(found, name, None) for name in ("fget", "__func__", "func"))
    found = next(filter(None, inner), found)  # of a property, a class's method, a cached property
    module = found if inspect.ismodule(found) else inspect.getmodule(found)
    if module is None:
        raise LookupError(f"{name} is a value, which has no source: name what it stands in")
    if not text and inspect.isfunction(found):  # which need not be read for it
        return module, inspect.unwrap(found).__code__.co_firstlineno
    if not text and inspect.isclass(found):  # as autodoc has read it: inspect parses the file again
        return module, ModuleAnalyzer.for_module(module.__name__).find_tags()[found.__qualname__][1]
    lines, first = inspect.getsourcelines(found)
    if not text:
        return module, max(first, 1)
    for number, line in enumerate(lines):
        if text in line:
            return module, max(first, 1) + number
    raise LookupError(f"{name} has no line with '{text}'")


def linked_modules(env: Any) -> set[str]:
    """Return the names of the modules that pages link to, which the environment keeps."""
    if not hasattr(env, "linked_modules"):
        env.linked_modules = set()
    modules: set[str] = env.linked_modules
    return modules


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for each module that is linked to: its source, a number at each line.

    It has no tree of all other pages beside it: to make one takes longer than the page.
    """
    highlighter = app.builder.highlighter  # type: ignore[attr-defined]
    for name in sorted(linked_modules(app.env)):
        source = Path(inspect.getfile(importlib.import_module(name))).read_text()
        code = highlighter.highlight_block(
            source, "python", linenos="inline", lineanchors="L", anchorlinenos=True
        )
        title = f"Source of {name}"
        body = f"<h1>{title}</h1>\n{code}"
        context = {"title": title, "body": body, "toctree": lambda **_: ""}
        yield f"{FOLDER}/{name.replace('.', '/')}", context, "page.html"


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the role, and the pages of source."""
    app.add_role("src", SourceRole())
    app.connect("doctree-read", link_entries)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
