"""Text in and out: tokenizer.json to ids, ids to text, exactly and a few tokens at a time.

Detokenising works on bytes. At start every id is mapped once to the bytes that it stands for, as the tokenizer's decoder
would render it inside a text; a stream then joins the bytes of its tokens and decodes them with an incremental UTF-8
decoder. So the work per token is constant, any split of a stream gives the same text, a character that is spread over
tokens appears when it is complete, and bytes that are no UTF-8 become U+FFFD. Whatever is valid UTF-8 equals the
one-shot decode of the `tokenizers` library; where a run of byte tokens is not, only its invalid parts are replaced.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from lockstep_common.errors import ConfigError, InvalidRequest

REPLACEMENT = "\ufffd"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class Vocabulary:
    """What each id renders as. `shown[i]` is `raw[i]`, but empty for special tokens. Ids without a token are empty."""

    raw: tuple[bytes, ...]
    shown: tuple[bytes, ...]
    special: frozenset[int]
    strips_first_space: bool = False  # the decoder drops a space that begins a whole text

    def __len__(self) -> int:
        return len(self.raw)

    def table(self, skip_special_tokens: bool) -> tuple[bytes, ...]:
        return self.shown if skip_special_tokens else self.raw

    def render(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> bytes:
        """The bytes of `tokens`, one after the other."""
        table = self.table(skip_special_tokens)
        try:
            return b"".join([table[token] for token in tokens])
        except IndexError:  # a model's vocabulary may be padded beyond its tokenizer's
            return b"".join([table[token] for token in tokens if token < len(table)])

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        data = self.render(tokens, skip_special_tokens=skip_special_tokens)
        if self.strips_first_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """A token for people: its text, or its bytes spelled out if they are no text by themselves."""
        data = self.raw[token] if token < len(self.raw) else b""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Detokenizer:
    """Turns a stream of tokens that continues a prompt into text.

    A character whose first bytes ended the prompt is emitted whole by the token that completes it; if none does, the
    prompt's dangling bytes leave no mark in the output.
    """

    __slots__ = ("_dangling", "_decoder", "_skip", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._decoder = _Utf8Decoder("replace")
        self._dangling = _incomplete_tail(vocabulary, prompt, skip_special_tokens)
        if self._dangling:
            self._decoder.decode(self._dangling)

    @property
    def pending(self) -> bool:
        """True while the bytes so far end inside a character."""
        return bool(self._decoder.getstate()[0])

    def feed(self, tokens: Sequence[int]) -> str:
        data = self._vocabulary.render(tokens, skip_special_tokens=self._skip)
        if self._dangling and data:
            return self._first(data)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left when the stream has ended: U+FFFD if it ended inside a character."""
        if self._dangling:
            return ""
        return self._decoder.decode(b"", final=True)

    def _first(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        broken = data[0] & 0xC0 != 0x80  # not a continuation of the prompt's character
        self._dangling = b""
        return text.removeprefix(REPLACEMENT) if broken else text


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer and what its directory says about texts."""

    hf: HfTokenizer
    vocabulary: Vocabulary
    special_texts: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...: for chat templates
    eos_ids: tuple[int, ...] = ()
    max_token_chars: int = 0  # no token covers more characters of a text; 0: unknown

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. Releases the interpreter lock, so a thread may do long texts beside the event loop."""
        encodings = self.hf.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    def refuse_hopeless(self, chars: int, limit: int, param: str) -> None:
        """InvalidRequest if a text of so many characters cannot have less than `limit` tokens; costs nothing."""
        if self.max_token_chars and chars > limit * self.max_token_chars:
            raise InvalidRequest(
                f"{param} has {chars} characters; that cannot fit the model's context of {limit} tokens", param=param
            )


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads the tokenizer of a model directory; ConfigError names the file and what is wrong with it."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{file}: not found; the router needs the tokenizers library's format")
    try:
        hf = HfTokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{file}: {error}") from error
    hf.no_padding()
    hf.no_truncation()
    return wrap(hf, read_json(path / "tokenizer_config.json"), eos_ids=_eos_ids(path, hf), source=str(file))


