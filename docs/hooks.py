"""Completes the site of mkdocs.yml: pages that are kept elsewhere in the repository, and a check of what was built.

Links in the sources are those of the repository, so that they also work without the site. Here they become links
between pages. Nothing of the site may come from another host.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/tiny/README.md": "tiny.md",
    f"{RESULTS}/README.md": "benchmarks/index.md",
}
"""Path in the repository -> path in the site. Other files of `RESULTS` keep their names; docs/ is the site's root."""

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|embed)\b[^>]*\bsrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)"""
)


def site_path(source: str) -> str | None:
    """The place in the site of a file of the repository; None if it is not part of the site."""
    if source in ELSEWHERE:
        return ELSEWHERE[source]
    for folder, place in ((f"{RESULTS}/", "benchmarks/"), ("docs/", "")):
        if source.startswith(folder):
            return place + source.removeprefix(folder)
    return None


def with_site_links(markdown: str, source: str) -> str:
    """`markdown`, the text of the file `source`, with links between pages instead of links between files.

    If a link leads to a file that is no page, only its text stays.
    """
    here = posixpath.dirname(site_path(source) or "")

    def link(match: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["path"]))
        place = site_path(file)
        if place is not None:
            return f"[{match['text']}]({posixpath.relpath(place, here or '.')}{match['anchor'] or ''})"
        return match["text"] if (ROOT / file).exists() else match[0]

    return _LINK.sub(link, markdown)


def fetched_from_elsewhere(text: str) -> list[str]:
    """Addresses of other hosts that a browser fetches when it shows this HTML, CSS or SVG. Links to click are none."""
    return [next(filter(None, found)) for found in _FETCHED.findall(text)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File  # noqa: PLC0415 - the tests of this file run without mkdocs

    results = [
        f"{RESULTS}/{path.name}"
        for path in sorted((ROOT / RESULTS).iterdir())
        if path.suffix in (".md", ".svg", ".json")
    ]
    for source in dict.fromkeys([*ELSEWHERE, *results]):
        place = site_path(source)
        assert place is not None
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    assert page.file.abs_src_path is not None
    return with_site_links(markdown, Path(page.file.abs_src_path).relative_to(ROOT).as_posix())


def on_post_build(config: MkDocsConfig) -> None:
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css", ".svg") and (found := fetched_from_elsewhere(path.read_text("utf-8"))):
            raise SystemExit(f"{path} would be shown with parts of other hosts: {', '.join(found)}")
