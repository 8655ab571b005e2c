"""What MkDocs cannot find under docs/: notebooks, the coverage table, and a page for each package.

The API pages name every public name of a package, read from its `__init__.py` without importing
it, so that a new name appears by itself. MkDocs takes this file as hooks, griffe as an extension.
"""

from __future__ import annotations

import ast
import re
from html import unescape
from pathlib import Path

import griffe
from latex2mathml.converter import convert
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

HERE = Path(__file__).parent
LIBRARY = HERE.parent / "unitscale"
PACKAGES = [
    "unitscale",
    *(f"unitscale.{p.parent.name}" for p in sorted(LIBRARY.glob("*/__init__.py"))),
]
COVERAGE = "scalify-coverage.md"


def public_names(package: str) -> list[str]:
    """Names that a package's `__init__.py` imports for users, not for other packages."""
    path = LIBRARY.parent.joinpath(*package.split(".")) / "__init__.py"
    for_users, _, _ = path.read_text("utf-8").partition("# For the other packages")
    imported = [
        alias.asname
        for node in ast.parse(for_users).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    return sorted((n for n in imported if n and not n.startswith("_")), key=str.lower)


def api_page(package: str) -> str:
    """The package's own docstring, then one entry for each of its names."""
    head = [f"# {package}", f"::: {package}", "    options:", "      members: false"]
    head += ["      show_root_heading: false", "      show_root_toc_entry: false"]
    return "\n".join([*head, "", *(f"::: {package}.{n}\n" for n in public_names(package))])


def on_config(config):
    pages = [{package: f"api/{package}.md"} for package in PACKAGES]
    for entry in config.nav:
        if "API reference" in entry:
            entry["API reference"] = pages
    return config


@event_priority(100)  # before mkdocs-jupyter, which turns notebooks into pages
def on_files(files, config):
    for path in [*sorted(HERE.glob("*.ipynb")), HERE / COVERAGE]:
        files.append(File(path.name, str(HERE), config.site_dir, config.use_directory_urls))
    for package in PACKAGES:
        files.append(File.generated(config, f"api/{package}.md", content=api_page(package)))
    return files


# Code as it is; else display and inline formulas, as Markdown pages and as notebooks have them.
FORMULA = re.compile(
    r"(?P<code><(pre|code|script|style)\b.*?</\2>|<div[^>]*clipboard-copy-txt.*?</div>)"
    r"|\\\[(?P<display>.+?)\\\]|\$\$(?P<shown>.+?)\$\$"
    r"|\\\((?P<inline>.+?)\\\)|\$(?P<word>[^$]+?)\$",
    re.DOTALL,
)


def mathml(match):
    """A TeX formula as MathML, which browsers draw without a script from elsewhere."""
    if match["code"]:
        return match["code"]
    display = match["display"] or match["shown"]
    tex = unescape(display or match["inline"] or match["word"])
    return convert(tex, display="block" if display else "inline")


def on_page_content(html, page, config, files):
    """Links between notebooks are links between files; on the site each is a folder."""
    if page.file.src_uri.endswith(".ipynb"):
        html = re.sub(r'href="(\w+)\.ipynb"', r'href="../\1/"', html)
    return FORMULA.sub(mathml, html)


class DoctestSections(griffe.Extension):
    """The house writes `Example:`; griffe shows doctests as code under `Examples:` only."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            value = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", value, flags=re.MULTILINE)
