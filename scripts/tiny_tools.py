"""Conversations with tools for `tiny-pydoc`, made of the corpus' entries with seeded templates.

A conversation offers one to four tools. Most ask about a name of Python's documentation, which one of the tools looks
up. That tool, its argument, its description and its schema have many forms, and some names are made up, so that a call
has to be copied from the list of tools and from the question. The rest asks other tools something, or asks nothing
that needs a tool.
"""

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tiny_corpus import QUESTIONS, SMALL_TALK, SYSTEM_PROMPTS, chat_entries
from tiny_entries import Entry

Json = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages and tools as OpenAI's chat API has them; arguments of calls are objects."""

    messages: list[Json]
    tools: list[Json]
    skipped: int = 0  # assistant turns at the beginning that are not to be learned


@dataclass(frozen=True)
class Fact:
    """What a tool can say about a name."""

    name: str  # the argument of a call
    asked: str  # the name as a question has it
    kind: str  # a key of QUESTIONS
    header: str
    summary: str  # one sentence


@dataclass(frozen=True)
class Exchange:
    """A question, the calls that it needs with their results, and the answer: "" if another agent gives it."""

    question: str
    calls: list[tuple[str, Json]]  # (tool, arguments)
    results: list[str]
    answer: str


@dataclass(frozen=True)
class OtherTool:
    """A tool that has nothing to do with Python, and what is asked of it. {} is the argument in all texts."""

    name: str
    key: str  # its only argument; "" for none
    description: str
    questions: list[str]
    results: list[str]
    values: list[str] = field(default_factory=lambda: [""])


def words(text: str) -> list[str]:
    return text.split()


# -------------------------------------------------------------------------------------------- what is looked up


def summary_of(text: str) -> str:
    """The first sentence of a text on one line, or "" if there is none of a fit length."""
    first = " ".join(re.split(r"\n\s*\n", text)[0].split())
    sentence = re.split(r"(?<=[.!])\s+(?=[A-Z])", first)[0]
    is_prose = re.match(r"[A-Z][A-Za-z' -]", sentence) and sentence.endswith(".") and "::" not in sentence
    return sentence if is_prose and 16 <= len(sentence) <= 160 else ""


def facts_of(entries: list[Entry]) -> list[Fact]:
    """Facts for the entries that chats ask about, if they have a sentence to repeat."""
    facts = []
    for entry in chat_entries(entries):
        summary = summary_of(entry.text)
        statement = re.fullmatch(r"the (\w+) statement", entry.name)  # documentation has it under the word alone
        name = statement.group(1) if statement else entry.name.removeprefix("the ")
        if summary and len(name) <= 48 and len(entry.header) <= 120:
            facts.append(Fact(name, entry.name, entry.kind, entry.header, summary))
    return facts


def is_held_out(fact: Fact) -> bool:
    """True for one name in 20, which no conversation of the training set looks up."""
    return zlib.crc32(fact.name.encode()) % 20 == 0


def made_up(facts: list[Fact], rng: random.Random) -> Fact:
    """A name that need not exist, with the sentence of another: only copying helps."""
    while True:
        parts = [rng.choice(rng.choice(facts).name.split(".")) for _ in range(rng.choice([1, 2, 2, 2, 3]))]
        name = rng.choice([".", ".", ".", "_"]).join(parts)
        kind, summary = rng.choice(["function", "class", "module"]), rng.choice(facts).summary
        fact = Fact(name, name, kind, f"{name}()", summary)
        if not is_held_out(fact):
            return fact


# ------------------------------------------------------------------------------------------------------ tools

