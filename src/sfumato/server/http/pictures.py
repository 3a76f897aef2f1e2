"""Pictures of requests: read from the body, and from the web servers and the folder that the
operator allows. Decoding takes place in few threads of its own. Knows no model and no message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from anyio import CapacityLimiter, to_thread

from sfumato.media.fetch import PORTS, fetched
from sfumato.media.part import PictureSource
from sfumato.media.patches import Cut, Patches
from sfumato.media.picture import Limits, Source
from sfumato.refused import Refused
from sfumato.server.http.admission import Budget


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
        """hosts: see `media.fetch.fetched`; folder: of the files that may be read, None: none;
        threads: pictures that are decoded at a time; waiting: those that may wait for it."""
        self._hosts, self._folder = tuple(hosts), folder
        self._limits = limits or Limits()
        self._decoding, self._fetching = Budget(threads, waiting), Budget(2 * threads, waiting)

    async def read(self, sources: Sequence[PictureSource], cut: Cut) -> Mapping[str, Patches]:
        """The patches of each picture, by its field. Raises Refused, naming the field of a picture
        that cannot be read; ApiError where too many wait."""
        # One after another, so that a request holds the memory of one picture.
        return {source.field: await self._patches(source, cut) for source in sources}

    async def _patches(self, source: PictureSource, cut: Cut) -> Patches:
        content = await self._content(source)
        async with self._decoding.hold():
            return await to_thread.run_sync(
                lambda: source.patches(cut, self._limits, content),
                limiter=CapacityLimiter(1),  # its own: the threads of other work stay free
            )

    async def _content(self, source: PictureSource) -> Source | None:
        """What stands at a URL; None where the source has its picture itself."""
        if source.scheme == "file" or isinstance(source.given, Path):
            return self._file(source)
        if source.scheme in PORTS:
            async with self._fetching.hold():
                url, most = str(source.given), self._limits.nbytes
                return await fetched(url, self._hosts, most, source.field)
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
