"""`inferd embed` against a scripted server: its files, lines that fail, and runs that end early and go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.embed.client import EmbedError
from inferd.server.commands.embed.run import EmbedOptions, run
from inferd.server.dispatch.model_lifecycle import State

from . import conftest
from .conftest import HIDDEN_SIZE, MAX_MODEL_LEN, vector_of

TEXTS = [f"line {i} of many" for i in range(23)]
Options = Callable[..., EmbedOptions]


@pytest.fixture(autouse=True)
def _unscripted(router: Any) -> Iterator[None]:
    yield
    vars(router).pop("check_queue", None)


@pytest.fixture
def options(url: str, tmp_path: Path) -> Options:
    """Options of a run on a file with `texts`, or with `content`."""

    def made(*texts: str, content: bytes | None = None, name: str = "in.txt", **given: Any) -> EmbedOptions:
        file = tmp_path / name
        file.write_bytes("".join(f"{text}\n" for text in texts).encode() if content is None else content)
        known: dict[str, Any] = {
            "output": None, "model": None, "api_key": None, "field": None, "base_url": url, "batch": 4,
            "patience_s": 5.0,
        }  # fmt: skip
        return EmbedOptions(file=str(file), **{**known, **given})

    return made


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected(router: Any, text: str) -> Any:
    ids = router.model.tokenizer.encode(text, True)
    return np.frombuffer(vector_of(ids, HIDDEN_SIZE), dtype=np.float32)


def left_files(path: Path) -> set[str]:
    return {file.name for file in path.parent.iterdir()} - {"in.txt", "in.jsonl"}


def test_each_line_gets_its_vector_in_order(options: Options, router: Any) -> None:
    asked = options(*TEXTS)
    assert run(asked) == 0
    rows = read(asked.output_path)
    assert [row["index"] for row in rows] == list(range(23))
    for text, row in zip(TEXTS, rows, strict=True):
        assert np.array_equal(np.float32(row["embedding"]), expected(router, text))
    assert left_files(asked.output_path) == {"in.txt.embeddings.jsonl"}


def test_json_lines_keep_their_ids(options: Options, router: Any) -> None:
    lines = [{"id": "a", "body": "one", "text": "x"}, "two", {"id": 3, "body": "three"}]
    content = "\n".join(map(json.dumps, lines)).encode()  # the last line has no end
    asked = options(content=content, name="in.jsonl", field="body")
    assert run(asked) == 0
    rows = read(asked.output_path)
    assert [row.get("id") for row in rows] == ["a", None, 3]
    for text, row in zip(("one", "two", "three"), rows, strict=True):
        assert np.array_equal(np.float32(row["embedding"]), expected(router, text))
    assert run(replace(asked, field=None, restart=True)) == 1, "only one line has a 'text'"


def test_a_field_that_no_line_has_ends_the_run(options: Options, tmp_path: Path) -> None:
    objects = [{"id": i, "body": "x", "title": "y"} for i in range(3_000)]
    content = "\n".join(map(json.dumps, objects)).encode()
    with pytest.raises(ConfigError) as caught:
        run(options(content=content, name="in.jsonl", base_url=None, model="never started"))
    assert "no text in the first 20 lines" in str(caught.value)
    assert "line 1: it has no text in 'text': --field may name one of its texts, 'body', 'title'" in str(caught.value)
    with pytest.raises(ConfigError, match=r"the only line of the input.*not JSON"):
        run(options(content=b"plain words", name="in.jsonl"))
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}
    late = b'{"body": "x"}\n' * 19 + b'{"text": "x"}\n'
    assert run(options(content=late, name="in.jsonl")) == 1


def test_lines_of_json_say_what_they_lack(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    long = json.dumps({"text": "long " * MAX_MODEL_LEN})
    content = f'{{"text": "one"}}\n{{"text": ""}}\n  \n[1]\n{long}\n'.encode()
    asked = options(content=content, name="in.jsonl")
    assert run(asked) == 1
    assert "The first is line 2: its 'text' is empty" in " ".join(capsys.readouterr().err.split())
    errors = [row.get("error", "") for row in read(asked.output_path)]
    assert errors[:4] == [
        "",
        "its 'text' is empty",
        "it is blank: each line needs a JSON object",
        "it is neither a JSON object nor a JSON string",
    ]
    assert errors[4].endswith("Or use --truncate, which cuts it.") and "truncate_prompt_tokens" not in errors[4]


def test_numpy_reads_the_array(options: Options, router: Any, tmp_path: Path) -> None:
    whole = tmp_path / "out.npy"
    assert run(options(*TEXTS, output=whole)) == 0
    assert np.array_equal(np.load(whole), [expected(router, text) for text in TEXTS])
    for kind, dtype, width in (("int8", np.int8, HIDDEN_SIZE), ("ubinary", np.uint8, -(-HIDDEN_SIZE // 8))):
        path = tmp_path / f"{kind}.npy"
        assert run(options(*TEXTS, output=path, output_dtype=kind)) == 0
        found = np.load(path)
        assert (found.dtype, found.shape) == (dtype, (23, width))


def test_lines_that_fail_are_written_and_counted(options: Options, router: Any, tmp_path: Path) -> None:
    texts = ["", *TEXTS[:5], "long " * MAX_MODEL_LEN, TEXTS[5]]
    content = "\n".join(texts).encode() + b"\n\xff\n"
    asked = options(content=content, concurrency=2)
    assert run(asked) == 1
    rows = read(asked.output_path)
    errors = {row["index"]: row["error"] for row in rows if "error" in row}
    assert (sorted(errors), len(rows)) == ([0, 6, 8], 9)
    assert "empty" in errors[0] and "context length" in errors[6] and "UTF-8" in errors[8]
    assert np.array_equal(np.float32(rows[7]["embedding"]), expected(router, TEXTS[5]))
    whole = tmp_path / "out.npy"
    assert run(options(content=content, output=whole)) == 1
    found = np.load(whole)
    assert np.isnan(found).all(axis=1).nonzero()[0].tolist() == [0, 6, 8]
    assert np.array_equal(found[7], expected(router, TEXTS[5]))
    assert [row["index"] for row in read(tmp_path / "out.npy.errors.jsonl")] == [0, 6, 8]
    assert run(options(*texts[1:], truncate=True, restart=True)) == 0


def test_fields_of_the_request(options: Options, router: Any) -> None:
    assert run(options("one two three", dimensions=2, input_type="query")) == 0
    assert router.submits[-1].params.pooling.num_components == 2
    with pytest.raises(EmbedError, match="other"):
        run(options("one", model="other", restart=True))


def test_a_refused_setting_leaves_no_file(options: Options) -> None:
    asked = options(*TEXTS)
    with pytest.raises(EmbedError, match="prompt_name"):
        run(replace(asked, prompt_name="none"))
    with pytest.raises(EmbedError, match="dimensions"):
        run(replace(asked, dimensions=HIDDEN_SIZE + 1))
    assert left_files(asked.output_path) == set()
    assert run(asked) == 0


def test_settings_may_change_while_no_line_is_done(options: Options, router: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    stop_after(router, 0)
    with pytest.raises(EmbedError, match="gave up"):
        run(options(*TEXTS, output=output, patience_s=0.0))
    go_on(router)
    assert (tmp_path / "out.jsonl.part").exists()
    assert run(options(*TEXTS, output=output, dimensions=2)) == 0


def test_the_run_tells_of_its_model(
    options: Options, url: str, router: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(options("a")) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"tiny gives vectors of {HIDDEN_SIZE} components" in said
    assert "warning: the model 'tiny' was not trained to embed" in said
    assert run(options("a", output_dtype="ubinary", restart=True)) == 0
    assert "vectors of 1 byte, a bit for each component" in capsys.readouterr().err
    ask = {"input": "a", "model": "tiny"}
    assert "not trained to embed" in httpx.post(f"{url}/v1/embeddings", json=ask).headers["x-inferd-warning"]


@pytest.mark.parametrize("name", ["out.jsonl", "out.npy"])
def test_a_run_that_ended_goes_on(options: Options, router: Any, tmp_path: Path, name: str) -> None:
    texts = [TEXTS[0], "", *TEXTS[1:]]
    whole, output = tmp_path / f"whole-{name}", tmp_path / name
    assert run(options(*texts, output=whole)) == 1
    for num_answers in (0, 1, 2):  # behind the one that describes the model
        asked = options(*texts, output=output, patience_s=0.0, concurrency=1)
        stop_after(router, num_answers)
        with pytest.raises(EmbedError, match="gave up"):
            run(asked)
        assert not output.exists()
        go_on(router)
    num_submits = len(router.submits)
    assert run(options(*texts, output=output)) == 1
    assert 0 < len(router.submits) - num_submits < len(texts), "what was done is not done again"
    assert output.read_bytes() == whole.read_bytes()
    assert left_files(output) == {path.name for path in (output, whole)} | (
        {f"{path.name}.errors.jsonl" for path in (output, whole)} if name == "out.npy" else set()
    )


def stop_after(router: Any, num_answers: int) -> None:
    """Have the server stop taking requests after so many batches."""
    check, left = type(router).check_queue, [num_answers]

    def checked(*given: Any, **named: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            router.state = State.STOPPED
        check(router, *given, **named)

    router.check_queue = checked


def go_on(router: Any) -> None:
    vars(router).pop("check_queue", None)
    router.reset()


def test_another_input_or_other_settings_are_not_mixed(options: Options, router: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    stop_after(router, 2)
    with pytest.raises(EmbedError):
        run(options(*TEXTS, output=output, patience_s=0.0, concurrency=1))
    go_on(router)
    with pytest.raises(ConfigError, match="are not those that"):
        run(options("changed", *TEXTS[1:], output=output))
    with pytest.raises(ConfigError, match="dimensions was None"):
        run(options(*TEXTS, output=output, dimensions=2))
    with pytest.raises(ConfigError, match="are not those that"):
        run(options(TEXTS[0], output=output))
    assert run(options("changed", output=output, restart=True)) == 0
    with pytest.raises(ConfigError, match="is there already"):
        run(options(*TEXTS, output=output))


@pytest.mark.parametrize("output_dtype", ["float", "ubinary"])
def test_vectors_of_another_model_are_not_mixed(
    options: Options, router: Any, tmp_path: Path, output_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    stop_after(router, 2 if output_dtype == "float" else 3)
    with pytest.raises(EmbedError):
        run(options(*TEXTS, output=output, output_dtype=output_dtype, patience_s=0.0, concurrency=1))
    go_on(router)
    monkeypatch.setattr(conftest, "vector_of", lambda ids, width: nearly(vector_of(ids, width)))
    with pytest.raises(ConfigError, match="the server now gives another for the same short text"):
        run(options(*TEXTS, output=output, output_dtype=output_dtype))
    assert not output.exists()
    monkeypatch.undo()
    assert run(options(*TEXTS, output=output, output_dtype=output_dtype)) == 0


def nearly(vector: bytes) -> bytes:
    """The vector that other weights under the same name may give: its signs are the same."""
    return (np.frombuffer(vector, np.float32) * np.float32(1.001)).tobytes()


def test_a_run_that_is_killed_goes_on(options: Options, router: Any, url: str, tmp_path: Path) -> None:
    texts = [f"{i} and more" for i in range(3_000)]
    output = tmp_path / "out.jsonl"
    asked = options(*texts, output=output, batch=1, concurrency=1)
    command = [sys.executable, "-m", "inferd", "embed", asked.file, "-o", str(output), "--url", url, "--batch", "1"]
    state = tmp_path / "out.jsonl.part.json"
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        with router.changed:
            assert router.changed.wait_for(lambda: len(router.submits) > 50, 60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    num_done = json.loads(state.read_text())["num_lines"]
    assert 0 < num_done < len(texts)
    assert run(replace(asked, batch=500)) == 0
    rows = read(output)
    assert [row["index"] for row in rows] == list(range(3_000))
    for i in (0, num_done - 1, num_done, num_done + 1, 2_999):
        assert np.array_equal(np.float32(rows[i]["embedding"]), expected(router, texts[i]))


def test_the_command_says_what_is_missing(options: Options, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model must name"):
        run(options("a", base_url=None))
    with pytest.raises(ConfigError, match="--output must name"):
        run(replace(options("a"), file="-"))
    with pytest.raises(ConfigError, match="cannot read"):
        run(replace(options("a"), file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="no directory"):
        run(options("a", output=tmp_path / "none" / "out.jsonl"))
    endings = r"must end in \.npy, or for JSON lines in \.jsonl or \.ndjson, but got 'o\.csv'"
    with pytest.raises(ConfigError, match=endings):
        run(options("a", output=tmp_path / "o.csv"))
    with pytest.raises(EmbedError, match="no server at"):
        run(options("a", base_url="http://127.0.0.1:9"))
