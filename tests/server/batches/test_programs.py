"""The documented batch programs, as users copy them, against a real server.

They are those of the page "OpenAI APIs - Completions" of SGLang's documentation (December 2024),
unchanged but for the port: the server has the model's name that they expect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.process import READY, Process

NAME = "meta-llama/Meta-Llama-3.1-8B-Instruct"
CREATE = """
import json
import time
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:30000/v1", api_key="None")

requests = [
    {
        "custom_id": "request-1",
        "method": "POST",
        "url": "/chat/completions",
        "body": {
            "model": "meta-llama/Meta-Llama-3.1-8B-Instruct",
            "messages": [
                {"role": "user", "content": "Tell me a joke about programming"}
            ],
            "max_tokens": 50,
        },
    },
    {
        "custom_id": "request-2",
        "method": "POST",
        "url": "/chat/completions",
        "body": {
            "model": "meta-llama/Meta-Llama-3.1-8B-Instruct",
            "messages": [{"role": "user", "content": "What is Python?"}],
            "max_tokens": 50,
        },
    },
]

input_file_path = "batch_requests.jsonl"

with open(input_file_path, "w") as f:
    for req in requests:
        f.write(json.dumps(req) + "\\n")

with open(input_file_path, "rb") as f:
    file_response = client.files.create(file=f, purpose="batch")

batch_response = client.batches.create(
    input_file_id=file_response.id,
    endpoint="/v1/chat/completions",
    completion_window="24h",
)

print_highlight(f"Batch job created with ID: {batch_response.id}")
"""
WAIT = """
while batch_response.status not in ["completed", "failed", "cancelled"]:
    time.sleep(3)
    print(f"Batch job status: {batch_response.status}...trying again in 3 seconds...")
    batch_response = client.batches.retrieve(batch_response.id)

if batch_response.status == "completed":
    print("Batch job completed successfully!")
    print(f"Request counts: {batch_response.request_counts}")

    result_file_id = batch_response.output_file_id
    file_response = client.files.content(result_file_id)
    result_content = file_response.read().decode("utf-8")

    results = [
        json.loads(line) for line in result_content.split("\\n") if line.strip() != ""
    ]

    for result in results:
        print_highlight(f"Request {result['custom_id']}:")
        print_highlight(f"Response: {result['response']}")

    print_highlight("Cleaning up files...")
    # Only delete the result file ID since file_response is just content
    client.files.delete(result_file_id)
else:
    print_highlight(f"Batch job failed with status: {batch_response.status}")
    if hasattr(batch_response, "errors"):
        print_highlight(f"Errors: {batch_response.errors}")
"""
STATUS = """
import json
import time
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:30000/v1", api_key="None")

requests = []
for i in range(100):
    requests.append(
        {
            "custom_id": f"request-{i}",
            "method": "POST",
            "url": "/chat/completions",
            "body": {
                "model": "meta-llama/Meta-Llama-3.1-8B-Instruct",
                "messages": [
                    {
                        "role": "system",
                        "content": f"{i}: You are a helpful AI assistant",
                    },
                    {
                        "role": "user",
                        "content": "Write a detailed story about topic. Make it very long.",
                    },
                ],
                "max_tokens": 500,
            },
        }
    )

input_file_path = "batch_requests.jsonl"
with open(input_file_path, "w") as f:
    for req in requests:
        f.write(json.dumps(req) + "\\n")

with open(input_file_path, "rb") as f:
    uploaded_file = client.files.create(file=f, purpose="batch")

batch_job = client.batches.create(
    input_file_id=uploaded_file.id,
    endpoint="/v1/chat/completions",
    completion_window="24h",
)

print_highlight(f"Created batch job with ID: {batch_job.id}")
print_highlight(f"Initial status: {batch_job.status}")

time.sleep(10)

max_checks = 5
for i in range(max_checks):
    batch_details = client.batches.retrieve(batch_id=batch_job.id)

    print_highlight(
        f"Batch job details (check {i+1} / {max_checks}) // ID: {batch_details.id} // Status: {batch_details.status} // Created at: {batch_details.created_at} // Input file ID: {batch_details.input_file_id} // Output file ID: {batch_details.output_file_id}"
    )
    print_highlight(
        f"<strong>Request counts: Total: {batch_details.request_counts.total} // Completed: {batch_details.request_counts.completed} // Failed: {batch_details.request_counts.failed}</strong>"
    )

    time.sleep(3)
"""  # noqa: E501


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    storage = str(tmp_path_factory.mktemp("programs") / "storage")
    flags = ("--context-length", "1024", "--file-storage-path", storage)
    process = Process(None, "--served-model-name", NAME, *flags)
    try:
        process.wait_for(READY)
        yield process
    finally:
        process.close()


def run(server: Process, *programs: str) -> str:
    """Run parts of a program one after another; what they showed."""
    shown: list[str] = []

    def show(*words: object) -> None:
        shown.append(" ".join(map(str, words)))

    scope = {"print_highlight": show, "print": show}
    for program in programs:
        exec(program.replace("127.0.0.1:30000", f"127.0.0.1:{server.port}"), scope)
    scope["client"].close()  # type: ignore[attr-defined]
    return "\n".join(shown)


def test_creating_a_batch_and_waiting_for_it(
    server: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run(server, CREATE, WAIT)
    assert "Batch job created with ID: batch_" in shown
    assert "Batch job status: validating...trying again in 3 seconds..." in shown
    assert "Request counts: BatchRequestCounts(completed=2, failed=0, total=2)" in shown
    assert re.findall(r"^Request (\S+):$", shown, re.MULTILINE) == ["request-1", "request-2"]
    assert shown.count("'status_code': 200") == 2
    assert shown.endswith("Cleaning up files...")


@pytest.mark.slow
def test_checking_the_status_of_a_batch(
    server: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = run(server, STATUS)
    assert "Initial status: validating" in shown
    rows = re.findall(r"Total: (\d+) // Completed: (\d+) // Failed: (\d+)", shown)
    assert len(rows) == 5
    assert {(total, failed) for total, _, failed in rows} == {("100", "0")}
    completed = [int(row[1]) for row in rows]
    assert completed == sorted(completed)
    [batch] = server.http.get("/v1/batches?limit=1").json()["data"]
    assert json.loads(server.http.post(f"/v1/batches/{batch['id']}/cancel").text)["status"]
