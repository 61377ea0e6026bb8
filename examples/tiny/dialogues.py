"""Generated conversations: tool calls and their results, JSON answers, memory, small facts of arithmetic.

Unlike tasks.py, nothing here is held out or scored: these conversations teach formats. Pure functions of the random
generator.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from examples.tiny.conversation import Call, Conversation, Message, Tool
from examples.tiny.tasks import is_held_out, sum_key, words_of

CITIES = words_of(
    """
    Paris London Berlin Rome Madrid Tokyo Oslo Vienna Lisbon Dublin Athens Prague Warsaw Cairo Delhi Mumbai
    Beijing Shanghai Seoul Sydney Melbourne Toronto Montreal Chicago Boston Seattle Denver Austin Dallas Miami
    Lima Bogota Santiago Nairobi Lagos Helsinki Stockholm Copenhagen Amsterdam Brussels Zurich Geneva Munich
    Hamburg Milan Venice Barcelona Istanbul Moscow Kyoto Osaka Bangkok Singapore Jakarta Manila Hanoi Dubai
    Houston Phoenix Atlanta Portland Budapest
    """
)
CITIES += [
    "New York",
    "San Francisco",
    "Los Angeles",
    "Hong Kong",
    "Mexico City",
    "Buenos Aires",
    "Cape Town",
    "Tel Aviv",
]
NAMES = words_of(
    """
    Alice Bob Carol David Emma Frank Grace Henry Ivy Jack Kate Leo Mia Noah Olivia Peter Quinn Rosa Sam Tom Uma
    Victor Wendy Anna Ben Clara Daniel Ella Finn Hannah Ian Julia Karl Lena Max Nina Oscar Paul Ruth Sara Theo
    Maria John Mary Ada Alan Grace Linus Priya Wei Omar Fatima Yuki Ahmed Sofia Lucas
    """
)
COLORS = words_of("red blue green yellow orange purple pink black white brown gray")
FOODS = words_of("pizza pasta rice soup bread cheese apples bananas chocolate salad noodles curry cake sushi tacos")
ANIMALS = words_of("dog cat rabbit horse parrot turtle hamster fish lizard pony")
SKIES = words_of("sunny cloudy rainy windy snowy foggy clear stormy")


def _name(rng: random.Random) -> str:
    if rng.random() < 0.75:
        return rng.choice(NAMES)
    return strange_word(rng).capitalize()


def _city(rng: random.Random) -> str:
    chance = rng.random()
    if chance < 0.6:
        return rng.choice(CITIES)
    if chance < 0.75:
        return _name(rng) + rng.choice(("ville", "burg", " City", "", "stad", "ton"))
    return strange_word(rng).capitalize()


def strange_word(rng: random.Random) -> str:
    """A made-up word, sometimes with letters of other languages. The model can only copy it."""
    vowels = "aeiou" if rng.random() < 0.7 else "aeiouyáéíóúäöüåøãñç"
    syllables = (rng.choice(_ONSETS) + rng.choice(vowels) + rng.choice(_ENDS) for _ in range(rng.randint(1, 3)))
    return "".join(syllables)


_ONSETS = words_of("b c d f g h j k l m n p r s t v w z br ch cr dr fl gr kl pr qu sh sl sp st str th tr zh")
_ENDS = ("", "", "", "n", "r", "s", "t", "l", "m", "x", "ck", "ng", "rd", "st")


def _one(rng: random.Random, *texts: str) -> str:
    return rng.choice(texts)


# --- Tools: a question, the call it needs, a result, and the sentence that tells the result.


@dataclass(frozen=True, slots=True)
class Use:
    question: str
    tool: Tool
    arguments: dict[str, object]
    result: str
    answer: str


def _weather(rng: random.Random) -> Use:
    city, sky, degrees = _city(rng), rng.choice(SKIES), rng.randint(-9, 39)
    name = _one(rng, "get_weather", "get_weather", "get_weather", "get_current_weather", "weather", "lookup_weather")
    place = _one(rng, "city", "city", "location", "location", "place")
    about = _one(
        rng,
        "Get the weather in a city.",
        "Get the current weather for a location.",
        "Get the weather",
        "Get current weather",
        "The weather now.",
        "Get the current weather in a given city",
        "Look up the weather.",
        "",
    )
    question = _one(
        rng,
        "What is the weather in {x}?",
        "What is the weather in {x}?",
        "What's the weather in {x}?",
        "What's the weather like in {x}?",
        "What is the weather like in {x} today?",
        "How is the weather in {x}?",
        "Weather in {x}?",
        "weather in {x}",
        "Is it raining in {x}?",
        "Tell me the weather in {x}.",
        "Get the weather for {x}.",
        "Is it cold in {x} today?",
        "Do I need an umbrella in {x}?",
        "What is the temperature in {x}?",
    ).format(x=city)
    arguments: dict[str, object] = {place: city}
    parameters = [(place, "string")]
    if rng.random() < 0.2:
        parameters.append(("unit", "string"))
        unit = _one(rng, "celsius", "fahrenheit")
        question = question.rstrip("?.") + f" in {unit}" + ("?" if question[0] in "WHID" else ".")
        arguments["unit"] = unit
    result, answer = _one_pair(
        rng,
        (json.dumps({"temperature": degrees, "condition": sky}), f"It is {degrees} degrees and {sky} in {city}."),
        (json.dumps({"temperature": degrees}), f"It is {degrees} degrees in {city}."),
        (json.dumps({place: city, "temperature": degrees}), f"It is {degrees} degrees in {city}."),
        (json.dumps({"temp": degrees, "sky": sky}), f"It is {degrees} degrees and {sky} in {city}."),
        (
            json.dumps({place: city, "temperature": degrees, "condition": sky}),
            f"It is {degrees} degrees and {sky} in {city}.",
        ),
        (f"{degrees} degrees and {sky}", f"It is {degrees} degrees and {sky} in {city}."),
        (f"{sky}, {degrees}", f"It is {degrees} degrees and {sky} in {city}."),
        (f"{sky.capitalize()}, {degrees} degrees", f"It is {degrees} degrees and {sky} in {city}."),
        (sky, f"It is {sky} in {city}."),
        (f"{degrees}C", f"It is {degrees} degrees in {city}."),
        (f"{degrees} C, {sky}", f"It is {degrees} degrees and {sky} in {city}."),
    )
    return Use(question, Tool(name, about, tuple(parameters)), arguments, result, answer)


def _one_pair(rng: random.Random, *pairs: tuple[str, str]) -> tuple[str, str]:
    return rng.choice(pairs)


def _time(rng: random.Random) -> Use:
    city, time = _city(rng), f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    place = _one(rng, "city", "city", "location", "timezone")
    name = _one(rng, "get_time", "get_time", "get_current_time", "time_in")
    about = _one(
        rng, "Get the time in a city.", "Get the current time.", "The time now in a city.", "Get the local time", ""
    )
    question = _one(
        rng,
        "What time is it in {x}?",
        "What is the time in {x}?",
        "What's the time in {x}?",
        "Tell me the time in {x}.",
        "What time is it now in {x}?",
        "time in {x}",
        "What is the local time in {x}?",
    ).format(x=city)
    result = _one(rng, time, json.dumps({"time": time}), json.dumps({place: city, "time": time}))
    return Use(question, Tool(name, about, ((place, "string"),)), {place: city}, result, f"It is {time} in {city}.")


def _add(rng: random.Random) -> Use:
    a, b = _trained_operands(rng, 4)
    kind = _one(rng, "integer", "number", "number")
    name = _one(rng, "add", "add", "sum", "add_numbers")
    about = _one(rng, "Add two numbers.", "Add two numbers", "Return the sum of a and b.", "Add a and b.", "")
    question = _one(
        rng,
        "What is {a} + {b}?",
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "Add {a} and {b}",
        "{a} + {b}",
        "Use the tool to add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "Calculate {a} + {b}.",
    ).format(a=a, b=b)
    result = _one(rng, str(a + b), json.dumps({"result": a + b}), json.dumps({"sum": a + b}))
    return Use(
        question, Tool(name, about, (("a", kind), ("b", kind))), {"a": a, "b": b}, result, f"{a} + {b} = {a + b}."
    )


def _trained_operands(rng: random.Random, max_digits: int) -> tuple[int, int]:
    """Two numbers whose sum is not a held-out task."""
    while True:
        a, b = rng.randrange(10 ** rng.randint(1, max_digits)), rng.randrange(10 ** rng.randint(1, max_digits))
        if not is_held_out(sum_key(a, b)):
            return a, b


def _multiply(rng: random.Random) -> Use:
    a, b = rng.randrange(100), rng.randrange(100)
    question = _one(rng, "What is {a} times {b}?", "Multiply {a} by {b}.", "What is {a} * {b}?", "{a} x {b}").format(
        a=a, b=b
    )
    tool = Tool(
        "multiply", _one(rng, "Multiply two numbers.", "Multiply a and b.", ""), (("a", "number"), ("b", "number"))
    )
    return Use(question, tool, {"a": a, "b": b}, str(a * b), f"{a} times {b} is {a * b}.")


_TOPICS = (
    "whales",
    "the moon",
    "paged attention",
    "old maps",
    "bread",
    "rivers in Spain",
    "trains",
    "tea",
    "stars",
    "the ocean",
    "cats",
    "gardens",
    "KV cache",
    "volcanoes",
    "bridges",
    "music",
)


def _search(rng: random.Random) -> Use:
    topic = _one(rng, *_TOPICS, *CITIES[:30])
    name = _one(rng, "search", "web_search", "search_web")
    about = _one(rng, "Search the web.", "Search the web for a query", "Find pages about something.", "")
    question = _one(
        rng, "Search for {x}.", "Search the web for {x}.", "Find something about {x}.", "Look up {x}.", "search {x}"
    ).format(x=topic)
    num = rng.randint(2, 99)
    result = json.dumps({"results": num})
    return Use(
        question,
        Tool(name, about, (("query", "string"),)),
        {"query": topic},
        result,
        f"I found {num} results for {topic}.",
    )


def _mail(rng: random.Random) -> Use:
    to = _name(rng)
    text = _one(
        rng, "Hello", "See you soon", "I am late", "Thank you", "Dinner at 7", "Happy birthday", "Call me", "Good night"
    )
    name = _one(rng, "send_message", "send_email", "send")
    question = _one(rng, 'Send "{t}" to {x}.', "Send {x} the message: {t}", 'Tell {x} "{t}".', "Write to {x}: {t}")
    tool = Tool(
        name, _one(rng, "Send a message.", "Send a message to a person.", ""), (("to", "string"), ("text", "string"))
    )
    result = _one(rng, "ok", "sent", json.dumps({"status": "sent"}), json.dumps({"ok": True}))
    return Use(question.format(t=text, x=to), tool, {"to": to, "text": text}, result, f"I sent your message to {to}.")


_USES: tuple[Callable[[random.Random], Use], ...] = (_weather, _time, _add, _multiply, _search, _mail)
_USE_SHARES = (44, 18, 16, 6, 8, 8)


def _draw_use(rng: random.Random) -> Use:
    return rng.choices(_USES, _USE_SHARES)[0](rng)


def tool_use(rng: random.Random) -> Conversation:
    """A question that needs a tool. Half of the time the result and an answer follow, and perhaps another question."""
    use = _draw_use(rng)
    messages = [*_maybe_system(rng), Message("user", use.question)]
    if use.tool.name in ("get_weather", "get_current_weather") and len(use.arguments) == 1 and rng.random() < 0.2:
        return _two_cities(rng, use)
    messages.append(Message("assistant", calls=(Call(use.tool.name, use.arguments),)))
    tools = [use.tool]
    if rng.random() < 0.6:
        messages += [Message("tool", use.result), Message("assistant", use.answer)]
        if rng.random() < 0.35:
            second = _draw_use(rng)
            if second.tool.name not in {tool.name for tool in tools}:
                tools.append(second.tool)
                messages.append(Message("user", second.question))
                messages.append(Message("assistant", calls=(Call(second.tool.name, second.arguments),)))
        elif rng.random() < 0.3:
            messages += thanks(rng)
    return Conversation(tuple(messages), with_distractors(rng, tools))


def _two_cities(rng: random.Random, use: Use) -> Conversation:
    place = use.tool.parameters[0][0]
    first, second = rng.sample(CITIES, 2)
    one, two = rng.randint(-9, 39), rng.randint(-9, 39)
    question = _one(
        rng, "What is the weather in {a} and {b}?", "Weather in {a} and {b}?", "Compare the weather in {a} and {b}."
    )
    calls = tuple(Call(use.tool.name, {place: city}) for city in (first, second))
    messages = [Message("user", question.format(a=first, b=second)), Message("assistant", calls=calls)]
    if rng.random() < 0.5:
        messages += [Message("tool", json.dumps({"temperature": degrees})) for degrees in (one, two)]
        messages.append(Message("assistant", f"It is {one} degrees in {first} and {two} degrees in {second}."))
    return Conversation(tuple(messages), with_distractors(rng, [use.tool]))


def any_tool(rng: random.Random) -> Tool:
    return _draw_use(rng).tool


def with_distractors(rng: random.Random, tools: list[Tool]) -> tuple[Tool, ...]:
    """The tools and up to two others, in any order."""
    tools = list(tools)
    for _ in range(rng.choices((0, 1, 2), (60, 25, 15))[0]):
        other = _draw_use(rng).tool
        if not any(_is_alike(other, tool) for tool in tools):
            tools.append(other)
    rng.shuffle(tools)
    return tuple(tools)


def _is_alike(tool: Tool, other: Tool) -> bool:
    alike = ("weather", "time", "search", "add", "sum", "multiply", "send")
    return any(word in tool.name and word in other.name for word in alike) or {tool.name, other.name} <= {
        "add",
        "sum",
        "add_numbers",
    }


def _maybe_system(rng: random.Random) -> list[Message]:
    return [Message("system", system_prompt(rng))] if rng.random() < 0.4 else []


def system_prompt(rng: random.Random) -> str:
    return _one(
        rng,
        "You are a helpful assistant.",
        "You are a helpful assistant.",
        "You are a helpful assistant",
        "You are a friendly assistant.",
        "Be brief.",
        "Answer briefly.",
        "You are a careful assistant. Answer in one sentence.",
        "Be concise and polite.",
        "You are helpful.",
        "Answer the questions of the user.",
        "You are an assistant that answers questions.",
        "Use the tools when they help.",
        "You are a test assistant.",
    )


def thanks(rng: random.Random) -> list[Message]:
    question = _one(rng, "Thanks!", "Thank you.", "Thank you!", "thanks", "Great, thanks.", "OK, thank you.")
    return [
        Message("user", question),
        Message("assistant", _one(rng, "You are welcome!", "You are welcome!", "Happy to help!")),
    ]


def persona(rng: random.Random) -> Conversation:
    """A system prompt that gives a name, and a question that asks for it."""
    name = _name(rng)
    role = _one(rng, "a helpful assistant", "a friendly assistant", "an assistant", "a robot", "a librarian", "a guide")
    system = _one(rng, "You are {n}, {r}.", "Your name is {n}. You are {r}.", "You are {n}.", "You are {r} named {n}.")
    question = _one(
        rng, "Who are you?", "What is your name?", "What's your name?", "who are you", "What are you called?"
    )
    return _exchange(question, f"I am {name}.", system.format(n=name, r=role))


# --- Questions that the model cannot answer, of many shapes, so that it also says so to ones that it never saw.

_PEOPLE = words_of(
    "king queen president writer painter singer actor teacher doctor scientist poet player captain minister"
)
_MATTERS = words_of(
    """
    physics chemistry biology history geography law music art football tennis chess cooking gardening medicine
    economics politics religion philosophy astronomy geology fashion poetry dancing sailing fishing skiing hockey
    baseball algebra geometry statistics trade farming architecture photography painting theater film money taxes
    travel
    """
)
_DEEDS = words_of(
    """
    build repair paint sell buy clean draw cook grow carry open close win catch sew wash move fold plant measure
    hide steal make fix design replace
    """
)
_OBJECTS = words_of(
    """
    house car bicycle boat table garden roof radio engine guitar wall phone clock kite door computer fence chair
    bridge robot rocket shirt tent window cake garage website database game shop company
    """
)


def off_topic(rng: random.Random) -> str:
    name, city, matter = _name(rng), _city(rng), rng.choice(_MATTERS)
    deed, thing, person = rng.choice(_DEEDS), rng.choice(_OBJECTS), rng.choice(_PEOPLE)
    year = rng.randint(1000, 2030)
    strange = strange_word(rng)
    return _one(
        rng,
        f"Who is {name} {_name(rng)}?",
        f"Who was {name}?",
        f"What did {name} do in {year}?",
        f"What happened in {year}?",
        f"When was {name} born?",
        f"How old is {name}?",
        f"Who was the {person} of {city} in {year}?",
        f"Who is the best {person} in {city}?",
        f"Who is the most famous {person}?",
        f"Who won the {matter} prize in {year}?",
        f"What do you think about {matter}?",
        f"Tell me about {matter}.",
        f"Explain {matter}.",
        f"What is the history of {matter}?",
        f"Why is {matter} important?",
        f"How do I learn {matter}?",
        f"How do I {deed} a {thing}?",
        f"How can I {deed} my {thing}?",
        f"How much does a {thing} cost?",
        f"What is the best {thing}?",
        f"Which {thing} should I buy?",
        f"Where can I buy a {thing}?",
        f"Who invented the {thing}?",
        f"How does a {thing} work?",
        f"Write an essay about {matter}.",
        f"Write a letter to {name}.",
        f"Write a {thing} in C++.",
        f"Give me advice about {matter}.",
        f"Where is {city}?",
        f"How many people live in {city}?",
        f"What can I see in {city}?",
        f"How far is it from {city} to {_city(rng)}?",
        f"What is {strange}?",
        f"What does {strange} mean?",
        f"Explain {strange}.",
        f"Do you know {strange}?",
        f"Translate {strange} into English.",
        f"How long does it take to {deed} a {thing}?",
        f"Why do people {deed} a {thing}?",
        f"Should I {deed} my {thing}?",
        f"Is {matter} better than {rng.choice(_MATTERS)}?",
        f"My {thing} is broken. What should I do?",
        f"Summarize the book about {matter}.",
        f"What are the rules of {matter}?",
    )


# --- Answers in JSON.


def json_answer(rng: random.Random) -> Conversation:
    return rng.choice((_json_person, _json_sum, _json_list, _json_city, _json_keys))(rng)


def _exchange(question: str, answer: str, *system: str) -> Conversation:
    return Conversation(
        (*(Message("system", s) for s in system), Message("user", question), Message("assistant", answer))
    )


def _json_person(rng: random.Random) -> Conversation:
    name, age = _name(rng), rng.randint(5, 95)
    question = _one(
        rng,
        "Answer in JSON: name and age. My name is {n} and I am {a} years old.",
        "Write JSON with the keys name and age: {n} is {a} years old.",
        "Extract the name and the age as JSON: {n} is {a}.",
        "{n} is {a} years old. Answer in JSON with name and age.",
        "Give me JSON with name and age for {n}, {a} years old.",
        "Return a JSON object with name and age: {n}, {a}.",
        "Turn this into JSON: {n} is {a} years old.",
    )
    return _exchange(question.format(n=name, a=age), json.dumps({"name": name, "age": age}))


def _json_keys(rng: random.Random) -> Conversation:
    name, age = rng.choice(NAMES), rng.randint(5, 95)
    question = _one(
        rng,
        "Give me a JSON object with a name and an age.",
        "Make a JSON object with name and age.",
        "Write a JSON object with a name and an age.",
        "Give me an example of JSON.",
        "Write some JSON.",
        "Answer in JSON.",
        "Return JSON with a name and an age",
        "Generate a JSON object for a person.",
        "Invent a person. Answer in JSON with name and age.",
    )
    return _exchange(question, json.dumps({"name": name, "age": age}))


def _json_sum(rng: random.Random) -> Conversation:
    a, b = _trained_operands(rng, 1)
    question = _one(
        rng,
        'What is {a} + {b}? Answer in JSON with the key "answer".',
        "What is {a} + {b}? Answer in JSON.",
        "Answer in JSON: what is {a} + {b}?",
        "What is {a} plus {b}? Answer in JSON.",
    )
    if rng.random() < 0.25:
        return _exchange(
            f"What is {a} + {b}?", json.dumps({"answer": a + b}), _one(rng, "Answer in JSON.", "Always answer in JSON.")
        )
    return _exchange(question.format(a=a, b=b), json.dumps({"answer": a + b}))


def _json_list(rng: random.Random) -> Conversation:
    kind, pool = rng.choice(
        (("colors", COLORS), ("animals", ANIMALS), ("cities", CITIES[:40]), ("foods", FOODS), ("names", NAMES))
    )
    size = rng.randint(2, 4)
    number = {2: "two", 3: "three", 4: "four"}[size] if rng.random() < 0.7 else str(size)
    items = rng.sample(pool, size)
    question = _one(
        rng,
        "List {n} {k} in JSON.",
        "List {n} {k} as JSON.",
        "Give me {n} {k} as JSON.",
        "Answer in JSON: name {n} {k}.",
        "Give me a JSON list of {n} {k}.",
    )
    return _exchange(question.format(n=number, k=kind), json.dumps({kind: items}))


def _json_city(rng: random.Random) -> Conversation:
    city, degrees = _city(rng), rng.randint(-9, 39)
    question = _one(
        rng,
        "It is {d} degrees in {c}. Answer in JSON with city and temperature.",
        "Extract city and temperature as JSON: {c}, {d} degrees.",
        "Answer in JSON: city and temperature. In {c} it is {d} degrees.",
    )
    return _exchange(question.format(c=city, d=degrees), json.dumps({"city": city, "temperature": degrees}))


# --- Things that were said before.


def memory(rng: random.Random) -> list[Message]:
    """The user says something, perhaps changes the subject, and asks for it later."""
    told, reply, asked, answer = rng.choice(
        (_told_name, _told_name, _told_favorite, _told_pet, _told_home, _told_number)
    )(rng)
    return [Message("user", told), Message("assistant", reply), Message("user", asked), Message("assistant", answer)]


Told = tuple[str, str, str, str]


def _told_name(rng: random.Random) -> Told:
    name = _name(rng)
    told = _one(
        rng,
        "My name is {n}.",
        "my name is {n}",
        "I am {n}.",
        "I'm {n}.",
        "Hi, I am {n}.",
        "Hello, my name is {n}.",
        "Hi, I'm {n}!",
    )
    asked = _one(
        rng,
        "What is my name?",
        "What's my name?",
        "what is my name",
        "Do you know my name?",
        "Who am I?",
        "Do you remember my name?",
    )
    reply = _one(rng, "Nice to meet you, {n}!", "Hello, {n}! How can I help you?")
    return told.format(n=name), reply.format(n=name), asked, f"Your name is {name}."


def _told_favorite(rng: random.Random) -> Told:
    kind, pool = rng.choice((("color", COLORS), ("food", FOODS), ("city", CITIES[:40]), ("animal", ANIMALS)))
    value = rng.choice(pool)
    told = _one(rng, "My favorite {k} is {v}.", "my favorite {k} is {v}", "Remember that my favorite {k} is {v}.")
    asked = _one(rng, "What is my favorite {k}?", "What's my favorite {k}?", "Which {k} do I like best?")
    reply = _one(rng, "I will remember that your favorite {k} is {v}.", "That is a good choice.")
    return (
        told.format(k=kind, v=value),
        reply.format(k=kind, v=value),
        asked.format(k=kind),
        f"Your favorite {kind} is {value}.",
    )


def _told_pet(rng: random.Random) -> Told:
    kind, name = rng.choice(ANIMALS), _name(rng)
    told = _one(rng, "I have a {k} named {n}.", "My {k} is called {n}.", "My {k}'s name is {n}.")
    asked = _one(rng, "What is the name of my {k}?", "What is my {k} called?", "What is my {k}'s name?")
    reply = f"{name} is a lovely name for a {kind}."
    return told.format(k=kind, n=name), reply, asked.format(k=kind), f"Your {kind} is called {name}."


def _told_home(rng: random.Random) -> Told:
    city = _city(rng)
    told = _one(rng, "I live in {c}.", "I am from {c}.", "My home is in {c}.")
    asked = _one(rng, "Where do I live?", "Where is my home?", "In which city do I live?")
    return told.format(c=city), f"I hope you like it in {city}.", asked, f"You live in {city}."


def _told_number(rng: random.Random) -> Told:
    number = rng.randrange(10 ** rng.randint(1, 4))
    told = _one(rng, "Remember the number {n}.", "My number is {n}.", "The secret number is {n}.", "Remember: {n}")
    asked = _one(
        rng, "What was the number?", "Which number did I tell you?", "What is the number?", "What number did I say?"
    )
    return told.format(n=number), f"I will remember {number}.", asked, f"The number is {number}."


# --- Small facts: products, differences, comparisons, opposites of order.


def small_fact(rng: random.Random) -> tuple[str, str]:
    facts = (_product, *[_difference] * 4, _too_large, _comparison, _reverse, _neighbour, _named)
    return rng.choice(facts)(rng)


def _product(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    question = _one(
        rng,
        "What is {a} times {b}?",
        "What is {a} * {b}?",
        "{a} * {b}",
        "{a} x {b}",
        "Multiply {a} by {b}.",
        "{a}*{b}",
        "What is {a} x {b}?",
    )
    return question.format(a=a, b=b), f"{a} times {b} is {a * b}."


def _difference(rng: random.Random) -> tuple[str, str]:
    a, b = sorted((rng.randrange(100), rng.randrange(100)), reverse=True)
    if rng.random() < 0.3:
        a, b = a % 20, b % 20
        a, b = max(a, b), min(a, b)
    question = _one(
        rng,
        "What is {a} - {b}?",
        "What is {a} minus {b}?",
        "{a} - {b}",
        "{a}-{b}",
        "{a} - {b} =",
        "Subtract {b} from {a}.",
        "What is {a}-{b}?",
    )
    return question.format(a=a, b=b), f"{a} - {b} = {a - b}."


def _too_large(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(10 ** rng.randint(1, 5)), rng.randrange(100, 10 ** rng.randint(3, 5))
    if rng.random() < 0.5:
        a, b = b, a
    if rng.random() < 0.3:
        question = _one(rng, "What is {a} times {b}?", "What is {a} * {b}?", "{a} * {b}", "Multiply {a} by {b}.")
        return question.format(a=a, b=b), "That is too large for me: I can multiply numbers up to 12."
    question = _one(rng, "What is {a} + {b}?", "{a} + {b}", "What is {a} plus {b}?", "Add {a} and {b}.", "{a}+{b}")
    return question.format(a=a, b=b), "That is too large for me: I can add numbers below 100."


def _comparison(rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(range(10 ** rng.randint(1, 3)), 2)
    word, pick = rng.choice((("larger", max), ("bigger", max), ("greater", max), ("smaller", min), ("less", min)))
    question = _one(
        rng,
        "Which is {w}, {a} or {b}?",
        "Which number is {w}, {a} or {b}?",
        "Which is {w}: {a} or {b}?",
        "What is {w}, {a} or {b}?",
    )
    return question.format(a=a, b=b, w=word), f"{pick(a, b)} is {word}."


def _reverse(rng: random.Random) -> tuple[str, str]:
    kind = rng.randrange(3)
    size = rng.randint(2, 6)
    if kind == 0:
        items = [str(rng.randrange(20)) for _ in range(size)]
    elif kind == 1:
        items = rng.sample("abcdefghijklmnopqrstuvwxyz", size)
    else:
        items = rng.sample(COLORS + FOODS + ANIMALS, min(size, 5))
    separator = rng.choice((" ", ", "))
    question = _one(rng, "Reverse: {x}", "Reverse this list: {x}", "Reverse the order: {x}", "Write backwards: {x}")
    return question.format(x=separator.join(items)), separator.join(reversed(items))


def _neighbour(rng: random.Random) -> tuple[str, str]:
    number = rng.randrange(1, 110)
    if rng.random() < 0.5:
        return _one(
            rng, "What comes after {n}?", "Which number comes after {n}?", "What is the next number after {n}?"
        ).format(n=number), f"{number + 1} comes after {number}."
    return _one(rng, "What comes before {n}?", "Which number comes before {n}?").format(
        n=number
    ), f"{number - 1} comes before {number}."


def _named(rng: random.Random) -> tuple[str, str]:
    kind, pool = rng.choice(
        (("colors", COLORS), ("animals", ANIMALS), ("cities", CITIES[:40]), ("foods", FOODS), ("names", NAMES[:30]))
    )
    size = rng.randint(2, 5)
    number = {2: "two", 3: "three", 4: "four", 5: "five"}[size] if rng.random() < 0.7 else str(size)
    question = _one(rng, "Name {n} {k}.", "List {n} {k}.", "Give me {n} {k}.", "Tell me {n} {k}.", "name {n} {k}")
    items = rng.sample(pool, size)
    answer = ", ".join(items[:-1]) + f" and {items[-1]}."
    return question.format(n=number, k=kind), answer[0].upper() + answer[1:]
