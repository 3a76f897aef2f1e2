"""A device that holds no numbers, on which a step is traced: any wait of the host for it shows.

On CPU tensors `.cpu()`, `.tolist()` and `.item()` dispatch nothing, so a step that keeps everything
on the device can only be told from one that does not where tensors claim to be on another one.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sfumato.model.loading import place
from sfumato.model.model_config import ModelConfig
from sfumato.model.network import Network
from sfumato.model.transformer import Transformer

DEVICE = torch.device("cuda", 0)
"""What tensors of `fake_device` claim to be on; this build of torch need not know CUDA."""

_COPIES = ("aten::_to_copy", "aten::copy_", "aten::copy", "aten::_copy_from")


class HostTraffic(AssertionError):
    """An operation that reads on the host, copies between devices, or has a shape that depends on
    data: none of them can be captured in a graph, and each makes the host wait."""


class Trace(TorchDispatchMode):
    """Counts operations, and refuses those that make the host wait for the device."""

    def __init__(self, copies: int = 0) -> None:
        """copies: from the device into given memory of the host, without waiting, that are let
        pass."""
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.copies, self._allowed = 0, copies

    @property
    def count(self) -> int:
        """How many tensor operations there were, views included."""
        return sum(self.operations.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "prim":  # a tensor's device is asked for
            self.operations[str(func)] += 1
        _refuse_data_dependence(func, args, kwargs)
        out = func(*args, **kwargs)
        if _copies_out(func, args) and self.copies < self._allowed:
            self.copies += 1
            return out
        _refuse_crossing(func, (args, kwargs), out)
        return out


def _refuse_data_dependence(func: Any, args: Any, kwargs: Any) -> None:
    tags = func.tags
    if torch.Tag.data_dependent_output in tags:
        raise HostTraffic(f"{func} reads numbers of the device on the host")
    masks = [t for t in _tensors((args[1:2], kwargs)) if t.dtype in (torch.bool, torch.uint8)]
    indexes = func.name().partition(".")[0] in ("aten::index", "aten::index_put_")
    if masks if indexes else torch.Tag.dynamic_output_shape in tags:
        raise HostTraffic(f"{func} has a shape that depends on data")


def _copies_out(func: Any, args: Any) -> bool:
    """Whether it is a copy to the host for which the host does not wait."""
    if func.name() != "aten::copy_" or args[2:] != (True,):
        return False
    return bool(args[0].device.type == "cpu" and args[1].device == DEVICE)


def _refuse_crossing(func: Any, inputs: Any, out: Any) -> None:
    """Numbers by themselves, such as the 0 of `x + 0`, travel with the call and are no copy."""
    copies = func.name().partition(".")[0] in _COPIES
    given = {t.device for t in _tensors(inputs) if t.ndim or copies}
    made = {t.device for t in _tensors(out)}
    devices = given | made if given else set()
    if len(devices) > 1:
        raise HostTraffic(f"{func} copies between {' and '.join(sorted(map(str, devices)))}")


def _tensors(tree: Any) -> Iterable[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def fake_device() -> Iterator[None]:
    """Within it, new tensors are on DEVICE where nothing else is asked for, and hold no numbers.
    What is traced there has to be built there; `Trace()` inside it watches."""
    with _guarded(), FakeTensorMode(), torch.device(DEVICE):
        yield


def fake_network(config: ModelConfig) -> Network:
    """A network in bfloat16 on DEVICE, as the loader makes one; for use within `fake_device`."""
    transformer = Transformer(config)
    for name, value in list(transformer.named_parameters()):
        path, _, leaf = name.rpartition(".")
        dtype = torch.float32 if ".router." in name or value.ndim == 1 else torch.bfloat16
        place(transformer.get_submodule(path), leaf, value.detach().to(dtype))
    return Network(transformer, DEVICE, torch.bfloat16)


@contextmanager
def _guarded() -> Iterator[None]:
    """Lets this build of torch name a CUDA device.

    Indexing, `nonzero` and some more switch to the device of their tensor before a mode sees them,
    by a table of C++ objects that has no entry for CUDA in a build without it, and raise there. For
    as long as this lasts, the entry is that of the "meta" device, which does nothing.
    """
    cuda, meta, library = 1, 14, Path(torch.__file__).parent / "lib"  # numbers of c10::DeviceType
    libraries = [path for path in library.glob("*c10.*") if path.suffix in (".so", ".dylib")]
    if not libraries:
        pytest.skip("torch's table of devices cannot be reached on this system")
    name = "_ZN3c104impl26device_guard_impl_registryE"
    table = (ctypes.c_void_p * (meta + 1)).in_dll(ctypes.CDLL(str(libraries[0])), name)
    before = table[cuda]
    table[cuda] = before or table[meta]
    try:
        yield
    finally:
        table[cuda] = before


@contextmanager
def traced() -> Iterator[Trace]:
    """What is made inside on DEVICE holds no numbers, and must stay there."""
    with _guarded(), FakeTensorMode(), Trace() as trace:
        yield trace
