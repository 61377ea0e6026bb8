"""The stream of conversations to learn from, with the shares of tasks, dialogues and written text.

`Mixture.draw` gives the next conversation of the training side or of the held-out side; no conversation is on both.
This module knows nothing about token ids.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from examples.tiny import dialogues
from examples.tiny.conversation import Conversation, Message
from examples.tiny.corpus import PHRASINGS, Entry, read_topics, vary
from examples.tiny.tasks import LITTLE_WORDS, TASKS, THINGS, copy_key, draw, is_held_out, words_of

Turn = tuple[str, str]  # what the user says, what the model says

# Shares of single turns by kind. The written topics have the names of their files.
TASK_SHARES: dict[str, float] = {"copy": 12, "count": 13, "sort": 16, "sum": 24}
TOPIC_SHARES: dict[str, float] = {
    "inference": 13,
    "inferd": 8,
    "chat": 8,
    "first": 6,
    "world": 7,
    "unknown": 6,
    "stories": 5,
    "poems": 2,
}
OTHER_SHARES: dict[str, float] = {"snippet": 7, "fact": 9, "off_topic": 4, "no_story": 1, "too_long": 1.5}


@dataclass(frozen=True, slots=True)
class Diet:
    """The share of conversations that drill one task, in addition to the usual stream, and the shares of those
    tasks."""

    drill_share: float = 0.0
    task_shares: tuple[tuple[str, float], ...] = ()


USUAL = Diet()
# First stage: the model learns soonest to look back at the prompt from pure drills.
EARLY = Diet(0.8, (("copy", 30), ("count", 15), ("sort", 30), ("sum", 25)))
# Last stage: sorting, counting and carrying need many more examples than the written text.
LATE = Diet(0.35, (("copy", 12), ("count", 26), ("sort", 34), ("sum", 28)))

NOT_UNDERSTOOD = "I did not understand that. Could you ask it in another way?"
TOO_LONG = "That is a long text, and I am only a small model. Please ask me a short question."
# The heading in unknown.md whose answers fit any off-topic question.
UNKNOWN = "unknown things"
_THINGS_WITHOUT_STORY = words_of(
    """
    panda zebra camel tiger lion snake eagle shark cow pig goat duck hen ant bed cake chair cup door drum flag hat
    lamp piano pencil shoe spoon witch pirate ghost monster doctor car plane city castle cloud river island desert
    forest penguin frog
    """
)


class Mixture:
    def __init__(self, seed: int, *, held_out: bool) -> None:
        self._rng = random.Random(seed)
        self._held_out = held_out
        self._topics = {
            topic: tuple(entry for entry in entries if not held_out or entry.held_out_questions())
            for topic, entries in read_topics().items()
        }
        shares: dict[str, float] = TASK_SHARES | {
            topic: share for topic, share in TOPIC_SHARES.items() if self._topics.get(topic)
        }
        if not held_out:
            shares |= OTHER_SHARES
        self._kinds, self._shares = list(shares), list(shares.values())
        self._unknown_answers = next(e.answers for e in self._topics["unknown"] if e.heading == UNKNOWN)
        self._sentences = _sentences(self._topics.values())

    def draw(self, diet: Diet = USUAL) -> Conversation:
        if diet.drill_share and self._rng.random() < diet.drill_share:
            return self._drill(diet.task_shares)
        return self._draw_usual()

    def _draw_usual(self) -> Conversation:
        rng = self._rng
        chance = rng.random()
        if self._held_out or chance < 0.46:
            return self._chat(1)
        if chance < 0.56:
            return self._chat(rng.randint(2, 4))
        if chance < 0.575:
            return self._chat(rng.randint(5, 14))
        if chance < 0.78:
            return self._drill(tuple(TASK_SHARES.items()))
        if chance < 0.89:
            return dialogues.tool_use(rng)
        if chance < 0.915:
            return self._tools_not_needed()
        if chance < 0.95:
            return dialogues.json_answer(rng)
        if chance < 0.96:
            return dialogues.persona(rng)
        return self._remembering()

    def draw_document(self) -> str:
        """A text outside of any conversation, for plain completion."""
        entry = self._rng.choice(self._topics[self._rng.choice(("stories", "stories", "inference", "inferd", "world"))])
        return self._rng.choice(entry.answers)

    def all_texts(self) -> list[str]:
        """All written text, a sample of drawn conversations, and single words: the tokenizer's training text."""
        texts = [
            text
            for entries in self._topics.values()
            for entry in entries
            for text in (*entry.answers, *entry.answers, *dict.fromkeys(entry.questions))
        ]
        words = sorted({*THINGS, *LITTLE_WORDS})
        spoken = [message.content for _ in range(3000) for message in self.draw().messages]
        return texts + spoken + words * 6 + [f"{word} {word}" for word in words] * 6

    def _turn(self) -> Turn:
        rng = self._rng
        kind = rng.choices(self._kinds, self._shares)[0]
        if kind in TASKS:
            example = draw(TASKS[kind], rng, held_out=self._held_out)
            return example.prompt, example.answer
        if kind == "fact":
            return dialogues.small_fact(rng)
        if kind == "off_topic":
            return vary(dialogues.off_topic(rng), rng), rng.choice(self._unknown_answers)
        if kind == "too_long":
            return self._too_long()
        if kind == "no_story":
            return self._no_story()
        if kind == "snippet":
            return self._snippet()
        return self._ask(rng.choice(self._topics[kind]))

    def _ask(self, entry: Entry) -> Turn:
        questions = entry.held_out_questions() if self._held_out else entry.trained_questions()
        return vary(self._rng.choice(questions), self._rng), self._rng.choice(entry.answers)

    def _snippet(self) -> Turn:
        """A copy task with words of the written text and strange words, because the tasks have fewer words."""
        text = ""
        while not text or is_held_out(copy_key(text)):
            words = self._rng.choice(self._sentences).split()
            start = self._rng.randrange(len(words))
            words = words[start : start + self._rng.randint(1, 8)]
            if self._rng.random() < 0.6:
                words[self._rng.randrange(len(words))] = dialogues.strange_word(self._rng)
            text = " ".join(words)
        phrasing = self._rng.choice(
            ("Repeat: {x}", "Repeat after me: {x}", "Copy: {x}", "Say: {x}", "Repeat this: {x}", "Echo: {x}")
        )
        return phrasing.format(x=text), text

    def _too_long(self) -> Turn:
        """One word many times, or a long text: the model answers that it is too much."""
        rng = self._rng
        if rng.random() < 0.5:
            words = [dialogues.strange_word(rng) if rng.random() < 0.3 else rng.choice(THINGS + LITTLE_WORDS)]
            return " ".join(words * rng.choice((5, 10, 20, 50, 100, 400, 1500))), NOT_UNDERSTOOD
        text = ". ".join(rng.choice(self._sentences) for _ in range(rng.choice((5, 10, 20, 40, 80))))
        return rng.choice(
            ("Summarize this text: ", "Summarize: ", "What do you think of this? ", "", "")
        ) + text, TOO_LONG

    def _no_story(self) -> Turn:
        """A request for a story that does not exist: the model says so and tells another one."""
        entry = self._rng.choice(self._topics["stories"])
        thing = self._rng.choice(_THINGS_WITHOUT_STORY)
        thing = ("an " if thing[0] in "aeiou" else "a ") + thing
        question = self._rng.choice(PHRASINGS["story"]).format(x=thing)
        return vary(
            question, self._rng
        ), f"I know no story about {thing}, but here is another one.\n\n{entry.answers[0]}"

    def _chat(self, num_turns: int) -> Conversation:
        messages = self._maybe_system()
        for _ in range(num_turns):
            messages += _messages(self._turn())
        return Conversation(tuple(messages))

    def _drill(self, shares: tuple[tuple[str, float], ...]) -> Conversation:
        """Two to five tasks of one kind in a row."""
        name = self._rng.choices([name for name, _ in shares], [share for _, share in shares])[0]
        examples = [draw(TASKS[name], self._rng, held_out=False) for _ in range(self._rng.randint(2, 5))]
        messages = [message for example in examples for message in _messages((example.prompt, example.answer))]
        return Conversation(tuple(messages))

    def _tools_not_needed(self) -> Conversation:
        turn = self._ask(self._rng.choice(self._topics[self._rng.choice(("chat", "first", "inferd", "inference"))]))
        messages = [*self._maybe_system(), *_messages(turn)]
        return Conversation(tuple(messages), dialogues.with_distractors(self._rng, [dialogues.any_tool(self._rng)]))

    def _remembering(self) -> Conversation:
        told = dialogues.memory(self._rng)
        between = [message for _ in range(self._rng.choice((0, 0, 1, 2))) for message in _messages(self._turn())]
        return Conversation((*self._maybe_system(), *told[:2], *between, *told[2:]))

    def _maybe_system(self) -> list[Message]:
        return [Message("system", dialogues.system_prompt(self._rng))] if self._rng.random() < 0.2 else []


def _messages(turn: Turn) -> list[Message]:
    return [Message("user", turn[0]), Message("assistant", turn[1])]


def _sentences(topics: Iterable[tuple[Entry, ...]]) -> list[str]:
    answers = [answer for entries in topics for entry in entries for answer in entry.answers]
    return [sentence for answer in answers for sentence in answer.replace("\n", " ").split(". ") if sentence.strip()]
