"""Claude Code over the Messages API: its own tools, tool search, a sub-agent, a picture, and a session that goes on."""

from __future__ import annotations

import json

from agent import BROKEN, HOME, MCP_SERVER, MENDED, MODEL, Project, call, mending, plan, when
from checks import KEY, URL, check, run

CONTEXT = 150_000
VARIABLES = {
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_AUTH_TOKEN": KEY,
    "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
    "DISABLE_AUTOUPDATER": "1",
    "IS_SANDBOX": "1",
}
SERVERS = {"mcpServers": {"words": {"command": MCP_SERVER[0], "args": MCP_SERVER[1:]}}}


def claude(project: Project, prompt: str, *flags: str, model: str = MODEL) -> str:
    """The last answer."""
    (HOME / "servers.json").write_text(json.dumps(SERVERS))
    command = ["claude", "--print", "--dangerously-skip-permissions", f"--mcp-config={HOME / 'servers.json'}"]
    told = project.run(
        [*command, "--output-format=stream-json", "--verbose", *flags, "--", prompt], ANTHROPIC_MODEL=model, **VARIABLES
    )
    results = [line for line in told.splitlines() if line.startswith('{"') and '"type":"result"' in line]
    assert results, told[-6000:]
    result = json.loads(results[-1])
    if model == MODEL:
        assert result["modelUsage"][model]["contextWindow"] == CONTEXT, result
    return str(result["result"])


def mend(project: Project) -> str:
    path = str(project.calc)
    return mending(
        call("Read", file_path=path),
        call("Edit", file_path=path, old_string=BROKEN, new_string=MENDED),
        call("Bash", command="python3 test_calc.py", description="Run the test"),
    )


@check
def a_task_and_its_session() -> None:
    """a task, and a session that goes on"""
    project = Project("task")
    said = claude(project, f"Mend calc.py. {mend(project)}")
    assert said == "It is mended.", said
    project.check_mended()
    again = plan([call("Read", file_path=str(project.calc))], when(MENDED, "It was mended."))
    said = claude(project, f"And again. {again}", "--continue")
    assert said == "It was mended.", said


@check
def a_model_that_it_knows() -> None:
    """a task with a model that it knows"""
    project = Project("known")
    said = claude(project, f"Mend calc.py. {mend(project)}", model="claude-sonnet-4-5")
    assert said == "It is mended.", said
    project.check_mended()


@check
def tool_search() -> None:
    """a tool of an MCP server, found by tool search"""
    count = call("mcp__words__count_words", text="one two three")
    find = call("ToolSearch", query="select:mcp__words__count_words", max_results=3)
    said = claude(Project("search"), plan([find], [count], when("3 words", "Three.")))
    assert said == "Three.", said


@check
def a_sub_agent() -> None:
    """a sub-agent reads a file, and its answer comes back"""
    project = Project("agents")
    below = plan([call("Read", file_path=str(project.calc))], when(BROKEN, "The sum is a difference."))
    ask = call("Agent", description="Read a file", prompt=f"Read calc.py. {below}", subagent_type="general-purpose")
    said = claude(project, plan([ask], "I wait.", when("The sum is a difference.", "It has read it.")))
    assert said == "It has read it.", said


@check
def a_picture() -> None:
    """a picture in a tool's result does not end the task"""
    project = Project("picture")
    read = call("Read", file_path=str(project.folder / "red.png"))
    said = claude(project, plan([read], "There is a picture."))
    assert said == "There is a picture.", said


run()
