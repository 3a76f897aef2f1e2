"""A code object: the ELF file that Triton compiles a kernel to, loaded into this process's memory,
and the arguments of a launch as the code reads them."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence

_LOAD, _SYMBOLS = 1, (2, 11)  # kinds of segments and sections
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SEGMENT, _SECTION = struct.Struct("<IIQQQQQQ"), struct.Struct("<IIQQQQIIQQ")
_SYMBOL, _DESCRIPTOR = struct.Struct("<IBBHQQ"), struct.Struct("<III4xq20xIIIHxx4x")
_KERNARG_POINTER_ALONE = 0x8
"""The code properties of a kernel whose first scalar registers are the address of its arguments,
and no other address; the bits above are about the size of a wave."""
_NUMBERS = {
    "i1": "<b", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I",
    "i64": "<q", "u64": "<Q", "fp32": "<f", "f32": "<f", "fp64": "<d",
}  # fmt: skip
_DENORMALS = 0xF << 16  # of the registers' settings: numbers below the normal ones are kept
_HIDDEN = 256  # bytes of what the runtime adds to the arguments, in code objects of version 5


class CodeObject:
    """A loaded kernel; `entry` is the address of its first instruction."""

    def __init__(self, binary: bytes, kernel: str) -> None:
        """Raises ValueError for a kernel that wants more of its launch than its arguments."""
        _, _, _, _, programs, sections, _, _, each, count, of_section, rows, _ = (
            _HEADER.unpack_from(binary)
        )
        assert each == _SEGMENT.size and of_section == _SECTION.size
        segments = [_SEGMENT.unpack_from(binary, programs + i * each) for i in range(count)]
        loads = [
            (at, to, size, room) for kind, _, at, to, _, size, room, _ in segments if kind == 1
        ]
        # A page more: the emulator reads past the last instruction.
        self.memory = mmap.mmap(-1, max(to + room for _, to, _, room in loads) + mmap.PAGESIZE)
        for at, to, size, _ in loads:
            self.memory[to : to + size] = binary[at : at + size]
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.name, table = kernel, dict[str, int]()
        headers = [_SECTION.unpack_from(binary, sections + i * of_section) for i in range(rows)]
        for _, kind, _, _, at, size, link, *_ in headers:
            if kind in _SYMBOLS:
                names = headers[link][4]
                for place in range(at, at + size, _SYMBOL.size):
                    name, _, _, _, value, _ = _SYMBOL.unpack_from(binary, place)
                    end = binary.index(b"\0", names + name)
                    table[binary[names + name : end].decode()] = value
        descriptor = self.base + table[f"{kernel}.kd"]
        raw = ctypes.string_at(descriptor, _DESCRIPTOR.size)
        self.shared, self.scratch, self.arguments, start, _, settings, self.resources, wanted = (
            _DESCRIPTOR.unpack(raw)
        )
        self.entry = descriptor + start
        if settings & _DENORMALS != _DENORMALS:
            raise ValueError(f"{kernel}: flushes denormal numbers, which the emulator keeps")
        if wanted & 0x7F != _KERNARG_POINTER_ALONE:
            raise ValueError(f"{kernel}: wants other registers at its start ({wanted:#x})")

    @property
    def span(self) -> tuple[int, int]:
        """Where its instructions and constants stand: addresses from, to."""
        return self.base, self.base + len(self.memory)

    def packed(
        self,
        kinds: Sequence[str],
        values: Sequence[float],
        grid: tuple[int, int, int],
        threads: int,
    ) -> bytes:
        """The arguments of a launch: values of Triton's kinds, addresses as integers; then Triton's
        two addresses of scratch memory, which is none, and what the runtime adds."""
        out = b""
        for kind, value in zip(kinds, values, strict=True):
            raw = struct.pack("<Q" if kind.startswith("*") else _NUMBERS[kind], value)
            out += b"\0" * (-len(out) % len(raw)) + raw
        out += b"\0" * (-len(out) % 8 + 16)
        if len(out) < self.arguments:
            sizes = struct.pack("<3I6H", *grid, threads, 1, 1, 0, 0, 0)
            out += (sizes + b"\0" * 40 + struct.pack("<H", 3)).ljust(_HIDDEN, b"\0")
        assert len(out) == self.arguments, f"{self.name}: {len(out)} of {self.arguments} bytes"
        return out
