"""The training text of `tiny-pydoc`: the documentation in every Python installation, as tokens.

    collect   `pydoc_data.topics` and the docstrings of the standard library (sources are parsed with `ast`, never
              imported; C modules come from a fixed list)
    encode    a byte-level BPE tokenizer of 4,096 tokens; plain documents, and question/answer chats (ChatML)

The text depends on the Python that runs this: another version has other documentation.
"""

import ast
import importlib
import inspect
import random
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc import Helper
from pydoc_data.topics import topics

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
TEXT_END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [TEXT_END, TURN_START, TURN_END]  # ids 0, 1, 2

C_MODULES = [
    "builtins",
    "sys",
    "math",
    "cmath",
    "itertools",
    "time",
    "operator",
    "_functools",
    "_collections",
    "_io",
    "array",
    "binascii",
    "zlib",
    "select",
    "_socket",
    "_struct",
    "_datetime",
    "_decimal",
    "_json",
    "_csv",
    "_pickle",
    "_random",
    "_heapq",
    "_bisect",
    "_statistics",
    "unicodedata",
    "_thread",
    "gc",
    "marshal",
    "posix",
    "errno",
    "_signal",
    "fcntl",
    "mmap",
    "_hashlib",
    "_ssl",
    "_sqlite3",
    "_bz2",
    "_lzma",
    "_asyncio",
    "_contextvars",
    "_weakref",
    "_codecs",
    "_sre",
    "_queue",
    "_tracemalloc",
    "_abc",
    "_stat",
    "_locale",
    "_string",
    "_symtable",
    "_opcode",
    "_multiprocessing",
    "_posixsubprocess",
    "_elementtree",
    "pyexpat",
    "atexit",
    "faulthandler",
    "resource",
    "grp",
    "pwd",
    "termios",
    "syslog",
]
SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    "site-packages",
    "dist-packages",
    "this.py",
    "antigravity.py",
    "__phello__",
    "__pycache__",
    "pydoc_data",
}
PUBLIC_NAMES = {"posix": "os", "posixpath": "os.path", "_thread": "_thread", "_sre": "re"}

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


@dataclass(frozen=True)
class Entry:
    """One documented thing. `group` names the document it is printed in; `kind` is a key of QUESTIONS."""

    name: str
    kind: str
    header: str
    text: str
    group: str
    weight: int = 1  # times its chat is seen in an epoch

    @property
    def held_out(self) -> bool:
        """True for about one group in 80, left out of training for the held-out loss; never a topic or built-in."""
        common = self.weight > 1 or self.group.startswith("topic ")
        return not common and zlib.crc32(self.group.encode()) % 80 == 0


# ---------------------------------------------------------------------------------------------------- collect


def reference_pages() -> dict[str, str]:
    """`pydoc_data.topics` by label; prose loses the quotes around names (`The "for" statement`), code keeps them."""
    pages = {}
    for label, page in sorted(topics.items()):
        paragraphs = re.split(r"(\n\s*\n)", page.strip() + "\n")
        for index, paragraph in enumerate(paragraphs):
            if not re.search(r"::=|>>>| = |^ {5}", paragraph):
                paragraphs[index] = re.sub(r'(?<![(\[])"([A-Za-z_][\w.]*(?:\(\))?)"', r"\1", paragraph)
        pages[label] = "".join(paragraphs)
    return pages


def sections_of(page: str) -> list[tuple[str, str]]:
    """(title, text) of each underlined heading."""
    parts = re.split(r"^(\S.*)\n[*=\-~]{3,}\n", page, flags=re.M)
    return [(title, text.strip()) for title, text in zip(parts[1::2], parts[2::2], strict=True)]


def topic_entries() -> Iterator[Entry]:
    """Sections and described names (`str.join(iterable)` and an indented text) of the language reference."""
    pages = reference_pages()
    for label, page in pages.items():
        for title, text in sections_of(page):
            phrase = re.sub(r"^The\b", "the", title.replace('"', ""))
            yield Entry(phrase, "topic", title, text, f"topic {label}", weight=3)
        for name, arguments, text in re.findall(r"^([a-z]\w*\.[\w.]+)\((.*)\)\n\n((?:   .*\n|\n)+)", page, flags=re.M):
            yield Entry(name, "function", f"{name}({arguments})", inspect.cleandoc(text), f"topic {label}", weight=3)
    for word, target in sorted({**Helper.topics, **Helper.keywords}.items()):  # `with`, `LISTS`: other ways to ask
        while target not in pages:
            target = target[0] if isinstance(target, tuple) else Helper.topics.get(target, "with")
        yield Entry(word.lower(), "topic", word, sections_of(pages[target])[0][1], f"topic {target}")


