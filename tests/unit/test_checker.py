"""The process that grammars are tried out in: what it answers, and that nothing a grammar does outlives its turn."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from inferd.engine.api.errors import RequestError
from inferd.engine.api.grammar import (
    CHECK_MEMORY_BYTES,
    MAX_GRAMMAR_BYTES,
    Verdict,
    body_length,
    frame_of,
    read_verdict,
)
from inferd.server.structured import checker as checker_module
from inferd.server.structured.checker import GrammarChecker
from inferd.server.structured.language import Language, json_value, lark, pattern

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
ENDLESS = json_value({"type": "integer", "multipleOf": 9_999_991})
"""llguidance needs minutes for it."""


def run(work: Callable[[GrammarChecker], Awaitable[None]], path: Path = MODEL_PATH, *command: str) -> None:
    async def main() -> None:
        checker = GrammarChecker(path, 3_072, command) if command else GrammarChecker(path, 3_072)
        try:
            await work(checker)
        finally:
            await checker.close()

    asyncio.run(main())


async def refusal(checker: GrammarChecker, language: Language, param: str = "here") -> RequestError:
    with pytest.raises(RequestError) as caught:
        await checker.check(language.text(), param)
    return caught.value


def pid_of(checker: GrammarChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


def test_verdicts() -> None:
    async def work(checker: GrammarChecker) -> None:
        plain = pattern("a+").text()
        assert await checker.check(plain, "here") == plain
        assert "::=" not in await checker.check(lark('root ::= "a"').text(), "here")
        error = await refusal(checker, pattern("(a"), "structured_outputs.regex")
        assert (error.code, error.param) == ("invalid_value", "structured_outputs.regex")
        assert error.message.startswith("Invalid value for 'structured_outputs.regex': invalid regex")
        pid = pid_of(checker)
        assert await checker.check(plain, "here") == plain
        assert pid_of(checker) == pid, "one process for all"

    run(work)


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "CHECK_TIMEOUT_S", 0.5)

    async def work(checker: GrammarChecker) -> None:
        await checker.check(pattern("a").text(), "here")
        first = pid_of(checker)
        error = await refusal(checker, ENDLESS)
        assert "it takes more than" in error.message
        assert not psutil.pid_exists(first), "the process that was stuck is gone"
        assert await checker.check(pattern("b").text(), "here")
        second = pid_of(checker)
        again = await refusal(checker, ENDLESS)
        assert again.message == error.message
        assert pid_of(checker) == second, "what was seen once is not tried again"

    run(work)


def test_a_grammar_that_took_too_long_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been the machine: until then the verdict stands, and costs nothing."""
    now_s, texts = 1000.0, []

    async def asked(self: GrammarChecker, text: str) -> Verdict:
        texts.append(text)
        return checker_module._TOOK_TOO_LONG if len(texts) == 1 else Verdict(text=text)

    async def work(checker: GrammarChecker) -> None:
        nonlocal now_s
        language = pattern("a+")
        for _ in range(2):
            assert "takes more than" in (await refusal(checker, language)).message
            now_s += checker_module._FORGIVEN_AFTER_S / 2
        assert await checker.check(language.text(), "here") == language.text()
        assert await checker.check(language.text(), "here") == language.text()
        assert len(texts) == 2 and checker._kept_bytes == checker_module._size_of(Verdict(text=language.text()))

    monkeypatch.setattr(GrammarChecker, "_asked", asked)
    monkeypatch.setattr(checker_module, "_now", lambda: now_s)
    run(work)


def test_a_grammar_that_takes_long_lets_others_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "_PATIENCE_S", 0.0)
    # It is the lowest of priorities: where the processors have other work it takes its time.
    monkeypatch.setattr(checker_module, "CHECK_TIMEOUT_S", 60.0)
    step_back, seen = checker_module._step_back, []

    def stepping(process: asyncio.subprocess.Process) -> None:
        before = psutil.Process(process.pid).nice()
        step_back(process)
        seen.append((process.pid, before, psutil.Process(process.pid).nice()))

    monkeypatch.setattr(checker_module, "_step_back", stepping)

    async def work(checker: GrammarChecker) -> None:
        text = json_value({"type": "object", "properties": {f"p{i}": {} for i in range(300)}}).text()
        assert await checker.check(text, "here") == text
        monkeypatch.setattr(checker_module, "_PATIENCE_S", 60.0)
        assert await checker.check(pattern("a").text(), "here")
        ((pid, before, after),) = seen
        assert before < after == 19
        assert pid_of(checker) != pid and not psutil.pid_exists(pid), "the next grammar has a process of its own"

    run(work)


