"""Conversion: a checkpoint of one kind becomes one of the other, or one of another format.

`convert()` joins the metadata of the network, of its sampler and of its tokenizer with the tensors.
One tensor is read, recoded and written at a time, in pieces.  A tokenizer and chat template become
the keys of a GGUF file (`tokenizer_keys`), and back (`write_tokenizer`); `sfumato.text` reads both.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from torch import Tensor

from sfumato.convert.files import (
    DTYPES,
    Progress,
    check_checkpoint_folder,
    config_files,
    save_folder,
    save_gguf,
)
from sfumato.convert.tower import (
    MMPROJ_TARGETS,
    hf_tower_tensors,
    mmproj_metadata,
    mmproj_tensors,
    open_source,
)
from sfumato.diffusion.checkpoint_defaults import checkpoint_defaults, defaults_to_gguf
from sfumato.model.families import family_of, open_checkpoint
from sfumato.model.loading import config_of, expected_shapes
from sfumato.model.model_config import ModelConfig
from sfumato.model.quantization import TARGETS, QuantRecipe, formats
from sfumato.model.vision.config import VisionConfig, vision_to_hf
from sfumato.model.vision.loading import Tower, find_tower
from sfumato.text.markers import ChatMarkers
from sfumato.text.template import ChatTemplate
from sfumato.text.tokenizer import (
    PIPELINES,
    SPACE,
    UNUSED,
    Pipeline,
    Tokenizer,
    TokenizerError,
    from_gguf,
    from_json,
)
from sfumato.weights.checkpoint import Checkpoint, Kind, is_mmproj
from sfumato.weights.errors import CheckpointError
from sfumato.weights.files.atomic_write import check_writable
from sfumato.weights.files.jsonfile import read_object
from sfumato.weights.files.tensorfile import Files, TensorInfo, TensorStream, require_readable
from sfumato.weights.formats import of_files
from sfumato.weights.joined import JoinedTensor

HF_TARGETS = tuple(format.lower() for format in DTYPES)
NEAREST = "nearest"
"""The target of narrow checkpoints that keeps what loading makes of each tensor."""
DEFAULTS = {"gguf": "q4_k_m", "safetensors": "bf16"}

_FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q6_K": 18}
"""GGUF's `general.file_type`, by the format of most tensors."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Converted:
    """What was written. `notes` say what the new checkpoint lacks."""

    path: Path
    target: str
    tensors: tuple[TensorStream, ...]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def convert(
    source: str | Path,
    out: str | Path,
    to: str | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Converts the checkpoint `source` to a GGUF file (`out` ends in .gguf) or an HF folder.

    to: a name in `TARGETS`; for a folder "bf16", "f16" or "f32". None: "q4_k_m" and "bf16"; for a
    narrow source "nearest", the blocks that are nearest to its matrices. A GGUF file with "mmproj"
    in its name gets the vision tower alone, as "bf16", "f16", "f32" or "q8_0"; a folder that is
    made of a GGUF file gets the tower of the mmproj file beside it.
    force: replaces what is there. Raises CheckpointError, ConfigError, ValueError or OSError,
    naming what cannot be used or written; `out` is then as it was.
    """
    out = Path(out)
    if is_mmproj(out.name):
        return _convert_tower(source, out, to or "bf16", force, progress)
    kind = _kind_of(out)
    if to != NEAREST:
        recipe_of(out, to)  # before anything is opened
    check_writable(out, force, check_checkpoint_folder)
    checkpoint = open_checkpoint(source)
    to, recipe = recipe_of(out, to, checkpoint)
    if kind == checkpoint.kind == "safetensors":
        raise ValueError(f"{out}: both are safetensors; give a name that ends in .gguf")
    shapes = expected_shapes(config_of(checkpoint))
    checkpoint.check_tensors(shapes)
    chosen = _kept(checkpoint, shapes) if to == NEAREST else formats(shapes, recipe)
    return write_checkpoint(checkpoint, out, to, recipe, chosen, force, progress)


@dataclass(frozen=True)
class HeldTensor(TensorInfo):
    """A tensor of a checkpoint whose values are others now, which are in memory."""

    value: Tensor = field(repr=False)

    def read(self, files: Files) -> Tensor:
        return self.value


def write_changed(
    checkpoint: Checkpoint, weights: Mapping[str, Tensor], out: Path, tower: Tower | None
) -> None:
    """Writes a folder in bfloat16 with these weights, by canonical name, and all else as the
    checkpoint has it, in place of an earlier one. tower: see `write_checkpoint`. Raises as
    `convert`."""
    held = {
        name: HeldTensor(name, tuple(value.shape), "F32", value.nbytes, out, 0, value)
        for name, value in weights.items()
    }
    changed = replace(checkpoint, tensors={**checkpoint.tensors, **held})
    chosen = dict.fromkeys(weights, "BF16")
    write_checkpoint(changed, out, "bf16", TARGETS["bf16"], chosen, True, None, tower)


def write_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    to: str,
    recipe: QuantRecipe,
    chosen: Mapping[str, str],
    force: bool,
    progress: Progress | None,
    tower: Tower | None = None,
) -> Converted:
    """Writes a checkpoint whose tensors have been checked: a GGUF file, with the formats of
    `chosen` (canonical name → format), or a folder, in the recipe's. tower: for a folder, in place
    of the checkpoint's own, or of the mmproj file beside it. Raises as `convert`."""
    config, metadata = config_of(checkpoint), checkpoint.metadata
    notes = _notes(checkpoint, chosen)
    if _kind_of(out) == "gguf":
        if checkpoint.vision:
            notes.append(
                f"the {len(checkpoint.vision)} tensors of the vision tower are left out; "
                f"`sfumato convert {checkpoint.path} mmproj-NAME.gguf` writes them"
            )
        tensors = gguf_tensors(checkpoint, chosen, config)
        metadata = _gguf_metadata(checkpoint, config, recipe)
        save_gguf(out, metadata, tensors, force, progress)
        has_tokenizer = "tokenizer.ggml.tokens" in metadata
    else:
        shapes = {name: checkpoint.tensors[name].shape for name in chosen}
        tensors = hf_tensors(checkpoint, shapes, recipe.base)
        own = find_tower(checkpoint, config.hidden_size) if checkpoint.kind == "gguf" else None
        if tower is None and own is not None:
            notes.append(f"the vision tower of {own[1].path.name} is written too")
        tower = tower or own
        vision = None if tower is None else tower[0]
        if checkpoint.kind == "safetensors":
            files = _own_files(checkpoint, recipe.base, vision)
            write_text = partial(_copy_text, checkpoint.folder)
            has_tokenizer = (checkpoint.folder / "tokenizer.json").is_file()
        else:
            files = _hf_files(checkpoint, config, recipe.base, vision)
            write_text = partial(write_tokenizer, metadata)
            has_tokenizer = "tokenizer.ggml.tokens" in metadata
        if tower is not None:
            tensors += hf_tower_tensors(*tower, recipe.base)
        else:
            tensors += [_as_it_is(checkpoint, info) for info in checkpoint.vision.values()]
        save_folder(out, files, tensors, write_text, force, progress)
    if not has_tokenizer:
        notes.append(f"{checkpoint.path} has no tokenizer, so the new checkpoint has none")
    return Converted(out, to, tuple(tensors), tuple(notes))


def _convert_tower(
    source: str | Path, out: Path, to: str, force: bool, progress: Progress | None
) -> Converted:
    """Writes an mmproj file of a checkpoint's tower, or of that of another such file."""
    if to not in MMPROJ_TARGETS:
        known = ", ".join(MMPROJ_TARGETS)
        raise ValueError(f"--to: {to!r} is none of {known}, which an mmproj file can be")
    check_writable(out, force, check_checkpoint_folder)
    config, tower = open_source(source)
    tensors = mmproj_tensors(config, tower, to)
    save_gguf(out, mmproj_metadata(config, tower, to), tensors, force, progress)
    return Converted(out, to, tuple(tensors), ())


def _kind_of(out: Path) -> Kind:
    return "gguf" if out.suffix.lower() == ".gguf" else "safetensors"


def recipe_of(
    out: Path, to: str | None, source: Checkpoint | None = None
) -> tuple[str, QuantRecipe]:
    """The target's name and recipe, if what `out` names can be of it; that of `NEAREST` is the one
    of most of the source's narrow tensors. Raises ValueError."""
    kind = _kind_of(out)
    if out.suffix.lower() == ".safetensors":
        raise ValueError(f"{out}: name a folder for safetensors, or a file that ends in .gguf")
    narrow = _narrow(source) if source is not None and kind == "gguf" else {}
    if narrow and to in (None, NEAREST):
        base = Counter(narrow.values()).most_common(1)[0][0]
        return NEAREST, QuantRecipe(base, _FILE_TYPES.get(base, TARGETS["bf16"].file_type))
    if to == NEAREST:
        raise ValueError(f"--to: {NEAREST!r} is for narrow checkpoints to GGUF files alone")
    known = TARGETS if kind == "gguf" else HF_TARGETS
    name = to or DEFAULTS[kind]
    if name not in known:
        if name.upper() in of_files("blocks") and kind == "gguf":
            raise ValueError(
                f"--to: {name!r} is none of {', '.join(known)}: blocks of {name.upper()} are read "
                "and run, and not made here"
            )
        where = "a GGUF file" if kind == "gguf" else "a folder of safetensors"
        raise ValueError(f"--to: {name!r} is none of {', '.join(known)}, which {where} can be")
    return name, TARGETS[name]


def _kept(checkpoint: Checkpoint, shapes: Shapes) -> dict[str, str]:
    """The format of every tensor for `NEAREST`: floats stay bfloat16, vectors and routers F32."""
    plain = formats(shapes, TARGETS["bf16"])
    return {name: plain[name] for name in shapes} | _narrow(checkpoint)


def _narrow(checkpoint: Checkpoint) -> dict[str, str]:
    """The formats of the tensors that reading makes of a checkpoint's narrow matrices."""
    return {
        name: info.format
        for name, info in checkpoint.tensors.items()
        if isinstance(info, JoinedTensor) and info.is_narrow
    }


def _notes(checkpoint: Checkpoint, chosen: Mapping[str, str]) -> list[str]:
    notes = []
    now = {name: checkpoint.tensors[name].format for name in chosen}
    coded = {
        now[name]
        for name, format in chosen.items()
        if format != now[name] and {format, now[name]} <= of_files("blocks").keys()
    }
    if coded:
        notes.append(
            f"the source is quantized already ({', '.join(sorted(coded))}): its errors add to the "
            "new ones"
        )
    return notes


def _gguf_metadata(
    checkpoint: Checkpoint, config: ModelConfig, recipe: QuantRecipe
) -> Mapping[str, Any]:
    general = {"general.file_type": recipe.file_type, "general.quantization_version": 2}
    if checkpoint.kind == "gguf":
        kept = {k: v for k, v in checkpoint.metadata.items() if k != "general.alignment"}
        return kept | general
    family, folder = family_of(checkpoint), checkpoint.folder
    return {
        "general.architecture": family.architecture,
        "general.type": "model",
        "general.name": folder.resolve().name,
        **general,
        **family.config.to_gguf(config),
        **defaults_to_gguf(checkpoint_defaults(checkpoint), family.sampler),
        **tokenizer_keys(folder, config.vocab_size, family.markers),
    }


def _hf_files(
    checkpoint: Checkpoint, config: ModelConfig, format: str, tower: VisionConfig | None
) -> dict[str, Any]:
    """The JSON files that describe the network, its sampler and its tower, by name."""
    family, tokens = family_of(checkpoint), checkpoint.metadata.get("tokenizer.ggml.tokens", [])
    ends = [tokens.index(text) for text in family.markers.end_tokens if text in tokens]
    end_ids = list(dict.fromkeys((*config.eos_ids, *ends)))
    return config_files(family, config, checkpoint_defaults(checkpoint), end_ids, format, tower)


_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def _own_files(checkpoint: Checkpoint, format: str, tower: VisionConfig | None) -> dict[str, Any]:
    """The JSON files of a folder of safetensors, for its tensors as plain floats of a format, and
    for this tower in place of its own."""
    stale = ("quantization_config", "compression_config", "torch_dtype")
    config = {key: v for key, v in checkpoint.metadata["config"].items() if key not in stale}
    files = {"config.json": config | {"dtype": DTYPES[format]}}
    if generation := checkpoint.metadata["generation_config"]:
        files["generation_config.json"] = generation
    if tower is not None:
        files["config.json"]["vision_config"] = vision_to_hf(tower)
    return files


def _copy_text(source: Path, folder: Path) -> None:
    for name in _TEXT_FILES:
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())


