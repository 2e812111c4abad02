"""A generation on the terminal: text to standard output as it comes, everything about it to standard error."""

import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.markup import escape

from models import chat, checkpoints, tokenizers
from models.deepseek_config import DeepseekConfig
from models.generate import Chunk, Generation, generate
from models.prompts import Prompts
from models.reference import ReferenceCorrection
from models.sampling import Sampling
from models.speculation import Speculation
from models.stats import Stats
from sparse_jax import selectors
from sparse_jax.selectors import Selector

REFERENCE = "reference"
"""The method that is no selector: dense until the capture, corrected after it."""
SHOWN = 160
"""Characters of the prompt's end that are repeated before its continuation."""


def run(
    prompts: Prompts,
    *,
    model: str,
    method: str | None,
    budget: int | float | None,
    chat_template: bool,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    exit_threshold: float | None,
    implementation: str | None,
    retention: float | None = None,
    capture_loops: Sequence[int] | None = None,
    drafts: int | None = None,
    draft_loops: int | None = None,
    cache_dtype: str | None = None,
) -> Stats:
    """Loads a model (a name for `checkpoints.resolve`), continues the prompts and shows the result.

    method: None for the usual one of the model; budget: None for 256 tokens, or what the model's own indexer chooses.
    chat_template: the prompts are messages to a model that was trained to chat. retention, capture_loops: of reference
    correction, see `reading`. drafts, draft_loops: of self-speculation; no drafts, no speculation. cache_dtype: as for
    `generate`.
    Raises what loading, the selector and `generate` raise for what does not fit.
    """
    check_implementation(implementation)
    place = checkpoints.resolve(model)
    sizes = checkpoints.read_config(place)
    method, budget = usual(sizes, method, budget)
    selector, reference = reading(method, budget, retention, capture_loops)
    check_loops(sizes, model, reference, exit_threshold)
    speculation = drafting(drafts, draft_loops, sizes, model)
    tokenizer = tokenizers.for_folder(place)
    texts = [chat.chat_prompt(place, text) for text in prompts.texts] if chat_template else prompts.texts
    encoded = [tokenizer.encode(text, bos=not chat_template) for text in texts]
    config, network = checkpoints.load(model)
    check_tokenizer(tokenizer, config, place)
    generation = generate(
        network,
        encoded,
        selector=selector,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed,
        cache_dtype=cache_dtype,
        exit_threshold=exit_threshold,
        implementation=implementation,
        reference=reference,
        speculation=speculation,
    )
    console = Console(stderr=True, highlight=False)
    opening = f"{opening_line(model, config, encoded)}; each step reads {share_read(method, budget, reference)}"
    console.print(f"[dim]{escape(opening)}[/]", soft_wrap=True)
    show(prompts, generation, tokenizer, console, end="\n" if chat_template else "")
    stats = generation.stats()
    console.print(f"[dim]{escape(closing_line(stats, reference))}[/]", soft_wrap=True)
    return stats


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError for the GPU kernels where there is no GPU."""
    if implementation == "triton" and jax.default_backend() != "gpu":
        raise ValueError(
            f"--implementation triton is a GPU kernel, and JAX runs on {jax.default_backend()} here; "
            "use auto, xla or (slow, for tests) interpret"
        )


def check_tokenizer(tokenizer: tokenizers.Tokenizer, config: checkpoints.Config, place: Path) -> None:
    """Raises ValueError for a tokenizer of another vocabulary than the model's."""
    bytes_only = isinstance(tokenizer, tokenizers.ByteTokenizer)
    if tokenizer.vocab_size > config.vocab_size or (bytes_only and tokenizer.vocab_size != config.vocab_size):
        raise ValueError(f"{place} has no tokenizer that fits a vocabulary of {config.vocab_size}: no tokenizer.json?")


