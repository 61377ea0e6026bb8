"""gptme over Chat Completions: calls as tools, and calls as blocks of code in the text."""

from __future__ import annotations

from agent import BROKEN, MENDED, MODEL, TESTED, Project, call, plan, when
from checks import BASE_URL, KEY, check, run

VARIABLES = {"OPENAI_BASE_URL": BASE_URL, "OPENAI_API_KEY": KEY, "GPTME_TELEMETRY": "false", "GPTME_CHECK_UPDATES": "0"}
PATCH = f"<<<<<<< ORIGINAL\n    {BROKEN}\n=======\n    {MENDED}\n>>>>>>> UPDATED"


def gptme(project: Project, tool_format: str, task: str) -> str:
    """Run the program with this task, and return its output."""
    command = ["gptme", "--non-interactive", "--model", f"local/{MODEL}", "--tools", "shell,patch,complete"]
    return project.run([*command, "--tool-format", tool_format, f"Mend it. {task}"], **VARIABLES)


@check
def calls_as_tools() -> None:
    """calls as tools"""
    project = Project("tools")
    end = call("complete")
    task = plan(
        [call("shell", command="cat calc.py")],
        when(BROKEN, [call("patch", path="calc.py", patch=PATCH)]),
        [call("shell", command="python3 test_calc.py")],
        when(TESTED, [end]),
    )
    gptme(project, "tool", task)
    project.check_mended()


@check
def calls_as_text() -> None:
    """calls as blocks of code"""
    project = Project("text")
    task = plan(
        "```shell\ncat calc.py\n```",
        when(BROKEN, f"```patch calc.py\n{PATCH}\n```"),
        "```shell\npython3 test_calc.py\n```",
        when(TESTED, "```complete\n```"),
    )
    gptme(project, "markdown", task)
    project.check_mended()


run()
