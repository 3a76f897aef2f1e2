"""Runs loaded kernels in the emulator, with every access to memory checked against the tensors that
the launch got, and keeps the emulator's compiled instructions from process to process."""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.support.emulated_gpu import ARCHITECTURE, WAVE, import_emulator
from tests.support.emulated_gpu.code_object import CodeObject

import_emulator()

from test.mockgpu.amd import emu  # noqa: E402
from tests.support.emulated_gpu import repairs  # noqa: E402
from tinygrad.device import Buffer, BufferSpec, Device, TinyELF  # noqa: E402
from tinygrad.dtype import dtypes  # noqa: E402

repairs.apply()

FAMILY = "rdna3"  # of ARCHITECTURE, as the emulator names it
BUILD = Path(__file__).parents[3] / "build/emulated"
_LDS = 1 << 16
_EXEC = emu.EXEC_LO.offset
_NO_REGISTER = 124
_LDS_BITS = 0x1FF << 15  # of the resources: how much shared memory, which Triton sets at the launch
_END = emu.ENDPGM_PC

Registers = tuple[Any, np.ndarray]
"""The scalar registers, uint32, and the vector registers, uint32 [registers, lanes]."""
Accesses = Callable[[Registers], tuple[np.ndarray, int]]
"""The addresses uint64 [n] that an instruction is about to access, and how many bytes at each."""


class OutsideError(AssertionError):
    """A kernel accessed memory of no tensor that it got."""


class _Decoded:
    """An instruction at a place."""

    def __init__(self, place: int) -> None:
        _load_kept()
        known = len(emu._canonical_runner_cache)
        (program, runtime), self.instruction = emu._decode_at(place, FAMILY)
        if len(emu._canonical_runner_cache) > known:
            _keep(emu._canonical_runner_cache[-1])
        self.function, places = runtime.fxn, tuple(program.arg.globals)
        if places not in _forms:
            _forms.append(places)
        self.form = _forms.index(places)
        operation = getattr(self.instruction, "op", None)
        self.waits = operation in emu._BARRIER_OPS
        self.accesses = _accesses(self.instruction)


_decoded: dict[int, _Decoded] = {}
_forms: list[tuple[int, ...]] = []
"""Which of a wave's buffers the function of an instruction takes."""
executed = 0
"""Instructions of waves that this process has run."""


