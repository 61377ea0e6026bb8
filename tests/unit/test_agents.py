"""The scripts and records of `make agents`, and the page that lists what it runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.agents.run import ENVIRONMENTS, HERE, faults_of
from tests.agents.scripted_model import PREFACE, Turn, answer_to
from tests.agents.shapes import LONGEST_TEXT, write_rows
from tests.clients.run import ROOT, clients, requirements_of

TOOLS = '# Tools\n<tools>\n{"type": "function", "function": {"name": "read", "parameters": {}}}\n</tools>\nWrite a call'
READ = [{"name": "read", "arguments": {"path": "a"}}]


def after(plan: Any, *turns: tuple[str, str]) -> str:
    asked = Turn("user", f"Do it. <plan>{json.dumps(plan)}</plan>")
    return answer_to([Turn("system", TOOLS), asked, *(Turn(*turn) for turn in turns)])


def test_a_plan_is_followed_by_the_models_turns() -> None:
    plan = [READ, {"seen": "blue", "text": "It is blue."}]
    assert after(plan) == f"{PREFACE}<tool_call>\n{json.dumps(READ[0])}\n</tool_call>"
    done = ("assistant", "I go on."), ("user", "<tool_response>\nblue\n</tool_response>")
    assert after(plan, *done) == "It is blue."
    assert after(plan, ("assistant", "I"), *done) == "It is blue.", "two turns of the model in a row are one"
    assert "'blue'" in after(plan, done[0], ("user", "red"))
    assert after(["Hello."], ("assistant", "Hello."), ("user", "Well?")) == "The plan has ended."


def test_a_call_needs_a_tool_that_is_offered() -> None:
    assert after([[{"name": "write", "arguments": {}}]]) == "Not offered: write. There are: read"


def test_steps_may_be_counted_by_a_mark() -> None:
    plan = {"mark": "result:", "steps": ["One.", {"seen": "blue", "text": "Two."}]}
    asked = f"<plan>{json.dumps(plan)}</plan>"
    assert answer_to([Turn("user", asked)]) == "One."
    assert answer_to([Turn("user", f"{asked} result: blue")]) == "Two."


def request(status: int, path: str = "/v1/messages", **body: Any) -> dict[str, Any]:
    return {
        "method": "POST",
        "path": path,
        "status": status,
        "answer": "no",
        "body": json.dumps({"model": "m", **body}),
    }


def test_what_a_served_route_refuses_is_a_fault_unless_stated(tmp_path: Path) -> None:
    stated = tmp_path / "refused.txt"
    requests = [request(200), request(404, "/v1/nothing"), request(400), request(500)]
    assert faults_of(requests, stated) == ["POST /v1/messages 400: no", "POST /v1/messages 500: no"]
    lines = ("POST /v1/messages 400 for a reason", "POST /v1/messages 500 for one", "GET /v1/models 401 for another")
    stated.write_text("\n".join(lines))
    assert faults_of(requests, stated) == ["GET /v1/models 401 is stated in refused.txt and did not occur"]


def test_a_record_has_one_row_of_each_shape(tmp_path: Path) -> None:
    long, item = "x" * 300, "call_" + "0a" * 12
    tools = [{"name": name, "parameters": {"type": "object"}} for name in ("a", "b")]
    requests = [
        request(200, signature=long, input=long, messages=[{"role": "user", "content": long}], tools=tools, id=item),
        request(200, input="", messages=[{"role": "user", "content": "y"}], id=item),
        request(400, messages=[{"role": "user", "content": "z", "more": 1}]),
        request(200, messages=[{"role": "assistant", "content": f"{'x' * 50}/tmp/codex-0123abcd/project {item[5:]}"}]),
        request(200, instructions=f"{'x' * 45} {item}"),
        request(200, input=[{"type": "item_reference", "id": "rs_1"}]),
    ]
    write_rows(tmp_path / "some.jsonl", requests)
    rows = [json.loads(line)["body"] for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    assert rows == [
        {
            "id": "call_1", "input": long[:LONGEST_TEXT], "signature": long, "tools": tools[:1],
            "messages": [{"content": long[:LONGEST_TEXT], "role": "user"}],
        },
        {"messages": [{"content": f"{'x' * 50}/home/agen", "role": "assistant"}]},
        {"instructions": f"{'x' * 45} call_1"},
    ]  # fmt: skip


@pytest.mark.parametrize("program", clients(HERE, ENVIRONMENTS), ids=lambda program: program.name)
def test_the_page_names_each_program_in_its_version(program: Any) -> None:
    assert f"{program.version} |" in (ROOT / "docs" / "clients.md").read_text()


SCRIPT = """
from checks import check_each, run

