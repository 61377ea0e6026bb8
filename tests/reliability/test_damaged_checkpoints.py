"""R8, R19: a start with a damaged checkpoint ends with one bounded line within seconds, or the damage has no effect.

`reading_damaged` starts with each in a process of its own. A part of those that can be read load their weights and
answer a request. `python -m tests.reliability.reading_damaged --seed S --first I --keep FOLDER` repeats case I.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from inferd.engine.arch.shown import MAX_MESSAGE

from .damaging import KINDS
from .reading_damaged import READ_CPU_S, Outcome

ROOT = Path(__file__).resolve().parents[2]
NUM_SHORT, NUM_LONG = 30, 2_000
SEED = "20261128"
MAX_LINE = 1_000
OURS = re.compile(r"\d\d:\d\d:\d\d ")
"""The beginning of our log lines. A library also prints a name of 10,000 characters that it does not know."""
WAIT_S = 3_000.0
PROGRAM = "from tests.reliability import reading_damaged as program\n"
RUN = "raise SystemExit(program.main())\n"


def outcomes(*flags: str, change: str = "") -> list[Outcome]:
    """The results of the program. `change` is code that changes it first."""
    command = [sys.executable, "-c", PROGRAM + change + RUN, "--seed", SEED, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    return [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]


def fault_of(outcome: Outcome) -> str:
    """The part of the promise that was broken; empty if none was."""
    if outcome.fault:
        return outcome.fault
    if outcome.error and not (outcome.message and outcome.message.isprintable()):
        return "the message is not one line"
    if len(outcome.message) > MAX_MESSAGE:
        return f"the message has {len(outcome.message)} characters"
    if outcome.phase == "read" and outcome.cpu_s > READ_CPU_S:
        return f"it took {outcome.cpu_s} s of processor time"
    ours = [line for line in outcome.log.splitlines() if OURS.match(line)]
    if "Traceback" in outcome.log or any(len(line) > MAX_LINE for line in ours):
        return f"the log has a traceback, or a line that is too long: {outcome.log[-2000:]}"
    return ""


def check(found: Sequence[Outcome]) -> None:
    faults = [(one.index, one.name, one.phase, fault_of(one)) for one in found if fault_of(one)]
    assert not faults, f"{len(faults)} of {len(found)}: {faults[:5]}"


@pytest.fixture(scope="module")
def num_cases(is_long: bool) -> int:
    return NUM_LONG if is_long else NUM_SHORT


@pytest.fixture(scope="module")
def started(num_cases: int) -> list[Outcome]:
    """Starts with a whole checkpoint of each kind, and then with damaged ones."""
    return outcomes("--whole", "--count", str(num_cases))


def test_r19_damaged_checkpoints_are_refused_in_one_line_or_served(started: list[Outcome], num_cases: int) -> None:
    found = [one for one in started if one.index >= 0]
    assert [one.index for one in found] == list(range(num_cases))
    ends = Counter((one.phase, one.error or "no error") for one in found)
    print(f"R19 with {num_cases} damaged checkpoints: {dict(ends)}; most {max(one.cpu_s for one in found):.1f} s")
    check(found)
    assert ends["read", "ModelError"] > num_cases / 3, "most damage is found when a checkpoint is read"
    assert ends["answer", "no error"] >= num_cases / 50, "some checkpoints answer a request"


def test_whole_checkpoints_of_each_kind_answer_a_request(started: list[Outcome]) -> None:
    """Otherwise the damage would not be the reason for a refusal."""
    found = [one for one in started if one.index < 0]
    check(found)
    last = {
        "config of any family": "read",
        "GGUF of an encoder": "read",
        "tokenizer of a draft model": "load",
        "config of a draft model": "load",
    }
    ends = {one.name.partition(":")[0]: (one.phase, one.message) for one in found}
    assert ends == {name: (last.get(name, "answer"), "") for name in KINDS}


PLANTED = """
import os, logging
def planted(case):
    match int(case.folder.name):
        case 0: raise KeyError("a field")
        case 1: os.kill(os.getpid(), 11)
        case 2:
            while True: pass
        case 3: bytearray(2**40)
        case 4:
            try: 1 / 0
            except ZeroDivisionError: logging.getLogger("inferd").exception("it failed")
        case _: raise program.StartError("")
program.READ_CPU_S, program._read, program.write_bases = 1, planted, lambda base: None
program.write_case = lambda seed, base, folder, whole: (folder.mkdir(), program.Case("", folder, {}, True))[1]
"""
PLANTED_FAULTS = (
    "KeyError: 'a field'",
    "with -11",
    "with -24",
    "MemoryError",
    "the log has a traceback",
    "not one line",
)


def test_each_way_to_break_the_promise_is_noticed() -> None:
    found = outcomes("--count", str(len(PLANTED_FAULTS)), "--serve-every", "1000", change=PLANTED)
    for outcome, words in zip(found, PLANTED_FAULTS, strict=True):
        assert words in fault_of(outcome), outcome
    whole = Outcome(0, "", "read", "ModelError", "x" * MAX_MESSAGE, "", 1.0, "")
    assert fault_of(whole) == ""
    assert "characters" in fault_of(Outcome(0, "", "read", "ModelError", "x" * (MAX_MESSAGE + 1), "", 1.0, ""))
    assert "too long" in fault_of(Outcome(0, "", "read", "", "", "", 1.0, "08:15:30 " + "x" * MAX_LINE))
