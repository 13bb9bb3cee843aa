"""The table of endpoints: paths, handlers, who may call them, what they take and give."""

from __future__ import annotations

from typing import Final

from trunkline.server import encode, load, native, operations, parsing, tokens
from trunkline.server.anthropic import messages
from trunkline.server.batches import batch_routes, file_routes
from trunkline.server.openai import chat, completions, embeddings, models, responses, scoring
from trunkline.server.openapi import (
    batch_fields,
    batch_shapes,
    bodies,
    endpoints,
    prompt_shapes,
    response_fields,
    response_shapes,
    shapes,
)
from trunkline.server.route import HTML, Gives, Route

POST, GET, GET_POST = ["POST"], ["GET"], ["GET", "POST"]
_TIMEOUT: Final = {"timeout": {"type": "number", "minimum": 0, "maximum": 3600}}
_LOADS: Final = {
    "include": {"type": "string", "description": f"Some of {', '.join(load.BLOCKS)}."},
    "dp_rank": {"type": "integer", "minimum": 0},
    "format": {"enum": ["json"]},
}
_NOT_IDLE: Final = {400: "Requests are running or waiting, or the timeout is no number."}
_IN_USE: Final = {409: "An unfinished batch reads the file."}
_ENDED: Final = {409: "The batch is past being cancelled."}
_DISK_FULL: Final = {507: "There is no room on the disk."}

