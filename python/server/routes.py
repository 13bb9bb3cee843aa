"""The table of endpoints."""

from __future__ import annotations

from trunkline.server import native, operations, tokens
from trunkline.server.anthropic import messages
from trunkline.server.batches import batch_routes, file_routes
from trunkline.server.openai import chat, completions, models, responses
from trunkline.server.route import Route

POST, GET, GET_POST = ["POST"], ["GET"], ["GET", "POST"]

ROUTES = [
    Route("/", operations.banner, methods=GET),
    Route("/health", operations.health, methods=GET, access="public"),
    Route("/ready", operations.health, methods=GET, access="public"),
    Route("/health_generate", operations.health_generate, methods=GET, access="public"),
    Route("/model_info", operations.model_info, methods=GET),
    Route("/get_model_info", operations.model_info, methods=GET),
    Route("/server_info", operations.server_info, methods=GET, access="admin"),
    Route("/get_server_info", operations.server_info, methods=GET, access="admin"),
    Route("/metrics", operations.metrics, methods=GET, access="public"),
    Route("/flush_cache", operations.flush_cache, methods=GET_POST, access="admin"),
    Route("/abort_request", operations.abort_request, methods=POST, access="admin"),
    Route("/generate", native.generate, methods=["POST", "PUT"]),
    Route("/tokenize", tokens.tokenize, methods=POST),
    Route("/v1/tokenize", tokens.tokenize, methods=POST),
    Route("/detokenize", tokens.detokenize, methods=POST),
    Route("/v1/detokenize", tokens.detokenize, methods=POST),
    Route("/v1/chat/completions", chat.chat_completions, methods=POST),
    Route("/v1/completions", completions.completions, methods=POST),
    Route("/v1/responses", responses.create_response, methods=POST),
    Route("/v1/responses/{response_id}", responses.get_response, methods=GET),
    Route("/v1/responses/{response_id}", responses.delete_response, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/cancel", responses.cancel_response, methods=POST),
    Route("/v1/responses/{response_id}/input_items", responses.list_input_items, methods=GET),
    Route("/v1/messages", messages.create_message, methods=POST),
    Route("/v1/messages/count_tokens", messages.count_tokens, methods=POST),
    Route("/v1/files", file_routes.create_file, methods=POST),
    Route("/v1/files", file_routes.list_files, methods=GET),
    Route("/v1/files/{file_id}", file_routes.get_file, methods=GET),
    Route("/v1/files/{file_id}", file_routes.delete_file, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", file_routes.get_content, methods=GET),
    Route("/v1/batches", batch_routes.create_batch, methods=POST),
    Route("/v1/batches", batch_routes.list_batches, methods=GET),
    Route("/v1/batches/{batch_id}", batch_routes.get_batch, methods=GET),
    Route("/v1/batches/{batch_id}/cancel", batch_routes.cancel_batch, methods=POST),
    Route("/v1/models", models.list_models, methods=GET),
    Route("/v1/models/{name:path}", models.get_model, methods=GET),
]
