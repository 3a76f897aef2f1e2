"""Pictures of requests: data URLs, hosts and folders that are allowed, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import gzip
import os
import socket
import struct
import threading
import time
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.pictures import file_of, picture

from sfumato.media import fetch
from sfumato.media.fetch import is_public
from sfumato.media.part import PictureSource
from sfumato.media.patches import Cut, Patches, patches_of
from sfumato.media.picture import Limits
from sfumato.refused import Refused
from sfumato.server.http import pictures
from sfumato.server.http.errors import ApiError
from sfumato.server.http.pictures import PictureReader

PNG = file_of(picture(20, 10), "PNG")


CUT = Cut(tokens=4)
KEY = patches_of(picture(20, 10), CUT).key


def key_of(reader: PictureReader, given: Any, field: str = "image") -> str:
    return asyncio.run(reader.read([PictureSource(given, field)], CUT))[field].key


def data_url(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


@pytest.mark.parametrize("head", ["data:image/png;base64,", "DATA:;base64,", "data:text/x;BASE64,"])
def test_a_data_url_is_read_whatever_it_calls_its_type(head: str) -> None:
    assert key_of(PictureReader(), data_url(PNG, head)) == KEY


def test_line_ends_in_base64_are_left_out() -> None:
    url = "data:image/png;base64," + base64.encodebytes(PNG).decode()
    assert key_of(PictureReader(), url) == KEY


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png,abc", "has no base64 data"),
        ("data:image/png;base64", "has no base64 data"),
        ("data:image/png;base64,@@@@", "base64 data are damaged"),
        ("data:image/png;base64,abc", "base64 data are damaged"),
        (data_url(b"no picture"), "no picture"),
        ("ftp://example.org/a.png", "scheme 'ftp'"),
        ("picture.png", "scheme 'picture.png'"),
        ("http://example.org/a.png", "not fetched from example.org:80"),
        ("file:///etc/passwd", "files are not read here"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_field(url: str, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        key_of(PictureReader(), url, "messages[0].content[1].image_url")
    assert refused.value.field == "messages[0].content[1].image_url"


def test_the_pictures_of_all_requests_have_a_bound() -> None:
    """Of waiting and running ones too; but one request alone may have more."""
    one = patches_of(picture(20, 10), CUT).levels.nbytes

    async def ask(count: int) -> list[Patches]:
        sources = [PictureSource(data_url(PNG), f"image[{i}]") for i in range(count)]
        return list((await reader.read(sources, CUT)).values())

    reader = PictureReader(held=2 * one)
    held = asyncio.run(ask(3))
    with pytest.raises(ApiError, match="pictures of other requests take 0 MiB") as error:
        asyncio.run(ask(1))
    assert (error.value.status, error.value.code) == (503, "bodies_busy")
    assert "Retry-After" in error.value.headers
    del held[1:]
    until = time.monotonic() + 20
    while len(reader._patches_held) > 1:  # a thread that ends may hold the last one for a moment
        assert time.monotonic() < until
        time.sleep(0.01)
    assert len(asyncio.run(ask(1))) == 1


def test_what_was_fetched_waits_for_its_decoder_in_few_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """32 MiB each: no more are fetched meanwhile."""
    fetched, may_end = threading.Semaphore(0), threading.Event()

    def content(*_: Any) -> bytes:
        fetched.release()
        return PNG

    monkeypatch.setattr(pictures, "fetch", content)
    monkeypatch.setattr(PictureReader, "_read", lambda *_: may_end.wait(20) and patches())
    reader = PictureReader(["*"], threads=1)

    def patches() -> Patches:
        return patches_of(picture(20, 10), CUT)

    async def ask() -> int:
        source = PictureSource("http://example.org/a.png", "image")
        readings = [asyncio.create_task(reader.read([source], CUT)) for _ in range(6)]
        while fetched._value < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        count = fetched._value
        may_end.set()
        await asyncio.gather(*readings)
        return count

    assert asyncio.run(ask()) == 2


def test_too_many_bytes_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(Refused, match="more than 100 bytes"):
        key_of(PictureReader(limits=Limits(nbytes=100)), data_url(bytes(200)))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        getattr(self, self.path.strip("/"))()

    def picture(self) -> None:
        self._send(200, PNG)

    def host(self) -> None:
        width = len(self.headers["Host"])
        self._send(200, file_of(picture(width, 1), "PNG"))

    def redirect(self) -> None:
        self.send_response(302)
        self.send_header("Location", "/picture")
        self.end_headers()

    def endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(1 << 16))
        except OSError:
            pass

    def tiny_parts(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.wfile.write(head + b"1\r\nx\r\n" * 400 + b"0\r\n\r\n")

    def drip(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while not self.server.ended.wait(0.02):  # type: ignore[attr-defined]
                self.wfile.write(b"x")
        except OSError:
            pass

    def headers_without_end(self) -> None:
        try:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not self.server.ended.is_set():  # type: ignore[attr-defined]
                self.wfile.write(b"A: " + b"b" * 1000 + b"\r\n")
        except OSError:
            pass

    def informational(self) -> None:
        try:
            while not self.server.ended.is_set():  # type: ignore[attr-defined]
                self.wfile.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 99)
        except OSError:
            pass

    def shorter(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + PNG)

    def longer(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(PNG) // 2)
        self.wfile.write(head + PNG)

    def no_length(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n" + PNG)

    def compressed(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n")
        self.wfile.write(gzip.compress(PNG + bytes(1 << 20)))

    def silent(self) -> None:
        self.server.ended.wait(20)  # type: ignore[attr-defined]

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.ended = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.ended.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_listed_address_may_be_private_and_is_fetched(port: int) -> None:
    here = f"127.0.0.1:{port}"
    assert key_of(PictureReader([here]), f"http://{here}/picture") == KEY


@pytest.mark.parametrize("hosts", [[], ["example.org"], ["*"], ["127.0.0.1"], ["127.0.0.1:1"]])
def test_other_hosts_and_ports_are_not_asked(port: int, hosts: list[str]) -> None:
    with pytest.raises(Refused, match=r"not fetched from 127\.0\.0\.1"):
        key_of(PictureReader(hosts), f"http://127.0.0.1:{port}/picture")


def test_a_name_that_leads_to_a_private_address_is_refused(port: int) -> None:
    with pytest.raises(Refused, match="localhost has an address that is not public"):
        key_of(PictureReader([f"localhost:{port}"]), f"http://localhost:{port}/picture")


def test_the_address_that_was_checked_is_the_one_that_is_used(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second look-up would find another address: there is none."""
    looked_up: list[str] = []

    def addresses(host: str, *args: Any, **options: Any) -> list[Any]:
        looked_up.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(fetch, "is_public", lambda address: True)
    original = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *args, **options: (
            original(host, *args, **options)
            if str(host)[:1].isdigit()
            else addresses(host, *args, **options)
        ),
    )
    name = f"pictures.example:{port}"
    key = key_of(PictureReader([name]), f"http://{name}/host")
    asked_as = picture(len(name), 1)
    assert key == patches_of(asked_as, CUT).key
    assert looked_up == ["pictures.example"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("redirect", "answered with status 302"),
        ("endless", "more than 100000 bytes"),
        ("silent", "within 0.5 s"),
        ("nothing", "could not be fetched"),
        ("tiny_parts", "in too many parts"),
        ("drip", "within 0.5 s"),
        ("headers_without_end", "could not be fetched"),
        ("informational", "within 0.5 s"),
        ("shorter", "could not be fetched"),
        ("longer", "PNG is truncated"),
        ("no_length", "could not be fetched"),
        ("compressed", "the bytes are no picture"),
    ],
)
def test_what_a_host_may_not_do(
    port: int, path: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "FETCH_S", 0.5 if "0.5" in why else 20.0)
    monkeypatch.setattr(fetch, "MOST_PARTS", 300)
    reader = PictureReader([f"127.0.0.1:{port}"], limits=Limits(nbytes=100_000))
    with pytest.raises(Refused, match=why):
        key_of(reader, f"http://127.0.0.1:{port}/{path}")


