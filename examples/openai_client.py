"""The openai client against Millrace: nothing changes but the address."""

import math
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),  # any text, unless the server has keys
)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "What is 2+2?"}]

# A whole answer.
answer = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=32)
print(answer.choices[0].message.content)

# The same as a stream; the last chunk has no choices, but the usage.
stream = client.chat.completions.create(
    model=model,
    messages=question,
    temperature=0,
    max_tokens=32,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")

# How sure the model was of its first word, and of what else it thought.
sure = client.chat.completions.create(
    model=model, messages=question, temperature=0, max_tokens=1, logprobs=True, top_logprobs=3
)
for option in sure.choices[0].logprobs.content[0].top_logprobs:
    print(f"{math.exp(option.logprob):6.1%}  {option.token!r}")
