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

import httpx

from sfumato.refused import Refused

FETCH_S = 10.0  # from the look-up of the name to the last byte
PORTS = {"http": 80, "https": 443}
_BEHIND = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses, as NAT64 writes them
_ADVICE = "send the picture itself, as a data URL"


async def fetched(given: str, hosts: Collection[str], most: int, field: str) -> bytes:
    """What stands at a URL, `most` bytes at most.

    hosts: names of web servers, each with a port where it is not the scheme's own; "*" stands for
    all that have public addresses, and an address that is listed itself may be private. Raises
    Refused, naming the field, for other hosts and for what cannot be had.
    """
    try:
        url = httpx.URL(given)
    except (httpx.InvalidURL, UnicodeError, ValueError):
        raise Refused(field, "is no URL") from None
    port = url.port or PORTS[url.scheme]
    _check_host(url, port, hosts, field)
    try:
        async with asyncio.timeout(FETCH_S):
            address = await _address(url.host, port, hosts, field)
            return await _get(url, address, most, field)
    except TimeoutError:
        why = f"{url.host} did not send the picture within {FETCH_S:g} s"
        raise Refused(field, why, _ADVICE) from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        why = f"the picture could not be fetched from {url.host} ({type(error).__name__})"
        raise Refused(field, why, _ADVICE) from None


def fetch(given: str, hosts: Collection[str], most: int, field: str) -> bytes:
    """`fetched`, for callers that wait, also where an event loop runs in their thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, fetched(given, hosts, most, field)).result()


def _check_host(url: httpx.URL, port: int, hosts: Collection[str], field: str) -> None:
    """Raises Refused for a URL that names a user, or a host that is not allowed."""
    if url.userinfo:
        raise Refused(field, "a URL with a user's name is not fetched", "leave the name out")
    is_usual = port == PORTS[url.scheme]
    names = {f"{url.host}:{port}", *((url.host, "*") if is_usual else ())}
    if not url.host or names.isdisjoint(hosts):
        why = f"pictures are not fetched from {url.host[:80]}:{port}"
        raise Refused(field, why, f"allowed are {', '.join(hosts)}" if hosts else _ADVICE)


async def _address(host: str, port: int, hosts: Collection[str], field: str) -> str:
    """The address that the host's name has now. Raises Refused for one that is not public: a name
    may be made to point at what only this machine can reach."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    is_listed = _is_address(host) and not {host, f"{host}:{port}"}.isdisjoint(hosts)
    if not is_listed and not all(map(is_public, addresses)):
        raise Refused(field, f"{host} has an address that is not public")
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
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
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
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if inner is None and ip in _BEHIND:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None and not is_public(str(inner)):
            return False
    return ip.is_global and not ip.is_multicast
