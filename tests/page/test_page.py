"""The page at / in a browser, beside a real server with scripted answers. Skipped if something is not installed.

CONTRIBUTING.md says what to install. The page's policy forbids to evaluate text, so tests wait for elements.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.auth.keys_file import append_entry, digest_of, entry_of
from inferd.server.endpoints.app import Backend
from inferd.server.observability.metrics import Metrics
from inferd.server.text.model import ServedModel
from tests.api.conftest import MAX_MODEL_LEN, MODEL_PATH, VOCAB_SIZE, Script, ScriptedRouter, app_settings, serving
from tests.e2e.conftest import Daemon, free_model, start
from tests.page.conftest import answered, opened, send
from tests.reliability.conftest import count, kill_engine

__all__ = ["start"]

AXE = Path(os.environ.get("AXE_CORE", "build/node_modules/axe-core/axe.min.js"))
SERIOUS = ("serious", "critical")

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel.load(MODEL_PATH, ("tiny",), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)


@pytest.fixture
def router(model: ServedModel) -> ScriptedRouter:
    return ScriptedRouter(model)


@pytest.fixture(params=[()], ids=["open"])
def page(request: pytest.FixtureRequest, browser: Any, model: ServedModel, router: ScriptedRouter) -> Iterator[Any]:
    """The page of a server with the keys of the parameter."""
    settings = app_settings(api_key=request.param, access_log=False)
    with serving(model, router, settings) as url, opened(browser, url) as page:
        yield page


def test_an_answer_streams_and_can_be_branched_from_a_token(page: Any, router: ScriptedRouter) -> None:
    router.will(Script("**Bold** <img src=x onerror=alert(1)>"), Script(" there"))
    send(page, "hi")
    answered(page, "Bold")
    assert page.locator(".markdown strong").inner_text() == "Bold"
    assert page.locator(".markdown img").count() == 0 and "<img" in page.locator(".markdown").inner_text()
    page.get_by_role("button", name="Tokens").click()
    page.locator(".token").nth(1).hover()
    other = page.locator(".alternatives button:not(:disabled) .text").first
    chosen = other.inner_text().replace("·", " ")
    first = page.locator(".token > button").first.inner_text()
    other.click()
    page.locator(".branches", has_text="2 of 2").wait_for()
    answered(page, "there")
    prompt = router.model.tokenizer.decode(list(router.submits[1].prompt_ids), False)
    assert prompt.endswith(f"{first}{chosen}"), "the second request continues the text up to the chosen token"


def test_stop_ends_the_request(page: Any, router: ScriptedRouter) -> None:
    router.will(Script("and so on", ends=False))
    send(page, "hi")
    page.locator(".markdown", has_text="and so on").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.locator(".facts", has_text="stopped").wait_for()
    router.wait_for(lambda: len(router.aborted) == 1)


def is_at_end(box: Any) -> bool:
    return bool(box.evaluate("box => box.scrollHeight - box.scrollTop - box.clientHeight < 40"))


GROWN_BEHIND_A_SCROLL = """async (box) => {
    const list = box.querySelector(".messages");
    const grow = () => list.append(Object.assign(document.createElement("p"), { style: "min-height: 100px" }));
    const scroll = new Promise((done) => box.addEventListener("scroll", done, { once: true }));
    const sized = new Promise((done) => {
        const sizes = new ResizeObserver(() => { if (list.lastChild.tagName === "P") setTimeout(done); });
        sizes.observe(list);
    });
    grow();
    await sized;  // the page has scrolled, and will hear of it in the next frame
    grow();
    await scroll;
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
}"""
"""Lets text grow between a scroll by the page and its event."""


def test_the_end_is_followed_until_the_reader_leaves_it(page: Any, router: ScriptedRouter) -> None:
    page.set_viewport_size({"width": 1000, "height": 500})
    router.will(Script("- a\n" * 40, ends=False), Script("- b\n" * 40), Script("last"))
    box = page.get_by_role("region", name="Conversation")
    send(page, "hi")
    page.locator(".markdown li").nth(39).wait_for()
    box.evaluate(GROWN_BEHIND_A_SCROLL)
    assert is_at_end(box)
    page.get_by_role("button", name="Stop").click()
    page.locator(".facts", has_text="stopped").wait_for()
    box.evaluate("box => new Promise((done) => { box.onscroll = done; box.scrollTop = 5; })")
    page.locator(".markdown li").first.evaluate("each => { each.style.height = '300px'; }")
    page.get_by_label("Message", exact=True).fill("more")
    assert not is_at_end(box) and box.evaluate("box => box.scrollTop") < 20, "the page stays where the reader is"
    page.keyboard.press("Enter")
    answered(page, "b")
    assert is_at_end(box)


def test_an_answer_goes_on_when_its_engine_is_killed(browser: Any, start: Callable[..., Daemon]) -> None:
    """Promise 2, up to the reader: the text is that of an undisturbed answer to the same prompt."""
    daemon = start(program=free_model(20))
    with opened(browser, daemon.url) as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Most tokens").fill("60")
        page.get_by_label("Ask for the probabilities of tokens").uncheck()  # this model gives none
        page.get_by_role("button", name="Engine").click()
        send(page, "hi")
        page.locator(".markdown", has_text="e").wait_for()
        kill_engine(daemon)
        answered(page, "60 tokens")
        interrupted = page.locator(".markdown").inner_text()
        assert count(daemon, "inferd_requests_replayed_total") == 1, "the engine died after the answer"
        page.locator("dt:text-is('Restarts') + dd:text-is('1')").wait_for()
        page.locator(".timeline", has_text="1 engine restart").wait_for()
        page.locator("tr", has_text=re.compile(r"Each further token\d+ ms\d+ msnone")).wait_for()
        newest = re.compile(r"Newest: decode, 1 request, 1 token, \d+ ms, bound by \w+")
        page.locator(".step", has_text=newest).wait_for()
        assert page.locator(".steps g.decode").count() > 20
        page.get_by_role("button", name="Again").click()
        page.locator(".branches", has_text="2 of 2").wait_for()
        answered(page, "60 tokens")
        assert page.locator(".markdown").inner_text() == interrupted


def test_an_edited_message_is_a_branch(page: Any, router: ScriptedRouter) -> None:
    router.will(Script("first answer"), Script("second answer"))
    send(page, "one")
    answered(page, "first answer")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("two")
    page.locator(".edit button.main").click()
    answered(page, "second answer")
    page.get_by_label("Earlier branch").click()
    page.locator(".assistant", has_text="first answer").wait_for()
    assert page.locator(".bubble").inner_text() == "one"


def test_a_call_waits_for_its_result(page: Any, router: ScriptedRouter) -> None:
    router.will(
        Script('<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'), Script("It is calm.")
    )
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools, as a list of functions").fill('[{"name": "look"')
    send(page, "hi")
    page.locator(".failure", has_text="Correct or empty it").wait_for()
    page.get_by_label("Tools, as a list of functions").fill('[{"name": "look"}]')
    page.get_by_role("button", name="New chat").click()
    send(page, "Look at the sea.")
    page.get_by_label("Result of look").fill("waves of 3 cm")
    page.get_by_role("button", name="Send results").click()
    answered(page, "It is calm.")
    assert "waves of 3 cm" in router.model.tokenizer.decode(list(router.submits[1].prompt_ids), False)


def test_an_error_is_shown_below_its_answer(page: Any, router: ScriptedRouter) -> None:
    router.refusal = RequestError("model_not_found", "No such model.")
    send(page, "hi")
    page.locator(".assistant .failure", has_text="No such model.").wait_for()
    assert page.get_by_role("button", name="Again", exact=True).count() == 0, "Try again does the same"
    router.refusal = None
    router.will(Script("better"))
    page.get_by_role("button", name="Try again").click()
    answered(page, "better")


def test_two_answers_are_compared_token_by_token(page: Any, router: ScriptedRouter) -> None:
    router.will(Script("one two three four"))
    send(page, "hi")
    answered(page, "four")
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("button", name="Send alone and among others").click()
    page.get_by_text(re.compile(r"^0 of \d+ tokens differ\.")).wait_for()
    assert page.locator(".pair .tokens").all_inner_texts() == ["one two three four"] * 2, "without the token that ends"
    assert page.locator(".pair p").all_inner_texts() == ["The model ended it."] * 2
    assert len(router.submits) == 1 + 1 + 31 + 1
    first, *others, second = router.submits[1:]
    assert first.prompt_ids == second.prompt_ids and first.params.seed == second.params.seed
    assert all(other.prompt_ids != first.prompt_ids for other in others)
    page.get_by_role("button", name="Back to the chat").click()

    router.will(*[Script("one two three four")] * 35, Script("one two five four"))
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_role("button", name="Send with both").click()
    page.get_by_text(re.compile(r"^1 of \d+ tokens differ\.$")).wait_for()
    assert sorted(page.locator(".differs").all_inner_texts()) == [" five", " three"]
    assert 0.5 in {submit.params.temperature for submit in router.submits[-2:]} != {0.5}
    assert len({submit.params.seed for submit in router.submits[-2:]}) == 1


def test_the_tables_of_the_engine_are_not_cut_off(page: Any) -> None:
    """Beside the scrollbar that a long panel has, at a common size of a window."""

    def with_steps(route: Any) -> None:
        answer = route.fetch()
        phase = {"steps": 12345, "median_step_ms": 12.3, "bound_by": "memory"}
        step = {"phase": "decode", "rows": 1, "tokens": 1, "ms": 12.3, "bound_by": "memory"}
        latency = {"p50_ms": 1234.5, "p95_ms": 43210.9}
        state = answer.json() | {
            "last_minute": {"decode": phase},
            "newest_steps": [step],
            "latencies": {"ttft": latency, "tpot": latency},
            "targets": {"ttft_ms": 1500.0, "tpot_ms": 1500.0},
        }
        route.fulfill(response=answer, json=state)

    page.set_viewport_size({"width": 1300, "height": 700})
    page.route("**/state", with_steps)
    page.locator("td", has_text="by memory bandwidth").wait_for()
    assert page.locator("tr", has_text="First token").inner_text().split("\t")[1:] == ["1.2 s", "43 s", "1.5 s"]
    sizes = page.locator("aside").evaluate(
        "each => [each.scrollHeight, each.clientHeight, each.scrollWidth, each.clientWidth]"
    )
    assert sizes[0] > sizes[1] and sizes[2] == sizes[3]


@pytest.mark.parametrize("page", [("right",)], indirect=True, ids=["key"])
def test_the_page_asks_for_a_key(page: Any, router: ScriptedRouter) -> None:
    router.will(Script("welcome"))
    for key in ("wrong", "right"):
        page.locator(".key-form input").fill(key)
        page.locator(".key-form button").click()
        if key == "wrong":
            page.locator(".key-form [role=alert]", has_text="Incorrect API key").wait_for()
    page.locator(".key-form").wait_for(state="detached")
    send(page, "hi")
    answered(page, "welcome")


def test_each_of_several_models_can_be_watched_loaded_and_unloaded(
    browser: Any, model: ServedModel, router: ScriptedRouter, tmp_path: Path
) -> None:
    """The lamp says what is worst. Loading takes an admin key, which a refusal asks for."""
    entry = entry_of(sha256=digest_of("user").hex(), name="alice")
    append_entry(tmp_path / "keys", entry)
    settings = app_settings(keys_file=tmp_path / "keys", admin_key=("boss",), access_log=False)
    second = ScriptedRouter(replace(model, names=("org/second",), max_model_len=128))
    beside = Backend(second.model, second, Metrics("org/second"), settings)  # type: ignore[arg-type]
    router.running_by_tenant = {entry.tenant_id: 2}
    with serving(model, router, settings, others=[beside]) as url, opened(browser, url) as page:
        status, lamp = page.locator("dt:text-is('Status') + dd"), page.locator("header .status")
        page.get_by_label("Model whose engine is shown").select_option("org/second")
        page.locator("dt:text-is('Context') + dd:text-is('128 tokens')").wait_for()
        assert page.locator(".tenants tbody tr").all_inner_texts() == ["alice\t2\t0\t0\t0", "other\t0\t0\t0\t0"]
        page.get_by_role("button", name="Unload").click()
        page.get_by_role("button", name="Use an admin key").click()
        page.locator(".key-form label", has_text="This needs an admin key.").wait_for()
        use_key(page, "user")
        page.get_by_role("button", name="Use another key").click()
        page.locator(".key-form [role=alert]", has_text="you sent an API key of a client").wait_for()
        use_key(page, "boss")
        status.filter(has_text="unloaded").wait_for()
        assert lamp.inner_text() == "ready", "the next request loads it"
        assert page.get_by_role("heading", name="KV blocks").count() == 0
        second.fail("a tensor is NaN")
        page.locator("dt:text-is('Reason') + dd:text-is('a tensor is NaN')").wait_for()
        assert lamp.inner_text() == "org/second: failed"
        check_accessible(page)
        page.get_by_role("button", name="Load", exact=True).click()
        status.filter(has_text="ready").wait_for()
        assert (second.failure, lamp.inner_text()) == ("", "ready")
        page.get_by_label("Model that answers").select_option("org/second")
        second.will(Script("I am the second"))
        send(page, "hi")
        answered(page, "I am the second")
        assert page.locator(".assistant .facts").inner_text().startswith("org/second · ")


def use_key(page: Any, key: str) -> None:
    page.locator(".key-form input").fill(key)
    page.locator(".key-form button").click()
    page.locator(".key-form").wait_for(state="detached")


def check_accessible(page: Any) -> None:
    if not AXE.is_file():
        return
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    assert [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in SERIOUS] == []


def test_axe_finds_no_serious_fault(page: Any, router: ScriptedRouter) -> None:
    if not AXE.is_file():
        pytest.skip(f"axe-core is not at {AXE}: the page's accessibility is not tested")
    router.will(Script("A [link](https://example.org) and `code`."))
    send(page, "hi")
    answered(page, "link")
    page.get_by_role("button", name="Tokens").click()
    page.locator(".token").nth(1).hover()
    for scheme, tab in (("light", "Engine"), ("dark", "Settings"), ("dark", "Compare")):
        page.emulate_media(color_scheme=scheme)
        page.get_by_role("button", name=tab).click()
        check_accessible(page)
