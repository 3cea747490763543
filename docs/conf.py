"""The documentation as a Sphinx site. `make docs` builds it without network and executes none of the pages' code."""

import pathlib
import re
import tomllib
from importlib.metadata import files

from docutils import nodes
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
html_title = f"glax {VERSION}"
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
        signature = inspect.stringify_signature(inspect.signature(obj.__init__, bound_method=True))
    return tuple(None if text is None else with_parsable_defaults(text) for text in (signature, returns))


def with_parsable_defaults(signature: str) -> str:
    """Name the defaults that have no literal. Sphinx prints a signature that it cannot parse with the modules of all types."""
    for found, name in (
        (r"<function [\w.]*<lambda>[^>]*>|<factory>", "..."),
        (r"<function (?:\w+\.)*(\w+)[^>]*>", r"\1"),
        (r"<class '(?:\w+\.)*(\w+)'>", r"\1"),
        (r"jaxlib\._jax\.Array", "Array"),
    ):
        signature = re.sub(found, name, signature)
    return signature


# ---- what a browser breaks in the wrong place: glax.css has rules for these classes ----------------------------------


UNBROKEN = re.compile(r"((?<![\w/.-])\d{4}-\d\d-\d\d(?![\w-])|\b\d[\d.]*e-\d+\b|(?<![\w-])-(?:inf\b|\d[\d.e-]*))")
LONG = 75  # characters of a cell that needs a wide column


def with_marks_for_css(app, doctree, docname):
    """Mark dates, negative numbers, and formulas with the punctuation behind them as unbroken, and cells of much text as long."""
    for text in list(doctree.findall(nodes.Text)):
        parts = UNBROKEN.split(text.astext())
        if len(parts) > 1 and not isinstance(text.parent, nodes.literal | nodes.literal_block | nodes.math):
            marked = (unbroken(nodes.Text(x)) if i % 2 else nodes.Text(x) for i, x in enumerate(parts))
            text.parent.replace(text, [x for x in marked if x.astext()])
    for formula in list(doctree.findall(nodes.math)):
        behind = formula.next_node(descend=False, siblings=True)
        if isinstance(behind, nodes.Text) and (mark := re.match(r"[.,;:)]+", behind.astext())):
            rest = nodes.Text(behind.astext()[mark.end() :])
            formula.parent.replace(behind, rest)
            formula.replace_self(unbroken(formula.deepcopy(), nodes.Text(mark[0])))
    for cell in doctree.findall(nodes.entry):
        if len(cell.astext()) > LONG:
            cell["classes"].append("long")


def unbroken(*children: nodes.Node) -> nodes.inline:
    return nodes.inline("", "", *children, classes=["unbroken"])


def copy_mathjax(app, failure):
    """Copy the file that the pages load from the package that ships it."""
    (shipped,) = [path for path in files("django-static-mathjax") or () if path.match("static/mathjax/es5/tex-svg.js")]
    if failure is None:
        copy_asset(str(shipped.locate()), app.outdir / "_static" / "mathjax")


def setup(app):
    app.connect("build-finished", copy_mathjax)
    app.connect("autodoc-process-docstring", to_restructured_text)
    app.connect("autodoc-process-signature", with_short_names)
    app.connect("doctree-resolved", with_marks_for_css)
    return dict(parallel_read_safe=True)
