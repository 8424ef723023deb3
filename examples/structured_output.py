"""An answer that is an object of a class of ours: the schema is a grammar that the engine draws by."""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id


class Review(BaseModel):
    """What we want to know of a text."""

    mood: Literal["good", "bad", "mixed"]
    stars: Literal[1, 2, 3, 4, 5]
    about: Literal["food", "service", "price", "other"]


text = "The soup was wonderful, and they brought it with a smile."
answer = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": f"Judge this review as JSON: {text}"}],
    response_format=Review,
    temperature=0,
    max_tokens=80,
)
review = answer.choices[0].message.parsed
print(f"{review.mood}, {review.stars} stars, about {review.about}")

# The same with a regular expression, for what is no JSON.
date = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "When did people first walk on the moon? Write the date as YYYY-MM-DD."}],
    extra_body={"structured_outputs": {"regex": r"19\d\d-[01]\d-[0-3]\d"}},
    temperature=0,
    max_tokens=20,
)
print(date.choices[0].message.content)
