"""What the site has beside the pages in docs/: hooks of MkDocs, named in mkdocs.yml.

The reference of the public API is written from the façades; ``llms.txt`` lists the pages, and each
page has its Markdown beside it. Links to files outside of docs/ lead to the repository.
"""

from __future__ import annotations

import ast
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FACADES = {
    "inspect_tinker_plugin": "Datasets, episodes and rewards.",
    "inspect_tinker_plugin.options": "What datasets, builders and commands take.",
    "inspect_tinker_plugin.rewards": "What reward plugins are made of.",
    "inspect_tinker_plugin.tools": "What tool executors are made of.",
    "inspect_tinker_plugin.plugins": "Plugins, and how they are found.",
    "inspect_tinker_plugin.logs": "Logs of rollouts.",
    "inspect_tinker_plugin.testing": "Scripted policies, and the comparison with an eval.",
    "inspect_docker_pool": "The sandbox provider `docker_pool`.",
    "inspect_rl_audit": "Audits of tasks, and what probes are made of.",
    "tinker_local": "A Tinker API server on this machine.",
}
"""Packages and modules of the reference, with one line each."""

GALLERY = "examples"
PAGES = (".md", ".svg", ".html")
"""The folder of the gallery, and what of it is part of the site."""

LINK = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
"""A link of a page to a file."""


def repository() -> str:
    """Return the address of the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [address] = project["urls"].values()
    return str(address)


def public_names(facade: str) -> list[str]:
    """Return the names in a façade's ``__all__``."""
    folder = ROOT / "src" / facade.replace(".", "/")
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(each) for each in ast.literal_eval(node.value)]
    return []


def reference() -> str:
    """Return the page of the Python API, for mkdocstrings."""
    parts = ["# Python reference\n\nWhat is public, by the package that it is imported from.\n"]
    shown: set[str] = set()
    for name, line in FACADES.items():
        own = [each for each in public_names(name) if each not in shown]
        shown.update(own)
        options = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"
        members = "".join(f"        - {each}\n" for each in own)
        parts.append(f"## `{name}`\n\n{line}\n\n::: {name}\n{options}      members:\n{members}")
    return "\n".join(parts)


def on_config(config: Any) -> Any:
    """Name the repository, which pyproject.toml knows."""
    config.repo_url = repository()
    config.repo_name = config.site_name
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the first page, the reference and the gallery."""
    files.append(
        File.generated(config, "index.md", content=(ROOT / "README.md").read_text("utf-8"))
    )
    files.append(File.generated(config, "reference.md", content=reference()))
    for path in sorted((ROOT / GALLERY).rglob("*")):
        if path.suffix in PAGES:
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def with_outer_links(markdown: str, folder: Path, address: str) -> str:
    """Let links of a page in a folder that leave docs/ lead to the repository."""
    docs = ROOT / "docs"

    def lead(link: re.Match[str]) -> str:
        target = (folder / link["path"]).resolve()
        if target == ROOT / "README.md":  # the first page
            up = "../" * len(folder.relative_to(docs).parts)
            return f"{up}index.md{link['anchor'] or ''}"
        shown = target.is_relative_to(ROOT / GALLERY) and target.suffix in PAGES
        if not target.exists() or (target.is_relative_to(docs) and folder.is_relative_to(docs)):
            return link[0]
        if shown or target.is_relative_to(docs):  # where the site has it
            place = target.relative_to(docs if target.is_relative_to(docs) else ROOT)
            here = folder.relative_to(docs if folder.is_relative_to(docs) else ROOT)
            return f"{os.path.relpath(place, here)}{link['anchor'] or ''}"
        kind = "tree" if target.is_dir() else "blob"
        return f"{address}/{kind}/main/{target.relative_to(ROOT)}{link['anchor'] or ''}"

    return LINK.sub(lead, markdown)


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Let links to files outside of docs/ lead to the repository."""
    if page.file.src_uri == "index.md":
        inner = with_outer_links(markdown, ROOT, config.repo_url)
        return re.sub(r"(?<=\]\()docs/(?:README\.md)?", "", inner)
    source = page.file.abs_src_path
    return with_outer_links(markdown, Path(source).parent, config.repo_url) if source else markdown


_nav: list[Navigation] = []


def on_nav(nav: Navigation, *, config: Any, files: Files) -> Navigation:
    """Keep the navigation for ``llms.txt``, which has its order."""
    _nav[:] = [nav]
    return nav


def on_post_build(*, config: Any) -> None:
    """Write ``llms.txt``, and a Markdown twin of every page."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]

    def listed(items: list[Any]) -> None:
        for item in items:
            if isinstance(item, Section):
                lines.extend(["", f"## {item.title}", ""])
                listed(item.children)
            elif isinstance(item, Page):
                source = item.file.src_uri
                lines.append(f"- [{item.title}]({source})")
                twin = site / source
                twin.parent.mkdir(parents=True, exist_ok=True)
                twin.write_text(item.markdown or "", encoding="utf-8")

    listed(_nav[0].items)
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
