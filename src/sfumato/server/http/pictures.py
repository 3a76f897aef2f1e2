"""Pictures of requests: read from the body, and from the web servers and the folder that the
operator allows. Decoding takes place in few threads of its own. Knows no model and no message."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit
from weakref import WeakSet

from anyio import CapacityLimiter, to_thread

from sfumato.media.fetch import PORTS, fetch
from sfumato.media.part import PictureSource
from sfumato.media.patches import Cut, Patches
from sfumato.media.picture import Limits, file_bytes
from sfumato.refused import Refused
from sfumato.server.http.admission import Budget, overloaded


class Unread(Exception):
    """A body has pictures that are not read yet."""

    def __init__(self, sources: Sequence[PictureSource]) -> None:
        super().__init__(sources)
        self.sources = sources


HELD = 1 << 29
"""Bytes of cut pictures that requests hold at a time, whether they are read, wait or run: 64 of
the largest size."""

OnPicture = Callable[[float, bool], None]
"""The seconds that a picture took from its bytes to patches, and whether it was read."""


class PictureReader:
    """What may be read, and how many pictures at a time."""

    def __init__(
        self,
        hosts: Sequence[str] = (),
        folder: Path | None = None,
        done: OnPicture = lambda seconds, is_read: None,
        limits: Limits | None = None,
        threads: int = 2,
        waiting: int = 64,
        held: int = HELD,
    ) -> None:
        """hosts: see `media.fetch.fetch`; folder: of the files that may be read, None: none;
        done: called behind each picture, in any thread; threads: pictures that are decoded at a
        time; waiting: those that may wait for it; held: bytes of patches in memory, those of one
        request aside."""
        self._hosts, self._folder, self._done = tuple(hosts), folder, done
        # Of damaged data, with a stranger's numbers: each would stay in memory, and fill a log.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        self._limits = limits or Limits()
        self._decoding, self._fetching = Budget(threads, waiting), Budget(2 * threads, waiting)
        self._most_held, self._patches_held = held, WeakSet[Patches]()

    async def read(self, sources: Sequence[PictureSource], cut: Cut) -> Mapping[str, Patches]:
        """The patches of each picture, by its field. Raises Refused, naming the field of a picture
        that cannot be read; ApiError where too many wait."""
        # One after another, so that a request holds the memory of one picture.
        read: dict[str, Patches] = {}
        for source in sources:
            read[source.field] = await self._made(source, cut, tuple(read.values()))
        return read

    async def _made(self, source: PictureSource, cut: Cut, own: Sequence[Patches]) -> Patches:
        """own: of the same request."""
        if source.scheme not in PORTS:
            return await self._decoded(source, cut, own, None)
        url, most = str(source.given), self._limits.nbytes
        async with self._fetching.hold():  # until it is decoded: what was fetched takes memory
            content = await _in_thread(lambda: fetch(url, self._hosts, most, source.field))
            return await self._decoded(source, cut, own, content)

    async def _decoded(
        self, source: PictureSource, cut: Cut, own: Sequence[Patches], content: bytes | None
    ) -> Patches:
        async with self._decoding.hold():
            held = sum(each.levels.nbytes for each in self._patches_held.difference(own))
            if held >= self._most_held:
                what = f"the pictures of other requests take {held / 2**20:.0f} MiB"
                raise overloaded(f"{what}, and this server holds no more")
            patches = await _in_thread(lambda: self._read(source, cut, content))
            self._patches_held.add(patches)
            return patches

    def _read(self, source: PictureSource, cut: Cut, content: bytes | None) -> Patches:
        since, is_read = time.perf_counter(), False
        try:
            if source.scheme == "file" or isinstance(source.given, Path):
                content = self._file(source)
            patches = source.patches(cut, self._limits, content)
            is_read = True
            return patches
        finally:
            self._done(time.perf_counter() - since, is_read)

    def _file(self, source: PictureSource) -> bytes:
        """The bytes of a file below the folder, links resolved."""
        if self._folder is None:
            raise Refused(
                source.field, "files are not read here", "start the server with --allow-image-files"
            )
        given, folder = source.given, self._folder.resolve()
        try:
            name = given if isinstance(given, Path) else unquote(urlsplit(str(given)).path)
            path = (folder / name).resolve()
        except (OSError, ValueError, RuntimeError):
            raise Refused(source.field, "is no path of a file") from None
        if not path.is_relative_to(folder):
            raise Refused(source.field, "the file is not in the folder that may be read")
        below = path.relative_to(folder).parts
        return file_bytes(
            path, self._limits, source.field, lambda _, flags: _opened_below(folder, below, flags)
        )


T = TypeVar("T")


async def _in_thread(work: Callable[[], T]) -> T:
    """The work's result, from a thread. Its own limiter: the threads of other work stay free."""
    return await to_thread.run_sync(work, limiter=CapacityLimiter(1))


def _opened_below(folder: Path, parts: Sequence[str], flags: int) -> int:
    """A descriptor of a file, reached without links: one that is put in its way after the path was
    checked is an error."""
    if os.open not in os.supports_dir_fd:
        return os.open(folder.joinpath(*parts), flags)
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for part in parts:
        try:
            below = os.open(part, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at
