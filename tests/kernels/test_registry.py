"""An op runs the first implementation that can, says why the others cannot, and obeys or refuses a forced choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from inferd.kernels import registry
from inferd.kernels.registry import Implementation, KernelError, Op, Selection, always

TestOp = Op[int, Callable[[], str]]


@pytest.fixture
def op() -> Iterator[TestOp]:
    """An op with int keys: "even" runs for even ones, "small" below 10, "rest" never below 100."""
    yield Op(
        "test_op",
        [
            Implementation("even", lambda: "even", lambda key: None if key % 2 == 0 else f"{key} is odd"),
            Implementation("small", lambda: "small", lambda key: None if key < 10 else f"{key} is not small"),
        ],
    )
    del registry._OPS["test_op"]


def test_the_first_that_can_run_is_chosen_and_the_refusals_are_kept(op: TestOp) -> None:
    assert [op.resolve(4)(), op.resolve(3)()] == ["even", "small"]
    assert op.choices() == (
        Selection("test_op", 4, "even", ()),
        Selection("test_op", 3, "small", (("even", "3 is odd"),)),
    )
    assert registry.explain()[-2:] == op.choices()


def test_a_choice_can_be_looked_at_without_running_it(op: TestOp) -> None:
    assert op.choice(3) == Selection("test_op", 3, "small", (("even", "3 is odd"),))
    assert op.choice(3) is op.choices()[0]


def test_nothing_can_run(op: TestOp) -> None:
    with pytest.raises(
        KernelError, match=r"test_op: no implementation can run for 11 \(even: 11 is odd; small: 11 is not small\)"
    ):
        op.resolve(11)


def test_a_forced_choice_runs_or_raises_and_is_never_replaced(op: TestOp) -> None:
    assert op.resolve(4)() == "even"
    op.force("small")
    assert op.resolve(4)() == "small"
    with pytest.raises(KernelError, match="even: small is forced; small: 12 is not small"):
        op.resolve(12)
    op.force(None)
    assert op.resolve(4)() == "even"


def test_what_is_excluded_never_runs(op: TestOp) -> None:
    assert op.resolve(4)() == "even"
    op.exclude(["even"])
    assert op.choice(4) == Selection("test_op", 4, "small", (("even", "is switched off"),))
    op.force("even")
    with pytest.raises(KernelError, match="even: is switched off; small: even is forced"):
        op.resolve(4)
    op.force(None)
    op.exclude(())
    assert op.resolve(4)() == "even"


def test_an_unknown_name_cannot_be_forced(op: TestOp) -> None:
    with pytest.raises(KernelError, match="no implementation is called 'triton'; known are: even, small"):
        op.force("triton")


def test_the_predicate_is_asked_once_per_key() -> None:
    asked: list[int] = []
    counted: TestOp = Op("counted", [Implementation("only", lambda: "ran", lambda key: asked.append(key))])
    for key in (1, 1, 2, 1):
        counted.resolve(key)
    del registry._OPS["counted"]
    assert asked == [1, 2]


def test_a_library_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(KernelError, match=r"nowhere\.at_all cannot be imported: No module named 'nowhere'; repair or"):
        registry.Deferred("nowhere.at_all", "run").load()


def test_always_runs() -> None:
    assert always(object()) is None
