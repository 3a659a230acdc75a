"""Fields of request bodies that the API does not know: found while a body is checked, reported, and hinted at.

They are ignored unless a body or the server asks for `strict_fields`. Whatever is kept or reported of them is bounded,
as clients choose the names.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from rayllm.errors import InvalidRequestError

Place = tuple[str | int, ...]  # keys and indices that lead to a part of a body

logger = logging.getLogger(__name__)

HEADER = "x-rayllm-ignored"
MAX_REPORTED = 16  # fields that are named for one request
MAX_PATH_CHARS = 100  # of a field's path where it is named
MAX_LOGGED = 1000  # names that a server logs, each once

# What other servers and libraries call a field -> its name here.
_OTHER_NAMES = {
    **dict.fromkeys(("max_length", "max_new_tokens", "max_output_tokens", "max_tokens_to_sample"), "max_tokens"),
    **dict.fromkeys(("n_predict", "num_predict", "max_gen_len"), "max_tokens"),
    **dict.fromkeys(("repeat_penalty", "rep_pen", "repetition_penality"), "repetition_penalty"),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stopping_strings", "stop_words"), "stop"),
    **dict.fromkeys(("regex", "json_schema", "grammar", "ebnf", "guided_decoding"), "structured_outputs"),
    **dict.fromkeys(("random_seed", "sampling_seed"), "seed"),
    **dict.fromkeys(("num_return_sequences", "best_of_n"), "n"),
    **dict.fromkeys(("enable_thinking", "thinking", "thinking_budget"), "chat_template_kwargs"),
    **{"do_sample": "temperature", "num_beams": "use_beam_search", "no_stop_trim": "include_stop_str_in_output"},
    **{"system": "messages", "n_probs": "logprobs", "reasoning": "reasoning_effort", "temp": "temperature"},
}


class UnknownField(NamedTuple):
    """A field that the part of a body where it stands does not know."""

    path: str  # with dots, without the indices of lists; printable ASCII
    name: str  # the last of it, as it came
    known: Collection[str]  # fields of that part

    @property
    def hint(self) -> str:
        """What may have been meant, as the end of a sentence; "" if nothing is like it."""
        meant = _OTHER_NAMES.get(self.name, "")
        close = [meant] if meant in self.known else []
        if not close and len(self.name) <= MAX_PATH_CHARS:
            close = difflib.get_close_matches(self.name, self.known, 1, 0.8)
        return f"; did you mean {close[0]}?" if close else ""


class UnknownFields:
    """What the parts of one body do not know. It is the context in which a body is validated.

    A part is told by the identity of its JSON object, since validators do not know where in the body they are.
    """

    def __init__(self) -> None:
        self._parts: dict[int, tuple[dict[str, Any], Collection[str], Collection[str]]] = {}
        self._any = False

    def add(self, part: dict[str, Any], known: frozenset[str]) -> None:
        """A part was accepted as one that has these fields. Where it fits several, a field that one knows is known."""
        unknown: Collection[str] = () if part.keys() <= known else part.keys() - known
        if id(part) in self._parts:
            unknown = [name for name in unknown if name in self._parts[id(part)][1]]
        self._parts[id(part)] = (part, unknown, known)  # holds the object, so that no other one gets its identity
        self._any = self._any or bool(unknown)

    def check(self, body: Any, prompts: Collection[str]) -> None:
        """Raise InvalidRequestError, which names the first unknown field, if there is any."""
        for place, name, known in self._places(body, prompts):
            path = ".".join(map(str, (*place, name)))[:200]
            hint = UnknownField(path, name, known).hint
            raise InvalidRequestError(f"unknown field {path!r}{hint}", str((*place, name)[0])[:200])

    def fields(self, body: Any, prompts: Collection[str]) -> list[UnknownField]:
        """The first ones, each path once; MAX_REPORTED + 1 if there are more."""
        found: dict[str, UnknownField] = {}
        for place, name, known in self._places(body, prompts):
            path = _printable(".".join((*(each for each in place if isinstance(each, str)), name)))
            found.setdefault(path, UnknownField(path, name, known))
            if len(found) > MAX_REPORTED:
                break
        return list(found.values())

    def _places(self, body: Any, prompts: Collection[str]) -> Iterator[tuple[Place, str, Collection[str]]]:
        """(a part, a field that it does not know, those that it knows), of all unknown fields.

        prompts: fields of the body that hold no parts and may be long.
        """
        if not self._any:
            return
        left = {key: part for key, part in self._parts.items() if part[1]}
        values: list[tuple[Place, Any]] = [((), body)]
        while values and left:
            place, value = values.pop()
            if isinstance(value, dict):
                _, unknown, known = left.pop(id(value), (value, (), ()))
                yield from ((place, name, known) for name in value if name in unknown)
                inner = [((*place, name), each) for name, each in value.items() if place or name not in prompts]
            else:
                inner = [((*place, index), each) for index, each in enumerate(value)]
            values += [each for each in reversed(inner) if isinstance(each[1], dict | list)]
        for _, unknown, known in left.values():  # a validator made the part of something else
            yield from (((), name, known) for name in unknown)


def header_value(fields: Collection[UnknownField]) -> str:
    """The header's value: paths with commas between them, and "..." if there are more than MAX_REPORTED."""
    paths = [field.path for field in fields]
    return ", ".join(paths[:MAX_REPORTED] + ["..."] * (len(paths) > MAX_REPORTED))


class FieldLog:
    """Logs each name of an ignored field once, up to MAX_LOGGED names."""

    def __init__(self) -> None:
        self._paths: set[str] = set()

    def note(self, fields: Collection[UnknownField], path: str) -> None:
        """path: of the request."""
        for field in fields:
            if field.path in self._paths or len(self._paths) >= MAX_LOGGED:
                continue
            self._paths.add(field.path)
            logger.warning("ignored the unknown field %s of a request to %s%s", field.path, path, field.hint)
            if len(self._paths) == MAX_LOGGED:
                logger.warning("ignored fields of %d names; no more are logged", MAX_LOGGED)


def _printable(path: str) -> str:
    """Printable ASCII without commas, which separate paths."""
    return "".join(c if "!" <= c <= "~" and c != "," else "?" for c in path[:MAX_PATH_CHARS])
