"""The OpenAPI document, made of the route table and the types and tables that validate."""

from trunkline.server.openapi.document import openapi_document

__all__ = ["openapi_document"]
