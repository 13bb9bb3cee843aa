"""`--preferred-sampling-params`: the server's own defaults of sampling parameters."""

from __future__ import annotations

import json
from typing import Any, Final

from trunkline.engine.validation import Limits, RequestError, parse_sampling_params

# Before a model is loaded, its bounds are not known: no value is too large for these.
ANY_MODEL: Final = Limits(vocab_size=1 << 31, context_length=1 << 31)


def preferred_sampling(text: str, limits: Limits) -> dict[str, Any]:
    """The parameters, checked as a request's would be.

    Raises:
        RequestError: they are not valid; the message begins with the flag.
    """
    flag = "--preferred-sampling-params"
    try:
        preferred = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{flag} is not valid JSON: {error}") from error
    try:
        parse_sampling_params(preferred, limits=limits, defaults={})
    except RequestError as error:
        raise RequestError(f"{flag}: {error.message}") from error
    return {name: value for name, value in (preferred or {}).items() if value is not None}
