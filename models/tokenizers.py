"""Text to ids and back: plain bytes for ouro-tiny, byte-level BPE for released checkpoints.

Both tokenizers offer `encode(text) -> list[int]`, `decode(ids) -> str` and `stream() -> TextStream` for text that
arrives in pieces. Which ids end a text is known to the model (`stop_ids` of its configuration), not to the tokenizer.
"""

import codecs
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer

from models.checkpoints import gguf_files, gguf_tokenizer


class TextStream(Protocol):
    """Turns ids that arrive in pieces into text, holding back bytes of a character that is not complete yet."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""

    def finish(self) -> str:
        """What is left, with a replacement character for bytes that never became one."""


class Tokenizer(Protocol):
    """What generation needs of a tokenizer."""

    vocab_size: int

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of a prompt, a first token for its beginning included where the model wants one and `bos` is True."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of generated ids, without special tokens."""

    def stream(self) -> TextStream:
        """A decoder for text that arrives in pieces."""


class ByteTokenizer:
    """Ids 0 .. 255 are bytes of UTF-8; 256 begins every sequence, 257 ends one; 258 .. 263 are unused."""

    bos_id, eos_id, vocab_size = 256, 257, 264

    def encode(self, text: str | bytes, *, bos: bool = True) -> list[int]:
        """Bytes of the text, after the beginning-of-sequence id unless `bos` is False."""
        # surrogateescape: bytes of a file or argument that were not UTF-8 come through as they were.
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
        return [self.bos_id] * bos + list(data)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids below 256; bytes that are not UTF-8 become replacement characters."""
        return bytes(token for token in ids if 0 <= token < 256).decode("utf-8", "replace")

    def stream(self) -> "ByteStream":
        """A decoder for text that arrives in pieces."""
        return ByteStream()


class ByteStream:
    """A TextStream of bytes."""

    def __init__(self):
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        return self.decoder.decode(bytes(token for token in ids if 0 <= token < 256))

    def finish(self) -> str:
        """What is left, with a replacement character for bytes that never became one."""
        return self.decoder.decode(b"", final=True)


class SubwordTokenizer:
    """A byte-level BPE, or whatever else the package `tokenizers` reads."""

    def __init__(self, fast: Any):
        self.fast = fast
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_file(cls, path: str | Path) -> "SubwordTokenizer":
        """From a `tokenizer.json` or a GGUF file.

        Raises FileNotFoundError without the file and CheckpointError for a GGUF file with another kind of tokenizer.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer at {path}")
        if path.suffix == ".gguf":
            return cls(gguf_tokenizer.tokenizer(gguf_files.open_gguf(path)))
        return cls(FastTokenizer.from_file(str(path)))

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of the text; special tokens written out in it (`<|im_start|>`) become their ids.

        bos: with what the tokenizer puts around a text; not for one that a chat template has begun.
        """
        # Bytes of a file or argument that were not UTF-8 have no token here: replacement characters.
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return self.fast.encode(text, add_special_tokens=bos).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, without special tokens."""
        return self.fast.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> "SubwordStream":
        """A decoder for text that arrives in pieces."""
        return SubwordStream(self)


class SubwordStream:
    """A TextStream over a `SubwordTokenizer`: decodes the ids since the last complete character again and again."""

    def __init__(self, tokenizer: SubwordTokenizer):
        self.tokenizer = tokenizer
        self.pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        pieces = []
        for token in ids:
            self.pending.append(token)
            text = self.tokenizer.decode(self.pending)
            if not text.endswith("\ufffd"):
                pieces.append(text)
                self.pending.clear()
        return "".join(pieces)

    def finish(self) -> str:
        """What is left, with a replacement character for bytes that never became one."""
        text = self.tokenizer.decode(self.pending)
        self.pending.clear()
        return text


def for_folder(place: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder or GGUF file: a `tokenizer.json`, that of a GGUF file, or plain bytes."""
    place = Path(place)
    if (place / "tokenizer.json").is_file():
        return SubwordTokenizer.from_file(place / "tokenizer.json")
    file = gguf_files.find(place)
    return ByteTokenizer() if file is None else SubwordTokenizer.from_file(file)
