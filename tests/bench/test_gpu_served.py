"""The parts of the served GPU benchmark that need no GPU: its tokenizer, and its clients on a real stack."""

from bench.gpu_served import make_tokenizer
from bench.load_client import WORDS, run_load
from bench.plane_stack import Stack


def test_each_word_of_a_prompt_is_a_token_and_every_token_has_a_text() -> None:
    tokenizer = make_tokenizer(2000)
    text = "".join(f" {word}" for word in WORDS)
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(WORDS) and tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() == 2000 and all(tokenizer.decode([i]) for i in (300, 1999))


def test_clients_read_whole_answers_and_name_refusals() -> None:
    with Stack("--engine", "fake") as stack:
        url = f"http://{stack.host}:{stack.port}/v1"
        seen = run_load(url, stack.model, [(20, 30)] * 12, 6, processes=2)
        [error] = run_load(url, "nobody", [(5, 5)] * 2, 2, processes=1)["errors"]
    assert seen["answers"] == 12 and not seen["errors"]
    assert seen["tok_per_s"] > 0 and seen["first_ms"]["p50"] > 0
    assert error.startswith("ValueError('404")
