"""What every request passes before a route: `observer`, `framing` and `Gate`.

The gate checks path, host, origin, key and size of the body, and adds headers to answers. The
observer, which is outermost and so sees what the gate refuses too, counts every answer by route,
status and time, gives a client's request id back, and writes refusals to the logs; its labels are
templates of routes and statuses, never a client's text. Plain ASGI, so that a stream passes through
unbuffered and a disconnect reaches its route.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fastapi.datastructures import Headers

from sfumato.engine.request import CALL
from sfumato.server.gateways import REQUEST_ID, kept
from sfumato.server.http.errors import (
    CLIENT_GONE,
    ERROR_FORM,
    OPENAI_ERRORS,
    REFUSAL,
    ApiError,
    ErrorForm,
)
from sfumato.server.http.logs import RateLimit
from sfumato.server.metrics import Metrics
from sfumato.server.settings import ServerSettings

log = logging.getLogger(__name__)

# Of OpenAI's API, which has them in /v1.
_SHORT = (
    *("/chat/completions", "/completions", "/decisions", "/models", "/responses"),
    *("/files", "/batches"),
)
_SHORT_PREFIXES = ("/chat/completions/", "/models/", "/responses/", "/files/", "/batches/")


def canonical(path: str) -> str:
    """The path as routes have it."""
    # No route and no file has a line end, and what stands for a name in a route matches none.
    path = path.replace("\n", "\ufffd").rstrip("/") or "/"
    short = path in _SHORT or path.startswith(_SHORT_PREFIXES)
    return f"/v1{path}" if short else path


Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
FormOf = Callable[[str, Headers], ErrorForm]
"""How the errors of a path are rendered, before a body is read."""
OWNER = "sfumato.owner"
"""Key of an ASGI scope: whose request it is, a digest of its key; "" where none is asked for."""
WITHIN = "sfumato.within"
"""Key of an ASGI scope: whose request in the background it is, see `OWNER`. Only what this process
asks of itself has it, as a batch does, and nothing that came over a network."""

KEY_HEADERS = ("x-api-key", "x-goog-api-key")  # besides Authorization
OPEN_PATHS = frozenset({"/health", "/v1/health", "/readyz", "/livez"})
MODEL_PATHS = frozenset({"/v1/models"})  # open where the operator says so, as the next one
METRICS_PATHS = frozenset({"/metrics"})
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; font-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class BodyTooLarge(ApiError):
    def __init__(self, limit: int) -> None:
        super().__init__(
            413,
            f"the request's body is over {limit:,} bytes, the limit of this server; send less, or "
            "raise --max-body",
            code="body_too_large",
        )


class KeyRefused(ApiError):
    """The key is wrong, or there is none."""

    def __init__(self, missing: bool, offer: str) -> None:
        super().__init__(
            401,
            "the API key is missing or wrong; send it as Authorization: Bearer KEY, X-Api-Key or "
            "X-Goog-Api-Key",
            code="invalid_api_key",
            headers={"WWW-Authenticate": offer},
        )
        self.missing = missing


def owner_of(key: bytes) -> str:
    """Returns what stands for a key in `OWNER`."""
    return hashlib.sha256(key).hexdigest()


def framing(app: ASGIApp) -> ASGIApp:
    """Refuses requests that say in two ways where they end, and closes their connection: a proxy
    may have read the other way, and the rest of the body would be a request that it never saw
    (RFC 9112, section 6.3)."""

    async def framed(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if "content-length" in headers and "transfer-encoding" in headers:
            error = ApiError(
                400,
                "the request has Content-Length and Transfer-Encoding; send one of them",
                code="two_lengths",
                headers={"Connection": "close"},
            )
            await error.response(scope)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return framed


class Gate:
    """Refuses requests that must not reach a route, and adds `HEADERS` to every answer."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        form_of: FormOf = lambda path, headers: OPENAI_ERRORS,
        files: frozenset[str] = frozenset(),
    ) -> None:
        """files: paths of the page's files, which hold nothing secret and ask for no key."""
        self.app, self.settings, self._form_of = app, settings, form_of
        self._keys = [key.encode() for key in settings.api_keys]
        self._open = OPEN_PATHS | (MODEL_PATHS if settings.public_models else frozenset())
        self._open |= METRICS_PATHS if settings.public_metrics else frozenset()
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                missing = [item for item in _HEADERS if item[0] not in given]
                message["headers"] = [*message["headers"], *missing]
            await send(message)

        scope["path"] = path = canonical(scope["path"])
        scope[ERROR_FORM] = self._form_of(path, Headers(scope=scope))
        try:
            self._check(scope)
        except ApiError as error:
            await error.response(scope)(scope, receive, with_headers)
            return
        await self.app(scope, receive, with_headers)

    def _check(self, scope: Scope) -> None:
        if WITHIN in scope:
            scope[OWNER] = scope[WITHIN]
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        self._check_host(host)
        self._check_origin(headers.get("origin"), host)
        is_open = scope["path"] in self._open
        is_file = scope["path"] in self._files and scope["method"] in ("GET", "HEAD")
        if self._keys and not is_open and not is_file:
            # Says that two requests have the same key, and not which.
            key = self._check_key(headers, scope["path"])
            scope[OWNER] = owner_of(key)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.settings.max_body:
            raise BodyTooLarge(self.settings.max_body)

    def _check_host(self, host: str) -> None:
        """Against pages of other hosts whose name is made to resolve to this machine."""
        allowed = self.settings.hosts
        name = _split(f"//{host}", "Host").hostname or ""
        if allowed is None or name in allowed or _is_address(name):
            return
        names = {urlsplit(origin).hostname for origin in self.settings.cors_origins}
        if name not in names:
            raise ApiError(
                403,
                f"this server answers to {', '.join(allowed)} and not to {name[:100]!r}; start it "
                "with an API key, or name the page's address with --cors-origin",
                code="host_refused",
            )

    def _check_origin(self, origin: str | None, host: str) -> None:
        """A page of another origin may not call, not even with requests that need no permission."""
        if origin is None or origin in self.settings.cors_origins:
            return
        if _split(origin, "Origin").netloc != host:
            raise ApiError(
                403,
                f"pages of {origin[:100]!r} may not call this server; --cors-origin lets them",
                code="origin_refused",
            )

    def _check_key(self, headers: Headers, path: str) -> bytes:
        """The key of the request. Raises KeyRefused."""
        given = (
            _credentials(headers.get("authorization", "")),
            *(headers.get(name, "").encode("latin-1", "replace") for name in KEY_HEADERS),
        )
        # All are compared, so that the time does not say which one it is.
        equal = [own for key in given for own in self._keys if hmac.compare_digest(key, own)]
        if equal:
            return equal[0]
        # A browser asks for a password where Basic is offered: the page has a field for the key,
        # and the reference has none.
        is_reference = path == "/docs"
        offer = 'Basic realm="Sfumato: the API key is the password"' if is_reference else "Bearer"
        raise KeyRefused(missing=not any(given), offer=offer)


