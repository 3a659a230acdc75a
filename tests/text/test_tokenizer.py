"""`load_tokenizer` against transformers' AutoTokenizer on small tokenizers trained here."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rayllm.config.options import BUNDLED_MODEL
from rayllm.errors import InvalidRequestError, ModelError
from rayllm.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = ["Hello world, this is a test of the tokenizer.", "naïve café 日本語 😀 é", "def f(x):\n    return x\n"] * 5
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces ",
    "naïve café\n\t日本語",
    "👩‍👩‍👧 e\u0301",
    "<s>Hi</s> there",
    "<think>\x00\x7f",
]


def train_byte_level(**trainer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        **trainer,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("né ä", special=False)])
    return backend


def train_byte_fallback() -> tokenizers.Tokenizer:
    """Like sentencepiece models: "▁" for spaces, <0xNN> for characters that the vocabulary lacks."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, limit_alphabet=30, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    parts = json.loads(backend.to_str())
    parts["model"]["byte_fallback"] = True
    parts["added_tokens"] = [token for token in parts["added_tokens"] if not token["content"].startswith("<0x")]
    backend = tokenizers.Tokenizer.from_str(json.dumps(parts))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def save(folder, backend, **config):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte_level")
    fast = PreTrainedTokenizerFast(tokenizer_object=train_byte_level(), bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("byte_fallback"), train_byte_fallback(), unk_token="<unk>")
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


PAIRS = ["byte_level", "byte_fallback"]


def assert_same(ours: Tokenizer, theirs, texts=TEXTS):
    for text in texts:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, (text, special)
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize("name", PAIRS)
def test_texts_and_ids_as_transformers(name, request):
    ours, theirs = request.getfixturevalue(name)
    assert_same(ours, theirs)

    @settings(max_examples=100, deadline=None)
    @given(st.text(max_size=40), st.lists(st.integers(0, ours.vocab_size + 3), max_size=12), st.booleans())
    def check(text, ids, special):
        assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special)

    check()
    assert (ours.special_tokens["bos_token"], ours.special_tokens["eos_token"]) == (theirs.bos_token, theirs.eos_token)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids)


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_token_bytes_are_exact(name, request, text):
    tokenizer, _ = request.getfixturevalue(name)
    joined = b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text, add_special_tokens=False))
    # The byte-fallback pre-tokenizer writes its own space in front, and spaces with the same sign as "▁".
    expected = text if name == "byte_level" else text.replace("▁", " ")
    assert joined.decode().removeprefix(" ") == expected.removeprefix(" ")


def test_token_text(byte_level, byte_fallback):
    tokenizer, _ = byte_level
    assert tokenizer.token_text(tokenizer.backend.token_to_id("</s>")) == "</s>"
    assert "".join(map(tokenizer.token_text, tokenizer.encode(" tokenizer"))) == " tokenizer"
    half = tokenizer.encode("\N{PILE OF POO}", add_special_tokens=False)[-1]  # not in the corpus: ends with lone bytes
    assert tokenizer.token_text(half) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.token_bytes(half) == "\N{PILE OF POO}".encode()[-1:]
    assert tokenizer.token_text(10**6) == ""
    assert tokenizer.token_bytes(10**6) == b""
    tokenizer, _ = byte_fallback
    assert tokenizer.token_bytes(tokenizer.backend.token_to_id("<0xE6>")) == b"\xe6"
    word = next(i for i in range(tokenizer.vocab_size) if (tokenizer.backend.id_to_token(i) or "").startswith("▁t"))
    assert tokenizer.token_text(word).startswith(" t")


def test_other_decoders_spell_tokens_by_text():
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "ab": 1, "c": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert (tokenizer.token_text(1), tokenizer.token_bytes(1)) == ("ab", b"ab")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": True, "bos_token": None},
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False}},
        {"pad_token": "<pad>", "additional_special_tokens": ["<|call|>"]},
        {"added_tokens_decoder": {"360": {"content": "<tool>"}, "355": {"content": "<new>", "special": True}}},
        {"extra_special_tokens": {"image_token": "<image>"}},
    ],
)
def test_tokenizer_config_as_transformers(tmp_path, config):
    backend = train_byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = save(tmp_path, backend, **config)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert_same(ours, theirs, [*TEXTS, "a<pad>b", "a<|call|>b", "a<tool>b<new>c", "a<image>b"])
    assert ours.special_tokens == {k: v for k, v in theirs.special_tokens_map.items() if k != "image_token"}


def test_names_in_a_file_of_their_own(tmp_path):
    folder = save(tmp_path, train_byte_level(), bos_token=None, eos_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "unk_token": "<s>"}))
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.special_tokens == theirs.special_tokens_map == {"eos_token": "</s>", "unk_token": "<s>"}


def test_truncation_and_padding_in_the_file_are_off(tmp_path):
    backend = train_byte_level()
    text = CORPUS[0] * 3
    ids = backend.encode(text).ids
    backend.enable_truncation(4)
    backend.enable_padding(length=640)
    assert load_tokenizer(save(tmp_path, backend)).encode(text) == ids


def test_without_tokenizer_config(tmp_path):
    train_byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.special_tokens == {}
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"


def test_folder_without_tokenizer_json(tmp_path):
    backend = train_byte_level()
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ 2 }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert_same(tokenizer, AutoTokenizer.from_pretrained(tmp_path))
    assert tokenizer.decode(tokenizer.encode("naïve 😀</s>")) == "naïve 😀"
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}]) == "2"


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json.*skip_tokenizer_init"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not sentencepiece")
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*converted.*skip_tokenizer_init"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)
    save(tmp_path, train_byte_level())
    no_template = ('{"chat_template": 3}', '{"chat_template": {"a": "b"}}', '{"chat_template": [{"name": "default"}]}')
    no_tokens = ('{"added_tokens_decoder": {"x": {}}}', '{"added_tokens_decoder": {"1": {}}}')
    for bad in ("[]", "{", "[" * 100_000, *no_tokens, *no_template):
        (tmp_path / "tokenizer_config.json").write_text(bad)
        with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)


def test_code_in_the_folder_is_not_run(tmp_path):
    (tmp_path / "tokenizer.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\nclass Tok: pass\n")
    config = {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["tokenizer.Tok", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ModelError):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "canary").exists()


def test_poisonous_input_is_refused(byte_level):
    tokenizer, _ = byte_level
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.encode("lone surrogate \ud800")
    assert caught.value.param == "prompt"
    for ids in ([-1], [2**40]):
        with pytest.raises(InvalidRequestError, match="token ids"):
            tokenizer.decode(ids)


def test_imports_and_loads_without_torch_and_transformers(tmp_path):
    folder = save(tmp_path, train_byte_level(), chat_template="{{ messages[0].content }}")
    code = f"""
import sys
import rayllm.engine.async_engine, rayllm.text.chat_template, rayllm.engine.client, rayllm.text.detokenizer
import rayllm.engine.driver, rayllm.text.outputs, rayllm.text.tokenizer
tokenizer = rayllm.text.tokenizer.load_tokenizer({str(folder)!r})
assert tokenizer.apply_chat_template([{{"role": "user", "content": "Hi"}}]) == "Hi"
heavy = {{"torch", "transformers", "ray"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_much_is_worked_on(work):
    """The library holds the interpreter's lock for one text, and lets go of it for a list of them."""
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    text = "The for statement, in Python. " * 10_000
    ids = tokenizer.encode(text)
    worker = threading.Thread(target=getattr(tokenizer, work), args=(text if work == "encode" else ids * 8,))
    turns = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20  # with the lock held it would be two or three
    assert tokenizer.decode(ids) == text
