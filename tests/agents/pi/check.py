"""pi over each of the three APIs: Chat Completions, Responses and Messages."""

from __future__ import annotations

import json

from agent import BROKEN, HOME, MENDED, MODEL, Project, call, mending, plan, when
from checks import BASE_URL, KEY, URL, check_each, run

APIS = {"openai-completions": BASE_URL, "openai-responses": BASE_URL, "anthropic-messages": URL}
SIZES = {"contextWindow": 200_000, "maxTokens": 32_000}
VARIABLES = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"}


def pi(project: Project, api: str, prompt: str, *flags: str) -> str:
    """Run the program with this task, and return its output."""
    model = {"id": MODEL, "reasoning": True, **SIZES}
    providers = {
        name: {"baseUrl": url, "api": name, "apiKey": KEY, "models": [{**model, "input": ["text", "image"]}]}
        for name, url in APIS.items()
    }
    folder = HOME / ".pi" / "agent"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.json").write_text(json.dumps({"providers": providers}))
    return project.run(["pi", "--print", "--provider", api, "--model", MODEL, *flags, prompt], **VARIABLES)


@check_each(APIS)
def a_task_and_its_session(api: str) -> None:
    """a task, and a session that goes on"""
    project = Project(api)
    task = mending(
        call("read", path="calc.py"),
        call("edit", path="calc.py", edits=[{"oldText": BROKEN, "newText": MENDED}]),
        call("bash", command="python3 test_calc.py"),
    )
    said = pi(project, api, f"Mend calc.py. {task}", "--thinking", "medium")
    assert "It is mended." in said, said
    project.check_mended()
    again = plan([call("read", path="calc.py")], when(MENDED, "It was mended."))
    said = pi(project, api, f"And again. {again}", "--continue")
    assert "It was mended." in said, said


@check_each(APIS)
def a_picture(api: str) -> None:
    """a picture"""
    said = pi(Project(f"{api}-picture"), api, plan([call("read", path="red.png")], "There is a picture."))
    assert "There is a picture." in said, said


run()
