"""The types of the answers of /v1/files and /v1/batches; a test compares them."""

from __future__ import annotations

from typing import Final, Literal, TypedDict

from trunkline.server.route import Gives


class File(TypedDict):
    """A stored file. Times are unix seconds."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FilePage(TypedDict):
    """A page of files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    """The file is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchProblem(TypedDict):
    """Why a batch could not be run; `line` counts from 1 and is null for the whole file."""

    code: str
    message: str
    line: int | None
    param: str | None


class BatchProblems(TypedDict):
    """All that is wrong with a batch's input."""

    object: Literal["list"]
    data: list[BatchProblem]


class RequestCounts(TypedDict):
    """The lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchUsage(TypedDict):
    """Token counts of all lines that were answered."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Batch(TypedDict):
    """A batch. Times are unix seconds."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "in_progress",
        "finalizing",
        "completed",
        "failed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchPage(TypedDict):
    """A page of batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


FILE: Final = Gives(kind=File)
FILES: Final = Gives(kind=FilePage)
DELETED_FILE: Final = Gives(kind=DeletedFile)
CONTENT: Final = Gives(kind=object, media_type="application/octet-stream")
BATCH: Final = Gives(kind=Batch)
BATCHES: Final = Gives(kind=BatchPage)
