"""The documentation as a Sphinx site. `make docs` builds it without network and executes none of the pages' code."""

import pathlib
import re
import tomllib
from importlib.metadata import files

from sphinx.util import inspect
from sphinx.util.fileutil import copy_asset

ROOT = pathlib.Path(__file__).parent.parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "glax" / "_version.py").read_text())[1]

project = "glax"
author = "The glax authors"
copyright = author
release = version = VERSION
license_name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
nitpicky = True
# Only names of glax itself are references that must resolve: annotations also name classes of other packages.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!glax).*"),
    (r"py:.*", r"glax\._src.*"),
    (r"py:class", r"glax\.(models|nn)\.\w+\..*"),
]

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
myst_all_links_external = False

html_theme = "sphinx_book_theme"
html_title = "glax"
html_logo = "_static/logo.svg"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["glax.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = dict(
    show_toc_level=2,
    use_download_button=False,
    use_fullscreen_button=False,
    # One way to search: the field in the sidebar, without the theme's second one in a bar above it.
    navbar_persistent=[],
)

# Formulas by a copy of MathJax on the site itself. Its SVG output needs no fonts, so one file is all.
MATHJAX = "mathjax/tex-svg.js"
mathjax_path = MATHJAX
mathjax3_config = dict(svg=dict(mtextInheritFont=True), options=dict(enableMenu=False))

copybutton_prompt_text = ">>> |\\.\\.\\. "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100


# ---- docstrings: paragraphs of plain text, with formulas and tables indented -----------------------------------------


ENTRY = re.compile(r"([a-z_]+(?:, [a-z_]+)*):\s+(\S.*)")


def to_restructured_text(app, what, name, obj, options, lines):
    """Turn a docstring into reStructuredText: paragraphs, lists of arguments, and indented formulas as literal blocks."""
    converted: list[str] = []
    for paragraph in paragraphs(lines):
        entries = [line for line in paragraph if ENTRY.match(line)]
        if paragraph[0].startswith(">>>"):
            converted += paragraph  # an example, which reStructuredText shows as code
        else:
            converted += list_of(paragraph) if len(entries) > 1 and ENTRY.match(paragraph[0]) else text_of(paragraph)
        converted.append("")
    lines[:] = converted


def paragraphs(lines: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        else:
            found.append([])
    return [paragraph for paragraph in found if paragraph]


def list_of(paragraph: list[str]) -> list[str]:
    """Items of a list, one for each "name: meaning"; an indented line goes on with the item before."""
    found: list[str] = []
    for line in paragraph:
        if match := ENTRY.match(line):
            found.append(f"* ``{match[1]}``: {escape(match[2])}")
        else:
            found.append(f"  {escape(line.strip())}")
    return ["", *found]


def text_of(paragraph: list[str]) -> list[str]:
    """Lines of text, and a literal block for each run of indented lines."""
    found: list[str] = []
    in_block = False
    for line in paragraph:
        if indented := line.startswith("  "):
            found += [] if in_block else ["", ".. code-block:: text", ""]
            found.append(f"   {line}")
        else:
            found += [""] if in_block else []
            found.append(escape(line))
        in_block = indented
    return found


def escape(line: str) -> str:
    """Escape what reStructuredText would read as markup, outside of `code`."""
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(f"`{x}`" if x.startswith("`") else re.sub(r"([*|_\\])", r"\\\1", x) for x in parts)


def with_short_names(app, what, name, obj, options, signature, returns):
    """Write Array for the class that jaxtyping's annotations name by its private module, and the arguments of `__init__` for
    those of the metaclass of Flax's modules."""
    if what == "class" and signature == "(*args: Any, **kwargs: Any)":
        of_init = inspect.signature(obj.__init__, bound_method=True)
        # A default that is a function has no literal; its name can be parsed.
        signature = re.sub(r"<function (\w+)[^>]*>", r"\1", inspect.stringify_signature(of_init))
    return tuple(None if text is None else text.replace("jaxlib._jax.Array", "Array") for text in (signature, returns))


def copy_mathjax(app, failure):
    """Copy the file that the pages load from the package that ships it."""
    (shipped,) = [path for path in files("django-static-mathjax") or () if path.match("static/mathjax/es5/tex-svg.js")]
    if failure is None:
        copy_asset(str(shipped.locate()), app.outdir / "_static" / "mathjax")


def setup(app):
    app.connect("build-finished", copy_mathjax)
    app.connect("autodoc-process-docstring", to_restructured_text)
    app.connect("autodoc-process-signature", with_short_names)
    return dict(parallel_read_safe=True)