ROUTES = [
    Route("/", operations.banner, methods=GET, gives=shapes.SENTENCE),
    Route(
        "/docs",
        endpoints.docs,
        methods=GET,
        access="public",
        gives=Gives(kind=str, media_type=HTML),
    ),
    Route(
        "/openapi.json",
        endpoints.openapi_json,
        methods=GET,
        access="public",
        gives=Gives(kind=dict),
    ),
    Route("/health", operations.health, methods=GET, access="public", gives=shapes.NOTHING),
    Route("/ready", operations.health, methods=GET, access="public", gives=shapes.NOTHING),
    Route(
        "/health_generate",
        operations.health_generate,
        methods=GET,
        access="public",
        gives=shapes.NOTHING,
    ),
    Route("/model_info", operations.model_info, methods=GET, gives=shapes.MODEL_INFO),
    Route("/get_model_info", operations.model_info, methods=GET, gives=shapes.MODEL_INFO),
    Route(
        "/server_info",
        operations.server_info,
        methods=GET,
        access="admin",
        gives=shapes.SERVER_INFO,
    ),
    Route(
        "/get_server_info",
        operations.server_info,
        methods=GET,
        access="admin",
        gives=shapes.SERVER_INFO,
    ),
    Route("/v1/loads", load.loads, methods=GET, query=_LOADS, gives=shapes.LOADS),
    Route("/metrics", operations.metrics, methods=GET, access="public", gives=shapes.SENTENCE),
    Route(
        "/flush_cache",
        operations.flush_cache,
        methods=GET_POST,
        access="admin",
        query=_TIMEOUT,
        errors=_NOT_IDLE,
        gives=shapes.SENTENCE,
    ),
    Route(
        "/abort_request",
        operations.abort_request,
        methods=POST,
        access="admin",
        takes=bodies.ABORT,
        gives=shapes.NOTHING,
    ),
    Route(
        "/generate",
        native.generate,
        methods=["POST", "PUT"],
        takes=bodies.GENERATE,
        gives=shapes.GENERATED,
    ),
    Route(
        "/encode",
        encode.encode,
        methods=["POST", "PUT"],
        takes=prompt_shapes.ENCODE,
        gives=prompt_shapes.ENCODED,
    ),
    Route("/tokenize", tokens.tokenize, methods=POST, takes=bodies.TOKENIZE, gives=shapes.TOKENS),
    Route(
        "/v1/tokenize", tokens.tokenize, methods=POST, takes=bodies.TOKENIZE, gives=shapes.TOKENS
    ),
    Route(
        "/detokenize",
        tokens.detokenize,
        methods=POST,
        takes=bodies.DETOKENIZE,
        gives=shapes.DETOKENIZED,
    ),
    Route(
        "/v1/detokenize",
        tokens.detokenize,
        methods=POST,
        takes=bodies.DETOKENIZE,
        gives=shapes.DETOKENIZED,
    ),
    Route(
        "/parse_function_call",
        parsing.parse_function_call,
        methods=POST,
        takes=bodies.PARSE_CALLS,
        gives=shapes.PARSED_CALLS,
    ),
    Route(
        "/separate_reasoning",
        parsing.separate_reasoning,
        methods=POST,
        takes=bodies.SEPARATE_REASONING,
        gives=shapes.SEPARATED,
    ),
    Route(
        "/v1/chat/completions",
        chat.chat_completions,
        methods=POST,
        takes=bodies.CHAT,
        gives=shapes.CHAT,
    ),
    Route(
        "/v1/completions",
        completions.completions,
        methods=POST,
        takes=bodies.COMPLETION,
        gives=shapes.COMPLETION,
    ),
    Route(
        "/v1/embeddings",
        embeddings.embeddings,
        methods=POST,
        takes=prompt_shapes.EMBEDDING,
        gives=prompt_shapes.EMBEDDINGS,
    ),
    Route(
        "/v1/score",
        scoring.score,
        methods=POST,
        takes=prompt_shapes.SCORE,
        gives=prompt_shapes.SCORING,
    ),
    Route(
        "/v1/rerank",
        scoring.rerank,
        methods=POST,
        takes=prompt_shapes.RERANK,
        gives=prompt_shapes.RANKING,
    ),
    Route(
        "/v1/responses",
        responses.create_response,
        methods=POST,
        takes=bodies.RESPONSE,
        gives=response_shapes.RESPONSE,
    ),
    Route(
        "/v1/responses/input_tokens",
        responses.count_input_tokens,
        methods=POST,
        takes=bodies.RESPONSE,
        gives=response_shapes.INPUT_TOKENS,
    ),
    Route(
        "/v1/responses/{response_id}",
        responses.get_response,
        methods=GET,
        query=response_fields.EVENTS_QUERY,
        gives=response_shapes.RESPONSE,
    ),
    Route(
        "/v1/responses/{response_id}",
        responses.delete_response,
        methods=["DELETE"],
        gives=response_shapes.DELETED_RESPONSE,
    ),
    Route(
        "/v1/responses/{response_id}/cancel",
        responses.cancel_response,
        methods=POST,
        errors={400: "It has ended, and did not run in the background."},
        gives=response_shapes.ONE_RESPONSE,
    ),
    Route(
        "/v1/responses/{response_id}/input_items",
        responses.list_input_items,
        methods=GET,
        query=response_fields.ITEMS_QUERY,
        gives=response_shapes.ITEMS,
    ),
    Route(
        "/v1/messages",
        messages.create_message,
        methods=POST,
        takes=bodies.MESSAGE,
        gives=response_shapes.MESSAGE,
        error=response_shapes.MessageError,
    ),
    Route(
        "/v1/messages/count_tokens",
        messages.count_tokens,
        methods=POST,
        takes=bodies.MESSAGE_TOKENS,
        gives=response_shapes.MESSAGE_TOKENS,
        error=response_shapes.MessageError,
    ),
    Route(
        "/v1/files",
        file_routes.create_file,
        methods=POST,
        takes=bodies.FILE,
        errors=_DISK_FULL,
        gives=batch_shapes.FILE,
    ),
    Route(
        "/v1/files",
        file_routes.list_files,
        methods=GET,
        query=batch_fields.FILES_QUERY,
        gives=batch_shapes.FILES,
    ),
    Route("/v1/files/{file_id}", file_routes.get_file, methods=GET, gives=batch_shapes.FILE),
    Route(
        "/v1/files/{file_id}",
        file_routes.delete_file,
        methods=["DELETE"],
        errors=_IN_USE | _DISK_FULL,
        gives=batch_shapes.DELETED_FILE,
    ),
    Route(
        "/v1/files/{file_id}/content",
        file_routes.get_content,
        methods=GET,
        gives=batch_shapes.CONTENT,
    ),
    Route(
        "/v1/batches",
        batch_routes.create_batch,
        methods=POST,
        takes=bodies.BATCH,
        errors=_DISK_FULL,
        gives=batch_shapes.BATCH,
    ),
    Route(
        "/v1/batches",
        batch_routes.list_batches,
        methods=GET,
        query=batch_fields.BATCHES_QUERY,
        gives=batch_shapes.BATCHES,
    ),
    Route("/v1/batches/{batch_id}", batch_routes.get_batch, methods=GET, gives=batch_shapes.BATCH),
    Route(
        "/v1/batches/{batch_id}/cancel",
        batch_routes.cancel_batch,
        methods=POST,
        errors=_ENDED | _DISK_FULL,
        gives=batch_shapes.BATCH,
    ),
    Route("/v1/models", models.list_models, methods=GET, gives=shapes.MODELS),
    Route("/v1/models/{name:path}", models.get_model, methods=GET, gives=shapes.MODEL),
]
