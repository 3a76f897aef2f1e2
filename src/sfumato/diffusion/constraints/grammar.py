"""Grammars: what a caller asks a reply to match, the grammar that llguidance makes of it over a
vocabulary, and its state along the tokens of one reply.

llguidance reads bytes, whatever tokens they come in.  A source is checked here as far as that needs
no vocabulary: its size, and what would reach behind the text (terminals that name tokens).  Errors
are ValueErrors whose message begins with the field that a source came in.  Loads torch for masks
alone, so that `trial_process` does without.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from sfumato.diffusion.constraints.held_schema import MOST_NOTES, held_schema
from sfumato.diffusion.constraints.schema_limits import (
    check_groups,
    check_rules,
    check_schema,
    entries,
)
from sfumato.refused import Refused
from sfumato.weights.errors import quoted

if TYPE_CHECKING:
    from torch import Tensor


def llguidance() -> ModuleType:
    """The library, imported at its first use. Raises ValueError where it is not installed."""
    try:
        import llguidance as library
    except ImportError:
        raise Refused(
            ("schema", "grammar"),
            "need the package llguidance",
            "install it with `pip install 'llguidance>=1.9'`",
        ) from None
    return library  # type: ignore[no-any-return,unused-ignore]


@dataclass(frozen=True, eq=False)
class GrammarTokens:
    """A vocabulary. Any thread may use it; what the library makes of it is made once, which takes
    seconds for a vocabulary of 262,144 tokens."""

    pieces: Callable[[], Sequence[bytes]]  # of each token its bytes; of a special one its name's
    special_ids: frozenset[int]
    end_ids: tuple[int, ...]  # each of them may end a reply
    encode: Callable[[str], list[int]]  # plain text to ids, as the model's tokenizer writes it
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def tokenizer(self) -> Any:
        """llguidance's `LLTokenizer`."""
        with self._lock:
            return self._tokenizer

    @cached_property
    def tokens(self) -> tuple[bytes, ...]:
        """The bytes of every token, by id."""
        return tuple(self.pieces())

    @cached_property
    def alphabet(self) -> frozenset[str] | None:
        """The characters that plain tokens can write; None: all, by tokens of single bytes."""
        plain = [text for i, text in enumerate(self.tokens) if i not in self.special_ids]
        if len({text for text in plain if len(text) == 1}) == 256:
            return None
        return frozenset("".join(text.decode(errors="ignore") for text in plain))

    @cached_property
    def single(self) -> dict[str, int]:
        """The tokens of short texts, by the texts that the tokenizer writes as one token."""
        texts, alphabet = [*map(chr, range(0x20, 0x7F)), "null", "true"], self.alphabet
        ids = {t: self.encode(t) for t in texts if alphabet is None or set(t) <= alphabet}
        one = {text: own[0] for text, own in ids.items() if len(own) == 1}
        return {text: token for text, token in one.items() if self.tokens[token] == text.encode()}

    @cached_property
    def _tokenizer(self) -> Any:
        library = llguidance()
        if not self.end_ids:
            raise Refused(("schema", "grammar"), "this model has no token that ends a reply")
        wrapper = _Wrapper(
            self.tokens, self.end_ids[0], sorted(self.special_ids | {*self.end_ids}), self.encode
        )
        return library.LLTokenizer(wrapper, eos_token=list(self.end_ids))


