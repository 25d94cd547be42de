"""Hooks of mkdocs: they add the pages that are made from the code, and repair links that leave the folder of the pages.

A page may link a file of the repository (``../kernelhub/dispatch/select.py``). On the site such a link leads to
`repo_url` of mkdocs.yml; while that is not set, it becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

import docs_pages  # noqa: E402
import docs_plots  # noqa: E402

LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Put the generated pages into the navigation."""
    places = {
        "OPS": ["ops/index.md", *docs_pages.guides(), *(f"ops/{op}.md" for op in docs_pages.ops())],
        "BACKENDS": [f"backends/{name}.md" for name in docs_pages.backends()],
    }
    config["nav"] = _filled(config["nav"], places)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and plots."""
    pages = {f"ops/{op}.md": docs_pages.op_page(op) for op in docs_pages.ops()}
    pages |= {
        "ops/index.md": docs_pages.ops_index(),
        "reference/cli.md": docs_pages.commands_page(),
        "reference/python.md": docs_pages.python_page(),
        "changelog.md": docs_pages.changes_page(),
    }
    pages |= docs_plots.pages()
    for name in docs_pages.backends():
        if not (ROOT / "docs" / "backends" / f"{name}.md").exists():
            pages[f"backends/{name}.md"] = f"# {name}\n"
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Shorten what the pages of the ops show, add a backend's kernels, and repair links."""
    path = page.file.src_uri
    folder, _, name = path.rpartition("/")
    if not folder:
        markdown = docs_pages.for_the_site(markdown)
    if folder == "backends":
        markdown = f"{markdown.rstrip()}\n\n{docs_pages.backend_kernels(name.removesuffix('.md'))}"
    parts = FENCE.split(markdown)
    parts[::2] = [
        LINK.sub(lambda link: _repaired(link, folder, config["repo_url"], files), part) for part in parts[::2]
    ]
    return "".join(parts)


def _filled(nav: Any, places: dict[str, list[str]]) -> Any:
    if isinstance(nav, str):
        return places.get(nav, nav)
    if isinstance(nav, dict):
        return {title: _filled(entry, places) for title, entry in nav.items()}
    return [_filled(entry, places) for entry in nav]


def _repaired(link: re.Match[str], folder: str, repository: str | None, files: Any) -> str:
    """A link of a page in `folder`, as it was unless its target lies outside of the folder of the pages."""
    text, target = link[1], link[2]
    if re.match(r"[a-z]+:|#", target):
        return link[0]
    path, _, anchor = target.partition("#")
    inside = posixpath.normpath(posixpath.join("docs", folder, path))
    if inside == "CHANGELOG.md":
        return f"[{text}]({'../' * len(folder.split('/')) if folder else ''}changelog.md)"
    if inside == "README.md":
        return f"[{text}]({'../' * len(folder.split('/')) if folder else ''}index.md)"
    if inside.startswith("docs/"):
        return link[0]
    if repository:
        return f"[{text}]({repository.rstrip('/')}/blob/main/{inside}{'#' + anchor if anchor else ''})"
    return text if text.strip("`") == inside or "`" in text else f"{text} (`{inside}`)"