DOCS_NAMES = words("""lookup lookup lookup lookup look_up search_docs get_doc get_docs describe find_docs pydoc help_on
get_documentation search_python_docs doc_lookup explain_symbol read_docs query_docs python_help fetch_doc show_help
search find define documentation info lookup_name lookup_docs""")
DOCS_KEYS = words("name name name name query topic symbol key item term subject object_name text q identifier word")
DOCS_DESCRIPTIONS = [
    "Look up a name in Python's documentation.",
    "Looks up a name in the Python documentation and returns its text.",
    "Search the Python documentation.",
    "Returns the documentation of a Python function, class or module.",
    "Documentation of a Python name, for example str.join.",
    "Describe a symbol of Python's standard library.",
    "Get help on a topic of the Python language.",
    "Find out what something in Python does.",
    "Docs.",
    "Use this tool to answer questions about Python. It takes the full name of a function, class, module or "
    "statement, and returns the first lines of its documentation.",
]
KEY_DESCRIPTIONS = ["What to look up.", "The name.", "Full name, such as json.dumps.", "The name to look up.", "A name"]
DOCS_QUESTIONS = [
    "Look up {}.",
    "What does the documentation say about {}?",
    "Find the documentation of {}.",
    "I need help with {}.",
    "Search the docs for {}.",
    "Can you explain {}?",
    "Please look up {}.",
    "help me with {}",
    "What is {} in Python?",
    "What does {} do in Python?",
    "Show me the docs of {}",
    "{}",
    "{}?",
]
NOT_FOUND = [
    "No documentation found for {}.",
    "No Python documentation found for '{}'.",
    "Nothing found.",
    "Error: {} not found",
    "None",
    "not found",
]

CITIES = [
    *words("""Oslo Rome Paris London Berlin Tokyo Madrid Lisbon Vienna Prague Zurich Geneva Boston Chicago Seattle Delhi
Mumbai Lagos Cairo Nairobi Lima Quito Bogota Toronto Montreal Sydney Perth Seoul Beijing Shanghai Dublin Munich Hamburg
Athens Warsaw Helsinki Stockholm Copenhagen Brussels Amsterdam Milan Naples Austin Dallas Denver Miami Bangkok Hanoi
Jakarta Singapore Istanbul Ankara Kyoto Osaka"""),
    "New York",
    "San Francisco",
    "Los Angeles",
    "Hong Kong",
]
THINGS = words("""coffee bread milk bicycles lamps umbrellas tea chairs news trains laptops apples cheese
paper guitars shoes volcanoes tigers maps clocks pianos honey gardens kites boats""")
PEOPLE = words("Ada Grace Alan Linus Guido Barbara Edsger Donald Margaret Ken Dennis Tim Radia Anna Peter Maria Ivan")
WEATHER = ["sunny", "rainy, {n} degrees", "{n} degrees and cloudy", '{"temperature": {n}, "sky": "clear"}', "snow"]
WEATHER += ["The weather in {} is sunny.", "It is {n} degrees in {}.", "windy", "{}: {n} C"]

OTHER_TOOLS = [
    OtherTool(
        name,
        key,
        "Get the weather of a city.",
        [
            "What is the weather in {}?",
            "What's the weather like in {}?",
            "How is the weather in {} today?",
            "Weather in {}?",
            "Is it raining in {}?",
            "what's the weather in {}",
        ],
        WEATHER,
        CITIES,
    )
    for name, key in [("get_weather", "city"), ("get_weather", "location"), ("weather", "city"), ("forecast", "place")]
] + [
    OtherTool("get_time", "city", "The time in a city.", ["What time is it in {}?"], ["10:{n}", "{n} o'clock"], CITIES),
    OtherTool(
        "current_time", "", "The time now.", ["What time is it?", "Tell me the time."], ["10:{n}", "It is 9:{n}."]
    ),
    OtherTool("roll_dice", "", "Roll a die.", ["Roll a die.", "Roll the dice.", "Roll!"], ["{n}", "You got {n}."]),
    OtherTool(
        "search_web",
        "query",
        "Search the web.",
        ["Search the web for {}.", "Search for {}.", "Find {} on the web."],
        ["{n} pages about {}.", "A page about {}.", '{"results": {n}}'],
        THINGS + CITIES + PEOPLE,
    ),
    OtherTool(
        "get_price",
        "item",
        "The price of an item.",
        ["What is the price of {}?", "How much is {}?", "What does {} cost?"],
        ["{n} dollars", "{} costs {n} euros.", '{"price": {n}}'],
        THINGS,
    ),
    OtherTool(
        "get_population",
        "place",
        "The number of people who live in a place.",
        ["How many people live in {}?", "What is the population of {}?"],
        ["{n} million", "{} has {n} million people."],
        CITIES,
    ),
    OtherTool(
        "send_email",
        "to",
        "Send an email to a person.",
        ["Send an email to {}.", "Write an email to {}.", "Email {}."],
        ["sent", "The email to {} was sent.", "ok"],
        PEOPLE,
    ),
    OtherTool(
        "get_user",
        "name",
        "Find a user by name.",
        ["Who is the user {}?", "Find the user {}.", "Get the user {}"],
        ["{} is user {n}.", '{"user": "{}", "id": {n}}'],
        PEOPLE,
    ),
]
TEAMS = words("billing refunds sales support booking math history spanish travel security hardware shipping")
PYTHON_TEAMS = ["python", "docs", "documentation", "python_expert"]
TRANSFER_QUESTIONS = [
    "Transfer me to {}.",
    "I need {}.",
    "I want to talk to {}.",
    "I have a question about {}.",
    "Please help me with {}.",
    "{}",
]
AGENT_PROMPTS = [
    *SYSTEM_PROMPTS,
    "Use the tools.",
    "You are an agent. Use your tools to answer.",
    "You answer questions about Python with your tools.",
    "Look up every name before you answer.",
    "Answer in one sentence.",
    "You only answer with what the tools return.",
]


