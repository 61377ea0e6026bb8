"""Cline's command line program over Chat Completions."""

from __future__ import annotations

from agent import BROKEN, MENDED, MODEL, Project, call, mending, plan
from checks import BASE_URL, KEY, check, run

VARIABLES = {"AI_SDK_LOG_WARNINGS": "false", "CLINE_TELEMETRY_DISABLED": "1", "CLINE_NO_AUTO_UPDATE": "1"}


def cline(project: Project, prompt: str) -> str:
    """Run the program with this task, and return its output."""
    project.run(["cline", "auth", "--provider", "openai", "--apikey", KEY, "--modelid", MODEL, "--baseurl", BASE_URL])
    return project.run(["cline", prompt], **VARIABLES)


@check
def a_task() -> None:
    """a task"""
    project = Project()
    path = str(project.calc)
    task = mending(
        call("read_files", files=[{"path": path}]),
        call("editor", path=path, old_text=BROKEN, new_text=MENDED),
        call("run_commands", commands=["python3 test_calc.py"]),
    )
    said = cline(project, f"Mend calc.py. {task}")
    assert "It is mended." in said, said
    project.check_mended()


@check
def a_picture() -> None:
    """a picture, which Cline puts into a message of the user"""
    project = Project("picture")
    read = call("read_files", files=[{"path": str(project.folder / "red.png")}])
    said = cline(project, plan([read], "There is a picture."))
    assert "There is a picture." in said, said


run()
