"""What tinygrad's emulator lacks or has wrong for kernels of Triton on RDNA 3, found by running
them: each function says what the instruction does on the device, by AMD's "RDNA3.5" manual of its
instruction set (chapters 8 to 11)."""

from __future__ import annotations

import re
from typing import Any

import tinygrad.renderer.amd as formats
import tinygrad.runtime.ops_cpu as ops_cpu
import tinygrad.runtime.support.hcq2 as hcq2
from test.mockgpu.amd import emu
from test.mockgpu.amd.emu import _c, _iattr, _lane_active, _u64, ir3
from tinygrad.device import Device
from tinygrad.dtype import AddrSpace, dtypes
from tinygrad.uop.ops import UOp

_BYTES = {"U8": 1, "I8": 1, "B8": 1, "U16": 2, "I16": 2, "B16": 2} | {
    f"B{32 * words}": 4 * words for words in (1, 2, 3, 4)
}


def apply() -> None:
    """Changes the emulator for this process."""
    ops_cpu.CPUDevice.__init__ = _without_workers
    ops_cpu.CPULLVMRenderer.supported_dtypes = _with_half
    emu._load_dpp16_src0 = lanes_of_another
    emu._Ctx.compile_lane_pcode = _with_literals(emu._Ctx.compile_lane_pcode)
    formats._load_formats()["rdna3"].append(ir3.MUBUF)
    emu._INST_HANDLERS[ir3.MUBUF] = buffer_access
    emu._INST_HANDLERS[ir3.DS] = _half_loads(emu._INST_HANDLERS[ir3.DS])
    _declare_intrinsics()


def _without_workers(self: Any, device: str = "") -> None:
    """A device of the host without the programs of its worker threads, which want a C compiler and
    serve no instruction."""
    self.workers, self.prgs = [], {}
    hcq2.HCQ2Compiled.__init__(
        self, device, ops_cpu.CPUAllocator(self), [ops_cpu.CPULLVMRenderer], ops_cpu.CPUProgram,
        arch="x86_64,native",
    )  # fmt: skip


def _with_half(self: Any) -> set[Any]:
    """Float16 as the processor has it (F16C). Tinygrad makes such numbers of integers, and takes
    those below 2⁻¹⁴ for zeros; a device keeps them, as kernels ask
    (.amdhsa_float_denorm_mode_16_64 3)."""
    return set(dtypes.all) - set(dtypes.fp8s)


def lanes_of_another(ctx: Any, instruction: Any, lane: UOp, fallback: UOp) -> UOp:
    """The first operand of DPP16, of another lane: all lanes are read before one is written, also
    where source and destination are one register."""
    masks = (_iattr(instruction, name, 0xF) for name in ("row_mask", "bank_mask"))
    of = emu._dpp16_ctrl(lane, _iattr(instruction, "dpp"), *masks, ctx.wave_size)
    source, enabled, valid = of
    nothing = _c(0, dtypes.int)
    bound = _iattr(instruction, "bc")
    if bound is not None and not _iattr(instruction, "fi", 0):
        # A lane that is off is as one out of bounds.
        place = (enabled & valid).where(source, nothing)
        valid = valid & _lane_active(ctx.rexec(), place)
    place, before = (enabled & valid).where(source, nothing), ctx.range()
    kept = UOp.placeholder((ctx.wave_size,), dtypes.uint32, slot=7, addrspace=AddrSpace.LOCAL)
    register = ctx.inst_field(type(instruction).vsrc0)
    filled = kept.index(before).store(ctx.rvgpr_dyn(register, before)).end(before)
    read = kept.after(filled).index(place).load()
    return enabled.where(
        valid.where(read, UOp.const(0, fallback.dtype) if bound else fallback), fallback
    )


def _with_literals(original: Any) -> Any:
    """Operations over lanes, such as v_permlanex16, may have a literal as an operand."""

    def compiled(self: Any, operation: Any, instruction: Any) -> Any:
        literal, read = self.optional_field(instruction, "literal"), emu._Ctx.rsrc_dyn
        if literal is None:
            return original(self, operation, instruction)

        def with_literal(
            self: Any, at: Any, lane: Any, bits: int = 32, lit: Any = None, **more: Any
        ) -> Any:
            return read(self, at, lane, bits, literal, **more)

        emu._Ctx.rsrc_dyn = with_literal
        try:
            return original(self, operation, instruction)
        finally:
            emu._Ctx.rsrc_dyn = read

    return compiled


def _joined(old: UOp, value: UOp, high: bool) -> UOp:
    """Sixteen bits in one half of a register whose other half stays."""
    half = value & _c(0xFFFF)
    return (old & _c(0xFFFF)) | (half << _c(16)) if high else (old & _c(0xFFFF0000)) | half


def _extended(value: UOp, size: int) -> UOp:
    """A signed number of 1 or 2 bytes as one of 32 bits."""
    narrow = {1: dtypes.int8, 2: dtypes.int16}[size]
    return value.cast(narrow).cast(dtypes.int32).bitcast(dtypes.uint32)