def _as_it_is(checkpoint: Checkpoint, info: TensorInfo) -> TensorStream:
    """A tensor of a vision tower."""
    require_readable(info)
    file = checkpoint.files[info.file]
    return TensorStream(info.name, info.shape, info.format, lambda: iter((file.data(info.name),)))


def gguf_tensors(
    checkpoint: Checkpoint,
    chosen: Mapping[str, str],
    config: ModelConfig,
) -> list[TensorStream]:
    """The tensors of a GGUF file: the constants of the config, then those of `chosen` (canonical
    name → format, all of the network's) in their order."""
    family = family_of(checkpoint)
    constants = family.config.gguf_constants(config).items()
    names = family.tensor_names
    streams = [TensorStream.of(name, value, "F32") for name, value in constants]
    for name, format in chosen.items():
        stack = names.stack_of(name)
        if stack is None or not stack.ranges:
            streams.append(_stream(checkpoint, names.gguf_name(name), name, format))
            continue
        prefix = name.removesuffix(stack.name)
        for part, own in enumerate(stack.ranges):
            at = (None, part, len(stack.ranges))
            streams.append(_stream(checkpoint, names.gguf_name(prefix + own), name, format, at))
    return streams


def hf_tensors(checkpoint: Checkpoint, shapes: Shapes, format: str) -> list[TensorStream]:
    """The tensors of a safetensors folder, all in one format: F32, F16 or BF16."""
    names, streams = family_of(checkpoint).tensor_names, list[TensorStream]()
    for name, shape in shapes.items():
        stack = names.stack_of(name)
        if stack is None or not stack.in_parts:
            streams.append(_stream(checkpoint, names.transformers_name(name), name, format))
            continue
        prefix = names.transformers_name(name.removesuffix(stack.name))
        for number in range(shape[0]):
            for part, own in enumerate(stack.parts):
                at = (number, part, len(stack.parts))
                file_name = prefix + own.format(number)
                streams.append(_stream(checkpoint, file_name, name, format, at))
    return streams


