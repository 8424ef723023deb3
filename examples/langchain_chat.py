"""LangChain: a prompt, a model and a parser as one chain."""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

llm = ChatOpenAI(
    model=os.environ.get("MODEL", "smollm2-135m-instruct"),
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
    temperature=0,
    max_tokens=24,
)
prompt = ChatPromptTemplate.from_messages([("system", "You answer in one sentence."), ("user", "What is {thing}?")])
chain = prompt | llm | StrOutputParser()

# One answer, whole.
print(chain.invoke({"thing": "a water mill"}))

# One answer, streamed.
for part in chain.stream({"thing": "a river"}):
    print(part, end="", flush=True)
print()

# Many at once: the engine computes them together.
for text in chain.batch([{"thing": thing} for thing in ("rain", "snow", "ice")]):
    print("-", text)
