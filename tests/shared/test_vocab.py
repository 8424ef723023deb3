import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from shared.errors import ConfigError
from shared.gguf_vocab import build_tokenizer
from shared.model_files import locate
from shared.vocab import Vocabulary, load_vocabulary
from tests.shared.tiny_models import (
    CONFIG,
    SPACE,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    write_folder,
    write_gguf,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def smollm() -> Vocabulary:
    return load_vocabulary(locate())


@pytest.fixture
def byte_level(tmp_path: Path) -> Vocabulary:
    return load_vocabulary(locate(str(write_folder(tmp_path / "m", tokenizer=byte_level_tokenizer()))))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("spm") / "m"
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    return load_vocabulary(
        locate(str(write_folder(folder, tokenizer=sentencepiece_tokenizer(), tokenizer_config=config)))
    )


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("1234", [33, 34, 35, 36]),
        ("2024-01-15", [34, 32, 34, 36, 29, 32, 33, 29, 33, 37]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("🙂", [10813, 38887]),
        ("😀", [10813, 242, 218]),
        ("<|im_start|>", [1]),
        ("", []),
    ],
)
def test_the_embedded_vocabulary_encodes_as_its_model_was_trained(
    smollm: Vocabulary, text: str, ids: list[int]
) -> None:
    assert smollm.encode(text) == ids


def test_the_embedded_vocabulary_is_what_transformers_reads(smollm: Vocabulary) -> None:
    transformers = pytest.importorskip("transformers")
    path = locate().path
    other = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = [
        "Hello, world!",
        "don't I'LL  \n\n x\r\n  y",
        "日本語🙂😀 e\u0301 안녕",
        "<|im_start|>user\nhi<|im_end|>\n",
    ]
    texts += list(random_texts(200))
    for text in texts:
        plain = re.sub(r"\d", "", text)  # it does not know that this family splits digits
        assert smollm.encode(plain) == other(plain, add_special_tokens=False)["input_ids"]


def random_texts(count: int) -> Iterator[str]:
    chance = random.Random(1)
    spans = [(32, 127), (0x80, 0x3000), (0x4E00, 0x9000), (0x1F600, 0x1F640), (9, 14)]
    for _ in range(count):
        yield "".join(chr(chance.randrange(*chance.choice(spans))) for _ in range(40))


def test_every_token_has_its_bytes(smollm: Vocabulary) -> None:
    assert smollm.num_ids == 49152
    assert smollm.token_bytes(10813) == b"\xf0\x9f"
    assert smollm.token_bytes(4649) == b" France"
    assert smollm.token_bytes(198) == b"\n"
    assert smollm.token_bytes(2) == b"<|im_end|>" and smollm.is_special(2)
    assert not smollm.is_special(198)
    assert [smollm.token_bytes(i) for i in (-1, 49152, 2**31)] == [None, None, None]


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_the_bytes_of_the_ids_are_the_bytes_of_the_text(smollm: Vocabulary, text: str) -> None:
    wanted = text.encode().translate(None, smollm.dropped_bytes)
    assert smollm.decode_bytes(smollm.encode(text), skip_special=False) == wanted


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_the_byte_vocabulary_round_trips(text: str) -> None:
    vocabulary = load_vocabulary(locate("bytes"))
    assert vocabulary.decode(vocabulary.encode(text), skip_special=False) == text


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_sentencepiece_round_trips(sentencepiece: Vocabulary, text: str) -> None:
    ids = sentencepiece.encode(text.replace(SPACE, ""))
    assert sentencepiece.decode(ids) == re.sub("<unk>|<s>|</s>", "", text.replace(SPACE, ""))


@settings(max_examples=100, deadline=None)
@given(TEXT, st.integers(1, 40))
def test_a_text_called_too_long_is_too_long(smollm: Vocabulary, text: str, limit: int) -> None:
    long = text * 50
    if smollm.is_too_long(long, limit):
        assert len(smollm.encode(long)) > limit