class _Wrapper:
    """What `LLTokenizer` takes in place of a tokenizer.

    It must really tokenize: where grammars force bytes, masks leave only the tokens with which the
    tokenizer would write them.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        end_id: int,
        special_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, end_id, special_ids
        self._encode = encode
        special = {*special_ids}
        self._bytes = {
            piece: i for i, piece in enumerate(tokens) if len(piece) == 1 and i not in special
        }

    def __call__(self, text: str | bytes) -> list[int]:
        """Bytes that are no text, as the first ones of a character that a grammar forces, are
        written as tokens of one byte. From the first byte that has none on, nothing is written:
        the grammar leaves the rest to masks."""
        if isinstance(text, str):
            return self._encode(text)
        ids: list[int] = []
        while text:
            try:
                return ids + self._encode(text.decode())
            except UnicodeDecodeError as error:
                start, stop = error.start, error.end
            ids += self._encode(text[:start].decode()) if start else []
            for at in range(start, stop):
                token = self._bytes.get(text[at : at + 1])
                if token is None:
                    return ids
                ids.append(token)
            text = text[stop:]
        return ids


Kind = Literal["schema", "regex", "choice", "grammar"]

LONGEST_SOURCE = 2**18
"""Characters of a source: a schema of that length that `schema_limits` lets pass compiles in about
half a second of CPU."""
MOST_TEXTS = 4096
"""A reply may be asked to be one of at most so many."""
MOST_INDENT = 20
"""Characters of white space before a line of a JSON text; within a line there are at most two."""

_SPACE = rf"[\x20\x09]{{1,2}}|\r?\n[\x20\x09]{{0,{MOST_INDENT}}}"
_ONE_OF = {"coerce_one_of": True}
_JSON_OPTIONS = {"whitespace_pattern": _SPACE} | _ONE_OF
# Texts and regular expressions of Lark and GBNF, in which a < has no meaning.
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|\#[^\n]*')
# Of GBNF texts, classes, in which a quote has no meaning, and comments.
_OF_GBNF = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:[^\]\\\n]|\\.)*\]|\#[^\n]*')
_TOKEN = re.compile(r"<[^\s<>]{0,80}>?")
_INLINE = re.compile(r"%json\s*")
_INLINE_OR_QUOTED = re.compile(rf"{_QUOTED.pattern}|({_INLINE.pattern})")
_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|start\s*:(?!:=))")


@dataclass(frozen=True)
class GrammarSource:
    """What a reply has to match."""

    kind: Kind
    text: str  # a JSON schema, a regular expression, a JSON list of texts, or GBNF or Lark
    field: str = "schema"  # what messages call it

    def __post_init__(self) -> None:
        if len(self.text) > LONGEST_SOURCE:
            raise Refused(
                self.field,
                f"has {len(self.text):,} characters, and at most {LONGEST_SOURCE:,} are read",
                "make it smaller",
            )

    def held(self) -> tuple[GrammarSource, tuple[str, ...]]:
        """The source with its JSON schemas as grammars can hold them, and notes about what of the
        schemas is not held. Raises ValueError."""
        room = LONGEST_SOURCE - len(self.text)
        if self.kind == "schema":
            text, notes = _held_text(json.loads(self.text), self.field, room)
            return replace(self, text=text), notes
        if self.kind != "grammar" or not self._is_lark():
            return self, ()
        parts, all_notes, at = list[str](), dict[str, None](), 0
        for start, end, schema in _inline_spans(self.text):
            options = _ONE_OF if '"oneOf"' in self.text[start:end] else {}
            text, notes = _held_text(schema, self.field, room, options)
            room -= max(0, len(text) - (end - start))
            parts += [self.text[at:start], text]
            all_notes |= dict.fromkeys(notes)
            at = end
        held = replace(self, text="".join([*parts, self.text[at:]]))
        return held, tuple(all_notes)[: MOST_NOTES + 1]

    def compile(self, tokens: GrammarTokens) -> Grammar:
        """Raises ValueError, naming the field, for what is no grammar, for what llguidance does not
        support or finds too large, and for texts that the vocabulary cannot write."""
        source, notes = self.held()
        check_alphabet(source, tokens)
        try:
            compiled = source.compiled()
        except Refused:
            raise
        except ValueError as error:  # of llguidance
            raise _refused(self.field, str(error)) from None
        return replace(compiled_grammar(compiled, self.field, tokens), notes=notes)

    def compiled(self) -> str:
        """The grammar as llguidance takes it, unchecked. Raises ValueError."""
        matcher = llguidance().LLMatcher
        if self.kind == "schema":
            check_schema(json.loads(self.text), self.field)
            grammar: str = matcher.grammar_from_json_schema(self.text, overrides=_JSON_OPTIONS)
        elif self.kind == "regex":
            check_groups(self.text, self.field)
            grammar = matcher.grammar_from_regex(_without_anchors(self.text))
        elif self.kind == "choice":
            choices = (json.dumps(text, ensure_ascii=False) for text in json.loads(self.text))
            grammar = matcher.grammar_from_lark("start: " + " | ".join(choices))
        else:
            grammar = matcher.grammar_from_lark(self._lark())
        return grammar

    def inline(self) -> str:
        """A schema with its options, to stand in a Lark grammar."""
        schema = json.loads(self.text)
        return json.dumps(schema | {"x-guidance": _JSON_OPTIONS}, ensure_ascii=False)

    def literals(self) -> Iterator[str]:
        """Texts that a reply has to hold as they are, or one of which it has to be."""
        if self.kind == "schema":
            yield from _schema_literals(json.loads(self.text))
        elif self.kind == "choice":
            yield from json.loads(self.text)
        elif self.kind == "grammar":
            for match in self._marked().finditer(self.text):
                if match[0][0] == '"':
                    yield match[0][1:-1]

    def _is_lark(self) -> bool:
        return _LARK.search(self.text) is not None

    def _marked(self) -> re.Pattern[str]:
        """What has a meaning of its own in a grammar, and is looked at no further."""
        return _QUOTED if self._is_lark() else _OF_GBNF

    def _lark(self) -> str:
        plain = self._marked().sub(" ", self.text)
        named = _TOKEN.search(plain)
        if named is not None:
            raise Refused(
                self.field,
                f"{quoted(named[0])} stands for a token, and a grammar is of text alone",
                "write the text in quotes",
            )
        check_rules(plain, self._is_lark(), self.field)
        if self._is_lark():
            for match in _QUOTED.finditer(self.text):
                if match[0][0] == "/":
                    check_groups(match[0], self.field)
            for schema in _inline_schemas(self.text):
                check_schema(schema, self.field)
            return self.text
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            lark: str = gbnf_to_lark(self.text)
        except Exception as error:  # bare Exceptions, and IndexErrors at the end of a text
            why = str(error) or "it ends too early"
            raise Refused(self.field, f"is neither GBNF nor Lark: {why}") from None
        return lark


def _inline_schemas(lark: str) -> Iterator[Any]:
    """All that may be a JSON schema in a Lark grammar; what is no JSON llguidance refuses."""
    for match in _INLINE.finditer(lark):
        try:
            yield json.JSONDecoder().raw_decode(lark, match.end())[0]
        except (ValueError, RecursionError):
            continue


def _inline_spans(lark: str) -> Iterator[tuple[int, int, Any]]:
    """Where the JSON schemas of a Lark grammar begin and end, and each of them; none within a text
    or a regular expression of the grammar."""
    at = 0
    while match := _INLINE_OR_QUOTED.search(lark, at):
        at = match.end()
        if match[1] is None:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, at)
        except (ValueError, RecursionError):
            continue
        yield at, end, schema
        at = end


def _held_text(
    schema: Any, field: str, room: int, options: Mapping[str, Any] = {}
) -> tuple[str, tuple[str, ...]]:
    """A schema as grammars can hold it, in JSON, and notes about the rest. options: of llguidance,
    which the schema gets too. Raises ValueError."""
    schema, notes = held_schema(schema, field, room)
    if options and isinstance(schema, dict):
        given = schema.get("x-guidance", {})
        schema["x-guidance"] = {**given, **options} if isinstance(given, dict) else given
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":")), notes
    except RecursionError:
        raise Refused(field, "its schemas stand too deeply in one another") from None


def schema_source(schema: Mapping[str, Any] | bool, field: str = "schema") -> GrammarSource:
    """The source of a JSON schema as plain data. Raises ValueError."""
    if not isinstance(schema, Mapping | bool):
        raise Refused(field, f"must be a JSON schema, an object, got {quoted(schema)}")
    if schema is False:
        raise Refused(field, "false matches nothing")
    try:
        text = json.dumps({} if schema is True else schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(field, f"is no JSON ({error})") from None
    return GrammarSource("schema", text, field)


def schema_of_type(schema: Any) -> Any:
    """The JSON schema of a pydantic model; anything else as it is."""
    make = getattr(schema, "model_json_schema", None)
    return make() if isinstance(schema, type) and callable(make) else schema


def choice_source(choices: Sequence[str], field: str = "choice") -> GrammarSource:
    """The source of texts of which the reply is to be one. Raises ValueError."""
    if not 0 < len(choices) <= MOST_TEXTS or not all(
        isinstance(text, str) and text for text in choices
    ):
        raise Refused(field, f"must be 1 to {MOST_TEXTS} texts that are not empty")
    return GrammarSource("choice", json.dumps(list(choices), ensure_ascii=False), field)


def _without_anchors(pattern: str) -> str:
    """The pattern without ^ at its beginning and $ at its end: it is matched as a whole anyway."""
    if any(char in pattern for char in "|") and pattern[:1] == "^":
        return pattern  # ^a|b$ anchors one side of each alternative
    pattern = pattern.removeprefix("^")
    escapes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and escapes % 2 == 0 else pattern


def _schema_literals(schema: Any) -> Iterator[str]:
    """Names of properties, and texts of `enum` and `const`, in a JSON schema."""
    for keyword, value in entries(schema):
        if isinstance(value, str) and keyword in ("enum", "const"):
            yield value
        elif isinstance(value, Mapping) and keyword in ("enum", "const", "properties"):
            yield from value


_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""What one grammar may take: some tenths of a second, and some tens of megabytes."""
_LONGEST_MESSAGE = 300
_OURS = {
    "NoExtensionBias": (  # where no token may come first
        "no text of this model's vocabulary can begin to match it",
        "look for a rule or a $ref that leads back to itself without end",
    ),
    "forced bytes": ("it needs a character that this model's vocabulary lacks", ""),
    "Too many items": ("is too large, or a rule leads back to itself", "make it smaller"),
}
"""Words of llguidance's messages, and why and advice of ours."""
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")