StackPart = tuple[int | None, int, int]
"""Which matrix of a stack (None: every one), and which of how many equal ranges of its rows."""


def _stream(
    checkpoint: Checkpoint, file_name: str, name: str, format: str, at: StackPart | None = None
) -> TensorStream:
    """A tensor as it is written, or the part of a stack that files have by themselves: a matrix, or
    a range of rows of all matrices."""
    shape = checkpoint.tensors[name].shape
    if at is not None:
        own, part, parts = at
        numbers = range(shape[0]) if own is None else (own,)
        shape = *(shape[:1] if own is None else ()), shape[1] // parts, shape[2]

    def pieces() -> Iterator[Tensor]:
        if at is None:
            yield from checkpoint.recoded(name, format)
            return
        for number in numbers:
            yield from checkpoint.recoded_part(name, format, number, part, parts)

    def chunks() -> Iterator[Tensor]:
        try:
            yield from pieces()
        except CheckpointError:
            raise  # names the file and the tensor of it
        except ValueError as error:
            info = checkpoint.tensors[name]
            raise ValueError(f"{info.file}: {info.name}: as {format}: {error}") from error

    return TensorStream(file_name, shape, format, chunks)


NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6  # ggml's token types, with UNUSED
SCORE = -1000.0  # what published files give every token: BPE does not use scores