def test_a_huge_text_is_known_to_be_too_long_without_encoding_it(smollm: Vocabulary) -> None:
    assert smollm.is_too_long("a" * 2_000_000, 8192)
    assert smollm.is_too_long("https://x.y/" * 100_000, 8192)
    assert not smollm.is_too_long("\x04" * 2_000_000, 8192)  # unknown, so it vanishes
    assert not smollm.is_too_long(" hello" * 8192, 8192)


def test_nothing_is_proven_where_text_may_shrink(tmp_path: Path) -> None:
    bounds: dict[str, int | None] = {}
    for name, normalizer in (
        ("none", None),
        ("NFC", normalizers.NFC()),
        ("strip", normalizers.Strip()),
        ("replace", normalizers.Replace("aa", "a")),
    ):
        tokenizer = byte_level_tokenizer()
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        bounds[name] = load_vocabulary(locate(str(write_folder(tmp_path / name, tokenizer=tokenizer)))).max_token_bytes
    assert bounds == {"none": 7, "NFC": 28, "strip": None, "replace": None}


def test_special_tokens_and_others_of_their_kind(byte_level: Vocabulary) -> None:
    think = byte_level.encode("<think>")
    assert think == [2] and not byte_level.is_special(2) and byte_level.decode(think) == "<think>"
    assert byte_level.encode("hello</s>")[-1] == 1
    assert byte_level.decode(byte_level.encode("hello</s>")) == "hello"


@pytest.mark.parametrize(
    ("bos", "settings_", "prefix"),
    [
        (False, {}, ()),
        (True, {}, (0,)),
        (True, {"bos_token": "<s>", "add_bos_token": False}, ()),
        (False, {"bos_token": {"content": "<s>"}, "add_bos_token": True}, (0,)),
        (False, {"bos_token": None, "add_bos_token": True}, ()),
    ],
)
def test_a_prompt_begins_with_one_bos_where_the_model_wants_it(
    tmp_path: Path, bos: bool, settings_: dict[str, Any], prefix: tuple[int, ...]
) -> None:
    folder = write_folder(tmp_path / "m", tokenizer=byte_level_tokenizer(bos=bos), tokenizer_config=settings_)
    vocabulary = load_vocabulary(locate(str(folder)))
    assert vocabulary.prefix_ids == prefix
    body = vocabulary.encode("hello", add_special=False)
    assert vocabulary.encode("hello") == [*prefix, *body]
    assert vocabulary.encode("<s>hello") == [0, *body]


def test_a_continuation_keeps_its_blank_and_a_start_does_not(sentencepiece: Vocabulary) -> None:
    assert sentencepiece.strips_leading_space
    ids = sentencepiece.encode("hi hi", add_special=False)
    assert sentencepiece.decode_bytes(ids) == b" hi hi"
    assert sentencepiece.decode(ids) == "hi hi"
    assert sentencepiece.encode("hi")[0] == 1
    assert sentencepiece.decode(sentencepiece.encode("é", add_special=False)) == "é"


def test_added_tokens_of_the_tokenizer_config_count(tmp_path: Path) -> None:
    added = {"300": {"content": "<|tool|>", "special": True}}
    tokenizer = byte_level_tokenizer()
    first = tokenizer.get_vocab_size()
    folder = write_folder(tmp_path / "m", tokenizer=tokenizer, tokenizer_config={"added_tokens_decoder": added})
    vocabulary = load_vocabulary(locate(str(folder)))
    assert vocabulary.encode("<|tool|>") == [first] and vocabulary.is_special(first)


def test_holes_between_ids_are_no_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary = load_vocabulary(locate(str(write_folder(tmp_path / "m", tokenizer=tokenizer))))
    assert vocabulary.num_ids == 8 and vocabulary.token_bytes(3) is None
    assert vocabulary.decode([0, 3, 7, 99]) == "ab"


def test_a_tokenizer_that_truncates_or_pads_does_neither_here(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    vocabulary = load_vocabulary(locate(str(write_folder(tmp_path / "m", tokenizer=tokenizer))))
    assert len(vocabulary.encode("xyz")) == 3


def test_one_vocabulary_serves_many_threads(smollm: Vocabulary) -> None:
    def work(k: int) -> bool:
        batch = [" hello" * (k % 40 + 1), "hi", "<|im_end|>"]
        return [len(ids) for ids in smollm.encode_batch(batch)] == [k % 40 + 1, 1, 1]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(400)))


