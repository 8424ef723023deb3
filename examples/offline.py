"""A model in this process: no broker, no services, and the same text as a served request with these parameters."""

import sys

from services.launcher.llm import LLM, SamplingParams

prompts = ["The capital of France is", "A water mill turns because", "1, 1, 2, 3, 5, 8,"]

with LLM(*sys.argv[1:2]) as llm:  # without an argument: the embedded model
    for prompt, answer in zip(
        prompts, llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16)), strict=True
    ):
        print(f"{prompt}{answer.text}\n  {answer.usage.completion_tokens} tokens, {answer.finish_reason}")

    [answer] = llm.chat(
        [[{"role": "user", "content": "Name a river."}]], SamplingParams(temperature=0.0, max_tokens=16)
    )
    print(answer.text)