def wrap(
    hf: HfTokenizer, config: dict[str, Any] | None = None, *, eos_ids: Sequence[int] = (), source: str = "tokenizer"
) -> Tokenizer:
    description = json.loads(hf.to_str())
    vocabulary = _vocabulary(hf, description, source)
    return Tokenizer(
        hf=hf,
        vocabulary=vocabulary,
        special_texts=_special_texts(config or {}),
        eos_ids=tuple(eos_ids),
        max_token_chars=_max_token_chars(description, vocabulary),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the model directory; empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


def _special_texts(config: dict[str, Any]) -> dict[str, str]:
    texts = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            texts[name] = value
    return texts


def _eos_ids(path: Path, hf: HfTokenizer) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json, else config.json, else the tokenizer's eos_token."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(path / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None:
            if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
                raise ConfigError(f"{path / name}: eos_token_id must be an id or a list of ids, not {value!r}")
            return tuple(ids)
    text = _special_texts(read_json(path / "tokenizer_config.json")).get("eos_token")
    token = hf.token_to_id(text) if text else None
    return () if token is None else (token,)


# --- ids to bytes ---------------------------------------------------------------------------------------------------


def _vocabulary(hf: HfTokenizer, description: dict[str, Any], source: str) -> Vocabulary:
    to_bytes, strips = _renderer(description.get("decoder"), source)
    tokens = hf.get_vocab(with_added_tokens=True)
    special = frozenset(i for i, token in hf.get_added_tokens_decoder().items() if token.special)
    raw = [b""] * (max(tokens.values(), default=-1) + 1)
    for token, index in tokens.items():
        raw[index] = to_bytes(token)
    shown = [b"" if i in special else data for i, data in enumerate(raw)]
    return Vocabulary(tuple(raw), tuple(shown), special, strips)


def _renderer(decoder: dict[str, Any] | None, source: str) -> tuple[Any, bool]:
    """(token -> bytes, whether a leading space of a whole text is dropped) for a decoder of tokenizer.json."""
    if decoder is None:
        raise ConfigError(f"{source}: field 'decoder' is missing; supported are ByteLevel, Metaspace and ByteFallback")
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    byte_level = byte_fallback = strips = False
    replaces: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replaces.append((old, new))
            case {"type": "Metaspace"}:
                replaces.append((part.get("replacement", "\u2581"), " "))
                strips = part.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strips = start == 1
            case _:
                raise ConfigError(f"{source}: decoder {json.dumps(part)} is not supported")
    if byte_level and (replaces or byte_fallback):
        raise ConfigError(f"{source}: a ByteLevel decoder cannot be combined with others")
    if byte_level:
        return _byte_level, strips
    return lambda token: _pieces(token, replaces, byte_fallback), strips


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for the 256 bytes: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:  # an added token that was never written in the byte alphabet
        return token.encode()


def _pieces(token: str, replaces: list[tuple[str, str]], byte_fallback: bool) -> bytes:
    if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    for old, new in replaces:
        token = token.replace(old, new)
    return token.encode()


def _max_token_chars(description: dict[str, Any], vocabulary: Vocabulary) -> int:
    """A bound that holds for every text, or 0 where unknown characters may be swallowed or fused without a bound."""
    decoder = json.dumps(description.get("decoder"))
    if not ('"ByteLevel"' in decoder or description.get("model", {}).get("byte_fallback")):
        return 0
    longest = max((len(data) for data in vocabulary.raw), default=0)
    normalized = description.get("normalizer") is not None  # may compose characters, four to one at the most
    strips_added = any(t.get("lstrip") or t.get("rstrip") for t in description.get("added_tokens", ()))
    return 0 if strips_added else longest * (4 if normalized else 1)


def _incomplete_tail(vocabulary: Vocabulary, prompt: Sequence[int], skip_special_tokens: bool) -> bytes:
    """The bytes at the prompt's end that begin a character and do not complete it."""
    tail = b""
    for token in reversed(prompt[-4:]):
        tail = vocabulary.render((token,), skip_special_tokens=skip_special_tokens) + tail
        if len(tail) >= 3:
            break
    for length in range(1, min(3, len(tail)) + 1):
        lead = tail[-length]
        if lead & 0xC0 == 0x80:
            continue
        need = 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if 0xF0 <= lead < 0xF5 else 1
        return tail[-length:] if need > length else b""
    return b""
