"""Pictures of requests: data URLs, hosts and folders that are allowed, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
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
    found = key_of(PictureReader([name]), f"http://{name}/host")
    asked_as = picture(len(name), 1)
    assert found == patches_of(asked_as, CUT).key
    assert looked_up == ["pictures.example"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("redirect", "answered with status 302"),
        ("endless", "more than 100000 bytes"),
        ("silent", "within 0.5 s"),
        ("nothing", "could not be fetched"),
    ],
)
def test_what_a_host_may_not_do(
    port: int, path: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "FETCH_S", 0.5 if path == "silent" else 20.0)
    reader = PictureReader([f"127.0.0.1:{port}"], limits=Limits(nbytes=100_000))
    with pytest.raises(Refused, match=why):
        key_of(reader, f"http://127.0.0.1:{port}/{path}")


def test_a_url_with_a_name_of_a_user_is_refused(port: int) -> None:
    with pytest.raises(Refused, match="user's name"):
        key_of(PictureReader(["127.0.0.1"]), f"http://me:secret@127.0.0.1:{port}/picture")


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