def test_a_url_with_a_name_of_a_user_is_refused(port: int) -> None:
    with pytest.raises(Refused, match="user's name"):
        key_of(PictureReader(["127.0.0.1"]), f"http://me:secret@127.0.0.1:{port}/picture")


@pytest.mark.parametrize(
    ("url", "hosts", "why"),
    [
        (f"http://{'a' * 64}.example/a.png", ["*"], "could not be fetched"),
        ("http://127.0.0.1:0/picture", ["127.0.0.1"], r"not fetched from 127\.0\.0\.1:0"),
        ("http://127.0.0.1:99999/picture", ["127.0.0.1"], "not fetched from"),
        ("http://[fe80::1]:8080/a.png", ["fe80::1:8080"], r"not fetched from \[fe80::1\]:8080"),
        ("http://[::ffff:127.0.0.1]/a.png", ["*"], "not public"),
        ("http://[::1]/a.png", ["*"], "not public"),
        ("http://127.1/a.png", ["*"], "not public"),
        ("http://0x7f000001/a.png", ["*"], "not public"),
        ("http://2130706433/a.png", ["*"], "not public"),
        ("http://0/a.png", ["*", "0"], "not public"),
        ("http:/a.png", ["*"], "not fetched from no host"),
        ("http:///a.png", ["*", ""], "not fetched from no host"),
        ("http://a@127.0.0.1/", ["127.0.0.1"], "user's name"),
        ("http://127.0.0.1\\@example.org/", ["example.org"], "user's name|is no URL"),
        ("http://[::1/a.png", ["*"], "is no URL"),
        ("http://127.0.0.1:80a/", ["*"], "is no URL"),
        ("http://127.0.0.1/\r\nHost: b", ["127.0.0.1"], "is no URL"),
        ("http://127.0.0.1/" + "a" * 70_000, ["127.0.0.1"], "is no URL"),
        ("gopher://127.0.0.1/", ["*", "127.0.0.1"], "scheme 'gopher'"),
    ],
)
def test_urls_that_lead_elsewhere(url: str, hosts: list[str], why: str) -> None:
    with pytest.raises(Refused, match=why):
        key_of(PictureReader(hosts), url)