@dataclass(frozen=True, eq=False)
class Grammar:
    """A grammar over a vocabulary; any thread may share it."""

    tokens: GrammarTokens
    field: str
    text: str  # as llguidance takes it
    _matcher: Any  # at its beginning; only ever copied
    notes: tuple[str, ...] = ()  # what of the source it does not hold, as warnings say it

    def begin(
        self, thought: tuple[int, int] | None = None, in_thought: bool = False
    ) -> GrammarState:
        """The state before the first token. thought: ids that open and close a thought, where one
        may come before what the grammar is of; in_thought: one is open."""
        thinks = (in_thought or None) if thought else False
        return GrammarState(self, self._matcher.deep_copy(), thought, thinks)


def compiled_grammar(compiled: str, field: str, tokens: GrammarTokens) -> Grammar:
    """Compiles a grammar as llguidance takes it. Raises ValueError."""
    library = llguidance()
    limits = library.LLParserLimits(**_LIMITS)
    matcher = library.LLMatcher(tokens.tokenizer, compiled, log_level=0, limits=limits)
    if matcher.is_error():
        raise _refused(field, matcher.get_error())
    grammar = Grammar(tokens, field, compiled, matcher)
    if grammar.begin().dead():
        raise Refused(field, "no text of this model's vocabulary matches it")
    return grammar


