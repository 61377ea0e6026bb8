"""Continue's command line program over Chat Completions."""

from __future__ import annotations

import json

from agent import BROKEN, HOME, MENDED, MODEL, Project, call, mending, plan, when
from checks import BASE_URL, KEY, check, run

CONFIG = {
    "name": "inferd",
    "version": "1.0.0",
    "schema": "v1",
    "models": [
        {
            "name": MODEL,
            "provider": "openai",
            "model": MODEL,
            "apiBase": BASE_URL,
            "apiKey": KEY,
            "capabilities": ["tool_use"],
            "defaultCompletionOptions": {"contextLength": 200_000, "maxTokens": 4_000},
        }
    ],
}
VARIABLES = {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_AUTO_UPDATED": "1"}


def cn(project: Project, prompt: str, *flags: str) -> str:
    """Run the program with this task, and return its output."""
    (HOME / "config.yaml").write_text(json.dumps(CONFIG))
    return project.run(["cn", "--config", str(HOME / "config.yaml"), "--auto", *flags, "--print", prompt], **VARIABLES)


@check
def a_task_and_its_session() -> None:
    """a task, and a session that goes on"""
    project = Project()
    path = str(project.calc)
    task = mending(
        call("Read", filepath=path),
        call("Edit", file_path=path, old_string=BROKEN, new_string=MENDED),
        call("Bash", command="python3 test_calc.py"),
    )
    said = cn(project, f"Mend calc.py. {task}")
    assert "It is mended." in said, said
    project.check_mended()
    again = plan([call("Read", filepath=path)], when(MENDED, "It was mended."))
    said = cn(project, f"And again. {again}", "--resume")
    assert "It was mended." in said, said


run()