_PRINTABLE = "\n" + "".join(map(chr, range(0x20, 0x7F)))
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_NAMED = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown", "mask": "mask"}


def tokenizer_keys(folder: Path, rows: int, markers: ChatMarkers) -> dict[str, Any]:
    """The `tokenizer.*` keys of the files in a checkpoint's folder; empty without tokenizer.json.

    rows: of the embedding; llama.cpp wants a token for each. markers: of the chat format; those
    that other programs look for in the text are written as visible tokens. Raises TokenizerError or
    TemplateError for files that cannot be used, or that no kind of vocabulary of GGUF can say.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    inner = from_json(path)
    state = json.loads(inner.to_str())
    if state["model"]["type"] != "BPE":
        raise TokenizerError(f"{path}: a {state['model']['type']} model; only BPE can be converted")
    ids = inner.get_vocab(with_added_tokens=True)
    pipeline = _pipeline(path, state)
    space = " " if pipeline.by_bytes else _space(path, state, ids)
    tokens = {i: token.replace(" ", space) for token, i in ids.items()}
    if sorted(tokens) != list(range(len(tokens))) or len(tokens) > rows:
        raise TokenizerError(
            f"{path}: its {len(tokens)} ids are not 0 to {len(tokens) - 1}, or more than the "
            f"embedding's {rows}; use the tokenizer that the model was trained with"
        )
    names = _special_names(folder / "tokenizer_config.json")
    named_ids = {long: ids.get(names[short]) for short, long in _NAMED.items()}
    metadata = {
        "tokenizer.ggml.model": pipeline.model,
        **({} if pipeline.pre is None else {"tokenizer.ggml.pre": pipeline.pre}),
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(rows)],
        **(
            {} if pipeline.by_bytes else {"tokenizer.ggml.scores": np.full(rows, SCORE, np.float32)}
        ),
        "tokenizer.ggml.token_type": _types(inner, tokens, rows, markers.visible),
        "tokenizer.ggml.merges": [
            " ".join(part.replace(" ", space) for part in merge)
            for merge in state["model"]["merges"]
        ],
        **{f"tokenizer.ggml.{key}_token_id": i for key, i in named_ids.items() if i is not None},
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": named_ids["bos"] is not None or not pipeline.by_bytes,
    }
    source = ChatTemplate.from_folder(folder).source if _has_template(folder) else ""
    _check(path, metadata, [source, f"{markers.turn_open}user\nHi{markers.turn_close}"], markers)
    return metadata | ({"tokenizer.chat_template": source} if source else {})


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja, as far as the keys are
    there. Raises TokenizerError for keys that contradict each other."""
    source = metadata.get("tokenizer.chat_template")
    if isinstance(source, str):
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    if "tokenizer.ggml.tokens" not in metadata:
        return
    inner, _ = from_gguf(metadata)
    inner.save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {
        f"{short}_token": tokens[i]
        for short, long in _NAMED.items()
        if (i := metadata.get(f"tokenizer.ggml.{long}_token_id")) is not None
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _pipeline(path: Path, state: Mapping[str, Any]) -> Pipeline:
    """What a GGUF file calls the pipeline. Of the vocabularies of characters there is one; `_space`
    and `_check` look further. Raises TokenizerError."""
    by_bytes = (state["decoder"] or {}).get("type") == "ByteLevel"
    named = [each for each in PIPELINES if each.by_bytes == by_bytes]
    if not by_bytes:
        return named[0]
    ours = state["normalizer"], _without_offsets(state["pre_tokenizer"])
    for each in () if state["model"].get("ignore_merges") else named:
        if ours == (each.normalizer, _without_offsets(each.pre_tokenizer)):
            return each
    raise TokenizerError(
        f"{path}: how it normalizes and splits texts before BPE is known to GGUF files under no "
        f"name; known are {', '.join(each.pre or '' for each in named)}"
    )


def _without_offsets(part: object) -> str:
    """A part of a pipeline, without what only says where tokens stand in the text."""
    return json.dumps(part, sort_keys=True).replace('"trim_offsets": true', '"trim_offsets": false')


def _space(path: Path, state: Mapping[str, Any], ids: Mapping[str, int]) -> str:
    """The text of a space in GGUF's tokens, where spaces always become U+2581 first."""
    normalizer = state["normalizer"]
    if normalizer is None:
        if " " in ids and SPACE in ids:
            raise TokenizerError(
                f"{path}: has tokens for a space and for {SPACE!r}, which GGUF files cannot tell "
                "apart"
            )
        return SPACE
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if normalizer != replaces:
        raise TokenizerError(
            f"{path}: its normalizer is a {normalizer.get('type')}; GGUF files know only the "
            f"replacement of spaces by {SPACE!r}"
        )
    return " "  # whatever spaces are in its tokens then are meant


def _special_names(config: Path) -> dict[str, str]:
    """The texts of the tokens that have a role, by role."""
    try:
        fields = read_object(config) if config.is_file() else {}
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error
    names = {}
    for role in _NAMED:
        text = fields.get(f"{role}_token")
        text = text.get("content") if isinstance(text, dict) else text
        names[role] = text if isinstance(text, str) else f"<{role}>"
    return names


def _types(
    inner: tokenizers.Tokenizer, tokens: Mapping[int, str], rows: int, visible: Sequence[str]
) -> np.ndarray:
    types = np.full(rows, UNUSED, np.int32)
    for i, token in tokens.items():
        types[i] = BYTE if _BYTE.fullmatch(token) else NORMAL
    for i, added in inner.get_added_tokens_decoder().items():
        shown = added.content in visible or not added.special
        types[i] = USER_DEFINED if shown else CONTROL
    return types


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and "chat_template" in read_object(config)


def _check(
    path: Path, metadata: Mapping[str, Any], texts: Sequence[str], markers: ChatMarkers
) -> None:
    """Raises TokenizerError where the keys encode a text otherwise than the file does."""
    before = Tokenizer.from_file(path, markers.tokens)
    after = Tokenizer.from_gguf(metadata, markers.tokens)
    for text in (_PRINTABLE, "  two  spaces\n\n", *texts):
        if before.encode(text) != after.encode(text):
            raise TokenizerError(
                f"{path}: a GGUF file's tokenizer would encode {text[:40]!r}… otherwise; its kind "
                "cannot be converted"
            )
