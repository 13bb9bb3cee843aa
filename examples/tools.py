"""A tool: the model asks for it, the program runs it, the model answers with its result."""

import json
from typing import Any

import openai


def get_weather(city: str) -> dict[str, Any]:
    return {"city": city, "celsius": 21, "sky": "clear"}


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 40}},
                "required": ["city"],
            },
        },
    }
]

client = openai.Client(base_url="http://127.0.0.1:30000/v1", api_key="None")
messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]

# "required" makes every model call; one that was taught tools decides by itself with "auto".
asked = client.chat.completions.create(
    model="default",
    messages=messages,
    tools=TOOLS,
    tool_choice="required",
    parallel_tool_calls=False,
    temperature=0,
    max_tokens=100,
)
message = asked.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls or []:
    result = get_weather(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) -> {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})

answered = client.chat.completions.create(
    model="default", messages=messages, tools=TOOLS, temperature=0, max_tokens=60
)
print(answered.choices[0].message.content)
