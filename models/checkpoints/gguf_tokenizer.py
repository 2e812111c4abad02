"""The tokenizer of a GGUF file: byte-level BPE from its tokens and merges, through the package `tokenizers`."""

from typing import Any

import gguf
import tokenizers
from tokenizers import decoders, pre_tokenizers, processors

from models.checkpoints.errors import CheckpointError
from models.checkpoints.gguf_files import CONTROL, GGUFModel

SINGLE_DIGITS = {"smollm": True, "gpt-2": False}
"""`tokenizer.ggml.pre`: whether digits are split singly before the byte-level words."""
USER_DEFINED = int(gguf.TokenType.USER_DEFINED)


def tokenizer(model: GGUFModel) -> Any:
    """A `tokenizers.Tokenizer`. Raises CheckpointError, with the field, for another kind of tokenizer."""
    for name, known in (("tokenizer.ggml.model", ("gpt2",)), ("tokenizer.ggml.pre", tuple(SINGLE_DIGITS))):
        if model.field(name) not in known:
            supported = ", ".join(map(repr, known))
            raise CheckpointError(f"{model.path} says {name} = {model.field(name)!r} (supported: {supported})")
    kinds = model.field("tokenizer.ggml.token_type", [])
    vocabulary = {token: n for n, token in enumerate(model.tokens)}
    if len(vocabulary) != len(model.tokens) or len(kinds) != len(model.tokens):
        raise CheckpointError(
            f"{model.path}: tokenizer.ggml.tokens has {len(model.tokens)} entries, {len(vocabulary)} different ones, "
            f"and tokenizer.ggml.token_type {len(kinds)}"
        )
    merges = [tuple(merge.split(" ")) for merge in model.field("tokenizer.ggml.merges", [])]
    try:
        fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the package raises plain exceptions
        raise CheckpointError(f"{model.path}: tokenizer.ggml.merges do not fit the tokens: {error}") from error
    words = pre_tokenizers.ByteLevel(add_prefix_space=bool(model.field("tokenizer.ggml.add_space_prefix", False)))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if SINGLE_DIGITS[model.field("tokenizer.ggml.pre")] else []
    fast.pre_tokenizer = pre_tokenizers.Sequence([*digits, words])
    fast.decoder = decoders.ByteLevel()
    added = [
        tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(model.tokens, kinds)
        if kind in (CONTROL, USER_DEFINED)
    ]
    fast.add_tokens([token for token in added if not token.special])
    fast.add_special_tokens([token for token in added if token.special])
    if model.field("tokenizer.ggml.add_bos_token", False):
        bos = model.tokens[model.field("tokenizer.ggml.bos_token_id")]
        fast.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=None, special_tokens=[(bos, vocabulary[bos])]
        )
    return fast
