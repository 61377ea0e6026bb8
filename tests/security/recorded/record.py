"""Record anew how requests are answered: `python -m tests.security.recorded.record`.

Without options it sends the stored requests again and writes their answers. Do so only if an answer is meant to change,
for example because a field got a new bound. Read the differences that `test_recorded_answers --long` prints first, and
say in the commit message which of them are meant. Never do so to make that test pass after a change of structure.

`--requests` also writes the requests anew: after `faults`, `heads`, `valid` or `corpus` changed, or a route was added.
`--openapi` first writes the document anew from which the requests are made.

Every request is sent twice, the second time in another order. If its two answers differ, or if the answer depends on
how busy the machine is, the reason is stored beside the answer, and the test does not compare it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import astuple

from tests.security.recorded import corpus, faults
from tests.security.recorded.asking import (
    ANSWERS,
    OPENAPI,
    REQUESTS,
    Answer,
    Case,
    Client,
    openapi_of,
    read_cases,
    served,
    write_rows,
)

TIMED = {408: "a deadline passed", 429: "a limit of requests in a time", 503: "too much waits", 529: "too much waits"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", action="store_true", help="write the requests anew, too")
    parser.add_argument("--openapi", action="store_true", help="write /openapi.json anew, too")
    options = parser.parse_args()
    with served() as clients:
        if options.openapi:
            write_rows(OPENAPI, [{name: openapi_of(clients[name]) for name in ("open", "keyed")}])
        if options.requests:
            write_rows(REQUESTS, (case.row() for case in _different([*corpus.cases(), *faults.cases()])))
        cases = read_cases()
        started_s = time.monotonic()
        answers = _ask(clients, cases)
        took_s = time.monotonic() - started_s
        again = _ask(clients, random.Random(1).sample(cases, len(cases)))
    left_out = {case.id: reason for case in cases if (reason := _reason(case, answers[case.id], again[case.id]))}
    write_rows(ANSWERS, ([case.id, *astuple(answers[case.id]), left_out.get(case.id)] for case in cases))
    _report(cases, answers, left_out, took_s)


def _different(cases: list[Case]) -> list[Case]:
    """Each request once."""
    found: dict[tuple[object, ...], Case] = {}
    for case in cases:
        found.setdefault((case.server, case.method, case.path, case.headers, case.body), case)
    return list(found.values())


def _ask(clients: dict[str, Client], cases: list[Case]) -> dict[str, Answer]:
    return {case.id: clients[case.server].ask(case)[0] for case in cases}


def _reason(case: Case, one: Answer, other: Answer) -> str | None:
    """Why an answer is not compared; None if it is."""
    if one.status in TIMED and case.server != "starting":
        return f"{one.status}: {TIMED[one.status]}"
    return None if one == other else f"asked twice, it was answered {one.status} and {other.status}"


def _report(cases: list[Case], answers: dict[str, Answer], left_out: dict[str, str], took_s: float) -> None:
    for route, count in sorted(Counter(case.route for case in cases).items()):
        print(f"{count:6} {route}")
    for (status, code), count in sorted(Counter((one.status, str(one.code)) for one in answers.values()).items()):
        print(f"{count:6} {status} {code}")
    for case_id, reason in left_out.items():
        print(f"left out: {case_id}: {reason}")
    sizes = ", ".join(f"{path.name} {path.stat().st_size}" for path in (REQUESTS, ANSWERS, OPENAPI))
    print(f"{len(cases)} requests, asked once in {took_s:.1f} s; bytes: {sizes}")


if __name__ == "__main__":
    main()
