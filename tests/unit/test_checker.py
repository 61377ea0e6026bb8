"""The process that checks grammars: its verdicts, and that no grammar's process outlives its check."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest

from inferd.engine.api.errors import RequestError
from inferd.engine.api.held_files import HeldFiles
from inferd.engine.api.wire.grammar_check import (
    CHECK_COMMAND,
    CHECK_MEMORY_BYTES,
    MAX_GRAMMAR_BYTES,
    Question,
    Verdict,
    body_length,
    frame_of,
    read_question,
    read_verdict,
)
from inferd.engine.grammar.check import _Check, _verdict_of
from inferd.server.errors import table
from inferd.server.structured import checker as checker_module
from inferd.server.structured.checker import GrammarChecker, TenantTurns
from inferd.server.structured.language import Language, lark, pattern
from tests.sim.loop import VirtualLoop

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
ENDLESS = lark('start: %json {"type": "integer", "multipleOf": 9999991}')
"""A grammar for which llguidance needs minutes."""


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
        assert (await checker.check(plain, "here")).text == plain
        assert "::=" not in (await checker.check(lark('root ::= "a"').text(), "here")).text
        error = await refusal(checker, pattern("(a"), "structured_outputs.regex")
        assert (error.code, error.param) == ("invalid_value", "structured_outputs.regex")
        assert error.message.startswith("Invalid value for 'structured_outputs.regex': invalid regex")
        pid = pid_of(checker)
        assert (await checker.check(plain, "here")).text == plain
        assert pid_of(checker) == pid, "one process for all"

    run(work)


async def children_of(checker: GrammarChecker) -> list[psutil.Process]:
    """Processes that check grammars, once there are any."""
    children: list[psutil.Process] = []
    while not children:
        await asyncio.sleep(0)
        if checker._process is not None:
            children = psutil.Process(pid_of(checker)).children()
    return children


def lane(cpu_s: float, *, is_nice: bool = True) -> checker_module._Lane:
    return checker_module._Lane(cpu_s, is_nice)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that the process is asked to check from now on."""
    texts, ask = [], GrammarChecker._ask

    async def counting(self: GrammarChecker, text: str, on: checker_module._Lane) -> Verdict:
        texts.append(text)
        return await ask(self, text, on)

    monkeypatch.setattr(GrammarChecker, "_ask", counting)
    return texts


def test_a_grammar_that_takes_too_much_is_refused_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = counted(monkeypatch)
    monkeypatch.setattr(checker_module, "_MAX_ANSWER_S", 60.0)  # a busy machine needs longer for the verdict

    async def work(checker: GrammarChecker) -> None:
        checker._lanes = lane(0.05), lane(0.1)
        error = await refusal(checker, ENDLESS)
        assert error.code == "invalid_value" and "it takes more than 1 s of processor time" in error.message
        pid = pid_of(checker)
        assert (await checker.check(pattern("b").text(), "here")).text
        assert (await refusal(checker, ENDLESS)).message == error.message
        assert pid_of(checker) == pid, "only the grammar's own process has ended"
        assert texts == [ENDLESS.text(), ENDLESS.text(), pattern("b").text()], "each lane, and never again"

    run(work)


def test_a_grammar_that_took_too_much_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the verdict holds and costs nothing."""
    now_s, texts = 1000.0, []

    async def ask(self: GrammarChecker, text: str, on: checker_module._Lane) -> Verdict:
        texts.append(text)
        return Verdict(error="it takes too much", stopped="cpu") if len(texts) <= 3 else Verdict(text=text)

    async def work(checker: GrammarChecker) -> None:
        nonlocal now_s
        language = pattern("a+")
        for _ in range(2):
            assert "takes too much" in (await refusal(checker, language)).message
            now_s += checker_module._RETRY_AFTER_S / 2
        assert (await checker.check(language.text(), "here")).text == language.text()
        assert (await checker.check(language.text(), "here")).text == language.text()
        assert len(texts) == 4 and checker._kept_bytes == checker_module._size_of(Verdict(text=language.text()))

    monkeypatch.setattr(GrammarChecker, "_ask", ask)
    monkeypatch.setattr(checker_module, "_now", lambda: now_s)
    run(work)


def test_a_busy_machine_makes_no_grammar_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock time ran out, not its processor time."""

    async def work(checker: GrammarChecker) -> None:
        checker._lanes = (lane(600.0),)
        await checker.check(pattern("a").text(), "here")
        monkeypatch.setattr(checker_module, "_MAX_RUN_S", 0.05)
        error = await refusal(checker, ENDLESS)
        assert error.code == "rate_limit_exceeded" and "It may be valid" in error.message
        assert table.headers_of(error)["Retry-After"]
        assert len(checker._kept) == 1, "nothing is remembered of it"
        monkeypatch.setattr(checker_module, "_MAX_RUN_S", 60.0)
        assert (await checker.check(pattern("b").text(), "here")).text

    run(work)


