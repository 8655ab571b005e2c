"""Pages that do not lie under docs/: notebooks, the coverage table, and a page for each package.

The API pages name every public name of a package, in the order and the groups of its `__init__.py`:
a comment on the first line of an import, such as `# Layers`, starts a group. The library is read,
not imported. MkDocs takes this file as hooks, griffe as an extension.
"""

from __future__ import annotations

import ast
import posixpath
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
TOP = ["CHANGELOG.md", "CONTRIBUTING.md"]
# Raw tables are not searched; what maintainers read comes after what users read.
SEARCH = {key: {"boost": 0.2} for key in ("decisions/", COVERAGE, *TOP)}
SEARCH["results/"] = {"exclude": True}
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
    config.nav += [{path.removesuffix(".md").capitalize(): path} for path in TOP]
    return config


@event_priority(100)  # before mkdocs-jupyter, which turns notebooks into pages
def on_files(files, config):
    for path in [*sorted(HERE.glob("*.ipynb")), HERE / COVERAGE, *(ROOT / name for name in TOP)]:
        files.append(File(path.name, str(path.parent), config.site_dir, config.use_directory_urls))
    library = griffe.load("unitscale", search_paths=[ROOT])
    for package in PACKAGES:
        module = library[package.partition(".")[2]] if "." in package else library
        content = api_page(package, module)
        files.append(File.generated(config, f"api/{package}.md", content=content))
    return files


LINK = re.compile(r"(?<=\]\()(?!\w+:)[^)\s#]+")


def on_page_markdown(markdown, page, config, files):
    """Links to the repository's files lead to their pages, else to the repository or to copies."""
    for start, search in SEARCH.items():
        if page.file.src_uri.startswith(start):
            page.meta.setdefault("search", search)
    if page.file.abs_src_path is None:  # generated
        return markdown
    sources = {file.abs_src_path: file.src_uri for file in files}
    sources[str(ROOT / "README.md")] = "index.md"

    def target(match):
        path = (Path(page.file.abs_src_path).parent / match[0]).resolve()
        if not (path.exists() and path.is_relative_to(ROOT)):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        if str(path) not in sources:
            if config.repo_url:
                return f"{config.repo_url.rstrip('/')}/blob/HEAD/{name}"
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
        return posixpath.relpath(sources.get(str(path), name), posixpath.dirname(page.file.src_uri))

    return LINK.sub(target, markdown)


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


def on_post_page(output, page, config):
    """The theme would ask GitHub for the numbers of stars and forks of the repository."""
    return output.replace('data-md-component="source"', "")


class DoctestSections(griffe.Extension):
    """Shows doctests as code: griffe does so under `Examples:`, and the house writes `Example:`."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"(?m)^>>> (?:.+\n?)+", r"```pycon\n\g<0>\n```", text)

    def on_package(self, *, pkg, **kwargs):
        self.on_object(obj=pkg)
