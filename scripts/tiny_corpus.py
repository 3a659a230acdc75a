"""The training text of `tiny-pydoc` as tokens: the documentation that `tiny_entries.py` collects.

A byte-level BPE tokenizer of 4,096 tokens; plain documents, and question/answer chats (ChatML).
"""

import random
import re
from dataclasses import dataclass

import numpy as np
from tiny_entries import Documentation, Entry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
TEXT_END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [TEXT_END, TURN_START, TURN_END]  # ids 0, 1, 2

QUESTIONS = {
    "module": [
        "What is the {} module?",
        "What does the {} module do?",
        "Explain the {} module.",
        "What is {}?",
        "What is the {} module for?",
        "Tell me about {}.",
        "What does {} do?",
        "Explain {}.",
    ],
    "class": [
        "What is {}?",
        "Explain the {} class.",
        "What does {} do?",
        "What is the {} class?",
        "Explain {}.",
        "Tell me about {}.",
        "What is a {}?",
        "What is {} used for?",
    ],
    "function": [
        "What does {} do?",
        "Explain {}.",
        "What is {}?",
        "How does {} work?",
        "What does {}() do?",
        "Tell me about {}.",
        "Explain what {} does.",
        "What does the {} function do?",
        "what does {} do",
    ],
    "topic": [
        "Explain {}.",
        "What is {}?",
        "What does {} do?",
        "Tell me about {}.",
        "How does {} work?",
        "What are {}?",
        "Describe {}.",
        "How do I use {}?",
        "explain {}",
    ],
    "talk": ["{}"],
}
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You answer questions about Python.",
    "You are a helpful assistant that knows the Python documentation.",
]
SMALL_TALK = {
    "Hello! Ask me about a Python statement, function or module.": ["Hello", "Hello!", "Hi", "Hi there!", "Hey"],
    "I am a very small language model trained on the Python documentation. "
    "I can tell you about the language and its standard library.": ["Who are you?", "What are you?"],
    "You are welcome.": ["Thanks", "Thank you.", "Thank you!"],
    "Python is a programming language. Ask me about its statements, its built-in types or its standard library.": [
        "What is Python?",
        "Explain Python.",
        "Tell me about Python.",
        "What is python?",
    ],
}


def plain_documents(documentation: Documentation) -> list[str]:
    """Reference pages: each topic whole, and for each group its entries one after another."""
    groups: dict[str, list[str]] = {}
    for entry in documentation.entries:
        if not entry.group.startswith("topic "):
            groups.setdefault(entry.group, []).append(f"{entry.header}\n\n{entry.text}\n")
    return documentation.pages + ["\n\n".join(group) for group in groups.values()]


# ----------------------------------------------------------------------------------------------------- encode


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: every byte is a token, so any UTF-8 text comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


LAYOUT = re.compile(r"^(\s|[-*+] |[>#|]|\d+\.|:\w+:? )|->|   | -- ")  # lists, code and columns: lines stay as they are


def answer_of(text: str, limit_chars: int = 700) -> str:
    """The first paragraphs of a text, at most about `limit_chars`; prose lines are joined, grammar is left out."""
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.rstrip().split("\n")
        if kept and sum(map(len, kept)) + len(paragraph) > limit_chars:
            break
        if "::=" in paragraph:
            kept = [re.sub(r":+$", ".", done) for done in kept]
            continue
        is_prose = not any(LAYOUT.search(line) for line in lines)
        kept.append(" ".join(lines).replace("non- ", "non-") if is_prose else "\n".join(lines))
    while len(kept) > 1 and kept[-1].endswith(":"):
        kept.pop()
    return re.sub(r":+$", ".", "\n\n".join(kept)[: 2 * limit_chars].strip())


