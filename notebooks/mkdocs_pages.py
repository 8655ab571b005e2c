"""What MkDocs cannot find under docs/: notebooks, the coverage table, and a page for each package.

The API pages name every public name of a package, in the order and the groups of its `__init__.py`:
a comment on the first line of an import, such as `# Layers`, starts a group. The library is read,
not imported. MkDocs takes this file as hooks, griffe as an extension.
"""

from __future__ import annotations

import ast
import re
import tomllib
from html import unescape
from pathlib import Path

import griffe
from latex2mathml.converter import convert
from markdown.extensions.toc import slugify
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

HERE = Path(__file__).parent
ROOT = HERE.parent
COVERAGE = "scalify-coverage.md"
PACKAGES = {
    "unitscale": "the basics",
    "unitscale.nn": "layers",
    "unitscale.ops": "functions",
    "unitscale.transforms": "scalify",
    "unitscale.optim": "optimizers",
    "unitscale.parallel": "many devices",
    "unitscale.analysis": "diagnosis",
    "unitscale.quant": "FP8 matmuls",
    "unitscale.rules": "scaling rules",
    "unitscale.core": "scaled arrays",
}


def groups_of(package: str) -> dict[str, list[str]]:
    """Names that a package's `__init__.py` imports for users, not for other packages, by group."""
    path = ROOT.joinpath(*package.split(".")) / "__init__.py"
    for_users, _, _ = path.read_text("utf-8").partition("# For the other packages")
    lines = for_users.splitlines()
    groups: dict[str, list[str]] = {}
    group = None
    for node in ast.parse(for_users).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        _, _, comment = lines[node.lineno - 1].partition("  # ")
        group = comment or group
        if names := [a.asname for a in node.names if a.asname and a.asname[0] != "_"]:
            if group is None:
                raise PluginError(f"{path}:{node.lineno}: name a group, such as `# Layers`")
            groups.setdefault(group, []).extend(names)
    return groups


def api_page(package: str, module: griffe.Object) -> str:
    """The package's own docstring, a table of its names, then an entry for each."""
    page = [f"# {package}: {PACKAGES[package]}", f"::: {package}", "    options:"]
    page += ["      members: false", "      show_root_heading: false"]
    page += ["      show_root_toc_entry: false", "", "| Name | Summary |", "|---|---|"]
    groups = groups_of(package)
    for group, names in groups.items():
        page.append(f"| **[{group}](#{slugify(group, '-')})** | |")
        for name in names:
            summary = " ".join(module[name].docstring.value.partition("\n\n")[0].split())
            page.append(f"| [`{name}`](#{package}.{name}) | {summary} |")
    for group, names in groups.items():
        page += ["", f"## {group}", "", *(f"::: {package}.{name}\n" for name in names)]
    return "\n".join(page)


def on_config(config):
    found = {
        "unitscale",
        *(f"unitscale.{p.parent.name}" for p in ROOT.glob("unitscale/*/__init__.py")),
    }
    if found != set(PACKAGES):
        raise PluginError(f"mkdocs_pages.py: PACKAGES lacks or misses {found ^ set(PACKAGES)}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    config.site_name += f" {project['version']}"
    pages = [{f"{package}: {what}": f"api/{package}.md"} for package, what in PACKAGES.items()]
    for entry in config.nav:
        if "API reference" in entry:
            entry["API reference"] = pages
    return config


@event_priority(100)  # before mkdocs-jupyter, which turns notebooks into pages
def on_files(files, config):
    for path in [*sorted(HERE.glob("*.ipynb")), HERE / COVERAGE]:
        files.append(File(path.name, str(HERE), config.site_dir, config.use_directory_urls))
    library = griffe.load("unitscale", search_paths=[ROOT])
    for package in PACKAGES:
        module = library[package.partition(".")[2]] if "." in package else library
        content = api_page(package, module)
        files.append(File.generated(config, f"api/{package}.md", content=content))
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
