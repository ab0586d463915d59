"""The documents as a site: a hook of mkdocs, for ``make docs``.

The first page is README.md of the root. A link that leaves ``docs/`` leads to a copy of the file on
the site, and a link to a folder becomes text. ``/runbooks/NAME.md``, where alerts point to, leads
to the runbook's page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MOVED = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "research/leaklab/recordings/README.md": "recordings.md",
}
"""Path in the repository -> path on the site; others keep theirs, without ``docs/``."""
LINK = re.compile(
    r"(?ms)^ *```.*?^ *```$|"
    r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)|"
    r"`[^`\n]+`"
)
"""A relative link, or code, in which nothing is a link."""
IMAGE = re.compile(r'\b(src|srcset)="(?!\w+:)([^"]+)"')
"""In HTML, which mkdocs leaves as it is. A page is a folder of the site."""
PAGES = (
    "README.md", "docs/README.md", "CHANGELOG.md", "GOVERNANCE.md", "MAINTAINERS.md", "SECURITY.md",
    "SUPPORT.md", "CODE_OF_CONDUCT.md", "ADOPTERS.md", "LICENSE", "SECURITY-INSIGHTS.yml",
)  # fmt: skip
TO_PAGE = '<meta http-equiv="refresh" content="0; url=../{name}/"><a href="../{name}/">{name}</a>\n'


def place(path: str) -> str:
    """Return where a file of the repository is on the site."""
    return MOVED.get(path) or path.removeprefix("docs/")


def source(there: str) -> str:
    """Return the file of the repository that is at a place of the site."""
    back = {moved: path for path, moved in MOVED.items()}
    path = back.get(there, f"docs/{there}")
    return path if (ROOT / path).exists() else there


def target(found: re.Match[str], page: str) -> str | None:
    """Return the path in the repository that a link of a page names; None for code."""
    if found[3] is None:
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), found[3]))


def rewritten(text: str, page: str) -> str:
    """Return a page's text with links as they are on the site."""
    here = posixpath.dirname(place(page))

    def link(found: re.Match[str]) -> str:
        path = target(found, page)
        if path is None:
            return found[0]
        if not (ROOT / path).is_file():
            return found[2]
        to = posixpath.relpath(place(path), here or ".")
        return f"{found[1]}[{found[2]}]({to}{found[4] or ''})"

    return LINK.sub(link, text)


def on_config(config: Any) -> Any:
    """List the pages of the folders that the navigation names."""
    for section in config.nav:
        for items in section.values():
            items[:] = [_listed(one) for one in items]
    return config


def _listed(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    ((title, there),) = item.items()
    folder = ROOT / "docs" / there
    if not folder.is_dir():
        return item
    return {title: [f"{there}/{path.name}" for path in sorted(folder.glob("*.md"))]}


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to outside of ``docs/``."""
    files.remove(first := files.get_file_from_path("README.md"))
    wanted = [*PAGES, *(source(file.src_uri) for file in files.documentation_pages())]
    seen: set[str] = set()
    while wanted:
        page = wanted.pop()
        if page in seen:
            continue
        seen.add(page)
        if page in PAGES or not page.startswith("docs/"):
            content = (ROOT / page).read_bytes()
            files.append(type(first).generated(config, place(page), content=content))
        if page.endswith(".md"):
            found = (target(one, page) for one in LINK.finditer((ROOT / page).read_text()))
            wanted += [one for one in found if one and (ROOT / one).is_file()]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with the site's links."""
    up = "../" * page.url.count("/")
    markdown = IMAGE.sub(rf'\1="{up}\2"', markdown)
    return rewritten(markdown, source(page.file.src_uri))


def on_post_build(config: Any) -> None:
    """Let the addresses in alerts lead to the runbooks."""
    for runbook in sorted((ROOT / "docs" / "runbooks").glob("*.md")):
        folder = Path(config["site_dir"], "runbooks", runbook.name)
        folder.mkdir()
        (folder / "index.html").write_text(TO_PAGE.format(name=runbook.stem))