def signature_of(obj: object) -> str:
    """`(self, iterable, /)`, or `(...)` where C code does not say."""
    try:
        return str(inspect.signature(obj))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"


def c_module_entries() -> Iterator[Entry]:
    """Docstrings that no source file holds: the types and functions of the modules written in C."""
    for module_name in C_MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        public, weight = public_name(module_name), 3 if module_name == "builtins" else 1
        prefix = "" if module_name == "builtins" else public + "."
        yield Entry(public, "module", f"module {public}", module.__doc__ or "", public, weight)
        for name, obj in sorted(vars(module).items()):
            if name.startswith("__") or not (inspect.isclass(obj) or inspect.isroutine(obj)):
                continue
            kind, full = "class" if inspect.isclass(obj) else "function", prefix + name
            group = full if kind == "class" else public
            yield Entry(full, kind, full + signature_of(obj), str(obj.__doc__ or ""), group, weight)
            for attribute, member in sorted(vars(obj).items()) if kind == "class" else ():
                doc, path = getattr(member, "__doc__", None), f"{full}.{attribute}"
                if attribute != "__doc__" and isinstance(doc, str):
                    yield Entry(path, "function", path + signature_of(member), doc, group, weight)


def public_name(module_name: str) -> str:
    """The name users import: `_json` -> `json`, `posixpath` -> `os.path`."""
    return PUBLIC_NAMES.get(module_name, module_name.lstrip("_"))


def source_entries() -> Iterator[Entry]:
    """Docstrings of the standard library's Python files, parsed and not imported, in path order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED.intersection(parts) or parts[0].startswith("config-"):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        module = public_name(".".join(parts).removesuffix(".py").removesuffix(".__init__"))
        yield Entry(module, "module", f"module {module}", ast.get_docstring(tree) or "", module)
        yield from definitions(tree, module, module)


def definitions(tree: ast.AST, prefix: str, group: str) -> Iterator[Entry]:
    """Entries of the classes and functions directly inside `tree`; a class's methods join its document."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            name = f"{prefix}.{node.name}"
            bases = f"({', '.join(map(ast.unparse, node.bases))})"
            yield Entry(name, "class", f"class {name}{bases}", ast.get_docstring(node) or "", name)
            yield from definitions(node, name, name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{node.name}"
            header = f"{name}({ast.unparse(node.args)})"
            yield Entry(name, "function", header, ast.get_docstring(node) or "", group)


def collect_entries() -> list[Entry]:
    """All entries with some text, the first of equal texts only, in a fixed order."""
    seen: set[str] = set()
    entries = []
    for source in (topic_entries, c_module_entries, source_entries):
        for entry in source():
            text = inspect.cleandoc(entry.text).encode("utf-8", "replace").decode()
            key = " ".join(text.split())
            if len(key) >= 16 and (key not in seen or entry.kind == "topic"):
                seen.add(key)
                entries.append(Entry(entry.name, entry.kind, entry.header, text, entry.group, entry.weight))
    return entries


def plain_documents(entries: list[Entry]) -> list[str]:
    """Reference pages: each topic whole, and for each group its entries one after another."""
    groups: dict[str, list[str]] = {}
    for entry in entries:
        if not entry.group.startswith("topic "):
            groups.setdefault(entry.group, []).append(f"{entry.header}\n\n{entry.text}\n")
    return list(reference_pages().values()) + ["\n\n".join(group) for group in groups.values()]


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


def encode_corpus(tokenizer: Tokenizer, entries: list[Entry]) -> Corpus:
    """Everything as token ids: pages, chats (repeated by weight), system turns, and the held-out entries."""

    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.array(e.ids, np.uint16) for e in tokenizer.encode_batch_fast(texts)]

    def ask(question: str) -> str:
        return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"

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
        plain=[encode_paragraphs(tokenizer, page) for page in plain_documents([e for e in entries if not e.held_out])],
        chats=chats,
        systems=encode([f"{TURN_START}system\n{prompt}{TURN_END}\n" for prompt in SYSTEM_PROMPTS]),
        held_out=encode([f"{e.header}\n\n{e.text}\n{TEXT_END}" for e in entries if e.held_out]),
    )
