"""vLLM without a model, for `http_cost.py`: its own server and scheduler over paced steps.

An executor that answers as `paced_engine.py` does, so that its HTTP layer is measured as ours is.
vLLM is no dependency: it needs a virtual environment of its own, and, for a machine without a GPU,
a version that ends in "+cpu" (rename its .dist-info folder and the version inside if need be).

    PYTHONPATH=bench python -m vllm.entrypoints.openai.api_server --model DIR --port 8000 \
        --distributed-executor-backend paced_vllm.PacedExecutor --served-model-name default \
        --max-model-len 8192 --max-num-seqs 512
    python bench/http_cost.py --url http://127.0.0.1:8000 --pid PID_OF_APISERVER

DIR is any checkpoint with a chat template and 8,192 positions; its weights are not read.
"""

from __future__ import annotations

import os
import string
import time
from concurrent.futures import Future
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

RATE = float(os.environ.get("PACED_RATE", "200"))
MEMORY_BYTES = 8 << 30


class PacedExecutor(Executor):
    """Waits for the clock's next point, and gives every sequence its letter."""

    def _init_executor(self) -> None:
        tokenizer = AutoTokenizer.from_pretrained(self.model_config.model)
        self._letters = [
            tokenizer.encode(letter, add_special_tokens=False)[-1]
            for letter in string.ascii_lowercase
        ]
        self._computed: dict[str, int] = {}
        self._prompt_tokens: dict[str, int] = {}

    def determine_available_memory(self) -> list[int]:
        """A pool for one worker."""
        return [MEMORY_BYTES]

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """One small layer."""
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16)
        return [{"layer": spec}]

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Answer for the worker that is not there."""
        answers: dict[Any, list[Any]] = {
            "get_supported_tasks": [("generate",)],
            "get_supported_kv_cache_layouts": [["NHD", "HND"]],
            "compile_or_warm_up_model": [],
        }
        answer = answers.get(method, [None])
        return _done(answer) if non_block else answer

    def check_health(self) -> None:
        """Always well."""

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """One step."""
        output = self._step(scheduler_output)
        return _done(output) if non_block else output

    def _step(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        for new in scheduled.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
            self._prompt_tokens[new.req_id] = len(new.prompt_token_ids or ())
        for name in scheduled.finished_req_ids:
            self._computed.pop(name, None)
            self._prompt_tokens.pop(name, None)
        names = list(scheduled.num_scheduled_tokens)
        if not names:
            return EMPTY_MODEL_RUNNER_OUTPUT
        point = int(time.monotonic() * RATE) + 1
        time.sleep(max(0.0, point / RATE - time.monotonic()))
        letter = self._letters[point % len(self._letters)]
        tokens = []
        for name in names:
            self._computed[name] += scheduled.num_scheduled_tokens[name]
            tokens.append([letter] if self._computed[name] >= self._prompt_tokens[name] else [])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=tokens,
        )


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
