"""Many requests in one file, answered in the background; the answers in a file, too."""

import json
import time

import openai

QUESTIONS = ["What is the capital of France?", "What is the capital of Japan?"]

client = openai.Client(base_url="http://127.0.0.1:30000/v1", api_key="None")

lines = [
    {
        "custom_id": f"question-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 16,
        },
    }
    for number, question in enumerate(QUESTIONS)
]
requests = "\n".join(json.dumps(line) for line in lines).encode()
file = client.files.create(file=("questions.jsonl", requests), purpose="batch")

batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
)
while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)
print(batch.status, batch.request_counts)

if batch.output_file_id is not None:
    for line in client.files.content(batch.output_file_id).text.splitlines():
        answer = json.loads(line)
        print(answer["custom_id"], answer["response"]["body"]["choices"][0]["message"]["content"])
if batch.error_file_id is not None:
    print(client.files.content(batch.error_file_id).text)
