"""Codex CLI over the Responses API: a model it knows and one it does not know, tools of an MCP server, a picture."""

from __future__ import annotations

import json

from agent import BROKEN, HOME, MCP_SERVER, MENDED, MODEL, TESTED, Project, call, plan, when
from checks import BASE_URL, KEY, check, run

CONFIG = f"""
model_provider = "inferd"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[model_providers.inferd]
name = "inferd"
base_url = "{BASE_URL}"
env_key = "INFERD_KEY"
wire_api = "responses"

[mcp_servers.words]
command = "{MCP_SERVER[0]}"
args = ["{MCP_SERVER[1]}"]

[analytics]
enabled = false
"""
PATCH = f"*** Begin Patch\n*** Update File: calc.py\n@@\n-    {BROKEN}\n+    {MENDED}\n*** End Patch\n"
TEST = call("exec_command", cmd="python3 test_calc.py")
READ = call("exec_command", cmd="cat calc.py")


def codex(project: Project, prompt: str, *, model: str = MODEL, is_resumed: bool = False, config: str = CONFIG) -> str:
    """The last answer."""
    (HOME / ".codex").mkdir(exist_ok=True)
    (HOME / ".codex" / "config.toml").write_text(config)
    (HOME / ".codex" / "auth.json").write_text(json.dumps({"OPENAI_API_KEY": KEY}))
    session = ["resume", "--last"] if is_resumed else []
    events = project.run(["codex", "exec", "--json", "--model", model, *session, prompt])
    told = [json.loads(line) for line in events.splitlines() if line.startswith("{")]
    answers = [event["item"]["text"] for event in told if event.get("item", {}).get("type") == "agent_message"]
    assert answers, events
    return str(answers[-1])


@check
def a_model_that_it_does_not_know() -> None:
    """a model that it does not know edits by the shell, and a session goes on"""
    project = Project("unknown")
    edit = call("exec_command", cmd=f"apply_patch <<'EOF'\n{PATCH}EOF")
    said = codex(project, "Mend calc.py. " + plan([READ], when(BROKEN, [edit]), [TEST], when(TESTED, "It is mended.")))
    assert said == "It is mended.", said
    project.check_mended()
    said = codex(project, "And again. " + plan([READ], when(MENDED, "It was mended.")), is_resumed=True)
    assert said == "It was mended.", said


@check
def a_model_that_it_knows() -> None:
    """a model that it knows edits by apply_patch"""
    project = Project("known")
    edit = call("apply_patch", input=PATCH)
    task = plan([READ], when(BROKEN, [edit]), when("Success", [TEST]), when(TESTED, "It is mended."))
    said = codex(project, "Mend calc.py. " + task, model="gpt-5.5")
    assert said == "It is mended.", said
    project.check_mended()


@check
def an_mcp_tool_is_called() -> None:
    """a tool of an MCP server, which an unknown model is shown at once"""
    said = codex(
        Project("mcp"), plan([call("mcp__words__count_words", text="one two three")], when("3 words", "Three."))
    )
    assert said == "Three.", said


@check
def an_mcp_tool_is_found() -> None:
    """a tool of an MCP server, which a known model finds by tool search"""
    count = call("mcp__words__count_words", text="one two three")
    task = plan([call("tool_search", query="count words")], when("count_words", [count]), when("3 words", "Three."))
    said = codex(Project("search"), task, model="gpt-5.5")
    assert said == "Three.", said


@check
def the_default_provider() -> None:
    """its default provider with another base URL"""
    config = f'openai_base_url = "{BASE_URL}"\nsandbox_mode = "danger-full-access"\napproval_policy = "never"\n'
    project = Project("default")
    edit = call("exec_command", cmd=f"apply_patch <<'EOF'\n{PATCH}EOF")
    task = plan([READ], when(BROKEN, [edit]), [TEST], when(TESTED, "It is mended."))
    said = codex(project, f"Mend calc.py. {task}", config=config)
    assert said == "It is mended.", said
    project.check_mended()


@check
def a_picture() -> None:
    """a picture in a tool's result does not end the task"""
    project = Project("picture")
    said = codex(project, plan([call("view_image", path=str(project.folder / "red.png"))], "There is a picture."))
    assert said == "There is a picture.", said


@check
def code_mode() -> None:
    """a model whose tools are in an item of the input runs code"""
    said = codex(
        Project("code"),
        plan([call("functions__exec", input="text('seen ' + 6 * 7)")], when("seen 42", "It ran.")),
        model="gpt-6.2-sol",
    )
    assert said == "It ran.", said


run()