def usual(config: checkpoints.Config, method: str | None, budget: int | float | None) -> tuple[str, int | float]:
    """Method and budget where they were not given: "quest", or what a DeepSeek-style model does by itself.

    Raises ValueError for the budget of a method that takes none.
    """
    indexer = getattr(config, "indexer", None)
    if method is None:
        latent = isinstance(config, DeepseekConfig)
        method = "dsa" if indexer is not None else "dense" if latent else "quest"
    if budget is not None and method in ("dense", REFERENCE):
        more = " before the capture; --retention says how much the loops after it read" * (method == REFERENCE)
        raise ValueError(f"--budget {budget}: the method {method} reads everything and takes no budget{more}")
    if budget is None:
        budget = indexer.topk if method == "dsa" and indexer is not None else 256
    return method, budget


def reading(
    method: str, budget: int | float, retention: float | None, capture_loops: Sequence[int] | None
) -> tuple[Selector, ReferenceCorrection | None]:
    """What chooses the keys of a step, and how later loops are corrected (None: not at all).

    The method "reference" is dense before the capture; any other method is corrected where a retention or capture
    loops are given. Raises ValueError for an unknown method and for values that do not fit.
    """
    if method == REFERENCE:
        selector = selectors.get("dense")
    elif method == "dsa":
        if not isinstance(budget, int):
            raise ValueError(f"the method dsa takes a number of tokens as its budget, got the share {budget}")
        selector = selectors.get(method, k=budget)
    elif method in selectors.names():
        selector = selectors.get(method, budget=budget)
    else:
        raise ValueError(f"no method {method!r}; there are {', '.join(selectors.names())} and {REFERENCE}")
    if method != REFERENCE and retention is None and capture_loops is None:
        return selector, None
    loops = (1,) if capture_loops is None else tuple(sorted(set(capture_loops)))
    return selector, ReferenceCorrection(retention=0.1 if retention is None else retention, capture_loops=loops)


def check_loops(
    config: checkpoints.Config, model: str, reference: ReferenceCorrection | None, exit_threshold: float | None
) -> None:
    """Raises ValueError for what a model of one loop has no use for."""
    if config.loops == 1 and reference is not None:
        raise ValueError(
            f"{model} has one loop, so there is none for reference correction (--method reference, --retention, "
            "--capture-loop) to correct"
        )
    if config.loops == 1 and exit_threshold is not None:
        raise ValueError(f"--exit-threshold {exit_threshold}: {model} has one loop, so there is none to choose")


def drafting(drafts: int | None, draft_loops: int | None, config: checkpoints.Config, model: str) -> Speculation | None:
    """What is drafted, by the first loops of the model or, where it has one, by its extra layer; None: nothing.

    Raises ValueError for draft loops without use, and for a model that has neither.
    """
    extra = config.loops == 1 and getattr(config, "mtp_layers", 0) > 0
    if drafts is None and draft_loops is not None:
        raise ValueError(f"--draft-loops {draft_loops} belongs to --speculate: how many tokens to draft")
    if extra and draft_loops is not None:
        raise ValueError(f"--draft-loops {draft_loops}: this model drafts with its extra layer, it has no loops")
    if extra and drafts is not None:
        return Speculation(drafts=drafts, by="extra")
    if drafts is not None and config.loops == 1:
        raise ValueError(
            f"--speculate needs a looped model, whose first loops draft, or an extra layer: {model} has neither"
        )
    return None if drafts is None else Speculation(drafts=drafts, draft_loops=draft_loops or 2)


def opening_line(model: str, config: checkpoints.Config, prompts: Sequence[Sequence[int]]) -> str:
    """The model, where it runs, and the length of its prompts."""
    loops = f"{config.loops} loops of " if config.loops > 1 else ""
    place, tokens = jax.devices()[0].device_kind, sum(map(len, prompts))
    return f"{model}, {loops}{config.num_layers} layers, on {place}; {tokens:,} prompt tokens"


def share_read(method: str, budget: int | float, reference: ReferenceCorrection | None = None) -> str:
    """What each step reads of the cache, in words."""
    if method in ("dense", REFERENCE):
        words = "the whole KV cache"
    else:
        amount = f"{budget} tokens" if isinstance(budget, int) else f"{100 * budget:g} %"
        keys = "the indexer's keys" if method == "dsa" else "the keys"
        more = f"; choosing reads {keys} of all" if selectors.get(method).reads_all_keys else ""
        words = f"at most about {amount} of the KV cache ({method}{more})"
    if reference is None:
        return words
    first, *later = reference.capture_loops
    words += f" up to loop {first}" if method in ("dense", REFERENCE) else f" before loop {first}, all of it there"
    words += f", and {100 * reference.retention:g} % of the keys in the loops after it"
    return words + "".join(f"; loop {loop} reads all and picks anew" for loop in later)


