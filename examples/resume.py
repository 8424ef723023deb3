"""A stream that outlives its connection: the client goes, comes back, and gets exactly the rest.

With `X-Millrace-Resume: 1` every event has an id. Whoever names the last one gets what follows it, from any replica,
while the answer is made and for a minute after.
"""

import json
import os
from collections.abc import Iterator

import httpx

key = os.environ.get("OPENAI_API_KEY", "none")
client = httpx.Client(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1").removesuffix("/v1"),
    headers={"Authorization": f"Bearer {key}"},
    timeout=60,
)
model = client.get("/v1/models").json()["data"][0]["id"]
body = {
    "model": model,
    "messages": [{"role": "user", "content": "Tell me a story about a river."}],
    "temperature": 0,
    "max_tokens": 40,
    "stream": True,
}


def events(response: httpx.Response) -> Iterator[tuple[str, str]]:
    """Give the id and the data of each event."""
    event_id = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            yield event_id, line[6:]


def text(data: str) -> str:
    """Give the text of a chunk."""
    choices = json.loads(data)["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


told = ""
with client.stream("POST", "/v1/chat/completions", json=body, headers={"X-Millrace-Resume": "1"}) as response:
    for event_id, data in events(response):
        last_id, stream_id = event_id, json.loads(data)["id"]
        told += text(data)
        if len(told) > 40:
            break  # the connection is gone
print(told, "[connection lost]", sep="")

with client.stream("GET", f"/v1/streams/{stream_id}", headers={"Last-Event-ID": last_id}) as response:
    for _, data in events(response):
        if data != "[DONE]":
            print(text(data), end="", flush=True)
            told += text(data)

whole = client.post("/v1/chat/completions", json={**body, "stream": False}).json()
assert told == whole["choices"][0]["message"]["content"], "not one token is missing or said twice"
print("\n[the same as without a loss]")