def test_tenants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def ask(self: GrammarChecker, text: str, on: checker_module._Lane) -> Verdict:
        await asyncio.sleep(0)
        order.append(text)
        return Verdict(text=text)

    async def work(checker: GrammarChecker) -> None:
        asked = [("a", f"a{i}") for i in range(5)] + [("b", "b0"), ("b", "b1"), ("c", "c0")]
        await asyncio.gather(*(checker.check(text, "here", tenant) for tenant, text in asked))
        assert order == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4"]

    monkeypatch.setattr(GrammarChecker, "_ask", ask)
    run(work)


def test_a_quick_grammar_does_not_wait_for_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(checker: GrammarChecker) -> None:
        slow_may_end, num_long = asyncio.Event(), 0

        async def ask(self: GrammarChecker, text: str, on: checker_module._Lane) -> Verdict:
            nonlocal num_long
            if text == "quick":
                return Verdict(text=text)
            if on is not checker._lanes[-1]:
                return Verdict(stopped="cpu")
            num_long += 1
            await slow_may_end.wait()
            return Verdict(error="slow", stopped="cpu")

        monkeypatch.setattr(GrammarChecker, "_ask", ask)
        slow = [asyncio.create_task(checker.check(f"slow{i}", "here", f"t{i}")) for i in range(5)]
        assert (await checker.check("quick", "here", "quick")).text == "quick"
        assert num_long <= checker._lanes[-1].turns.num_at_once and not any(task.done() for task in slow)
        slow_may_end.set()
        found = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(error, RequestError) and error.code == "invalid_value" for error in found)

    run(work)


class Trials:
    """Stands for the process. A check takes as many seconds as its text says, and its lane lets it run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        monkeypatch.setattr(GrammarChecker, "_ask", lambda _, text, on: self.ask(text, on))
        monkeypatch.setattr(GrammarChecker, "_running", self.running)
        monkeypatch.setattr(checker_module, "num_cpus", lambda: 2)

    @staticmethod
    async def running(_: GrammarChecker) -> None:
        """Whether the process has started."""

    async def ask(self, text: str, on: checker_module._Lane) -> Verdict:
        self.texts.append(text)
        needed_s = float(text.partition(" ")[0])
        await asyncio.sleep(min(needed_s, on.cpu_s))
        return Verdict(text=text) if needed_s <= on.cpu_s else Verdict(error="it takes too long", stopped="cpu")


async def timed(checker: GrammarChecker, text: str, tenant: str = "") -> tuple[float, str, float]:
    """(seconds until the answer, its code or "taken", when to ask again)."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        await checker.check(text, "here", tenant)
    except RequestError as error:
        return loop.time() - began_s, error.code, error.retry_after_s or 0.0
    return loop.time() - began_s, "taken", 0.0


def run_in_virtual_time(work: Callable[[GrammarChecker], Awaitable[None]]) -> None:
    async def main() -> None:
        await work(GrammarChecker(MODEL_PATH, 3_072))

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(Random(1), limit_s=1e4)) as runner:
        runner.run(main())


@pytest.mark.parametrize("num_slow", [1, 5, 20, 200])
@pytest.mark.parametrize("tenant", ["slow", "other"])
def test_no_request_waits_long_for_its_grammar(monkeypatch: pytest.MonkeyPatch, num_slow: int, tenant: str) -> None:
    """Each slow grammar gets its verdict in bounded time. A usual grammar behind them waits a short time for each, and
    is accepted."""
    Trials(monkeypatch)

    async def work(checker: GrammarChecker) -> None:
        slow = [asyncio.create_task(timed(checker, f"99 {i}", "slow")) for i in range(num_slow)]
        await asyncio.sleep(0.01)
        if num_slow < checker_module._MAX_PENDING_OF_TENANT or tenant == "other":
            wait_s, code, _ = await timed(checker, "0.005 usual", tenant)
            num_ahead = 2 if tenant == "other" else num_slow
            assert code == "taken" and wait_s < (num_ahead + 1) * checker_module._QUICK_CPU_S
        found = await asyncio.gather(*slow)
        assert all(wait_s <= checker_module._MAX_ANSWER_S for wait_s, _, _ in found)
        assert {code for _, code, _ in found} <= {"invalid_value", "rate_limit_exceeded"}
        assert any(code == "invalid_value" for _, code, _ in found) or num_slow > 5
        assert all(1 <= again_s <= 30 for _, code, again_s in found if code == "rate_limit_exceeded")

    run_in_virtual_time(work)


