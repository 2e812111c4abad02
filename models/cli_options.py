"""What `sparse-jax generate` asks for: types and help of its options."""

import enum
import fractions
from pathlib import Path
from typing import Annotated, Any

import typer


class Implementation(enum.StrEnum):
    """Values of --implementation."""

    AUTO = "auto"
    XLA = "xla"
    TRITON = "triton"
    INTERPRET = "interpret"


def read_budget(text: str) -> int | float:
    """A number of tokens, or a share of the cached tokens: a decimal number or a fraction of at most 1.

    Raises typer.BadParameter for anything else.
    """
    try:
        value = float(fractions.Fraction(text)) if set(text) & set("./") else int(text)
    except (ValueError, ZeroDivisionError):
        value = 0
    if value <= 0 or (isinstance(value, float) and value > 1):
        raise typer.BadParameter(f"{text!r} is neither a number of tokens nor a share between 0 and 1")
    return value


ModelOption = Annotated[
    str,
    typer.Option(
        help="ouro-tiny or deepseek-tiny (shipped), smollm2-135m (after `fetch`), a folder or .gguf file, or "
        "owner/name of a hub."
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        help="What each step reads of the KV cache: dense (all of it) or the choice of a method, one of {methods}; "
        "reference: dense up to the capture loop of a looped model, few keys in the loops after it. "
        "Unless given: quest; dsa for a DeepSeek-style model."
    ),
]
BudgetOption = Annotated[
    Any,
    typer.Option(
        parser=read_budget,
        metavar="TOKENS|SHARE",
        help="What a step may read, per layer and head: tokens, or a share of what is cached (0.125, 1/8). "
        "Unless given: 256; for dsa as many as the model's indexer chooses. dense and reference take none.",
    ),
]
RetentionOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Reference correction: loops after the capture read this share of the keys, 0.1 unless given. "
        "Beside another method it adds the correction: the method then serves the loops before the capture.",
    ),
]
CaptureLoopOption = Annotated[
    list[int] | None,
    typer.Option(
        min=0,
        help="Reference correction, which this switches on beside any method: the loop, from 0 up, that attends "
        "densely and picks the keys; 1 unless given. "
        "Give it twice to pick anew in a later loop.",
    ),
]
SpeculateOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="K",
        help="Draft K tokens with the first loops of a looped model, or the extra layer of a DeepSeek-style one, and "
        "verify them at once: several tokens a round. That can save time on a GPU, where a round of a large model "
        "takes little longer than a step; a CPU is slower with it. "
        "dense and reference say what they would have said anyway (drawn text differs, but is as likely); methods that "
        "choose pages may choose a little differently, because summaries of pages already hold the drafts.",
    ),
]
DraftLoopsOption = Annotated[int | None, typer.Option(min=1, help="Loops of a draft, for --speculate; 2 unless given.")]
PromptFileOption = Annotated[Path | None, typer.Option(help="A file with the text to continue; - is standard input.")]
BatchFileOption = Annotated[
    Path | None,
    typer.Option(help='Many prompts: one on each line, or a .jsonl file of {"prompt": ...}, answered as .jsonl.'),
]
DemoOption = Annotated[
    str | None, typer.Option(help="A built-in prompt with a known answer: passkey (2,000 bytes hide a number).")
]
ChatOption = Annotated[
    bool, typer.Option("--chat", help="The prompt is a message to a model that was trained to chat.")
]
TemperatureOption = Annotated[
    float, typer.Option(help="0 always takes the likeliest token; 1 draws as the model says.")
]
ExitThresholdOption = Annotated[
    float | None,
    typer.Option(help="Of a looped model: take the loop where the chance to have left reaches this; 1 is the last."),
]
CacheDtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Type of the KV cache: bfloat16, float16, float32 or float8_e4m3fn; of a DeepSeek-style model fp8_ds_mla "
        "(or fp8) or nvfp4_ds_mla instead of the last. Unless given: the model's own."
    ),
]
ImplementationOption = Annotated[
    Implementation,
    typer.Option(help="auto: the GPU kernels on a GPU, plain XLA elsewhere. interpret is for tests."),
]