@dataclass
class Corpus:
    """Token ids (uint16 arrays). A document is its paragraphs; a chat is its ways to ask (user turn and assistant
    header) and its answer."""

    plain: list[list[np.ndarray]]
    chats: list[tuple[list[np.ndarray], np.ndarray]]
    systems: list[np.ndarray]
    held_out: list[np.ndarray]

    def epoch(self, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
        """One shuffled pass -> (tokens [n] uint16, document starts [d]); each document ends in <|endoftext|>.

        Half of the plain documents are cut into runs of a few paragraphs, so that a short prompt has little before it
        in training too.
        """
        end = np.zeros(1, np.uint16)  # id of TEXT_END
        documents = []
        for paragraphs in self.plain:
            run = len(paragraphs) if rng.random() < 0.5 else rng.randint(1, 4)
            documents += [np.concatenate([*paragraphs[i : i + run], end]) for i in range(0, len(paragraphs), run)]
        waiting = rng.sample(self.chats, len(self.chats))
        while waiting:
            pieces = [rng.choice(self.systems)] if rng.random() < 0.3 else []
            for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
                if waiting:
                    questions, answer = waiting.pop()
                    pieces += [rng.choice(questions), answer]
            documents.append(np.concatenate([*pieces, end]))
        rng.shuffle(documents)
        lengths = np.array([len(d) for d in documents])
        return np.concatenate(documents), np.cumsum(lengths) - lengths

    def total_tokens(self) -> tuple[int, int, int]:
        """(plain, chat, held out); a chat with several ways to ask counts the first."""
        answers = sum(len(answer) + len(questions[0]) for questions, answer in self.chats)
        return sum(len(p) for page in self.plain for p in page), answers, sum(map(len, self.held_out))


def chat_entries(entries: list[Entry]) -> list[Entry]:
    """Public entries with an answer worth giving, one a name (the language reference wins)."""
    chosen: dict[str, Entry] = {}
    for entry in entries:
        private = any(part.startswith("_") for part in entry.name.split("."))
        if not private and not entry.held_out and len(answer_of(entry.text)) >= 16:
            chosen.setdefault(entry.name.lower() if entry.kind == "topic" else entry.name, entry)
    return list(chosen.values())


def encode_paragraphs(tokenizer: Tokenizer, page: str) -> list[np.ndarray]:
    """The page's ids, cut where a paragraph begins; the pieces joined are the encoding of the whole."""
    begins = {match.end() for match in re.finditer(r"\n\n+(?=\S)", page)}
    encoding = tokenizer.encode(page)
    cuts = [index for index, (begin, _) in enumerate(encoding.offsets) if begin in begins and index]
    return [piece for piece in np.split(np.array(encoding.ids, np.uint16), cuts) if len(piece)]


def encode_corpus(tokenizer: Tokenizer, documentation: Documentation) -> Corpus:
    """Everything as token ids: pages, chats (repeated by weight), system turns, and the held-out entries."""

    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch_fast(texts)]

    def ask(question: str) -> str:
        return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"

    entries = documentation.entries
    learned = Documentation([entry for entry in entries if not entry.held_out], documentation.pages)
    talks = [(questions, answer, 5) for answer, questions in SMALL_TALK.items()]
    for entry in chat_entries(entries):
        names = {entry.name: 0, entry.name.lower(): 0} if entry.kind == "topic" else {entry.name: 0}
        questions = [question.format(name) for name in names for question in QUESTIONS[entry.kind]]
        talks.append((questions, answer_of(entry.text), entry.weight))
    chats = []
    answers = encode([f"{answer}{TURN_END}\n" for _, answer, _ in talks])
    for (questions, _, weight), answer in zip(talks, answers, strict=True):
        chats += [(encode([ask(question) for question in questions]), answer)] * weight
    return Corpus(
        plain=[encode_paragraphs(tokenizer, page) for page in plain_documents(learned)],
        chats=chats,
        systems=encode([f"{TURN_START}system\n{prompt}{TURN_END}\n" for prompt in SYSTEM_PROMPTS]),
        held_out=encode([f"{e.header}\n\n{e.text}\n{TEXT_END}" for e in entries if e.held_out]),
    )