def gpt2_meta(pre: str, **extra: Any) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", "<tool>", *alphabet, "12", "123", "ab", "abc"]
    types = [3, 3, 4] + [1] * (len(tokens) - 3)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["1 2", "12 3", "a b"],
        "tokenizer.ggml.bos_token_id": 0,
        **extra,
    }


@pytest.mark.parametrize(
    ("pre", "pieces", "add_bos"),
    [
        ("gpt-2", ["123", "4", "ab", "c"], False),
        ("smollm", ["1", "2", "3", "4", "ab", "c"], False),
        ("qwen2", ["1", "2", "3", "4", "ab", "c"], False),
        ("llama-bpe", ["123", "4", "abc"], True),
        ("tekken", ["1", "2", "3", "4", "abc"], True),
    ],
)
def test_a_gguf_vocabulary_splits_as_its_family_does(pre: str, pieces: list[str], add_bos: bool) -> None:
    tokenizer, found = build_tokenizer(gpt2_meta(pre))
    assert tokenizer.encode("1234abc", add_special_tokens=False).tokens == pieces
    assert found is add_bos
    assert build_tokenizer(gpt2_meta(pre, **{"tokenizer.ggml.add_bos_token": not add_bos}))[1] is not add_bos
    assert tokenizer.encode("</s><tool>", add_special_tokens=False).ids == [1, 2]


def test_a_sentencepiece_gguf_joins_by_score(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), SPACE, "a", "b", "c", "ab", "bc", "abc"]
    scores = [0.0] * 259 + [-9.0, -8.0, -8.0, -8.0, -2.0, -1.0, -3.0]
    types = [2, 3, 3] + [6] * 256 + [1] * 7
    path = write_gguf(
        tmp_path / "s.gguf",
        kind="llama",
        pre=None,
        tokens=tokens,
        scores=scores,
        types=types,
        eos=2,
        extra={"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_space_prefix": False},
    )
    vocabulary = load_vocabulary(locate(str(path)))
    assert [tokens[i] for i in vocabulary.encode("abc")] == ["<s>", "abc"]
    assert [tokens[i] for i in vocabulary.encode("abcb", add_special=False)] == ["abc", "b"]
    assert [tokens[i] for i in vocabulary.encode("bcab c", add_special=False)] == ["bc", "ab", SPACE, "c"]
    assert vocabulary.encode("é", add_special=False) == [3 + 0xC3, 3 + 0xA9]
    assert vocabulary.decode(vocabulary.encode(" é a")) == " é a" and not vocabulary.strips_leading_space


def test_unknown_kinds_are_refused_by_name(tmp_path: Path) -> None:
    word_level = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    broken = write_folder(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    for model, word in (
        (write_gguf(tmp_path / "pre.gguf", pre="martian", tokens=["a"]), "martian"),
        (write_gguf(tmp_path / "kind.gguf", kind="rwkv", tokens=["a"]), "rwkv"),
        (write_gguf(tmp_path / "none.gguf"), "no vocabulary"),
        (write_gguf(tmp_path / "scores.gguf", kind="llama", tokens=["a"]), "scores"),
        (write_folder(tmp_path / "word", tokenizer=word_level), "decoder none"),
        (write_folder(tmp_path / "missing", config=CONFIG), "tokenizer.json is missing"),
        (broken, "not a readable tokenizer"),
    ):
        with pytest.raises(ConfigError, match=word) as caught:
            load_vocabulary(locate(str(model)))
        assert str(model) in str(caught.value)


def test_the_byte_vocabulary_needs_no_library() -> None:
    script = (
        "import sys; sys.modules['tokenizers'] = None;"
        "from shared.model_files import locate; from shared.vocab import load_vocabulary;"
        "v = load_vocabulary(locate('bytes')); print(v.encode('hi<|im_end|>'), v.eos_ids)"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[104, 105, 258] (258,)"
