"""A model calls a function of ours, and answers with what it returned.

`tool_choice="required"` is enforced by a grammar: the call names a function that exists, with arguments that fit it,
even from a small model. With `"auto"` the model decides by itself.
"""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id


def water_level(river: str) -> dict[str, object]:
    """Stand for anything: a database, a service, a sensor."""
    return {"river": river, "level_cm": 215, "trend": "rising"}


tools = [
    {
        "type": "function",
        "function": {
            "name": "water_level",
            "description": "Look up the water level of a river now.",
            "parameters": {
                "type": "object",
                "properties": {"river": {"type": "string", "enum": ["Rhine", "Danube", "Elbe"]}},
                "required": ["river"],
                "additionalProperties": False,
            },
        },
    }
]
talk = [{"role": "user", "content": "How high is the Rhine today?"}]

asked = client.chat.completions.create(
    model=model,
    messages=talk,
    tools=tools,
    tool_choice="required",
    parallel_tool_calls=False,  # one call at a time
    temperature=0,
    max_tokens=64,
)
message = asked.choices[0].message
talk.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    result = water_level(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) -> {result}")
    talk.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})

answer = client.chat.completions.create(
    model=model, messages=talk, tools=tools, tool_choice="none", temperature=0, max_tokens=32
)
print(answer.choices[0].message.content)