def check_alphabet(source: GrammarSource, tokens: GrammarTokens) -> None:
    """Raises ValueError for a literal with characters that no token writes."""
    alphabet = tokens.alphabet
    if alphabet is None:
        return
    for literal in source.literals():
        if lacking := set(literal) - alphabet:
            raise Refused(
                source.field,
                f"{literal[:80]!r} cannot be written with this model's vocabulary, which lacks "
                f"{min(lacking)!r}",
            )


@dataclass(frozen=True)
class Agreement:
    """How tokens that may follow a reply agree with the grammar."""

    valid: int  # so many of them do, the first ones, an end token not counted
    ended: bool  # the next one is an end token, and may stand there


@dataclass(frozen=True)
class Continuation:
    """The tokens that may follow others by a grammar."""

    forced: list[int]
    mask: Tensor  # bool [vocabulary], of the position after the forced ones

    @property
    def is_dead_end(self) -> bool:
        """Whether no token may stand behind the forced ones."""
        return not bool(self.mask.any())


class GrammarState:
    """How far a reply has come in its thought and its grammar: of one reply, in one thread."""

    def __init__(
        self,
        grammar: Grammar,
        matcher: Any,
        thought: tuple[int, int] | None,
        thinks: bool | None,
    ) -> None:
        """thinks: whether a thought is open; None: neither it nor the answer has begun."""
        self.grammar, self._matcher = grammar, matcher
        self._thought, self.thinks = thought, thinks
        self._vocab_size = len(grammar.tokens.tokens)

    def copy(self) -> GrammarState:
        """An independent state; costs microseconds."""
        return GrammarState(self.grammar, self._matcher.deep_copy(), self._thought, self.thinks)

    def read(self, ids: list[int]) -> Agreement:
        """How the ids agree with the grammar that may follow what was taken."""
        ends = self.grammar.tokens.end_ids
        end = next((n for n, token in enumerate(ids) if token in ends), len(ids))
        answer = self.answer(ids)
        if answer is None or answer > end:
            return Agreement(end, False)  # a reply may not end in its thought
        valid = answer + self.valid(ids[answer:end])
        if valid < end or end == len(ids):
            return Agreement(valid, False)
        return Agreement(end, self.after(ids[:end]).accepts)

    def valid(self, ids: list[int]) -> int:
        """How many of the ids of an answer, no end token among them, may follow one after
        another."""
        beyond = (n for n, token in enumerate(ids) if token >= self._vocab_size)
        count: int = self._matcher.validate_tokens(ids[: next(beyond, len(ids))])
        self._check()
        return count

    def take(self, ids: list[int]) -> None:
        """Moves on by ids that are valid."""
        answer = self.answer(ids)
        if answer is None:
            self.thinks = True
        elif ids:
            self.thinks = False
            if ids[answer:] and not self._matcher.consume_tokens(ids[answer:]):
                self._check()
                raise AssertionError("only valid ids are taken")

    def after(self, ids: list[int]) -> GrammarState:
        """The state behind valid ids; this one stays."""
        moved = self.copy()
        moved.take(ids)
        return moved

    def following(self) -> Continuation:
        """The tokens that may follow those taken so far."""
        if self.thinks:
            mask = self.mask().fill_(True)
            mask[[*self.grammar.tokens.end_ids]] = False
            return Continuation([], mask)
        forced = [] if self.thinks is None else self.forced()
        mask = self.after(forced).mask()
        if self.thinks is None:
            assert self._thought
            mask[self._thought[0]] = True
        return Continuation(forced, mask)

    def answer(self, ids: list[int]) -> int | None:
        """Where the answer begins among ids that follow; None where it does not."""
        if self.thinks is False:
            return 0
        assert self._thought
        opens, closes = self._thought
        if self.thinks is None and ids[:1] != [opens]:
            return 0
        return ids.index(closes) + 1 if closes in ids else None

    @property
    def accepts(self) -> bool:
        """Whether the reply may end here."""
        return not self.thinks and bool(self._matcher.is_accepting())

    @property
    def is_complete(self) -> bool:
        """Whether the reply may end here, and nothing may follow."""
        return self.accepts and bool(self._matcher.is_stopped())

    def forced(self) -> list[int]:
        """The tokens that must follow, as the tokenizer writes them; end tokens are not among
        them."""
        if self._matcher.is_stopped():
            return []
        ids: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        ends = self.grammar.tokens.end_ids
        return ids[: next((n for n, token in enumerate(ids) if token in ends), len(ids))]

    def mask(self, known: bytes | None = None) -> Tensor:
        """bool [tokens of the vocabulary]: which may follow. End tokens are among them only where
        the grammar accepts: at a dead end llguidance leaves these alone. known: what `bits` has
        given here."""
        import numpy as np
        import torch

        packed = np.frombuffer(self.bits() if known is None else known, np.uint8)
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
        allowed = torch.from_numpy(bits).bool()
        allowed[list(self.grammar.tokens.end_ids)] = self.accepts
        return allowed

    def bits(self) -> bytes:
        """The same, a bit for each token, the lowest of a byte first; but end tokens are among them
        at a dead end too."""
        packed: bytes = self._matcher.compute_bitmask()
        self._check()
        return packed

    def dead(self) -> bool:
        """Whether no token may follow."""
        allowed = int.from_bytes(self.bits(), "little") & (1 << self._vocab_size) - 1
        ends = sum(1 << token for token in self.grammar.tokens.end_ids)
        return not (self.accepts or allowed & ~ends)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refused(self.grammar.field, self._matcher.get_error())


def _refused(field: str, why: str) -> Refused:
    """A message of llguidance as one of ours, in one line and without the parser's state."""
    unsupported = _UNSUPPORTED.search(why)
    if unsupported is not None:
        return Refused(field, f"{unsupported[1]} is not supported", "leave it out")
    for words, ours in _OURS.items():
        if words in why:
            return Refused(field, *ours)
    why = why.replace("<non-verbose/>", "")
    lines = [line.strip() for line in why.split("<state>")[0].splitlines() if line.strip()]
    text = "; ".join(lines)[:_LONGEST_MESSAGE] or "cannot be followed any further"
    return Refused(field, f"{text[0].lower()}{text[1:]}")
