"""Who may call what: API keys. Knows nothing of HTTP; keeps digests, never the keys themselves."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from trunkline.server.route import Access


class Keys:
    """The keys of a server.

    Without client keys, what clients may call is open. Admin endpoints take the admin key alone if
    there is one, otherwise what any client may call with. The admin key opens everything. Comparing
    takes the same time for every key, right or wrong.
    """

    def __init__(self, client: Sequence[str], admin: str | None) -> None:
        self._client = [_digest(key) for key in client]
        self._admin = None if admin is None else _digest(admin)

    def refusal(self, access: Access, given: str) -> tuple[int, str] | None:
        """HTTP status and reason for which a caller with the key `given` ("": none) is refused."""
        needs_admin = access == "admin" and self._admin is not None
        if access == "public" or not (needs_admin or self._client):
            return None
        digest = _digest(given)
        is_admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        matches = [hmac.compare_digest(digest, key) for key in self._client]  # all, every time
        if is_admin or (any(matches) and not needs_admin):
            return None
        if any(matches):
            return 403, "this endpoint needs the server's admin key (--admin-api-key)"
        whose = "its admin key" if needs_admin else "an API key"
        if given:
            return 401, f"the API key is wrong: this server needs {whose}"
        return 401, (
            f"this server needs {whose}: as a bearer token in the Authorization header, "
            "or in the x-api-key header"
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
