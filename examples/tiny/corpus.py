"""The written text: reads text/*.md into entries and phrases their questions in many ways.

An entry is a heading, questions (`Q: `) and answers (`A: `). Any of the answers is right, and one may take several
lines. A heading `## what: a KV cache | the KV cache` adds the usual ways to ask for it; the kinds are the keys of
`PHRASINGS`. A question is held out of training by its hash. This module knows nothing about token ids.
"""

import hashlib
import random
import re
from dataclasses import dataclass
from pathlib import Path

TEXT_DIR = Path(__file__).parent / "text"
HELD_OUT_ONE_IN = 25

PHRASINGS: dict[str, tuple[str, ...]] = {
    "what": (
        "What is {x}?",
        "What is {x}?",
        "What's {x}?",
        "Explain {x}.",
        "Can you explain {x}?",
        "Please explain {x}.",
        "Tell me about {x}.",
        "What do you know about {x}?",
        "Define {x}.",
        "What does {x} mean?",
        "Describe {x}.",
        "In simple words, what is {x}?",
        "What exactly is {x}?",
        "Do you know what {x} is?",
        "Can you tell me what {x} is?",
        "Could you explain {x} to me?",
        "What is {x} and why does it matter?",
        "Explain {x} in one sentence.",
        "Explain {x} like I am five.",
        "I want to know what {x} is.",
        "Give me a short explanation of {x}.",
        "What is meant by {x}?",
        "So what is {x}?",
        "And what is {x}?",
        "{x}?",
        "{x}",
    ),
    "plural": (
        "What are {x}?",
        "What are {x}?",
        "Explain {x}.",
        "Can you explain {x}?",
        "Tell me about {x}.",
        "What do you know about {x}?",
        "Describe {x}.",
        "In simple words, what are {x}?",
        "Can you tell me what {x} are?",
    ),
    "how": (
        "How do I {x}?",
        "How do I {x}?",
        "How can I {x}?",
        "How to {x}?",
        "How do you {x}?",
        "How does one {x}?",
        "Can you tell me how to {x}?",
        "Please tell me how to {x}.",
        "What do I do to {x}?",
        "I want to {x}.",
    ),
    "why": ("Why {x}?", "Why {x}?", "Can you tell me why {x}?", "Please explain why {x}."),
    "story": (
        "Tell me a story about {x}.",
        "Tell me a short story about {x}.",
        "Write a story about {x}.",
        "Write a short story about {x}.",
        "Can you tell me a story about {x}?",
        "A story about {x}, please.",
        "Story about {x}",
    ),
    "poem": (
        "Write a poem about {x}.",
        "Write a short poem about {x}.",
        "Tell me a poem about {x}.",
        "Can you write a poem about {x}?",
        "A poem about {x}, please.",
    ),
    "difference": (
        "What is the difference between {x}?",
        "What's the difference between {x}?",
        "Explain the difference between {x}.",
        "How do {x} differ?",
        "Compare {x}.",
    ),
}
ANY_STORY = (
    "Tell me a short story.",
    "Tell me a short story.",
    "Tell me a story.",
    "Tell me a story.",
    "Write a short story.",
    "Write a story.",
    "Can you tell me a story?",
    "Can you tell me a short story?",
    "Please tell me a story.",
    "I want to hear a story.",
    "Tell me another story.",
    "Tell me a bedtime story.",
    "A story, please.",
    "Once upon a time",
)
ANY_POEM = (
    "Write a poem.",
    "Write a short poem.",
    "Tell me a poem.",
    "Can you write a poem?",
    "A poem, please.",
    "Write me a poem.",
)


@dataclass(frozen=True, slots=True)
class Entry:
    heading: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]

    def trained_questions(self) -> tuple[str, ...]:
        return tuple(q for q in self.questions if not is_held_out(q)) or self.questions

    def held_out_questions(self) -> tuple[str, ...]:
        return tuple(q for q in self.questions if is_held_out(q)) if len(self.questions) > 3 else ()


def is_held_out(question: str) -> bool:
    digest = hashlib.sha256(question.lower().encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def read_topics() -> dict[str, tuple[Entry, ...]]:
    """Entries by topic (the file's name), in the order of the file."""
    return {path.stem: read_entries(path.read_text(encoding="utf-8")) for path in sorted(TEXT_DIR.glob("*.md"))}


def read_entries(text: str) -> tuple[Entry, ...]:
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return tuple(_entry(*section.split("\n", 1)) for section in sections)


def _entry(heading: str, body: str) -> Entry:
    kind, _, subjects = heading.partition(": ")
    questions: list[str] = []
    if kind in PHRASINGS:
        questions = [_phrase(phrasing, x.strip()) for x in subjects.split("|") for phrasing in PHRASINGS[kind]]
    questions += {"story": ANY_STORY, "poem": ANY_POEM}.get(kind, ())
    parts = re.split(r"^([QA]): ", body.strip(), flags=re.MULTILINE)[1:]
    marks, texts = parts[::2], [text.strip() for text in parts[1::2]]
    written = [text for mark, text in zip(marks, texts, strict=True) if mark == "Q"]
    answers = [text for mark, text in zip(marks, texts, strict=True) if mark == "A"]
    if not answers or not (questions or written):
        raise ValueError(f"an entry needs a question and an answer: {heading!r}")
    return Entry(heading, tuple(questions + written * 2), tuple(answers))


def _phrase(phrasing: str, subject: str) -> str:
    question = phrasing.format(x=subject)
    return question if question.startswith("inferd") else question[0].upper() + question[1:]


def vary(question: str, rng: random.Random) -> str:
    """The question in the style of a hurried, a polite or a plain person."""
    draw = rng.random()
    if draw < 0.12:
        return question.lower().rstrip("?.!")
    if draw < 0.18:
        return question.rstrip("?.!")
    if draw < 0.23:
        return question.lower()
    if draw < 0.26:
        return "Please: " + question
    if draw < 0.29:
        return rng.choice(("Hi! ", "Hello! ", "Hi, ", "OK. ", "Hey, ")) + question
    if draw < 0.31:
        return question + rng.choice(
            (" Please.", " Thanks!", " Thank you.", "\n", " ", " Answer briefly.", " Be brief.")
        )
    return question
