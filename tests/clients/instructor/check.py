"""instructor: answers as classes, by tools, by JSON schema, as lists and in part."""

from __future__ import annotations

import instructor
from checks import BASE_URL, KEY, MODEL, check, run
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Invent a person."}], "max_tokens": 200, "seed": 3}


def wrapped(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0), mode=mode)


@check
def every_mode_gives_a_person() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        person = wrapped(mode).chat.completions.create(response_model=Person, max_retries=0, **ASK)
        assert isinstance(person, Person), mode


@check
def a_person_comes_in_parts() -> None:
    parts = list(wrapped(instructor.Mode.TOOLS).chat.completions.create_partial(response_model=Person, **ASK))
    assert parts[-1].name is not None
    assert parts[-1].age is not None


run()