@check_each(("a_b", "c"))
def mend(case):
    'a task'
    assert case == "c", case

run()
"""


def test_a_check_is_made_of_each_case() -> None:
    variables = {"INFERD_URL": "", "INFERD_KEY": "", "PYTHONPATH": str(ROOT / "tests" / "clients")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True)
    told = [line for line in done.stdout.splitlines() if line.startswith(("ok", "FAILED"))]
    assert (told, done.returncode) == (["FAILED a b: a task", "ok c: a task"], 1)


def test_the_versions_of_all_packages_are_pinned() -> None:
    """A program is the one that the page names only if its libraries are, too."""
    for folder in (HERE, ROOT / "tests" / "clients"):
        for file in folder.glob("*/requirements.txt"):
            lines = [line for line in requirements_of(file).splitlines() if line and not line.startswith("#")]
            assert [line for line in lines if "==" not in line] == [], file


def test_open_webui_is_one_version_as_a_client_and_as_an_agent() -> None:
    """Its requirements as a client include those as an agent program."""
    (agent,), client = (
        requirements_of(folder / "open_webui" / "requirements.txt").splitlines()
        for folder in (HERE, ROOT / "tests" / "clients")
    )
    assert agent.startswith("open-webui==") and client[0] == agent
    (as_client,) = (one for one in clients(ROOT / "tests" / "clients", ENVIRONMENTS) if one.name == "open_webui")
    assert as_client.version == agent.replace("==", " ")


def test_the_readme_counts_the_programs() -> None:
    counted = re.search(r"(\d+) \[agent programs and frameworks\]", (ROOT / "README.md").read_text())
    assert counted is not None and int(counted[1]) == len(clients(HERE, ENVIRONMENTS))


PAGE = (ROOT / "docs" / "clients.md").read_text()
PROGRAMS = [one for one in clients(HERE, ENVIRONMENTS) if re.search(rf"\(#[\w-]+\) \| {re.escape(one.version)} ", PAGE)]


def keys_of(value: Any) -> set[str]:
    """All keys of a configuration, at any depth."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    return set(value).union(*map(keys_of, value.values())) if isinstance(value, dict) else set()


READERS = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_page_says_what_the_check_does(program: Any) -> None:
    """Each flag, variable and key of a program's blocks is in its `check.py`, which runs the program with them."""
    heading = re.search(rf"\| \[([^]]+)\]\(#[\w-]+\) \| {re.escape(program.version)} \|", PAGE)
    assert heading is not None
    section = PAGE.split(f"\n### {heading[1]}\n")[1].split("\n## ")[0].split("\n### ")[0]
    blocks = re.findall(r"^( *)```(\w+)\n(.*?)^\1```$", section, re.MULTILINE | re.DOTALL)
    commands = "\n".join(text for _, kind, text in blocks if kind == "sh")
    assert commands, "the page has no command that starts the program"
    said = {*re.findall(r"(?<!\S)(--[a-z][a-z-]+)", commands), *re.findall(r"\b([A-Z][A-Z_]+)=", commands)}
    for _, kind, text in blocks:
        if kind != "sh":
            said |= {key for key in keys_of(READERS[kind](text)) if "qwen3-coder" not in key} - {"inferd"}
    checked = (program.folder / "check.py").read_text()
    assert {word for word in said if word not in checked} == set()
    for variable in re.findall(r'env_key = "(\w+)"', section):
        assert f"export {variable}=" in commands
