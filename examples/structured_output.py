"""An answer as an object of your own type, and an answer of a given form."""

from typing import Literal

import openai
from pydantic import BaseModel


class City(BaseModel):
    name: str
    country: str
    size: Literal["small", "large"]


client = openai.Client(base_url="http://127.0.0.1:30000/v1", api_key="None")

described = client.chat.completions.parse(
    model="default",
    messages=[{"role": "user", "content": "Describe Paris as JSON: name, country, size."}],
    response_format=City,
    temperature=0,
    max_tokens=200,
)
print(repr(described.choices[0].message.parsed))

chosen = client.chat.completions.create(
    model="default",
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    temperature=0,
    extra_body={"regex": r"The capital of France is (London|Paris|Rome)\."},
)
print(chosen.choices[0].message.content)
