"""Answers that are hard to format, in a browser: all their text is visible, and the page goes on.

The time limits are far above what a busy machine needs. They only notice a page that has stopped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from inferd.server.text.model import ServedModel
from tests.api.conftest import MODEL_PATH, VOCAB_SIZE, Script, ScriptedRouter, app_settings, serving
from tests.page.conftest import answered, opened, send

pytestmark = pytest.mark.browser
TIMEOUT_MS = 30_000
END = "\n\nfinish"

HOSTILE = {
    "quotes": ">" * 2_000,
    "more quotes": ">" * 8_000,
    "quotes with spaces": "> " * 5_000 + "deep",
    "lists in one line": "1. " * 1_500,
    "lists by indentation": "".join("  " * i + "- deep\n" for i in range(300)),
    "lists in quotes": "> - " * 1_000 + "deep",
    "no address": "a.b-c+" * 16_000 + "@",
    "emphasis": "*" * 10_000 + "word" + "*" * 10_000,
    "nested emphasis": "*a _b " * 1_500 + "c_ d*" * 1_500,
    "brackets": "[" * 10_000,
    "links in links": "[" * 2_000 + "word" + "](a)" * 2_000,
    "images": "![](" * 5_000,
    "images that are whole": "![word](a)" * 5_000,
    "a table": "|a|b|\n|-|-|\n" + "|word|word|\n" * 5_000,
    "a wide table": "|a" * 2_000 + "|\n" + "|-" * 2_000 + "|\n" + "|word" * 2_000 + "|",
    "rows that are too long": "|a|b|\n|-|-|\n|c|d|hidden|",
    "a fence": "```words that are shown\n" + "word = 1\n" * 10_000 + "```",
    "fences": "```\n" * 5_001,
    "one long word": "word" * 30_000,
    "many lines": "word\n" * 40_000,
    "many blocks": "word\n\n" * 15_000,
    "tags": "<div><b>word</b>" * 3_000,
    "tags that do not end": "<a " * 5_000,
    "comments": "<!-- word --" * 3_000,
    "code": "`" * 5_001 + "word" + "`" * 5_000,
    "definitions": "[word]: <word> 'word'\n" * 1_000,
    "references": "[word]: " + "word" * 10_000 + "\n\n" + "[word] " * 5_000,
    "no text in a link": "[](hidden) [ ](hidden)",
    "backslashes": "\\" * 20_001,
    "rulers and headings": "- - - word\n# word\n" * 2_000,
}
HIDDEN = {"links in links": Counter("a")}
"""Letters that Markdown hides: the address of the innermost link."""


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel.load(MODEL_PATH, ("tiny",), max_model_len=2**20, vocab_size=VOCAB_SIZE)


@pytest.fixture
def router(model: ServedModel) -> ScriptedRouter:
    return ScriptedRouter(model)


@pytest.fixture
def page(browser: Any, model: ServedModel, router: ScriptedRouter) -> Iterator[Any]:
    with (
        serving(model, router, app_settings(access_log=False)) as url,
        opened(browser, url, TIMEOUT_MS) as page,
    ):
        page.get_by_role("button", name="Settings").click()
        yield page


def letters_of(text: str) -> str:
    return re.sub(r"[^a-z]", "", text)


def check_visible(answer: Any, name: str) -> None:
    """All letters are visible, in their order."""
    written, visible = letters_of(HOSTILE[name] + END), letters_of(answer.inner_text())
    if visible != written:
        assert Counter(written) - Counter(visible) == HIDDEN.get(name), f"{len(visible)} of {len(written)} letters"


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("name", HOSTILE)
def test_all_text_is_visible_and_the_next_answer_streams(page: Any, router: ScriptedRouter, name: str) -> None:
    text = HOSTILE[name] + END
    router.will(Script(text, cuts=(2_000,)), Script("This is **bold**."))
    page.get_by_label("Ask for the probabilities of tokens").uncheck()
    send(page, "hi")
    hostile = page.locator(".assistant").first.locator(".markdown")
    hostile.filter(has_text="finish").wait_for()
    page.locator(".facts", has_text="tokens").wait_for()
    check_visible(hostile, name)
    send(page, "hello")
    answered(page, "This is bold.")
    assert page.locator("strong", has_text=re.compile("^bold$")).count() == 1, "the next answer is formatted"
    page.locator(".assistant").first.locator(".markdown:not([aria-busy=true])").wait_for()
    check_visible(hostile, name)
    box = page.get_by_label("Message", exact=True)
    box.fill("still here")
    assert box.input_value() == "still here"


def test_a_text_that_takes_too_long_is_shown_as_it_is(page: Any, router: ScriptedRouter) -> None:
    router.will(Script(HOSTILE["no address"], cuts=(2_000,)))
    page.get_by_label("Ask for the probabilities of tokens").uncheck()
    send(page, "hi")
    page.locator(".note", has_text="it took more than 2 s").wait_for()
    assert page.locator(".markdown .plain").last.text_content().endswith("a.b-c+@")


def test_an_answer_is_shown_if_the_worker_cannot_be_loaded(page: Any, router: ScriptedRouter) -> None:
    page.route("**/parser.js", lambda route: route.abort())
    page.reload()
    router.will(Script("This is **bold**."))
    send(page, "hi")
    page.locator(".note", has_text="the worker could not be loaded").wait_for()
    assert page.locator(".markdown").inner_text() == "This is **bold**."


def test_many_tokens_are_compared_and_coloured_up_to_a_bound(page: Any, router: ScriptedRouter) -> None:
    router.will(Script("same" + " one" * 2_100 + " end"), Script("same" + " two" * 2_100 + " end"))
    page.get_by_label("Most tokens").fill("9000")
    send(page, "hi")
    answered(page, "one end")
    page.get_by_role("button", name="Compare").click()
    page.get_by_label("Temperature").fill("0.5")
    router.will(*[Script("same" + " one" * 2_100 + " end")] * 2, Script("same" + " two" * 2_100 + " end"))
    page.get_by_role("button", name="Send with both").click()
    page.get_by_text("the answers are too long to compare there token by token").wait_for()
    verdict = page.get_by_text(re.compile(r"^(\d+) of (\d+) tokens differ\.$")).inner_text()
    num_differ, num = map(int, re.findall(r"\d+", verdict))
    assert 2_100 <= num_differ < num <= num_differ + 10, "the beginning and the end are the same"
    page.get_by_role("button", name="Back to the chat").click()

    router.will(Script(" one" * 8_100, cuts=(500,)))
    page.get_by_role("button", name="New chat").click()
    send(page, "hi")
    page.locator(".facts", has_text="8101 tokens").wait_for()
    page.get_by_role("button", name="Tokens").click()
    page.locator(".note", has_text="The first 8,000 tokens are coloured.").wait_for()
    assert page.locator(".token").count() == 8_000
    assert letters_of(page.locator(".message.assistant").text_content()).count("one") == 8_100