def test_who_asks_again_when_told_to_finds_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check goes on without the request, and is not made again."""
    trials = Trials(monkeypatch)

    async def work(checker: GrammarChecker) -> None:
        texts = [f"0.9 {i}" for i in range(4)]
        found = await asyncio.gather(*(timed(checker, text) for text in texts))
        refused = [(text, again_s) for text, (_, code, again_s) in zip(texts, found, strict=True) if code != "taken"]
        assert refused and all(code in ("taken", "rate_limit_exceeded") for _, code, _ in found)
        await asyncio.sleep(max(again_s for _, again_s in refused))
        num_trials = len(trials.texts)
        assert [await timed(checker, text) for text, _ in refused] == [(0.0, "taken", 0.0)] * len(refused)
        assert len(trials.texts) == num_trials == 3 * len(texts)

    run_in_virtual_time(work)


def test_a_lane_takes_nothing_that_would_wait_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch)

    async def work(checker: GrammarChecker) -> None:
        slow = [asyncio.create_task(timed(checker, f"99 {i}", "slow")) for i in range(30)]
        other = asyncio.create_task(timed(checker, "0.5 other", "other"))
        await asyncio.gather(*slow)
        assert (await other)[1:] != ("invalid_value", 0.0)
        await asyncio.sleep(60)
        assert not checker._pending
        num_long = len(trials.texts) - 2 * 31
        assert num_long < 15, "what is refused is not tried behind the request's back"
        assert await timed(checker, "0.5 other", "other") == (0.0, "taken", 0.0)

    run_in_virtual_time(work)


def test_turns_ahead() -> None:
    async def main() -> None:
        turns = TenantTurns(2)
        assert turns.num_ahead("a") == 0
        waiting = [asyncio.create_task(turns.acquire(tenant)) for tenant in ("a", "a", "a", "a", "a", "b")]
        await asyncio.sleep(0)
        assert turns.num_ahead("a") == 2 + 3 + 1, "all of its own, and one of the other's"
        assert turns.num_ahead("b") == 2 + 1 + 2, "no more of the other's than it has of its own, and one"
        assert turns.num_ahead("c") == 2 + 1 + 1
        for _ in waiting:
            turns.release()
        await asyncio.gather(*waiting)
        assert turns.num_ahead("c") == 0

    asyncio.run(main())


def test_a_grammar_that_takes_long_lets_others_go_first() -> None:
    async def work(checker: GrammarChecker) -> None:
        checker._lanes = lane(0.01, is_nice=False), lane(600.0)
        waiting = asyncio.create_task(checker.check(ENDLESS.text(), "here"))
        seen: set[int] = set()
        while 10 not in seen:
            with suppress(psutil.NoSuchProcess):  # a child may end after it was listed
                seen |= {child.nice() for child in await children_of(checker)}
        assert psutil.Process(pid_of(checker)).nice() < 10
        await checker.close()
        with pytest.raises(RequestError, match="too much to do"):
            await waiting

    run(work)


def test_a_caller_that_goes_away_takes_nothing_from_others() -> None:
    async def work(checker: GrammarChecker) -> None:
        checker._lanes = lane(0.02), lane(0.1)
        text = pattern("[ab]").text()
        gone = [asyncio.create_task(checker.check(each, "gone")) for each in (ENDLESS.text(), text)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        texts = [text, *(pattern(f"[a-z]{{{i}}}").text() for i in range(1, 6))]
        found = await asyncio.gather(*(checker.check(text, "here") for text in texts))
        assert [verdict.text for verdict in found] == texts
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*gone, return_exceptions=True)
        )

    run(work)


def test_the_same_grammar_is_tried_once_for_all_who_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = counted(monkeypatch)

    async def work(checker: GrammarChecker) -> None:
        text = pattern("[a-z]{3}").text()
        num_callers = 2 * checker_module._MAX_PENDING_OF_TENANT
        found = await asyncio.gather(*(checker.check(text, "here") for _ in range(num_callers)))
        assert [verdict.text for verdict in found] == [text] * num_callers
        assert texts == [text]

    run(work)


@pytest.mark.parametrize(("bound", "num_others"), [("_MAX_PENDING_OF_TENANT", 1), ("_MAX_PENDING", 0)])
def test_not_without_end_may_wait(monkeypatch: pytest.MonkeyPatch, bound: str, num_others: int) -> None:
    monkeypatch.setattr(checker_module, bound, 3)

    async def work(checker: GrammarChecker) -> None:
        texts = [pattern(f"x{{{i}}}").text() for i in range(1, 7)]
        asked = [*((text, "a") for text in texts[:5]), (texts[5], "b")]
        found = await asyncio.gather(*(checker.check(text, "here", who) for text, who in asked), return_exceptions=True)
        assert [verdict.text for verdict in found[:3] if isinstance(verdict, Verdict)] == texts[:3]
        assert all(isinstance(error, RequestError) and error.code == "rate_limit_exceeded" for error in found[3:5])
        assert (getattr(found[5], "text", "") == texts[5]) is bool(num_others), "a tenant's bound is its own"
        assert (await checker.check(texts[4], "here", "a")).text == texts[4]

    run(work)


def test_a_process_that_dies_is_replaced_and_no_grammar_blamed() -> None:
    async def work(checker: GrammarChecker) -> None:
        checker._lanes = (lane(600.0),)
        await checker.check(pattern("a").text(), "here")
        waiting = asyncio.create_task(checker.check(ENDLESS.text(), "here"))
        first, (trial,) = psutil.Process(pid_of(checker)), await children_of(checker)
        first.kill()
        with pytest.raises(RequestError) as caught:
            await waiting
        assert caught.value.code == "rate_limit_exceeded"
        trial.kill()
        assert (await checker.check(pattern("b").text(), "here")).text
        assert pid_of(checker) != first.pid

    run(work)


@pytest.mark.parametrize("signal_name", ["ABRT", "SEGV", "KILL"])
def test_what_its_process_dies_of_is_refused(signal_name: str) -> None:
    """Like a grammar that uses all the memory allowed."""
    source, target = os.pipe()
    process = subprocess.Popen(["sh", "-c", f"kill -{signal_name} $$"])
    os.close(target)
    verdict = _verdict_of(_Check(7, process.pid, source, 0.0))
    process.returncode = -1  # its end was awaited
    assert "more memory" in verdict.error and verdict.number == 7 and not verdict.stopped


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


def test_the_files_that_the_server_holds_are_no_arguments() -> None:
    """Anybody sees arguments, and each file has up to 1,024 numbers."""

    async def main() -> None:
        held = HeldFiles(sorted(MODEL_PATH.iterdir()))
        held.pin()
        checker = GrammarChecker(MODEL_PATH, 3_072, files=held.pinned)
        try:
            await checker.check(pattern("a").text(), "here")
            arguments = psutil.Process(pid_of(checker)).cmdline()
            assert len(held.pinned) > 1 and len(arguments) == len(CHECK_COMMAND) + 3, arguments
        finally:
            await checker.close()

    asyncio.run(main())


def test_an_error_of_the_check_is_not_the_grammar_s(capfd: pytest.CaptureFixture[str]) -> None:
    async def work(checker: GrammarChecker) -> None:
        error = await refusal(checker, pattern("a"))
        assert error.code == "unsupported_value" and "the server's log" in error.message

    broken = (
        "from inferd.engine.grammar import check; check.judge = lambda *_: {}['oops']; raise SystemExit(check.main())"
    )
    run(work, MODEL_PATH, sys.executable, "-c", broken)
    assert "KeyError: 'oops'" in capfd.readouterr().err


@pytest.mark.parametrize("command", [(sys.executable, "-c", "raise SystemExit(1)"), ("/no/such/program",)])
def test_a_process_that_does_not_start_is_said_so(command: tuple[str, ...]) -> None:
    async def work(checker: GrammarChecker) -> None:
        assert "did not start" in (await refusal(checker, pattern("a"))).message

    run(work, MODEL_PATH, *command)


def test_bounds_are_checked_before_anything_is_asked() -> None:
    async def work(checker: GrammarChecker) -> None:
        error = await refusal(checker, pattern("a" * MAX_GRAMMAR_BYTES))
        assert f"at most {MAX_GRAMMAR_BYTES} are allowed" in error.message
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
    question = Question(3, "t", 0.5, 2.0, is_nice=True)
    assert read_question(frame_of(question)[4:]) == question
    verdict = Verdict(text="t", error="e", is_broken=True)
    frame = frame_of(verdict)
    assert body_length(frame[:4]) == len(frame) - 4
    assert read_verdict(frame[4:]) == verdict
