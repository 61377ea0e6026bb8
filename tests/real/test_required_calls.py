"""Required tool calls of weights that never learned the markers of calls in their chat template.

CODER_GGUF is the path of such a model: Qwen2.5-Coder-Instruct 0.5B or 1.5B as GGUF. Without it the tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from benchmarks.tool_questions import QUESTIONS, asked, judged
from tests.e2e.conftest import Daemon

CODER = os.environ.get("CODER_GGUF")
ONE_CALL = tuple(question for question in QUESTIONS if len(question[1]) == 1)[::6]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if CODER is None:
        pytest.skip("CODER_GGUF is not set to a GGUF file of Qwen2.5-Coder-Instruct")
    served = Daemon(CODER, "--served-model-name", "m", "--max-model-len", "4096", "--kv-memory", "256MiB")
    served.wait_ready()
    yield served.url
    served.process.terminate()
    served.process.wait(30)


@pytest.mark.parametrize("index", range(len(ONE_CALL)))
def test_a_required_call_ends_the_turn(url: str, index: int) -> None:
    question, wanted = ONE_CALL[index]
    assert judged(asked(url, question, "required", 0.0, 120, 0), wanted) >= {"read", "ended", "number"}


def test_a_required_call_is_the_free_one(url: str) -> None:
    """It comes from the same odds."""
    question = ONE_CALL[0][0]
    free, required = (asked(url, question, way, 0.0, 120, 0)["message"]["tool_calls"] for way in ("auto", "required"))
    assert [call["function"] for call in required] == [call["function"] for call in free]