def show(
    prompts: Prompts, generation: Generation, tokenizer: tokenizers.Tokenizer, console: Console, end: str = ""
) -> None:
    """Runs a generation to its end and writes what it says; a single prompt is streamed, with its end before it.

    end: what stands between the two.
    """
    chunks = iter(generation)
    with console.status("compiling and reading the prompt"):
        first = list(itertools.islice(chunks, 2))  # the prompt's chunk and the first of decoding: both compile
    if prompts.batch:
        for _ in chunks:
            pass
        show_batch(prompts, generation, tokenizer)
    else:
        console.print(f"[dim]{escape(_tail(prompts.texts[0]))}[/]", end=end, soft_wrap=True)
        text = show_stream(itertools.chain(first, chunks), tokenizer)
        if prompts.answer is not None:
            console.print(verdict(text, prompts.answer))


def show_stream(chunks: Iterable[Chunk], tokenizer: tokenizers.Tokenizer) -> str:
    """Writes the text of one request as its chunks arrive, and returns it."""
    stream, pieces = tokenizer.stream(), []

    def write(piece: str) -> None:
        pieces.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()

    for chunk in chunks:
        write(stream.push(chunk.tokens[0]))
    write(stream.finish() + "\n")
    return "".join(pieces)


def show_batch(prompts: Prompts, generation: Generation, tokenizer: tokenizers.Tokenizer) -> None:
    """Writes what every request generated, in the order of the prompts."""
    for number, (prompt, tokens, reason) in enumerate(zip(prompts.texts, generation.tokens, generation.finished), 1):
        text = tokenizer.decode(tokens)
        if prompts.json:
            print(json.dumps({"prompt": prompt, "text": text, "finished": reason}))
        else:
            print(f"--- {number} ---\n{text}")


def verdict(text: str, answer: str) -> str:
    """Whether a demonstration found what its prompt hides, as rich markup."""
    if text.strip().startswith(answer):
        return f"[bold green]Found:[/] the pass key hidden in the prompt is {answer}."
    return f"[bold red]Not found:[/] the pass key hidden in the prompt is {answer}."


def closing_line(stats: Stats, reference: ReferenceCorrection | None = None) -> str:
    """Speed, share of the KV cache that was read, what correction kept and speculation won, and peak memory."""
    parts = [f"{stats.tokens} tokens"]
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s (and {stats.compile_seconds:.1f} s to compile)")
    if stats.kv_fraction is not None:
        drafts = "" if stats.acceptance is None else ", by drafts too,"  # so it may be more than dense reads without
        parts.append(
            f"KV tokens read {stats.kv_tokens_read:,}{drafts} of {stats.kv_tokens_dense:,} that dense reads "
            f"({100 * stats.kv_fraction:.1f} %)"
        )
    if reference is not None and stats.retained_mass is not None and stats.retained_mass_least is not None:
        parts.append(
            f"references of {100 * reference.retention:g} % of the keys held {100 * stats.retained_mass:.1f} % of the "
            f"attention where they were captured ({100 * stats.retained_mass_least:.1f} % in the worst head)"
        )
    if stats.acceptance is not None and stats.tokens_per_round is not None:
        parts.append(
            f"{100 * stats.acceptance:.0f} % of the drafts accepted, {stats.tokens_per_round:.2f} tokens a round"
        )
    if stats.peak_memory_bytes is not None:
        parts.append(f"peak memory of the {stats.peak_memory_of} {stats.peak_memory_bytes / 2**20:,.0f} MiB")
    return "; ".join(parts)


def _tail(text: str) -> str:
    shown = text[-SHOWN:].encode("utf-8", "replace").decode()
    return shown if len(text) <= SHOWN else "..." + shown