def test_a_caller_that_goes_away_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "CHECK_TIMEOUT_S", 0.5)

    async def work(checker: GrammarChecker) -> None:
        await checker.check(pattern("a").text(), "here")
        gone = asyncio.create_task(checker.check(ENDLESS.text(), "gone"))
        await asyncio.sleep(0)
        gone.cancel()
        texts = [pattern(f"[a-z]{{{i}}}").text() for i in range(1, 6)]
        assert await asyncio.gather(*(checker.check(text, "here") for text in texts)) == texts
        with pytest.raises(asyncio.CancelledError):
            await gone

    run(work)


def test_callers_wait_in_turn_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "_MAX_PENDING", 3)

    async def work(checker: GrammarChecker) -> None:
        texts = [pattern(f"x{{{i}}}").text() for i in range(1, 6)]
        found = await asyncio.gather(*(checker.check(text, "here") for text in texts), return_exceptions=True)
        assert found[:3] == texts[:3]
        assert all(isinstance(error, RequestError) and error.code == "server_is_overloaded" for error in found[3:])
        assert await checker.check(texts[4], "here") == texts[4]

    run(work)


def test_what_the_process_dies_of_is_refused() -> None:
    """As under a grammar that takes all the memory there is for it."""
    ready = frame_of(Verdict())
    script = f"import sys; sys.stdout.buffer.write({ready!r}); sys.stdout.flush(); sys.stdin.buffer.read(9)"

    async def work(checker: GrammarChecker) -> None:
        for language in (pattern("a"), pattern("b")):
            error = await refusal(checker, language)
            assert "more memory" in error.message and error.code == "invalid_value"

    run(work, MODEL_PATH, sys.executable, "-c", script)


def test_the_process_has_so_much_memory_and_ends_with_its_input() -> None:
    async def work(checker: GrammarChecker) -> None:
        await checker.check(pattern("a").text(), "here")
        process = psutil.Process(pid_of(checker))
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_AS)
        taken = process.memory_info().vms
        assert soft == hard and CHECK_MEMORY_BYTES / 2 < soft - taken <= CHECK_MEMORY_BYTES
        assert checker._process is not None and checker._process.stdin is not None
        checker._process.stdin.close()
        assert await asyncio.wait_for(checker._process.wait(), 20) == 0

    run(work)


def test_a_model_whose_tokens_cannot_be_read_serves_no_grammars(tmp_path: Path) -> None:
    async def work(checker: GrammarChecker) -> None:
        error = await refusal(checker, pattern("a"))
        assert (error.code, error.param) == ("unsupported_value", "here")
        assert "has no tokenizer.json" in error.message

    run(work, tmp_path)


def test_a_process_that_does_not_start_is_said_so() -> None:
    async def work(checker: GrammarChecker) -> None:
        assert "did not start" in (await refusal(checker, pattern("a"))).message

    run(work, MODEL_PATH, sys.executable, "-c", "raise SystemExit(1)")


def test_bounds_are_checked_before_anything_is_asked() -> None:
    async def work(checker: GrammarChecker) -> None:
        error = await refusal(checker, pattern("a" * MAX_GRAMMAR_BYTES))
        assert f"at most {MAX_GRAMMAR_BYTES} are served" in error.message
        error = await refusal(checker, pattern("\ud800"))
        assert "no Unicode text" in error.message
        assert checker._process is None

    run(work)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "_MAX_KEPT_BYTES", 2_000)

    async def work(checker: GrammarChecker) -> None:
        for i in range(1, 20):
            await checker.check(pattern(f"y{{{i}}}").text(), "here")
        assert 1 <= len(checker._kept) <= 8

    run(work)


def test_frames() -> None:
    verdict = Verdict(text="t", error="e", is_broken=True)
    frame = frame_of(verdict)
    assert body_length(frame[:4]) == len(frame) - 4
    assert read_verdict(frame[4:]) == verdict