def test_hosts_are_listed_in_either_case_and_in_brackets(port: int) -> None:
    reader = PictureReader(["LOCALHOST", "[::1]:8080"])
    for url in ("http://localhost/a.png", "http://LocalHost:80/a.png"):
        with pytest.raises(Refused, match="localhost has an address that is not public"):
            key_of(reader, url)
    with pytest.raises(Refused, match=r"could not be fetched|did not send"):  # not "not allowed"
        key_of(reader, "http://[::1]:8080/a.png")


def test_a_refusal_does_not_say_which_hosts_there_are() -> None:
    with pytest.raises(Refused) as refused:
        key_of(PictureReader(["10.0.0.5:9000"]), "http://example.org/a.png")
    assert "10.0.0.5" not in str(refused.value)


def test_answers_of_strangers_are_parsed_outside_of_the_event_loop(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    get = fetch._get

    async def recorded(*args: Any) -> bytes:
        threads.append(threading.get_ident())
        return await get(*args)

    monkeypatch.setattr(fetch, "_get", recorded)
    here = f"127.0.0.1:{port}"
    assert key_of(PictureReader([here]), f"http://{here}/picture") == KEY
    assert threads and threading.get_ident() not in threads


def test_a_look_up_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    monkeypatch.setattr(fetch, "FETCH_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: free.wait(60))
    start = time.monotonic()
    try:
        with pytest.raises(Refused, match=r"example\.org did not send the picture"):
            key_of(PictureReader(["*"]), "http://example.org/a.png")
        assert time.monotonic() - start < 30
    finally:
        free.set()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("168.63.129.16", False),
        ("::", False),
        ("::127.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
        ("::ffff:93.184.216.34", False),
        ("fec0::1", False),
        ("2002:5db8:d822::", False),
        ("2001:0:5db8:d822::", False),
        ("64:ff9b:1::5db8:d822", False),
        ("64:ff9b::5db8:d822", True),
        ("ff0e::1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_files_are_read_below_the_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "allowed"
    folder.mkdir()
    (folder / "a b.png").write_bytes(PNG)
    (tmp_path / "outside.png").write_bytes(PNG)
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    reader = PictureReader(folder=folder)
    assert key_of(reader, (folder / "a b.png").as_uri()) == KEY
    assert key_of(reader, Path("a b.png")) == KEY
    for path in (tmp_path / "outside.png", folder / "link.png", Path("../outside.png")):
        with pytest.raises(Refused, match="not in the folder"):
            key_of(reader, path)
    with pytest.raises(Refused, match="no file"):
        key_of(reader, Path("none.png"))
    with pytest.raises(Refused, match=r"no file|no path"):
        key_of(reader, "file:///%00")
    with pytest.raises(Refused, match="no path"):
        key_of(reader, "file://[")


def test_refusals_of_files_have_no_folder(tmp_path: Path) -> None:
    for name in ("none.png", "%00", "..", ".", "a/b", "x" * 5000):
        with pytest.raises(Refused) as refused:
            key_of(PictureReader(folder=tmp_path), f"file:{name}")
        assert str(tmp_path) not in str(refused.value)


def test_pipes_and_devices_in_the_folder_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "."):
        with pytest.raises(Refused, match=r"is no file|not in the folder"):
            key_of(PictureReader(folder=tmp_path), Path(name))
    with pytest.raises(Refused, match="is no file"):
        key_of(PictureReader(folder=Path("/dev")), Path("zero"))


@pytest.mark.parametrize("swapped", ["file", "folder"])
def test_a_link_that_takes_a_files_place_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    """Between the look at the path and the opening of it."""
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    for folder in (allowed / "in", outside):
        folder.mkdir(parents=True)
        (folder / "a.png").write_bytes(PNG)
    changed = allowed / "in" if swapped == "folder" else allowed / "in" / "a.png"

    def swap(self: Path) -> bool:
        changed.rename(tmp_path / "old")
        changed.symlink_to(outside if swapped == "folder" else outside / "a.png")
        return True

    reader = PictureReader(folder=allowed)
    assert key_of(reader, Path("in/a.png")) == KEY
    monkeypatch.setattr(Path, "is_file", swap)
    with pytest.raises(Refused, match="cannot be read"):
        key_of(reader, Path("in/a.png"))


def test_what_decoders_warn_of_fills_no_log() -> None:
    damaged = b"Exif\0\0II*\0\x08\0\0\0\1\0" + struct.pack("<HHLL", 1, 1, 99, 99)
    url = data_url(file_of(picture(20, 10), "JPEG", exif=damaged))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        key_of(PictureReader(), url)
    assert seen == []


def test_pictures_are_decoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def patches(*args: Any) -> Patches:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.02)
        with lock:
            running -= 1
        return patches_of(picture(20, 10), CUT)

    monkeypatch.setattr(PictureSource, "patches", patches)

    async def ask() -> int:
        reader, sources = PictureReader(threads=2), [PictureSource(PNG, "image")]
        return len(await asyncio.gather(*(reader.read(sources, CUT) for _ in range(12))))

    assert asyncio.run(ask()) == 12
    assert most == 2


def test_a_request_with_too_many_before_it_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()

    def patches(*args: Any) -> Patches:
        free.wait(20)
        return patches_of(picture(20, 10), CUT)

    monkeypatch.setattr(PictureSource, "patches", patches)

    async def ask() -> list[Any]:
        reader, sources = PictureReader(threads=1, waiting=1), [PictureSource(PNG, "image")]
        tasks = [asyncio.create_task(reader.read(sources, CUT)) for _ in range(3)]
        while not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
        free.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    statuses = [getattr(each, "status", 200) for each in asyncio.run(ask())]
    assert statuses == [200, 200, 503]
