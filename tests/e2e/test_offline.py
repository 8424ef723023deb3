"""The offline API says what the services say."""

from services.launcher.llm import LLM, SamplingParams
from tests.e2e.stack import Stack


def test_offline_text_equals_served_text(real: Stack) -> None:
    questions = ["What is the capital of France?", "Name three colours."]
    cases = [
        {"temperature": 0.0},
        {"temperature": 0.0, "stop": ["the"]},
        {"temperature": 0.7, "seed": 11},
    ]
    with LLM(dtype="float32", max_running_requests=4, threads=1) as llm:
        for fields in cases:
            params = SamplingParams(max_tokens=24, **fields)  # type: ignore[arg-type]
            offline = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
            for question, answer in zip(questions, offline, strict=True):
                served = real.chat(question, max_tokens=24, **fields)
                choice = served["choices"][0]
                assert choice["message"]["content"] == answer.text
                assert choice["finish_reason"] == answer.finish_reason
                assert served["usage"]["completion_tokens"] == answer.usage.completion_tokens
