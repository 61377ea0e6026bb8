"""aider over Chat Completions: edits in the text of the answer, and a test whose failure goes back to the model."""

from __future__ import annotations

import json

from agent import BROKEN, MENDED, MODEL, Project, plan, when
from checks import BASE_URL, KEY, check, run

VARIABLES = {"AIDER_ANALYTICS": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "AIDER_CHECK_UPDATE": "false"}
FLAGS = (
    "--yes-always", "--no-git", "--no-show-model-warnings", "--no-check-update", "--no-pretty", "--no-gitignore",
    "--map-tokens", "0", "--edit-format", "diff", "--auto-test", "--test-cmd", "python3 test_calc.py",
)  # fmt: skip


MODEL_FACTS = {"max_input_tokens": 65536, "max_output_tokens": 8192, "litellm_provider": "openai", "mode": "chat"}


def block(old: str, new: str) -> str:
    return f"I change it.\n\ncalc.py\n```python\n<<<<<<< SEARCH\n    {old}\n=======\n    {new}\n>>>>>>> REPLACE\n```\n"


@check
def a_task() -> None:
    """an edit that fails its test, and a second one"""
    project = Project()
    (project.folder / ".aider.model.metadata.json").write_text(json.dumps({f"openai/{MODEL}": MODEL_FACTS}))
    wrong = "return a * b"
    # Between the two, aider writes three turns in the model's name.
    task = plan(when(BROKEN, block(BROKEN, wrong)), *["Ok."] * 3, when("AssertionError", block(wrong, MENDED)))
    key = ["--openai-api-base", BASE_URL, "--openai-api-key", KEY]
    project.run(
        ["aider", "--model", f"openai/{MODEL}", *key, *FLAGS, "--message", f"Mend it. {task}", "calc.py"], **VARIABLES
    )
    project.check_mended()


run()
