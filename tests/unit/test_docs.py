"""The tables of the pages are up to date, the pages name only existing things, and the README is short."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from inferd.server.endpoints import reference as docs
from inferd.server.endpoints.schema_words import rule_of
from inferd.server.schema.json_schema import Schema

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "tiny" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
MAX_README_WORDS = 900


def load_hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


HOOKS = load_hooks()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MAX_README_WORDS


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and mkdocs give a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)\s#:]*)(#[^)\s]*)?\)", page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor[1:] in anchors(target), f"{page.name} links to {path}{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_exist(page: Path) -> None:
    """Names may omit `.py`. docs/reliability.md names files of tests/reliability without their folder."""
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"`((?:server|engine|kernels|tests|benchmarks|deploy|docs)/[\w/.*-]+)`", text)
    if page.name == "reliability.md":
        names += [f"tests/reliability/{name}" for name in re.findall(r"`(test_[a-z_]+)`", text)]
        assert len(names) > 40
    for name in names:
        assert any(ROOT.glob(name)) or (ROOT / f"{name}.py").is_file(), f"{page.name} names {name}"


def packages(*folders: str) -> list[Path]:
    return sorted(path.parent for folder in folders for path in (ROOT / folder).glob("*/__init__.py"))


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "design.md"], ids=lambda page: page.name)
def test_files_that_are_named_without_their_top_folder_exist(page: Path) -> None:
    """Such a name begins with a package of the server or the engine: `dispatch/router`."""
    found = packages("server", "engine")
    starts = "|".join(sorted({package.name for package in found}))
    names = re.findall(rf"`((?:{starts})/[\w/.]+)`", page.read_text(encoding="utf-8"))
    assert len(names) > 10
    parents = sorted({package.parent for package in found})
    for name in names:
        assert any(part.exists() for parent in parents for part in (parent / name, parent / f"{name}.py")), name


def test_the_map_has_a_row_for_each_package_and_no_other() -> None:
    """Packages of the server stand there by their names, others by their paths."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^ *([\w/]*\w)/?(?:<op>/)? {2,}\S", page.split("```")[1], re.MULTILINE)
    expected = {package.name for package in packages("server")}
    expected |= {package.relative_to(ROOT).as_posix() for package in packages("engine", "kernels")}
    assert expected - set(rows) == set()
    parents = (ROOT, ROOT / "server", ROOT / "engine" / "api")
    places = {row: [parent / name for parent in parents for name in (row, f"{row}.py")] for row in rows}
    assert [row for row, found in places.items() if not any(place.exists() for place in found)] == []


def test_the_limits_on_the_path_of_a_request_are_those_of_its_test() -> None:
    test = (ROOT / "tests" / "e2e" / "test_request_path.py").read_text(encoding="utf-8")
    limits = re.findall(r"^MOST_\w+ = (\d+)$", test, re.MULTILINE)
    assert len(limits) == 2
    assert re.findall(r"at most (\d+) files", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")) == limits


def nav_places(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [place for entry in (nav.values() if isinstance(nav, dict) else nav) for place in nav_places(entry)]


def test_the_site_has_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(nav_places(nav)) == sorted(HOOKS.site_path(page.relative_to(ROOT).as_posix()) for page in PAGES)


def test_links_of_the_repository_become_links_of_the_site() -> None:
    assert HOOKS.with_site_links("[a](docs/api.md#x) ![b](docs/assets/b.svg)", "README.md") == (
        "[a](api.md#x) ![b](assets/b.svg)"
    )
    assert HOOKS.with_site_links("[a](../benchmarks/results/README.md)", "docs/gpu.md") == "[a](benchmarks/index.md)"
    assert HOOKS.with_site_links("[a](soak.md) [b](../../README.md)", "benchmarks/results/README.md") == (
        "[a](soak.md) [b](../index.md)"
    )
    assert HOOKS.with_site_links("[a](../../LICENSE) [b](none.md)", "examples/tiny/README.md") == "a [b](none.md)"
    assert HOOKS.with_site_links("[a](https://example.org/docs/) [b](#c)", "README.md") == (
        "[a](https://example.org/docs/) [b](#c)"
    )


@pytest.mark.parametrize(
    "text",
    [
        '<script async src="https://cdn.example/a.js">',
        "<img alt='x' src=//cdn.example/a.png>",
        '<link rel="stylesheet" href="https://cdn.example/a.css">',
        "@font-face { src: url(https://cdn.example/a.woff2) }",
        '@import "https://cdn.example/a.css";',
    ],
)
def test_what_a_browser_would_fetch_from_another_host_is_found(text: str) -> None:
    assert len(HOOKS.fetched_from_elsewhere(text)) == 1


def test_links_to_click_and_own_files_are_not_fetched_from_another_host() -> None:
    page = (
        '<a href="https://example.org">x</a><script src="a.js"></script><link rel="canonical" href="https://a.example">'
    )
    assert HOOKS.fetched_from_elsewhere(page + "body { background: url(a.png) }") == []
    assert HOOKS.fetched_from_elsewhere((ROOT / "docs" / "assets" / "answer.svg").read_text(encoding="utf-8")) == []


def test_the_pages_are_what_the_tables_give() -> None:
    pages = {page: (ROOT / page).read_text(encoding="utf-8") for page in docs.PAGES}
    for page, text in pages.items():
        assert docs.fill(text) == text, f"{page} is out of date: run `make docs`"
    assert all(f"<!-- table: {name} -->" in "".join(pages.values()) for name in docs.TABLES)


def test_a_stale_table_is_written_anew_and_prose_is_left_alone() -> None:
    page = "before\n<!-- table: aliases -->\n| old |\n<!-- end -->\nafter"
    filled = docs.fill(page)
    assert filled.startswith("before\n<!-- table: aliases -->\n| Name |")
    assert filled.endswith("\n<!-- end -->\nafter")
    assert "old" not in filled
    with pytest.raises(KeyError):
        docs.fill("<!-- table: nothing -->\n<!-- end -->")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer"}, "integer"),
        ({"type": ["integer", "null"], "minimum": 1, "maximum": 128}, "integer 1 to 128"),
        ({"type": "integer", "minimum": 0}, "integer 0 or more"),
        ({"type": "number", "minimum": 0.01, "maximum": 100}, "number 0.01 to 100"),
        ({"type": "boolean"}, "boolean"),
        ({"type": "string"}, "string"),
        ({"type": "string", "minLength": 1, "maxLength": 1_024}, "string of 1 to 1,024 characters"),
        ({"type": "string", "enum": ["a", "b"]}, '`"a"` or `"b"`'),
        ({"anyOf": [{"enum": [1, ["text"]]}, {"type": "null"}]}, '`1` or `["text"]`'),
        (
            {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 9}, "maxItems": 16},
            "array of up to 16 strings of 1 to 9 characters",
        ),
        (
            {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": 64},
            "array of 1 to 64 integers 0 or more",
        ),
        (
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 4}]},
            "string; or array of up to 4 strings",
        ),
        ({"type": "object"}, "object"),
    ],
)
def test_bounds_in_words(schema: Schema, words: str) -> None:
    assert rule_of(schema) == words
