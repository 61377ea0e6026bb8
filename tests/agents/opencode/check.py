"""opencode over Chat Completions, by the AI SDK's `openai-compatible` provider."""

from __future__ import annotations

import json

from agent import BROKEN, HOME, MENDED, MODEL, Project, call, mending, plan, when
from checks import BASE_URL, KEY, check, run

PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": BASE_URL, "apiKey": KEY},
    "models": {MODEL: {"name": MODEL, "limit": {"context": 200_000, "output": 32_000}}},
}
CONFIG = {"provider": {"inferd": PROVIDER}, "autoupdate": False, "share": "disabled", "permission": {"*": "allow"}}
VARIABLES = {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}


def opencode(project: Project, prompt: str, *flags: str) -> str:
    """Run the program with this task, and return its output."""
    folder = HOME / ".config" / "opencode"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "opencode.json").write_text(json.dumps(CONFIG))
    # It would put quotes around an argument.
    return project.run(["opencode", "run", "--model", f"inferd/{MODEL}", *flags], stdin=prompt, **VARIABLES)


@check
def a_task_and_its_session() -> None:
    """a task, and a session that goes on"""
    project = Project()
    path = str(project.calc)
    task = mending(
        call("read", filePath=path),
        call("edit", filePath=path, oldString=BROKEN, newString=MENDED),
        call("bash", command="python3 test_calc.py", description="Run the test"),
    )
    said = opencode(project, f"Mend calc.py. {task}")
    assert "It is mended." in said, said
    project.check_mended()
    again = plan([call("read", filePath=path)], when(MENDED, "It was mended."))
    said = opencode(project, f"And again. {again}", "--continue")
    assert "It was mended." in said, said


run()