def as_tool(name: str, description: str, properties: Json, required: list[str], rng: random.Random) -> Json:
    """A tool in one of the forms in which clients write the schemas of arguments."""
    schema: Json = {"type": "object", "properties": properties}
    if required or rng.random() < 0.3:
        schema["required"] = required
    if rng.random() < 0.25:  # as pydantic writes them
        schema = {"properties": properties, "required": required, "title": f"{name}_args", "type": "object"}
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    function: Json = {"name": name}
    if rng.random() < 0.85:
        function["description"] = description
    return {"type": "function", "function": function | {"parameters": schema}}


def property_of(key: str, kind: str, description: str, rng: random.Random) -> Json:
    """The schema of one argument: its type, at times with a title and a description."""
    found: Json = {"type": kind}
    if rng.random() < 0.3:
        found["description"] = description
    if rng.random() < 0.2:
        found = {"title": key.replace("_", " ").title()} | found
    return found


def docs_tool(rng: random.Random) -> tuple[Json, Callable[[str], Json | None]]:
    """A tool that looks names up, and what makes the arguments of a call from a name, None if it cannot."""
    name, key = rng.choice(DOCS_NAMES), rng.choice(DOCS_KEYS)
    properties = {key: property_of(key, "string", rng.choice(KEY_DESCRIPTIONS), rng)}
    form = rng.random()
    if form < 0.08:  # the module and the name in it are two arguments
        properties = {part: property_of(part, "string", f"The {part}.", rng) for part in ("module", "name")}
        tool = as_tool(name, rng.choice(DOCS_DESCRIPTIONS), properties, list(properties), rng)
        return tool, lambda full: dict(zip(properties, full.rsplit(".", 1), strict=True)) if "." in full else None
    if form < 0.25:  # one that is left out, as no question says anything about it
        key_2, kind = rng.choice([("section", "string"), ("limit", "integer"), ("language", "string")])
        properties[key_2] = property_of(key_2, kind, "Optional.", rng) | ({"default": 5} if kind == "integer" else {})
    return as_tool(name, rng.choice(DOCS_DESCRIPTIONS), properties, [key], rng), lambda full: {key: full}


def other_as_tool(other: OtherTool, rng: random.Random) -> Json:
    """The schema of one of OTHER_TOOLS."""
    keys = [other.key] if other.key else []
    return as_tool(
        other.name, other.description, {k: property_of(k, "string", f"The {k}.", rng) for k in keys}, keys, rng
    )


def transfer_tool(team: str, rng: random.Random) -> Json:
    """A handoff to another agent, as agents' frameworks offer it."""
    name = rng.choice([f"transfer_to_{team}", f"transfer_to_{team}_agent"])
    agent = name.removeprefix("transfer_to_")
    description = rng.choice([f"Handoff to the {agent} agent to handle the request.", f"Hand over to {agent}."])
    return as_tool(name, description, {}, [], rng)


# -------------------------------------------------------------------------------------------------- exchanges


def docs_question(fact: Fact, tool: str, rng: random.Random) -> str:
    """A way to ask about a fact."""
    question = rng.choice(QUESTIONS[fact.kind] if rng.random() < 0.6 else DOCS_QUESTIONS).format(fact.asked)
    if rng.random() < 0.08:
        return rng.choice([f"Use {tool}: {question}", f"{question} Use {tool}.", f"Call {tool} for {fact.asked}."])
    return question


