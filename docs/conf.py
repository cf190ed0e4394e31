"""Build the site: `sphinx-build -W docs build/docs`."""

from importlib import metadata

project = "lightning_rl"
version = release = metadata.version("lightning-rl")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
]
intersphinx_mapping: dict[str, tuple[str, None]] = {}  # built without a network
html_theme = "furo"
html_title = "lightning_rl"
exclude_patterns: list[str] = []
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3
napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = True