def _split(address: str, header: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError:
        raise ApiError(
            403, f"the {header} header holds no address", code=f"{header.lower()}_refused"
        ) from None


def _credentials(authorization: str) -> bytes:
    """The key of a Bearer header, or the password of a Basic one."""
    scheme, _, rest = authorization.partition(" ")
    rest = rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return rest.encode("latin-1", "replace") if scheme.lower() == "bearer" else b""


def _is_address(name: str) -> bool:
    """Whether a host is an IP address, to which no name can be made to resolve."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


PAGE, OTHER = "page", "other"
_NO_HEADERS: Mapping[str, str] = {}
AuditLine = Callable[[dict[str, Any]], None]


def observer(
    app: ASGIApp, routes: Sequence[Any], metrics: Metrics, audit: AuditLine | None
) -> ASGIApp:
    """Counts and times answers, and reports refusals; headers of routers go into the log lines of
    the call, and its request id into its answer. audit: takes a line for the audit log."""
    refusals = Refusals(audit)

    async def observed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        began = time.perf_counter()
        status = CLIENT_GONE  # where no answer is begun
        call = kept(Headers(scope=scope).get)
        CALL.set(call)  # of this call's task alone

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if (given := call.get(REQUEST_ID)) is not None:
                    own = REQUEST_ID.encode()
                    others = [item for item in message["headers"] if item[0].lower() != own]
                    message["headers"] = [*others, (own, given.encode())]
            await send(message)

        path = canonical(scope["path"])  # as the gate has it
        try:
            await app(scope, receive, watched)
        except Exception:
            status = 500
            raise
        finally:
            route = _template(routes, scope, path, status)
            metrics.answered(route, status, time.perf_counter() - began)
            if status >= 400 and status != CLIENT_GONE:
                refusals.add(scope, route, status, call)

    return observed


def _template(routes: Sequence[Any], scope: Scope, path: str, status: int) -> str:
    """The template of the route that matches the request."""
    matched = scope.get("route") or next((r for r in routes if r.path_regex.match(path)), None)
    # Other requests reach the page's files.
    page = OTHER if matched is None or status in (404, 405) else PAGE
    return str(getattr(matched, "path", "") or page)


class Refusals:
    """Writes refusals to the log and the audit log: some of each status at once, then one every ten
    seconds with the number of those left out. The metrics count them all."""

    def __init__(self, audit: AuditLine | None, limit: RateLimit | None = None) -> None:
        self._audit, self._limit = audit, limit or RateLimit()

    def add(
        self, scope: Scope, route: str, status: int, call: Mapping[str, str] = _NO_HEADERS
    ) -> None:
        """call: headers of routers, by name."""
        held_back = self._limit.passes(status)
        if held_back is None:
            return
        error: ApiError | None = scope.get(REFUSAL)
        kind = error.code if error else None
        client = scope["client"][0] if scope.get("client") else None
        method = str(scope["method"])[:20]
        named = "".join(f", {name} {value}" for name, value in call.items())
        more = f"; {held_back} more with this status since the last such line" if held_back else ""
        log.warning(
            "refused: %s %s, status %d, %s, client %s%s%s",
            *(method, route, status, kind or "no code", client, named, more),
        )
        if self._audit is None or (error is not None and error.recorded):
            return
        self._audit(
            {
                "event": "refused",
                "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "request_id": error.headers.get("X-Request-Id") if error else None,
                "endpoint": route,
                "method": method,
                "status": status,
                "error": kind,
                "client": client,
                "success": False,
                "seconds": None,
                "held_back": held_back,
                **({"headers": dict(call)} if call else {}),
            }
        )
