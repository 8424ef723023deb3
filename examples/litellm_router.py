"""LiteLLM's router with the configuration of its proxy (`litellm.yaml`), in this process."""

import os
from pathlib import Path

import yaml

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the internet for prices
from litellm import Router

os.environ.setdefault("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
os.environ.setdefault("OPENAI_API_KEY", "none")
config = yaml.safe_load((Path(__file__).parent / "litellm.yaml").read_text())
router = Router(model_list=config["model_list"], **config["router_settings"])
question = [{"role": "user", "content": "Name one colour."}]

answer = router.completion(model="millrace", messages=question, temperature=0, max_tokens=16)
print(answer.choices[0].message.content)

for chunk in router.completion(model="millrace", messages=question, temperature=0, max_tokens=16, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