def _half_loads(original: Any) -> Any:
    """Loads of 16 bits from shared memory keep the other half of the register."""

    def compiled(instruction: Any, ctx: Any) -> UOp:
        name, kind = emu._op_name(instruction), type(instruction)
        if "D16" not in name or "LOAD" not in name:
            return original(instruction, ctx)
        size = 1 if "8_D16" in name else 2
        mask, lane = ctx.rexec(), ctx.range()
        register, target = ctx.inst_field(kind.addr), ctx.inst_field(kind.vdst)
        offset = (ctx.inst_field(kind.offset1) << _c(8)) | ctx.inst_field(kind.offset0)
        at = ctx.rvgpr_dyn(register, lane) + offset
        word = ctx.lds.index((at >> _c(2)).valid(_lane_active(mask, lane)))
        value = (word >> ((at & _c(3)) * _c(8))) & _c((1 << 8 * size) - 1)
        if "_I8" in name:
            value = _extended(value, 1)
        value = _joined(ctx.rvgpr_dyn(target, lane), value, name.endswith("_HI"))
        return UOp.sink(ctx.wvgpr_dyn(target, lane, value, mask).end(lane), *ctx.inc_pc())

    return compiled


def buffer_access(instruction: Any, ctx: Any) -> UOp:
    """Raw loads from buffers and stores to them: the address is base + offset of a register + that
    of the instruction + that of a scalar; an access past the buffer reads 0 and stores nothing."""
    name, kind = instruction.op.name, type(instruction)
    if name.endswith("_INV"):
        return UOp.sink(*ctx.inc_pc())
    match = re.fullmatch(r"BUFFER_(LOAD|STORE)_(D16_)?(HI_)?([UIB]\d+)", name)
    assert match, f"{name} is not emulated"
    assert not instruction.idxen and not instruction.tfe
    half, high, size = bool(match[2]), bool(match[3]), _BYTES[match[4]]
    data, register = ctx.inst_field(kind.vdata), ctx.inst_field(kind.vaddr)
    first = ctx.inst_field(kind.srsrc) * _c(4)
    base = _u64(ctx.rsgpr_dyn(first), ctx.rsgpr_dyn(first + _c(1))) & _wide((1 << 48) - 1)
    bytes_ = ctx.rsgpr_dyn(first + _c(2)).cast(dtypes.uint64)
    more = ctx.rsrc_dyn(ctx.inst_field(kind.soffset), None).cast(dtypes.uint64)
    mask, lane = ctx.rexec(), ctx.range()
    within = ctx.inst_field(kind.offset).cast(dtypes.uint64)
    if instruction.offen:
        within = within + ctx.rvgpr_dyn(register, lane).cast(dtypes.uint64)
    inside = _lane_active(mask, lane) & ((within + _wide(size)) <= bytes_)
    at = inside.where(base + more + within, _wide(0))
    words = max(1, size // 4)
    if match[1] == "STORE":
        stored = []
        for word in range(words):
            value = ctx.rvgpr_dyn(data + _c(word), lane)
            value = value >> _c(16) if high else value
            bits = min(32, 8 * size)
            stored += emu._mem_store(ctx.vmem, at + _wide(4 * word), value, inside, 64, bits)
        return UOp.sink(UOp.group(*stored).end(lane), *ctx.inc_pc())
    values = []
    for word in range(words):
        index = (at + _wide(4 * word)) >> _wide(2)
        values.append(inside.where(ctx.vmem.index(index.valid(inside)), _c(0)))
    if size < 4:  # aligned to its size, as Triton's are
        shift = (at.cast(dtypes.uint32) & _c(3)) * _c(8)
        value = (values[0] >> shift) & _c((1 << 8 * size) - 1)
        if match[4][0] == "I":
            value = inside.where(_extended(value, size), _c(0))
        values = [_joined(ctx.rvgpr_dyn(data, lane), value, high) if half else value]
    written = [
        ctx.wvgpr_dyn(data + _c(word), lane, value, mask) for word, value in enumerate(values)
    ]
    return UOp.sink(UOp.group(*written).end(lane), *ctx.inc_pc())


def _wide(value: int) -> UOp:
    return UOp.const(value, dtypes.uint64)


def _declare_intrinsics() -> None:
    """LLVM before 19 wants its intrinsics declared, and denormal float64 constants as bits."""
    names = {"float": "f32", "double": "f64", "half": "f16"}
    compiler = type(Device["CPU"].renderer.compiler)
    owner = next(each for each in compiler.__mro__ if "compile" in each.__dict__)
    original = owner.__dict__["compile"]

    def compile_(self: Any, source: str) -> Any:
        for name, kind in sorted(set(re.findall(r"@llvm\.(\w+)\.(float|double|half)\(", source))):
            declared = f"declare {kind} @llvm.{name}.{names[kind]}("
            source = source.replace(f"@llvm.{name}.{kind}(", f"@llvm.{name}.{names[kind]}(")
            source += "" if declared in source else f"\n{declared}{kind})\n"
        for sign, bits in (("-", "8000000000000001"), ("", "0000000000000001")):
            source = source.replace(f"double {sign}5e-324", f"double 0x{bits}")
        return original(self, source)

    owner.compile = compile_
