"""Pictures of requests: read from the body, from web servers and folders that the operator allows.

A URL in a request makes the server connect to where a stranger wants it to. So hosts have to be
allowed by name; a name is resolved once, and the address that was checked is the one that is used;
redirects are not followed; bytes and seconds have bounds. Decoding takes place in few threads of
its own. Knows no model and no message.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import httpx
from anyio import CapacityLimiter, to_thread
from PIL import Image

from sfumato.media.picture import Limits, Source
from sfumato.media.source import PictureSource
from sfumato.refused import Refused
from sfumato.server.http.admission import Budget

FETCH_S = 10.0  # from the look-up of the name to the last byte
_PORTS = {"http": 80, "https": 443}
_BEHIND = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses, as NAT64 writes them
T = TypeVar("T")


class PictureReader:
    """What may be read, and how many pictures at a time."""

    def __init__(
        self,
        hosts: Sequence[str] = (),
        folder: Path | None = None,
        limits: Limits | None = None,
        threads: int = 2,
        waiting: int = 64,
    ) -> None:
        """hosts: names of web servers, each with a port where it is not the scheme's own; "*"
        stands for all that have public addresses, and an address that is listed itself may be
        private. folder: of the files that may be read; None: none. threads: pictures that are
        decoded at a time; waiting: those that may wait for it."""
        self._hosts, self._folder = tuple(hosts), folder
        self.limits = limits or Limits()
        self._decoding, self._fetching = Budget(threads, waiting), Budget(2 * threads, waiting)

    async def read(
        self, sources: Sequence[PictureSource], make: Callable[[PictureSource, Image.Image], T]
    ) -> list[T]:
        """What `make`, called in a thread, makes of each picture, in their order. Raises Refused,
        naming the field of a picture that cannot be read; ApiError where too many wait."""
        # One after another, so that a request holds the memory of one picture.
        return [await self._made(source, make) for source in sources]

    async def _made(
        self, source: PictureSource, make: Callable[[PictureSource, Image.Image], T]
    ) -> T:
        content = await self._content(source)
        async with self._decoding.hold():
            return await to_thread.run_sync(
                lambda: make(source, source.read(self.limits, content)),
                limiter=CapacityLimiter(1),  # its own: the threads of other work stay free
            )

    async def _content(self, source: PictureSource) -> Source | None:
        """What stands at a URL; None where the source has its picture itself."""
        if source.scheme == "file" or isinstance(source.given, Path):
            return self._file(source)
        if source.scheme in _PORTS:
            async with self._fetching.hold():
                return await self._fetched(source)
        return None

    def _file(self, source: PictureSource) -> Path:
        """The path of a file below the folder, links resolved."""
        if self._folder is None:
            raise Refused(
                source.field, "files are not read here", "start the server with --allow-image-files"
            )
        given = source.given
        path = given if isinstance(given, Path) else Path(unquote(urlsplit(str(given)).path))
        folder = self._folder.resolve()
        try:
            path = (folder / path).resolve()
        except (OSError, ValueError, RuntimeError):
            raise Refused(source.field, "is no path of a file") from None
        if not path.is_relative_to(folder):
            raise Refused(source.field, "the file is not in the folder that may be read")
        return path

    async def _fetched(self, source: PictureSource) -> bytes:
        try:
            url = httpx.URL(str(source.given))
        except (httpx.InvalidURL, UnicodeError, ValueError):
            raise Refused(source.field, "is no URL") from None
        port = url.port or _PORTS[url.scheme]
        self._check_host(url, port, source.field)
        try:
            async with asyncio.timeout(FETCH_S):
                address = await self._address(url.host, port, source.field)
                return await self._get(url, address, source.field)
        except TimeoutError:
            raise Refused(
                source.field,
                f"{url.host} did not send the picture within {FETCH_S:g} s",
                "send the picture itself, as a data URL",
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise Refused(
                source.field,
                f"the picture could not be fetched from {url.host} ({type(error).__name__})",
                "send the picture itself, as a data URL",
            ) from None

    def _check_host(self, url: httpx.URL, port: int, field: str) -> None:
        """Raises Refused for a URL that names a user, or a host that is not allowed."""
        if url.userinfo:
            raise Refused(field, "a URL with a user's name is not fetched", "leave the name out")
        own = port == _PORTS[url.scheme]
        if not url.host or not (
            f"{url.host}:{port}" in self._hosts
            or (own and (url.host in self._hosts or "*" in self._hosts))
        ):
            raise Refused(
                field,
                f"pictures are not fetched from {url.host[:80]}:{port}",
                "send the picture itself, as a data URL"
                if not self._hosts
                else f"allowed are {', '.join(self._hosts)}",
            )

    async def _address(self, host: str, port: int, field: str) -> str:
        """The address that the host's name has now. Raises Refused for one that is not public: a
        name may be made to point at what only this machine can reach."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in found]
        listed = host in self._hosts or f"{host}:{port}" in self._hosts
        if not (listed and _is_address(host)) and not all(map(is_public, addresses)):
            raise Refused(field, f"{host} has an address that is not public")
        return addresses[0]

    async def _get(self, url: httpx.URL, address: str, field: str) -> bytes:
        """The bytes that the address answers with, asked as the host of the URL."""
        async with httpx.AsyncClient(trust_env=False, timeout=FETCH_S) as client:
            headers = {"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity"}
            request = client.build_request(
                "GET",
                url.copy_with(host=address),
                headers=headers,
                extensions={"sni_hostname": url.host},
            )
            response = await client.send(request, stream=True)
            try:
                if response.status_code != 200:
                    why = f"{url.host} answered with status {response.status_code}"
                    raise Refused(field, why, "give the URL of the picture itself")
                content = bytearray()
                async for part in response.aiter_raw():
                    content += part
                    if len(content) > self.limits.nbytes:
                        raise Refused(
                            field,
                            f"the picture has more than {self.limits.nbytes} bytes",
                            "send a smaller one",
                        )
                return bytes(content)
            finally:
                await response.aclose()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet's, however it is written."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if inner is None and ip in _BEHIND:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None and not is_public(str(inner)):
            return False
    return ip.is_global and not ip.is_multicast
