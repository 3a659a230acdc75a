"""What is documented in every Python installation: `pydoc_data.topics` and the docstrings of the standard library.

    python3.12 scripts/tiny_entries.py entries.json

writes the documentation of that Python, which may be another than the one that trains: each version has other texts.
Sources are parsed with `ast` and never imported; the modules written in C come from a fixed list. Only the standard
library is needed.
"""

import ast
import importlib
import inspect
import json
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc import Helper
from pydoc_data.topics import topics

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
    "tkinter",  # this and turtle: many installations lack them
    "turtle.py",
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


@dataclass(frozen=True)
class Documentation:
    """Entries, and the pages of the language reference whole."""

    entries: list[Entry]
    pages: list[str]


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


def collect() -> Documentation:
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
    return Documentation(entries, list(reference_pages().values()))


def read(path: Path) -> Documentation:
    """What this script wrote."""
    found = json.loads(path.read_text())
    return Documentation([Entry(**fields) for fields in found["entries"]], found["pages"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asdict(collect())) + "\n")