def run(
    code: CodeObject,
    arguments: bytes,
    grid: tuple[int, int, int],
    threads: int,
    shared: int,
    spans: Sequence[tuple[int, int]],
) -> None:
    """Runs all programs of a launch, one after another.

    spans: the memory of its tensors, addresses from, to.  Shared memory holds NaNs at the start of
    each program, so that what is read before it is written shows.  Raises OutsideError, with the
    kernel and the instruction, for an access to other memory."""
    held = ctypes.create_string_buffer(arguments + bytes(64), len(arguments) + 64)
    at = ctypes.addressof(held)
    ours = [code.span, (at, at + len(held))]
    allowed = _Spans([*spans, *ours])
    memory = Buffer("CPU", 1 << 40, dtypes.uint32, options=BufferSpec(external_ptr=0))
    memory = memory.ensure_allocated()
    lds = Buffer("CPU", _LDS // 4, dtypes.uint32).ensure_allocated()
    count = -(-threads // WAVE)
    scratch = [_scratch(code.scratch * WAVE) for _ in range(count)]
    resources = code.resources & ~_LDS_BITS | -(-shared // 512) << 15
    for z, y, x in product(*map(range, reversed(grid))):
        ctypes.memset(lds._buf.va_addr, 0xFF, _LDS)
        waves = []
        for wave, own in enumerate(scratch):
            state = emu._init_wave(
                code.entry, wave * WAVE, threads, threads, 1, 1, at, resources, code.scratch,
                FAMILY, x, y, z, None, WAVE,
            )  # fmt: skip
            buffers = state.sgpr_buf, state.vgpr_buf, memory, lds, own, state.accvgpr_buf
            waves.append(_Wave(code, state, buffers, allowed))
        while waves:
            waves = [wave for wave in waves if wave.until_barrier()]


def _scratch(size: int) -> Any:
    return Buffer("CPU", max(size, 4), dtypes.uint8).ensure_allocated()


class _Spans:
    """Memory that may be accessed."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        joined: list[list[int]] = []
        for start, end in sorted(spans):
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(end, joined[-1][1])
            else:
                joined.append([start, end])
        self._starts, self._ends = np.array(joined, dtype=np.uint64).T.copy()

    def outside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which of these accesses of so many bytes are not within one span."""
        which = np.searchsorted(self._starts, addresses, side="right")
        ends = self._ends[np.maximum(which, 1) - 1]
        return addresses[(which == 0) | (addresses + np.uint64(size) > ends)]


class _Wave:
    """A wave on its way through a program."""

    def __init__(
        self, code: CodeObject, state: Any, buffers: Sequence[Any], allowed: _Spans
    ) -> None:
        self._code, self._state, self._allowed = code, state, allowed
        self._buffers = [ctypes.c_uint64(each._buf.va_addr) for each in buffers]
        self._given: list[list[ctypes.c_uint64]] = []  # by the number of a form
        vectors = np.frombuffer(state._vgpr_mv, dtype=np.uint32).reshape(-1, WAVE)
        self._registers = state._sgpr_mv, vectors

    def until_barrier(self) -> bool:
        """Runs up to the next barrier; False at the end."""
        global executed
        scalars, given = self._state._sgpr_mv, self._given
        while (place := scalars[256] | scalars[257] << 32) != _END:
            decoded = _decoded.get(place)
            if decoded is None:
                decoded = _decoded[place] = _Decoded(place)
            if decoded.accesses is not None:
                self._check(place, decoded)
            while decoded.form >= len(given):
                given.append([self._buffers[which] for which in _forms[len(given)]])
            decoded.function(*given[decoded.form])
            executed += 1
            if decoded.waits:
                return True
        return False

    def _check(self, place: int, decoded: _Decoded) -> None:
        addresses, size = decoded.accesses(self._registers)
        outside = self._allowed.outside(addresses, size)
        if len(outside):
            raise OutsideError(
                f"{self._code.name}: {decoded.instruction!r} at {place - self._code.entry:#x} "
                f"accesses {size} bytes at {int(outside[0]):#x}, which are of no tensor of the "
                f"launch ({len(outside)} of {len(addresses)} lanes)"
            )


def _accesses(instruction: Any) -> Accesses | None:
    """What an instruction accesses of the memory of tensors; None: nothing."""
    kind = type(instruction).__name__.removesuffix("_LIT")
    if kind not in _ACCESSES or "_INV" in instruction.op.name:
        return None
    return _ACCESSES[kind](instruction)


def _size(name: str) -> int:
    """Bytes of the access of an operation, such as GLOBAL_LOAD_D16_HI_B16."""
    match = re.search(r"_[BUIF](\d+)$", name)
    assert match, f"{name}: how much does it access?"
    return max(1, int(match[1]) // 8)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _register(operand: Any) -> int:
    """The number of a scalar or vector register."""
    return int(operand.offset) & 0xFF


def _pair(scalars: Any, at: int) -> int:
    return int(scalars[at] | scalars[at + 1] << 32)


def _lanes(scalars: Any) -> np.ndarray:
    """bool [lanes]: which take part."""
    return (np.uint32(scalars[_EXEC]) >> np.arange(WAVE, dtype=np.uint32)) & 1 == 1


def _of_global(instruction: Any) -> Accesses:
    size, at = _size(instruction.op.name), _register(instruction.addr)
    offset, base = _signed(int(instruction.offset), 13), _register(instruction.saddr)

    def accesses(registers: Registers) -> tuple[np.ndarray, int]:
        scalars, vectors = registers
        addresses = vectors[at].astype(np.uint64)
        if base < _NO_REGISTER:
            addresses = addresses + np.uint64((_pair(scalars, base) + offset) & (1 << 64) - 1)
        else:
            addresses = addresses | vectors[at + 1].astype(np.uint64) << np.uint64(32)
            addresses = addresses + np.uint64(offset & (1 << 64) - 1)
        return addresses[_lanes(scalars)], size

    return accesses


def _of_buffer(instruction: Any) -> Accesses:
    size, at = _size(instruction.op.name), _register(instruction.vaddr)
    base, more = _register(instruction.srsrc), _register(instruction.soffset)
    offset, adds = int(instruction.offset), bool(instruction.offen)

    def accesses(registers: Registers) -> tuple[np.ndarray, int]:
        scalars, vectors = registers
        within = np.full(WAVE, offset, dtype=np.uint64)
        if adds:
            within = within + vectors[at].astype(np.uint64)
        # What lies beyond the buffer is not accessed: so kernels leave lanes out.
        taken = _lanes(scalars) & (within + np.uint64(size) <= np.uint64(scalars[base + 2]))
        start = _pair(scalars, base) & (1 << 48) - 1
        start += 0 if more == _NO_REGISTER else int(scalars[more])
        return within[taken] + np.uint64(start), size

    return accesses


def _of_scalars(instruction: Any) -> Accesses:
    size, base = _size(instruction.op.name), _register(instruction.sbase)
    offset, more = _signed(int(instruction.offset), 21), _register(instruction.soffset)

    def accesses(registers: Registers) -> tuple[np.ndarray, int]:
        scalars, _ = registers
        start = _pair(scalars, base) + offset
        start += 0 if more == _NO_REGISTER else int(scalars[more])
        return np.array([start & ~3], dtype=np.uint64), size

    return accesses


_ACCESSES: dict[str, Callable[[Any], Accesses]] = {
    "GLOBAL": _of_global,
    "FLAT": _of_global,
    "MUBUF": _of_buffer,
    "SMEM": _of_scalars,
}


_loaded = False


def _folder() -> Path:
    """Where the compiled instructions of this emulator, these repairs and this processor are."""
    texts = [Path(emu.__file__).read_bytes(), Path(repairs.__file__).read_bytes()]
    texts += [platform.processor().encode(), ARCHITECTURE.encode()]
    texts += [line for line in Path("/proc/cpuinfo").read_bytes().split(b"\n") if b"flags" in line][
        :1
    ]
    return BUILD / hashlib.sha256(b"\n".join(texts)).hexdigest()[:16]


def _load_kept() -> None:
    """Takes the instructions that earlier processes compiled, once."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    device, folder = Device["CPU"], _folder()
    kinds = {_name(kind): kind for kind in _kinds()}
    for path in sorted(folder.glob("*.pickle")):
        kind, base, mask, size, name, binary, places = pickle.loads(path.read_bytes())
        object_ = TinyELF(binary, name, device.renderer.target, ())
        program = SimpleNamespace(arg=SimpleNamespace(globals=places))
        entry = program, device.runtime(object_)
        emu._canonical_runner_cache.append((kinds[kind], base, mask, size, entry))


def _kinds() -> Iterator[type]:
    """The emulator's classes of instructions."""
    for handled in emu._INST_HANDLERS:
        yield handled
        yield from handled.__subclasses__()


def _name(kind: type) -> str:
    """The name of a class of instructions with that of its module, of which each family has one."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _keep(entry: tuple[type, int, int, int, tuple[Any, Any]]) -> None:
    kind, base, mask, size, (program, _) = entry
    binary = program.to_elf()
    record = _name(kind), base, mask, size, binary.name, binary.lib, tuple(program.arg.globals)
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind.__name__}-{size}-{mask:x}-{base:x}"[:200]
    part = path.with_suffix(f".{id(record)}")
    part.write_bytes(pickle.dumps(record))
    part.replace(path.with_suffix(".pickle"))
