"""Refusals of the endpoint, and the forms of errors of the APIs (spec MD6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hostlib.documents import Object

NO_MEMORY = "other requests of this child take its memory; ask again when one has ended"

MIB = 1024 * 1024

MESSAGES_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
"""Status -> kind of error in the Messages API; others are ``api_error``."""


MESSAGES_CODES = {
    "api_error": "api_error",
    "billing_error": "billing_error",
    "context_length_exceeded": "invalid_request_error",
    "insufficient_quota": "rate_limit_error",
    "invalid_request_error": "invalid_request_error",
    "not_found_error": "not_found_error",
    "overloaded_error": "overloaded_error",
    "rate_limit_error": "rate_limit_error",
    "rate_limit_exceeded": "rate_limit_error",
    "request_too_large": "request_too_large",
    "timeout_error": "timeout_error",
}
"""Code of the provider -> kind of error in the Messages API, for errors whose status does not
give it.  Codes for a wrong key are left out, since the child's own key is right."""


CODE_STATUSES = {
    "authentication_error": 401,
    "context_length_exceeded": 400,
    "insufficient_quota": 429,
    "invalid_api_key": 401,
    "invalid_prompt": 400,
    "invalid_request_error": 400,
    "not_found_error": 404,
    "overloaded_error": 529,
    "permission_error": 403,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "request_too_large": 413,
}
"""Code of an error in a provider's event -> status (spec MD6)."""


class RefusedRequestError(Exception):
    """A request is answered with an error.

    Attributes:
        status: HTTP status.
        kind: ``type`` in the form of the OpenAI APIs.
        code: ``code`` in that form.
        headers: headers of the reply, beside the usual ones.

    Args:
        retry_after_s: when the client may ask again; None for never.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        code: str | None = None,
        *,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        # The official clients retry by themselves without this header.
        self.headers: Mapping[str, str] = {"x-should-retry": "false"}
        if retry_after_s is not None:
            self.headers = {"retry-after": str(retry_after_s)}

    def body(self, form: str = "openai") -> bytes:
        """Return the error as JSON; the form is ``openai``, or ``messages`` for that API."""
        return msgspec.json.encode(api_error(form, self))


class TooManyBytesError(RefusedRequestError):
    """There is no memory for a request at the moment."""

    def __init__(self) -> None:
        super().__init__(
            429, NO_MEMORY, "overloaded", "too_many_bytes", retry_after_s=1
        )


class TooLargeRequestError(RefusedRequestError):
    """A request takes more memory than its child may ever have for one.

    Args:
        size_bytes: memory of all its copies.
        most_bytes: most memory of a child for one request.
    """

    def __init__(self, size_bytes: int, most_bytes: int) -> None:
        needed, most = -(-size_bytes // MIB), most_bytes // MIB
        text = (
            f"cannot take the request: it takes {needed} MiB in all its forms, and a child"
            f" has {most} MiB for one; send less in one request"
        )
        super().__init__(413, text, "invalid_request_error", "request_too_large")


class MalformedRequestError(RefusedRequestError):
    """A request is invalid or too long; the connection ends with it."""


def api_error(form: str, why: RefusedRequestError) -> Object:
    """Return an error in the form of an API."""
    if form == "messages":
        by_code = MESSAGES_CODES.get(why.code or "", "api_error")
        kind = MESSAGES_KINDS.get(why.status, by_code)
        return {"type": "error", "error": {"type": kind, "message": str(why)}}
    return {
        "error": {
            "message": str(why),
            "type": why.kind,
            "param": None,
            "code": why.code,
        }
    }


def responses_code(why: RefusedRequestError) -> str:
    """Return the code of an error in ``response.failed``; Codex stops at some codes."""
    return why.code or ("server_error" if why.status >= 500 else why.kind)