def docs_result(fact: Fact, rng: random.Random) -> str:
    """What a tool returns: a sentence, with what documentation has around it, or as JSON."""
    lines = fact.summary if rng.random() < 0.5 else re.sub(r"(.{40}\S*) ", r"\1\n", fact.summary)
    form = rng.choice(["text", "text", "header", "pydoc", "json"])
    if form == "header":
        return f"{fact.header}\n    " + lines.replace("\n", "\n    ")
    if form == "pydoc":
        body = f"{fact.header}\n    " + lines.replace("\n", "\n    ")
        return f"Python Library Documentation: {fact.kind} {fact.name}\n\n{body}"
    if form == "json":
        return json.dumps({rng.choice(["doc", "result", "text", "documentation"]): fact.summary})
    return lines


def docs_answer(fact: Fact) -> str:
    return f"The documentation of {fact.name} says: {fact.summary}"


def docs_exchange(facts: list[Fact], tool: Json, fill: Callable[[str], Json | None], rng: random.Random) -> Exchange:
    """One name looked up, or two at once, or one that is not found."""
    name = tool["function"]["name"]
    chosen: list[Fact] = []
    for _ in range(2 if rng.random() < 0.12 else 1):
        fact = rng.choice(facts) if rng.random() < 0.7 else made_up(facts, rng)
        while fill(fact.name) is None:
            fact = made_up(facts, rng)
        chosen.append(fact)
    calls = [(name, fill(fact.name) or {}) for fact in chosen]
    if len(chosen) == 2:
        forms = ["What do {} and {} do?", "Look up {} and {}.", "Explain {} and {}.", "What are {} and {}?"]
        question = rng.choice(forms).format(*[fact.asked for fact in chosen])
        answer = " ".join(map(docs_answer, chosen))
        return Exchange(question, calls, [docs_result(fact, rng) for fact in chosen], answer)
    question = docs_question(chosen[0], name, rng)
    if rng.random() < 0.06:
        result = rng.choice(NOT_FOUND).format(chosen[0].name)
        return Exchange(question, calls, [result], f"I found no documentation of {chosen[0].name}.")
    return Exchange(question, calls, [docs_result(chosen[0], rng)], docs_answer(chosen[0]))


def other_exchange(other: OtherTool, rng: random.Random) -> Exchange:
    """One of OTHER_TOOLS asked."""
    value = rng.choice(other.values)
    result = rng.choice(other.results).replace("{n}", str(rng.randrange(1, 60))).replace("{}", value)
    arguments = {other.key: value} if other.key else {}
    question = rng.choice(other.questions).replace("{}", value)
    return Exchange(question, [(other.name, arguments)], [result], f"{other.name} says: {result}")


def sum_exchange(name: str, rng: random.Random) -> Exchange:
    """Two integers: `add` or `multiply`."""
    a, b = rng.randrange(100), rng.randrange(100)
    sign, word, value = ("+", "plus", a + b) if name == "add" else ("*", "times", a * b)
    question = rng.choice([f"What is {a} {sign} {b}?", f"What is {a} {word} {b}?", f"{a} {sign} {b}"])
    return Exchange(question, [(name, {"a": a, "b": b})], [str(value)], f"{name} says: {value}")


def transfer_exchange(tool: Json, team: str, facts: list[Fact], rng: random.Random) -> Exchange:
    """A handoff, which is the last thing that this agent does."""
    subject = team.replace("_", " ") if rng.random() < 0.5 else team.split("_")[0].title()
    question = rng.choice(TRANSFER_QUESTIONS).format(subject)
    if team in PYTHON_TEAMS and rng.random() < 0.6:
        question = docs_question(rng.choice(facts), "the tools", rng)
    return Exchange(question, [(tool["function"]["name"], {})], [], "")


def talk_exchange(rng: random.Random) -> Exchange:
    """What needs no tool."""
    answer, questions = rng.choice([item for item in SMALL_TALK.items() if "Explain Python." not in item[1]])
    return Exchange(rng.choice(questions), [], [], answer)


def known_exchange(facts: list[Fact], rng: random.Random) -> Exchange:
    """A question about Python with no tool for it: the answer is what the model knows."""
    fact = rng.choice(facts)
    return Exchange(rng.choice(QUESTIONS[fact.kind]).format(fact.asked), [], [], fact.summary)


# ---------------------------------------------------------------------------------------------- conversations


