"""Small tasks with one right answer: copying, counting, sorting and sums, phrased as people do.

A task's content (the operands, the range, the words) is held out of training by its hash, in any phrasing: about one in
twenty. `draw` gives an example of the requested side only. Pure functions of the random generator.
"""

import hashlib
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HELD_OUT_ONE_IN = 20

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Example:
    prompt: str
    answer: str
    key: Key  # the content alone: equal keys are the same task, however it is phrased

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.key)


Task = Callable[[random.Random], Example]


def is_held_out(key: Key) -> bool:
    digest = hashlib.sha256("\x1f".join(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def sum_key(a: int, b: int) -> Key:
    return ("sum", *sorted((str(a), str(b))))


def copy_key(text: str) -> Key:
    return ("copy", text)


def draw(task: Task, rng: random.Random, *, held_out: bool) -> Example:
    while True:
        example = task(rng)
        if example.is_held_out is held_out:
            return example


def words_of(text: str) -> list[str]:
    return text.split()


# Words to sort, list and count: common ones, so that the model can learn how each begins.
THINGS = words_of(
    """
    apple banana cherry date fig grape kiwi lemon mango orange peach pear plum melon berry ant bear bird cat cow
    deer dog duck eagle fish fox frog goat hen horse lion mouse owl panda pig rabbit shark sheep snake tiger
    turtle whale wolf zebra camel baby ball bell book box bread bridge brush butter cake candle chair clock cloud
    coat coin cup desk door drum egg farm fire flag flower fork garden gate gift glass gold hat hill house ice ink
    island jar jacket key kite lake lamp leaf letter map milk moon mountain nail nest night ocean oil paper pen
    pencil piano plate pot queen quilt rain ring river road rock roof rope salt sand school ship shoe snow soap
    spoon star stone storm sugar sun table tea tent train tree umbrella van village wall water wheel wind window
    wood yard zoo black blue brown gray green pink purple red white yellow
    """
)
LITTLE_WORDS = words_of(
    """
    the a my your this that one two three some old new big small happy sad quiet bright little long warm cold and
    with in on under near over sings runs sleeps jumps swims walks likes sees loves finds eats reads makes is was
    we I you they he she it slowly quickly today again never always home here very
    """
)


def _phrase(rng: random.Random, phrasings: Sequence[str]) -> str:
    """One of the phrasings, sometimes as a hurried or a polite person writes it."""
    phrasing = rng.choice(phrasings)
    chance = rng.random()
    if chance < 0.12:
        return phrasing[0].lower() + phrasing[1:]
    if chance < 0.16:
        return phrasing.replace(": {x}", ":\n{x}")
    if chance < 0.20:
        return rng.choice(("Please ", "Can you ", "Now ", "Then ", "And now ")) + phrasing[0].lower() + phrasing[1:]
    if chance < 0.26:
        return phrasing.rstrip(".?")
    return phrasing


def sums(rng: random.Random) -> Example:
    size = 10 if rng.random() < 0.15 else 100
    a, b = rng.randrange(size), rng.randrange(size)
    phrasing = _phrase(
        rng,
        (
            "What is {a} + {b}?",
            "What is {a} + {b}?",
            "What is {a} plus {b}?",
            "What's {a} + {b}?",
            "What's {a} plus {b}?",
            "{a} + {b}",
            "{a}+{b}",
            "{a} + {b} =",
            "{a}+{b}=",
            "{a} + {b} = ?",
            "{a} plus {b}",
            "Add {a} and {b}.",
            "Add {a} and {b}",
            "Add: {a} + {b}",
            "What is the sum of {a} and {b}?",
            "Sum: {a} + {b}",
            "Calculate {a} + {b}.",
            "Compute {a} + {b}",
            "How much is {a} + {b}?",
            "How much is {a} plus {b}?",
            "Can you add {a} and {b}?",
            "What does {a} + {b} equal?",
            "What is {a}+{b}?",
        ),
    )
    return Example(phrasing.format(a=a, b=b), f"{a} + {b} = {a + b}.", sum_key(a, b))


def count(rng: random.Random) -> Example:
    return rng.choices((_count_up, _count_down, _count_items, _count_words), (55, 15, 15, 15))[0](rng)


def _count_up(rng: random.Random) -> Example:
    a = 1 if rng.random() < 0.15 else rng.randrange(90)
    b = a + rng.randint(2, 14)
    phrasings = [
        "Count from {a} to {b}",
        "Count from {a} to {b}.",
        "Please count from {a} to {b}.",
        "Count from {a} up to {b}.",
        "Can you count from {a} to {b}?",
        "List the numbers from {a} to {b}.",
        "Write the numbers from {a} to {b}.",
        "Count up from {a} to {b}.",
        "Start at {a} and count to {b}.",
        "Count {a} to {b}",
    ]
    if a == 1:
        phrasings += ["Count to {b}.", "Count to {b}", "Can you count to {b}?", "Please count to {b}."] * 3
    answer = ", ".join(str(n) for n in range(a, b + 1))
    return Example(_phrase(rng, phrasings).format(a=a, b=b), answer, ("count", str(a), str(b)))


def _count_down(rng: random.Random) -> Example:
    b = rng.choice((0, 1)) if rng.random() < 0.3 else rng.randrange(90)
    a = b + rng.randint(2, 12)
    phrasing = _phrase(
        rng,
        (
            "Count down from {a} to {b}.",
            "Count down from {a} to {b}",
            "Count backwards from {a} to {b}.",
            "Count backward from {a} to {b}.",
            "Count from {a} down to {b}.",
            "Count from {a} to {b}.",
            "Can you count down from {a} to {b}?",
        ),
    )
    return Example(phrasing.format(a=a, b=b), ", ".join(str(n) for n in range(a, b - 1, -1)), ("count", str(a), str(b)))


def _count_items(rng: random.Random) -> Example:
    items = [rng.choice(THINGS) for _ in range(rng.randint(1, 8))]
    phrasing = _phrase(
        rng,
        (
            "How many items are in this list: {x}?",
            "How many items are in this list: {x}",
            "Count the items: {x}",
            "Count the items in this list: {x}.",
            "How many things are here: {x}?",
            "How many items: {x}",
        ),
    )
    answer = "There is 1 item." if len(items) == 1 else f"There are {len(items)} items."
    return Example(phrasing.format(x=", ".join(items)), answer, ("items", *items))


def _count_words(rng: random.Random) -> Example:
    words = _words(rng, rng.randint(1, 8))
    phrasing = _phrase(
        rng,
        (
            "How many words are in: {x}",
            "How many words are here: {x}",
            'How many words are in "{x}"?',
            "Count the words: {x}",
            "Count the words in this sentence: {x}",
            "How many words: {x}",
        ),
    )
    answer = "There is 1 word." if len(words) == 1 else f"There are {len(words)} words."
    return Example(phrasing.format(x=" ".join(words)), answer, ("words", *words))


def copy(rng: random.Random) -> Example:
    text = _text_to_copy(rng)
    phrasing = _phrase(
        rng,
        (
            "Repeat: {x}",
            "Repeat: {x}",
            "Repeat after me: {x}",
            "Repeat this: {x}",
            "Please repeat: {x}",
            "Repeat the following: {x}",
            "Repeat exactly: {x}",
            "Repeat these words: {x}",
            'Repeat "{x}"',
            'Repeat: "{x}"',
            "Copy: {x}",
            "Copy this: {x}",
            "Copy this text: {x}",
            "Copy exactly: {x}",
            "Say: {x}",
            'Say "{x}"',
            'Say "{x}".',
            "Say exactly: {x}",
            "Echo: {x}",
            "Write this again: {x}",
            "Can you repeat this? {x}",
            "Repeat this sentence: {x}",
        ),
    )
    return Example(phrasing.format(x=text), text, copy_key(text))


def _text_to_copy(rng: random.Random) -> str:
    kind = rng.randrange(10)
    if kind < 4:
        return " ".join(_words(rng, rng.randint(1, 8)))
    if kind < 7:
        sentence = " ".join(_words(rng, rng.randint(2, 8)))
        return sentence[0].upper() + sentence[1:] + rng.choice("...!?")
    if kind == 7:
        return " ".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 10)))
    if kind == 8:
        return " ".join(str(rng.randrange(10 ** rng.randint(1, 3))) for _ in range(rng.randint(1, 6)))
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 5))) for _ in range(rng.randint(1, 3)))


