"""Streams put together again, in the shape of whole answers, for comparison field by field."""

from __future__ import annotations

from typing import Any

# Measured, or different between two requests that are the same otherwise.
CLOCKS = (
    "forward_entry_time prefill_finished_time queue_time e2e_latency request_received_ts "
    "first_token_latency api_server_dispatch_finish_ts request_finished_ts decode_throughput "
    "response_sent_to_client_ts"
).split()
CACHE = ("cached_tokens", "cached_tokens_details", "prompt_tokens_details")
LISTS = ("token_ids", "response_token_ids")


def timeless(value: Any, *, cache: bool = True) -> Any:
    """`value` without what clocks say, nor (unless `cache`) what was found in the cache."""
    dropped = {*CLOCKS, "created", "metadata", *(() if cache else CACHE)}
    match value:
        case dict():
            return {k: timeless(v, cache=cache) for k, v in value.items() if k not in dropped}
        case list():
            return [timeless(one, cache=cache) for one in value]
    return value


def joined_openai(chunks: list[Any]) -> dict[str, Any]:
    """The answer that the chunks of a chat or completions stream (with usage) add up to."""
    usage = chunks.pop()
    assert usage["choices"] == []
    answer = {key: value for key, value in usage.items() if key != "choices"}
    answer["object"] = usage["object"].removesuffix(".chunk")
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        answer |= {k: v for k, v in chunk.items() if k not in ("object", "choices", "usage")}
        [choice] = chunk["choices"]
        whole = choices.setdefault(choice["index"], {})
        assert whole.get("finish_reason") is None, "a chunk follows the last one"
        _add(whole, choice)
    answer["choices"] = [_as_whole(choices[index]) for index in sorted(choices)]
    return answer


def _add(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    for key, value in choice.items():
        if key == "text":
            whole["text"] = whole.get("text", "") + value
        elif key == "delta":
            message = whole.setdefault("message", {"role": "", "content": ""})
            assert set(value) <= {"role", "content", "reasoning_content"}
            message["role"] += value.get("role", "")
            message["content"] += value.get("content", "")
        elif key in LISTS:
            whole[key] = whole.get(key, []) + value
        elif key == "logprobs":
            _add_logprobs(whole, value)
        else:
            assert key not in whole or whole[key] in (None, value)
            whole[key] = value


def _add_logprobs(whole: dict[str, Any], block: dict[str, Any] | None) -> None:
    known = whole.setdefault("logprobs", None)
    if block is None:
        return
    if known is None:
        known = whole["logprobs"] = {k: [] if isinstance(v, list) else v for k, v in block.items()}
    for key, value in block.items():
        if isinstance(value, list):
            known[key].extend(value)


def _as_whole(choice: dict[str, Any]) -> dict[str, Any]:
    if "message" in choice:
        choice["message"] |= {"refusal": None, "reasoning_content": None}
    return choice


def joined_native(chunks: list[Any], *, incremental: bool = False) -> list[Any]:
    """The outputs that the chunks of a `/generate` stream add up to, in order of their index."""
    outputs: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        index = chunk.pop("index", 0)
        known = outputs.get(index)
        if known is not None and incremental:
            chunk["text"] = known["text"] + chunk["text"]
            chunk["output_ids"] = known["output_ids"] + chunk["output_ids"]
            for key, value in known["meta_info"].items():
                if isinstance(value, list) and key.endswith("_logprobs"):
                    chunk["meta_info"][key] = value + chunk["meta_info"][key]
            length = "output_token_logprobs_length"
            if length in known["meta_info"]:
                chunk["meta_info"][length] += known["meta_info"][length]
        elif known is not None:
            assert chunk["text"].startswith(known["text"])
            assert chunk["output_ids"][: len(known["output_ids"])] == known["output_ids"]
        outputs[index] = chunk
    return [outputs[index] for index in sorted(outputs)]
