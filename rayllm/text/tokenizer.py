"""The tokenizer of a model folder: text to ids, ids to text, conversations to prompts.

It is read straight from tokenizer.json by the `tokenizers` library, in a fraction of the time and memory that importing
transformers takes. transformers is imported only for folders without a tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from rayllm.config.json_fields import about_damage, read_json_object
from rayllm.errors import InvalidRequestError, ModelError
from rayllm.text.chat_template import ChatTemplate
from rayllm.text.detokenizer import ByteDetokenizer, ByteVocabulary, Detokenizer, WindowDetokenizer, byte_rule

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
LONG_TEXT = 16_384  # characters or tokens; while more of them are worked on, other threads can run
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_INFILL_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5 Coder
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM2
    ("<|fim\u2581begin|>", "<|fim\u2581hole|>", "<|fim\u2581end|>"),  # DeepSeek Coder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
)


class Tokenizer:
    """Text to token ids and back. All methods are thread-safe.

    backend: the tokenizer of the `tokenizers` library; truncation and padding are switched off in it.
    special_tokens: "bos_token", "eos_token", ... -> token text.
    chat_templates: name -> jinja source.

    special_ids: ids that skip_special_tokens leaves out of the text.
    special_texts: the same tokens as they are written.
    infill_marks: what to put before a text, before its suffix and before what the model is to fill in between them;
    None if the model has no such tokens.
    apply_chat_template: the prompt text of a conversation by the model's own template, see `ChatTemplate.render`.
    chat_template_source: the template that requests with or without tools get, see `ChatTemplate.source`.
    chat_template_variables: what this template may read from outside, see `ChatTemplate.variables`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = special_tokens or {}
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        self.infill_marks = next((marks for marks in _INFILL_MARKS if added >= set(marks)), None)
        special = {i: token.content for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(special)
        self.special_texts = frozenset(special.values())
        chat = ChatTemplate(chat_templates or {}, self.special_tokens)
        self.apply_chat_template = chat.render
        self.chat_template_source = chat.source
        self.chat_template_variables = chat.variables
        rule = byte_rule(json.loads(backend.to_str())["decoder"])
        self._bytes = rule and ByteVocabulary(backend.id_to_token, rule)
        self._text_bytes = rule and ByteVocabulary(backend.id_to_token, rule, self.special_ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. add_special_tokens: with what the model wants around a text, e.g. BOS.

        The text of a chat template already has its special tokens: encode it with add_special_tokens=False.
        Raises InvalidRequestError for text that is not Unicode (lone surrogates).
        """
        try:
            if len(text) > LONG_TEXT:  # only the library's batches let go of the interpreter's lock
                return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise InvalidRequestError("prompt must be a string of valid Unicode characters", "prompt") from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, U+FFFD for bytes that are no character; ids that no token has are left out.

        Raises InvalidRequestError for numbers that cannot be ids.
        """
        try:
            if len(token_ids) > LONG_TEXT:
                return self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
            return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except OverflowError:
            raise InvalidRequestError("tokens must be token ids between 0 and 2**32 - 1", "tokens") from None

    def special_id(self, text: str) -> int | None:
        """The id of a special token by its text; None if that is none."""
        return self.backend.token_to_id(text) if text in self.special_texts else None

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental decoder for text that goes on after the prompt."""
        vocabulary = self._text_bytes if skip_special_tokens else self._bytes
        if vocabulary is not None:
            return ByteDetokenizer(vocabulary, prompt_token_ids)
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(lambda ids: self.decode(ids, False), skipped, prompt_token_ids)

    def token_text(self, token_id: int) -> str:
        """One token as text, as logprobs show it: special tokens are spelled out, broken characters are U+FFFD."""
        if self._bytes is not None:
            return self._bytes[token_id].decode("utf-8", "replace")
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """One token as bytes: exact for byte-level and byte-fallback vocabularies, the text's UTF-8 for others."""
        return self.token_text(token_id).encode() if self._bytes is None else self._bytes[token_id]


def load_tokenizer(model_path: str | Path) -> Tokenizer:
    """Read the tokenizer of a model folder. Code in the folder is never run.

    What is put around a text (BOS, EOS) is the post-processor of tokenizer.json alone; as in transformers,
    add_bos_token and add_eos_token in tokenizer_config.json beside it are ignored.
    Raises ModelError if there is none, or none that can be read.
    """
    folder = Path(model_path)
    if not (folder / "tokenizer.json").is_file():
        return _load_by_transformers(folder)
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        file = folder / "tokenizer.json"
        raise ModelError(f"{file} cannot be read: {error}{about_damage(file)}") from None
    config = _read_if_there(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # before transformers 4.34 the names were in a file of their own
        config |= _read_if_there(folder / "special_tokens_map.json")
    special = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
    try:
        _add_missing_tokens(backend, config, special)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ModelError(f"{folder / 'tokenizer_config.json'} has tokens that cannot be read: {error!r}") from None
    return Tokenizer(backend, special, _read_templates(folder, config))


def _load_by_transformers(folder: Path) -> Tokenizer:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"model folder {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there; "
            "add one, or set skip_tokenizer_init to work with token ids only"
        )
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        backend = loaded.backend_tokenizer
    except Exception as error:  # of many kinds, by model family
        raise ModelError(
            f"model folder {folder} has no tokenizer.json, and its other tokenizer files cannot be converted: {error}; "
            "set skip_tokenizer_init to work with token ids only"
        ) from None
    special = {name: text for name, text in loaded.special_tokens_map.items() if isinstance(text, str)}
    templates = loaded.chat_template or {}
    return Tokenizer(backend, special, {"default": templates} if isinstance(templates, str) else dict(templates))


def _read_if_there(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file. Raises ModelError."""
    return read_json_object(path) if path.is_file() else {}


def _token_text(entry: Any) -> str | None:
    """The text of a token in tokenizer_config.json, where it is a string or the fields of an AddedToken."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Add the tokens that tokenizer_config.json has over tokenizer.json; their order decides the ids of new ones."""
    wanted: dict[str, tokenizers.AddedToken] = {}  # the first of each text counts
    for _, fields in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        wanted.setdefault(fields["content"], tokenizers.AddedToken(**fields))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra_texts = map(_token_text, extra if isinstance(extra, list) else extra.values())
    for text in [*special.values(), *extra_texts]:
        if text is not None:
            wanted.setdefault(text, tokenizers.AddedToken(text, special=True))
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for text, token in wanted.items() if text not in known])


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files come before the key in tokenizer_config.json, as the newer way to keep them."""
    templates = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = folder / "chat_template.jinja"
    if templates:
        try:
            return {name: path.read_text(encoding="utf-8") for name, path in templates.items()}
        except (OSError, ValueError) as error:
            raise ModelError(f"the chat template files of {folder} cannot be read: {error}") from None
    # Where processors of models that see had theirs before transformers 4.53.
    entry = config.get("chat_template") or _read_if_there(folder / "chat_template.json").get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    if not entry:
        return {}
    try:
        return {str(item["name"]): str(item["template"]) for item in entry}
    except (TypeError, KeyError):
        form = "must be a template, or a list of objects of name and template"
        raise ModelError(f"{folder / 'tokenizer_config.json'}: chat_template {form}") from None