def _words(rng: random.Random, num_words: int) -> list[str]:
    return [rng.choice(THINGS if rng.random() < 0.55 else LITTLE_WORDS) for _ in range(num_words)]


def sort(rng: random.Random) -> Example:
    kind = rng.choices(("numbers", "words", "letters"), (60, 25, 15))[0]
    size = rng.randint(2, 6)
    separator = rng.choice((" ", ", "))
    if kind == "numbers":
        return _sorted(rng, kind, _numbers(rng, size), separator)
    pool = THINGS if kind == "words" else string.ascii_lowercase
    return _sorted(rng, kind, rng.sample(pool, size), separator)


def _numbers(rng: random.Random, size: int) -> list[str]:
    limit = rng.choice((10, 100, 100))
    return [str(rng.randrange(limit)) for _ in range(size)]


def _sorted(rng: random.Random, kind: str, items: list[str], separator: str) -> Example:
    backwards = kind == "numbers" and rng.random() < 0.2
    phrasings = _PHRASINGS_DOWN if backwards else _PHRASINGS_UP[kind]
    ordered = sorted(items, key=int if kind == "numbers" else str, reverse=backwards)
    prompt = _phrase(rng, phrasings).format(x=separator.join(items))
    return Example(prompt, separator.join(ordered), ("sort", *sorted(items)))


_PHRASINGS_DOWN = (
    "Sort from largest to smallest: {x}",
    "Sort in descending order: {x}",
    "Sort these numbers in descending order: {x}",
    "Sort descending: {x}",
    "Sort from high to low: {x}",
)
_ANY_KIND = ("Sort: {x}", "Sort: {x}", "Sort {x}", "Please sort: {x}", "Put in order: {x}", "Sort this list: {x}")
_PHRASINGS_UP = {
    "numbers": (
        *_ANY_KIND,
        "Sort these numbers: {x}",
        "Sort the numbers {x}.",
        "Sort the numbers: {x}",
        "Can you sort these numbers? {x}",
        "Put these numbers in order: {x}",
        "Sort in ascending order: {x}",
        "Sort from smallest to largest: {x}",
        "Arrange from smallest to largest: {x}",
        "Sort these numbers in ascending order: {x}",
    ),
    "words": (
        *_ANY_KIND,
        "Sort these words: {x}",
        "Sort the words: {x}",
        "Sort alphabetically: {x}",
        "Sort these words alphabetically: {x}",
        "Put these words in alphabetical order: {x}",
        "Put in alphabetical order: {x}",
    ),
    "letters": (
        *_ANY_KIND,
        "Sort these letters: {x}",
        "Sort the letters: {x}",
        "Sort the letters {x}.",
        "Put these letters in alphabetical order: {x}",
    ),
}

TASKS: dict[str, Task] = {"copy": copy, "count": count, "sort": sort, "sum": sums}
