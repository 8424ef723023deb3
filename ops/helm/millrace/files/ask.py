"""What `helm test` runs: each model answers a chat through the api, whole and as a stream."""

import json
import os
import urllib.request
from pathlib import Path

url = os.environ["API_URL"]
headers = {"content-type": "application/json"}
if "KEYS_FILE" in os.environ:
    lines = Path(os.environ["KEYS_FILE"]).read_text("utf-8").splitlines()
    first = next(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    name, _, key = first.split()[0].partition("=")
    headers["authorization"] = f"Bearer {key or name}"


def ask(model: str, **more: object) -> bytes:
    """Ask one model for a few tokens; an answer that is none raises."""
    chat = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, **more}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(chat).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return bytes(response.read())


for name in os.environ["MODELS"].splitlines():
    answer = json.loads(ask(name))
    count = answer["usage"]["completion_tokens"]
    if count < 1 or answer["model"] != name:
        raise SystemExit(f"{name}: no answer: {answer}")
    if not ask(name, stream=True).rstrip().endswith(b"data: [DONE]"):
        raise SystemExit(f"{name}: the stream did not end")
    print(f"{name}: {count} tokens, and a stream to its end")  # noqa: T201
