"""How the pages are built: Sphinx reads Markdown through MyST; `make docs` treats a warning as an error."""

import tomllib
from pathlib import Path

_PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

project = _PROJECT["name"]
author = "The flowrl authors"
copyright = "2026, The flowrl authors"
release = version = _PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3  # [a link](page.md#a-heading) works down to ###

highlight_language = "none"  # a block without a language is drawn as it is
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["flowrl.css"]
html_title = f"flowrl {version}"
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # of a signature; the text says what a parameter is
napoleon_numpy_docstring = False
