"""Plain words, as far as a program can see them (`words`), in every folder that has been rewritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.arch.words import MAX_WORDS, files, findings

PLAIN = (
    "CONTRIBUTING.md",
    "README.md",
    *(f"docs/{path.name}" for path in files("docs") if path.suffix == ".md"),
    "docs/assets",
    "docs/hooks.py",
    "server/endpoints",
    "server/auth",
    "examples/tiny/README.md",
    *(f"examples/tiny/{path.name}" for path in files("examples/tiny") if path.suffix == ".py"),
    "server/cli.py",
    "server/commands",
    "server/config",
    "server/dispatch",
    "server/generate",
    "server/schema",
    "server/structured",
    "server/supervision",
    "server/text",
    "server/tools",
    "tests/chaos",
    "tests/conftest.py",
    "tests/shape.py",
    "tests/tiers.py",
    "tests/clients",
    "tests/unit",
    "engine/cache",
    "engine/core",
    "engine/grammar",
    "engine/layers",
    "engine/process",
    "engine/request.py",
    "engine/sched",
    "engine/models",
    "engine/quant",
    "engine/sample",
    "engine/arch",
    "benchmarks",
    "kernels",
    "tests/aot",
    "tests/benchmarks",
    "tests/deploy",
    "tests/kernels",
    "tests/mutants",
    "tests/prometheus",
    "tests/sim",
    "server/lifecycle",
    "server/errors",
    "engine/worker",
    "engine/api",
    "server/observability",
    "server/playground",
    "server/transport",
    "tests/api",
    "tests/page",
    "tests/e2e",
    "tests/reliability",
    "tests/security",
    "tests/cpu",
    "tests/arch",
    "tests/property",
)
"""Folders and files without a finding. A new one belongs here from its first line on."""

LONG = " ".join(["word"] * (MAX_WORDS + 1))


@pytest.mark.parametrize("folder", PLAIN)
def test_the_words_of_a_folder_are_plain(folder: str) -> None:
    assert files(folder), f"{folder} holds nothing"
    assert [str(found) for path in files(folder) for found in findings(path)] == []


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ('"""Of one scheduler."""', ["opens without its subject"]),
        ('class A:\n    b: int\n    """What gives way."""', ["opens without its subject"]),
        ('"""None where there is none."""', ['"where" for "if" (or name the place)']),
        ('"""The line where the text begins."""', []),
        ("# Whoever comes is taken.", ["word of our own"]),
        ("# The engine was told to end.", ["passive without its actor"]),
        ("# Callers are told apart by their key.", []),
        ("# It is refused. So is one without a key.", ["subject behind its verb"]),
        (f'"""{LONG}."""', [f"sentence of {MAX_WORDS + 1} words"]),
        (f"# {LONG[:60]}\n# {LONG[60:]}", [f"sentence of {MAX_WORDS + 1} words"]),
        ('x = "What is it, where no one looks?"', []),
    ],
)
def test_a_finding_is_seen(text: str, rules: list[str], tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(text)
    assert [found.rule for found in findings(path)] == rules


def test_code_and_headings_of_a_page_are_not_judged(tmp_path: Path) -> None:
    page = tmp_path / "some.md"
    page.write_text(f"# {LONG}\n\n```\n{LONG}\n```\n\n- Short.\n- {LONG}\n\n| a | {LONG} |\n")
    assert [found.line for found in findings(page)] == [8, 10]
