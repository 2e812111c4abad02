"""Prompts for models that were trained to chat: the checkpoint's own template around what the user says."""

import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox

from models.checkpoints import gguf_files


def chat_prompt(place: Path, text: str) -> str:
    """The text as the one message of a user, up to where the model begins to answer.

    place: a checkpoint folder or GGUF file. Raises ValueError for a model without a chat template, or whose template
    cannot be used.
    """
    template, tokens = find_template(place)
    if template is None:
        raise ValueError(f"the model in {place} has no chat template; leave out --chat")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "user", "content": text}]
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **tokens)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of {place} cannot be used: {error}") from error


def find_template(place: Path) -> tuple[str | None, dict[str, str]]:
    """The template, None where there is none, and the special tokens that it may name."""
    if file := gguf_files.find(place):
        model = gguf_files.open_gguf(file)
        ids = {name: model.field(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        tokens = {f"{name}_token": model.tokens[n] for name, n in ids.items() if n is not None}
        return model.field("tokenizer.chat_template"), tokens
    settings: dict[str, Any] = {}
    if (path := place / "tokenizer_config.json").is_file():
        settings = json.loads(path.read_text(encoding="utf-8"))
    tokens = {name: _text(settings[name]) for name in ("bos_token", "eos_token") if settings.get(name)}
    if (path := place / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8"), tokens
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template, tokens


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]
