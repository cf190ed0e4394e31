"""Build the site: `sphinx-build -W docs build/docs`."""

import logging
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "lightning_rl"
version = release = metadata.version("lightning-rl")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "mathml",
    "source_links",
]
intersphinx_mapping: dict[str, tuple[str, None]] = {}  # built without a network
html_math_renderer = "mathml"
html_theme = "furo"
html_title = "lightning_rl"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
exclude_patterns: list[str] = []
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = True

# The API reference, `docs/api`: `_extensions/docstrings.py` reads docstrings, which are plain text.
extensions.append("docstrings")
default_role = "name"
add_module_names = False
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False  # an override without a docstring is its base's: see there
logging.disable(logging.DEBUG)  # of autodoc's 55,000 messages nobody sees one
autodoc_use_type_comments = False  # there are none, and to look takes a tenth of the time
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
napoleon_custom_sections = [("Reward terms", "params_style")]
# Types of others, whose inventories cannot be asked without a network. Our own have to resolve.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!lightning_rl\.).*"),
    (r"py:class", r".*\._\w+"),  # type variables
    (r"py:class", r"lightning_rl\.(system\.lightning_private\.Counter|compiled\.graphs\.Graphs)"),
    (r"py:class", r"lightning_rl\.system\.process\.Computing"),
]