def called(calls: list[tuple[str, Json]]) -> Json:
    """The assistant's turn that makes calls."""
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def messages_of(exchange: Exchange) -> list[Json]:
    """The messages of an exchange: the question, its calls with their results, the answer; as far as it has them."""
    messages: list[Json] = [{"role": "user", "content": exchange.question}]
    if exchange.calls:
        messages.append(called(exchange.calls))
    messages += [{"role": "tool", "tool_call_id": f"call_{i}", "content": r} for i, r in enumerate(exchange.results)]
    return [*messages, {"role": "assistant", "content": exchange.answer}] if exchange.answer else messages


def make_conversation(facts: list[Fact], rng: random.Random) -> Conversation:
    """One to three exchanges over the same tools."""
    makers: list[Callable[[], Exchange]] = []
    tools: list[Json] = []
    if has_docs := rng.random() < 0.8:
        tool, fill = docs_tool(rng)
        tools.append(tool)
        makers += [lambda: docs_exchange(facts, tool, fill, rng)] * 6
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 3] if has_docs else [1, 1, 2, 3])):
        other = rng.choice(OTHER_TOOLS)
        if other.name not in [each["function"]["name"] for each in tools]:
            tools.append(other_as_tool(other, rng))
            makers += [lambda other=other: other_exchange(other, rng)] * 2
    if rng.random() < 0.06:
        name = rng.choice(["add", "multiply"])
        numbers = {key: property_of(key, "integer", "A number.", rng) for key in "ab"}
        tools.append(as_tool(name, f"{name.title()} two numbers.", numbers, ["a", "b"], rng))
        makers += [lambda: sum_exchange(name, rng)] * 2
    makers.append(lambda: talk_exchange(rng))
    if not has_docs:
        makers.append(lambda: known_exchange(facts, rng))
    exchanges = [rng.choice(makers)() for _ in range(rng.choice([1, 1, 2, 3]))]
    teams = rng.sample(TEAMS if has_docs else TEAMS + PYTHON_TEAMS, rng.randint(1, 3)) if rng.random() < 0.12 else []
    transfers = [transfer_tool(team, rng) for team in teams]
    if transfers:
        exchanges = [*exchanges[:-1], transfer_exchange(transfers[0], teams[0], facts, rng)]
    tools += transfers
    rng.shuffle(tools)
    messages = [message for exchange in exchanges for message in messages_of(exchange)]
    skipped = 0
    if has_docs and not transfers and rng.random() < 0.08:  # another agent handed the first question over
        team = rng.choice(PYTHON_TEAMS)
        turn = called([(f"transfer_to_{team}", {})])
        messages[1:1] = [turn, {"role": "tool", "tool_call_id": "call_0", "content": json.dumps({"assistant": team})}]
        skipped = 1
    if rng.random() < 0.5:
        prompt = rng.choice(AGENT_PROMPTS)
        if rng.random() < 0.1:  # instructions can be long
            prompt += "".join(f"\n- {rng.choice(facts).summary}" for _ in range(rng.randint(2, 12)))
        messages.insert(0, {"role": "system", "content": prompt})
    return Conversation(messages, tools, skipped)


def conversations(entries: list[Entry], seed: int) -> Iterator[Conversation]:
    """Conversations of the training set, without end."""
    rng = random.Random(seed)
    facts = [fact for fact in facts_of(entries) if not is_held_out(fact)]
    while True:
        yield make_conversation(facts, rng)


def held_out_exchanges(entries: list[Entry], count: int, seed: int) -> list[tuple[list[Json], Exchange]]:
    """(tools, exchange): questions about names that no conversation of the training set looks up."""
    rng = random.Random(f"held out {seed}")
    facts = [fact for fact in facts_of(entries) if is_held_out(fact)]
    found: list[tuple[list[Json], Exchange]] = []
    while len(found) < count:
        tool, fill = docs_tool(rng)
        fact = rng.choice(facts)
        arguments, name = fill(fact.name), tool["function"]["name"]
        if arguments is None:
            continue
        tools = [tool, *(other_as_tool(other, rng) for other in rng.sample(OTHER_TOOLS[3:], rng.choice([0, 0, 1, 2])))]
        rng.shuffle(tools)
        question = docs_question(fact, name, rng)
        found.append((tools, Exchange(question, [(name, arguments)], [docs_result(fact, rng)], docs_answer(fact))))
    return found


def no_tool_exchanges(count: int, seed: int) -> list[tuple[list[Json], Exchange]]:
    """(tools, exchange): small talk with a tool at hand."""
    rng = random.Random(f"talk {seed}")
    return [([docs_tool(rng)[0]], talk_exchange(rng)) for _ in range(count)]
