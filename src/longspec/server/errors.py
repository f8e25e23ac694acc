"""Errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError


class ApiError(Exception):
    """The status and the body of an error response."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unsupported_parameter"}


def refused(error: ValidationError) -> ApiError:
    """The error response for a bad request. It names the first field that is not supported, or else the first
    fault: a message with tool calls and without a content is refused because of the tool calls."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    first = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    # For a field with several types, the location also has the types' names.
    place = [str(part) for part in first["loc"] if part != "str" and not str(part).startswith("list[")]
    param = ".".join(place) or None
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {message}", "invalid_json")
    if kind == "missing":
        message = f"{param} is missing"
    elif kind == "extra_forbidden":
        message = f"{param} is not supported"
    elif param is not None and not message.startswith(param):
        message = f"{param}: {message}"
    return ApiError(400, message, _CODES.get(kind, "invalid_value"), param)
