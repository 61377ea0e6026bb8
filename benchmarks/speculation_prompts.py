"""Prompts for measuring speculation: answers that repeat their prompt, plain chats, and JSON under a schema."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.tiny.corpus import read_topics
from examples.tiny.tasks import TASKS, draw
from inferd.engine.api.checkpoint import EMBEDDED_NAME

NUM_EACH = 20
_CHATS = Path(__file__).with_name("quality") / "chats.txt"

_CODES = (
    '''def read_settings(path):
    """Read the settings file and return them as a dict."""
    settings = {}
    with open(path) as handle:
        for line in handle:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, value = line.split("=", 1)
            settings[name.strip()] = value.strip()
    return settings''',
    '''class Account:
    """An account with a balance in cents."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount''',
    '''def count_words(text):
    """Count how often each word occurs in the text."""
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda item: item[1], reverse=True)''',
    """function formatPrice(amount, currency) {
  const whole = Math.floor(amount / 100);
  const cents = String(amount % 100).padStart(2, "0");
  if (currency === "USD") {
    return "$" + whole + "." + cents;
  }
  return whole + "." + cents + " " + currency;
}""",
    """SELECT customers.name, customers.city, SUM(orders.total) AS total
FROM customers
JOIN orders ON orders.customer_id = customers.id
WHERE orders.created_at >= '2024-01-01'
  AND orders.status = 'paid'
GROUP BY customers.name, customers.city
ORDER BY total DESC
LIMIT 20;""",
)
_TEXTS = (
    "The harbour was built in 1872 by a merchant named Jonas Hale. He wanted a place for large ships to unload wool "
    "and grain. In 1881 a storm destroyed the eastern pier, and it took three years to repair it. Today fishing boats "
    "use the harbour, and visitors come for the lighthouse.",
    "Maria Lopez works as a nurse at the Green Valley hospital. She starts at seven in the morning and looks after "
    "twelve patients. On Tuesdays she teaches students how to measure blood pressure. Her phone number is 555-0142.",
    "The library opens at nine and closes at eight. Members may borrow up to ten books for four weeks. A late book "
    "costs twenty cents a day. The reading room on the second floor has forty seats, and every seat has a lamp.",
    "Order 8841 was placed on 12 May by Daniel Weber from Bremen. It contains two blue chairs, one oak table and four "
    "cushions. The total is 512 euros. Delivery is planned for 3 June between eight and noon.",
    "Honey bees live in colonies of up to sixty thousand. A queen lays about two thousand eggs a day in summer. "
    "Workers collect nectar from flowers up to five kilometres away. A jar of honey takes two million visits.",
)
_JSON_ABOUT = (
    "a person",
    "a book",
    "a city",
    "a recipe",
    "a car",
    "an animal",
    "a film",
    "a shop",
    "a river",
    "a phone",
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing", "idea"]},
        "description": {"type": "string", "maxLength": 120},
        "properties": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "label": {"type": "string", "maxLength": 20},
                    "value": {"type": "string", "maxLength": 30},
                    "is_certain": {"type": "boolean"},
                },
                "required": ["label", "value", "is_certain"],
                "additionalProperties": False,
            },
            "minItems": 4,
            "maxItems": 6,
        },
    },
    "required": ["name", "kind", "description", "properties"],
    "additionalProperties": False,
}


def _repeats() -> Iterator[str]:
    for code in _CODES:
        yield f"Write this code again, and add a comment before each statement:\n\n{code}"
    for text in _TEXTS:
        yield f"List the sentences of this text that hold a number, word for word:\n\n{text}"
        yield f"Summarise this text in three points, each with a quote from the text:\n\n{text}"
        yield (
            "Fill in this form from the text. Write the whole form.\n\n"
            f"Name:\nPlace:\nDate or time:\nNumbers in the text:\nText:\n\nText: {text}"
        )


def requests(model: str = "smollm2") -> dict[str, list[dict[str, Any]]]:
    """Kind of load -> the fields of each request that are its own. The embedded model gets what it was trained for."""
    if model == EMBEDDED_NAME:
        prompts = {"tasks": _tasks(), "questions": _questions()}
        return {kind: [{"messages": _user(text)} for text in texts] for kind, texts in prompts.items()}
    chats = _CHATS.read_text(encoding="utf-8").splitlines()[:NUM_EACH]
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    about = [f"Describe {what} as JSON, {how}." for how in ("in short", "in detail") for what in _JSON_ABOUT]
    loads: dict[str, list[dict[str, Any]]] = {
        "repeats": [{"messages": _user(text)} for text in _repeats()],
        "chats": [{"messages": _user(text)} for text in chats],
        "JSON": [{"messages": _user(text), "response_format": form} for text in about],
    }
    assert [len(each) for each in loads.values()] == [NUM_EACH] * len(loads)
    return loads


def _tasks() -> list[str]:
    """Tasks that the embedded model never saw: to copy, count, sort and add."""
    rng, texts = random.Random(7), dict[str, None]()
    while len(texts) < NUM_EACH:
        texts[draw(rng.choice(list(TASKS.values())), rng, held_out=True).prompt] = None
    return list(texts)


def _questions() -> list[str]:
    """Questions in phrasings that it never saw."""
    topics = read_topics()
    texts = [
        question
        for topic in ("inference", "inferd", "world", "stories")
        for entry in topics[topic]
        for question in entry.held_out_questions()[:1]
    ]
    return random.Random(7).sample(sorted(set(texts)), NUM_EACH)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
