"""OpenVINO GenAI's offline pipeline under the workloads of the serving benchmarks.

Runs in a Python that has `openvino-genai` and `tokenizers`; started by `cpu_serving.py`. Each line
that comes over the socket names a workload and a seed, and the answer is its result as JSON. There
is no HTTP and no stream of text in what is measured.

    python bench/openvino_offline.py MODEL TOKENIZER_DIRECTORY PORT THREADS
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from workloads import Answer, Words, measure, warm_up

CACHE_GB = 2


class OpenVinoTransport:
    """Requests of all tasks share the pipeline's steps."""

    def __init__(self, model: Path, threads: int) -> None:
        """Compile the model."""
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = 64
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(model), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._next = 0
        self._stepper: asyncio.Task[None] | None = None

    async def __call__(self, prompt: list[int], output_tokens: int) -> Answer:
        """See `workloads.Transport`."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._next += 1
        sent = time.perf_counter()
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handle = self._pipeline.add_request(self._next, ids, config)
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._step())
        arrivals: list[float] = []
        tokens: list[int] = []
        while len(tokens) < output_tokens:
            await asyncio.sleep(0)
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
                    arrivals.append(time.perf_counter())
        text = self._tokenizer.decode(tokens)
        return Answer(sent, arrivals, len(prompt), len(tokens), text)

    async def _step(self) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            await asyncio.sleep(0)


async def serve(transport: OpenVinoTransport, words: Words, port: int) -> None:
    """Answer until killed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            workload, seed = line.decode().strip().split(maxsplit=1)
            if workload == "warm-up":
                await warm_up(transport, words)
                writer.write(b"{}\n")
            else:
                result = await measure(transport, words, workload, seed)
                writer.write(json.dumps(asdict(result)).encode() + b"\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    """Compile, then serve."""
    model, tokenizer, port, threads = sys.argv[1:]
    transport = OpenVinoTransport(Path(model), int(threads))
    asyncio.run(serve(transport, Words(Path(tokenizer)), int(port)))


if __name__ == "__main__":
    main()
