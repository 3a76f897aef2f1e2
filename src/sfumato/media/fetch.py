"""Pictures at http and https URLs.

A URL in a request makes this process connect to where a stranger wants it to. So hosts have to be
allowed by name; a name is resolved once, and the address that was checked is the one that is used;
redirects are not followed; bytes and seconds have bounds.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx

from sfumato.refused import Refused

FETCH_S = 10.0  # from the look-up of the name to the last byte
PORTS = {"http": 80, "https": 443}
MOST_PARTS = 1 << 16  # that an answer arrives in; each is handled in Python
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses in IPv6 ones
_GIVEN_OUT = ipaddress.ip_network("2000::/3")  # the part of IPv6 that networks of the internet have
_CLOUD = ipaddress.ip_address("168.63.129.16")  # public in form; a cloud's own services
_ADVICE = "send the picture itself, as a data URL"
# A look-up cannot be cancelled: one that hangs takes none of the threads that others need.
_LOOK_UPS = ThreadPoolExecutor(8, "look-up")


def fetch(given: str, hosts: Collection[str], most: int, field: str) -> bytes:
    """The content at a URL, `most` bytes at most. For callers that wait, also where an event loop
    runs in their thread: the answer of a stranger is parsed in a thread and a loop of its own.

    hosts: names of web servers, each with a port where it is not the scheme's own; "*" stands for
    all that have public addresses, and an address that is listed itself may be private. Raises
    Refused, naming the field, for other hosts and for what cannot be had.
    """
    with ThreadPoolExecutor(1, "fetch") as pool:
        return pool.submit(asyncio.run, _fetched(given, hosts, most, field)).result()


async def _fetched(given: str, hosts: Collection[str], most: int, field: str) -> bytes:
    try:
        url = httpx.URL(given)
    except (httpx.InvalidURL, UnicodeError, ValueError):
        raise Refused(field, "is no URL") from None
    is_listed = _is_listed(url, hosts, field)
    try:
        async with asyncio.timeout(FETCH_S):
            address = await _address(url, is_listed, field)
            return await _get(url, address, most, field)
    except TimeoutError:
        why = f"{url.host} did not send the picture within {FETCH_S:g} s"
        raise Refused(field, why, _ADVICE) from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
        why = f"the picture could not be fetched from {url.host[:80]} ({type(error).__name__})"
        raise Refused(field, why, _ADVICE) from None


def _port(url: httpx.URL) -> int:
    return PORTS[url.scheme] if url.port is None else url.port


def _is_listed(url: httpx.URL, hosts: Collection[str], field: str) -> bool:
    """Whether the host itself is listed, and not only "*". Raises Refused for a URL that names a
    user, or a host that is not allowed."""
    if url.userinfo:
        raise Refused(field, "a URL with a user's name is not fetched", "leave the name out")
    port, allowed = _port(url), {host.lower() for host in hosts}
    host = f"[{url.host}]" if ":" in url.host else url.host
    is_usual = port == PORTS[url.scheme]
    names = {f"{host}:{port}", *((host, url.host) if is_usual else ())} if host else set()
    is_listed = not allowed.isdisjoint(names)
    if not (is_listed or (host and is_usual and "*" in allowed)):
        why = f"pictures are not fetched from {host[:80] or 'no host'}:{port}"
        raise Refused(field, why, _ADVICE)
    return is_listed


async def _address(url: httpx.URL, is_listed: bool, field: str) -> str:
    """The address that the host's name has now. Raises Refused for one that is not public: a name
    may be made to point at what only this machine can reach."""
    answers = await asyncio.get_running_loop().run_in_executor(
        _LOOK_UPS, partial(socket.getaddrinfo, url.host, _port(url), type=socket.SOCK_STREAM)
    )
    addresses = [str(each[4][0]) for each in answers]
    if not (is_listed and _is_address(url.host)) and not all(map(is_public, addresses)):
        raise Refused(field, f"{url.host[:80]} has an address that is not public")
    return addresses[0]


async def _get(url: httpx.URL, address: str, most: int, field: str) -> bytes:
    """The bytes that the address answers with, asked as the host of the URL."""
    async with httpx.AsyncClient(trust_env=False, timeout=FETCH_S) as client:
        headers = {"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity"}
        at = url.copy_with(host=address)
        named = {"sni_hostname": url.host}  # whose certificate the server has to have
        async with client.stream("GET", at, headers=headers, extensions=named) as response:
            if response.status_code != 200:
                why = f"{url.host} answered with status {response.status_code}"
                raise Refused(field, why, "give the URL of the picture itself")
            content, parts = bytearray(), 0
            async for part in response.aiter_raw():
                content += part
                parts += 1
                if parts > MOST_PARTS:
                    raise Refused(field, f"{url.host} sends the picture in too many parts", _ADVICE)
                if len(content) > most:
                    why = f"the picture has more than {most} bytes"
                    raise Refused(field, why, "send a smaller one")
            return bytes(content)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet's, however it is written."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not ip.is_multicast and ip != _CLOUD
    if ip in _NAT64:
        return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    # 6to4 and Teredo, which no web server needs, lead to IPv4 addresses by other ways.
    return ip in _GIVEN_OUT and ip.is_global and not (ip.sixtofour or ip.teredo)
