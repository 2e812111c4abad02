"""Methods by name for the command line: a selector and options, such as `quest` or `quest:page_size=32:sinks=0`."""

import ast
import dataclasses
from typing import Any

from models import checkpoints
from models.deepseek_config import DeepseekConfig
from sparse_jax import selectors
from sparse_jax.selectors import DSA, Dense, Selector

PAGE_SIZE = 16
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {"h2o-evict": ("h2o", {"form": "evict"})}
"""Short names for a selector with options."""
INTERESTING = (
    "dense",
    "oracle",
    "random",
    "window",
    "quest",
    "centroid",
    "lserve",
    "h2o_sparse_attention",
    "gqa_h2o_sparse_attention",
    "h2o",
    "h2o-evict",
    "snapkv",
    "tova",
    "rocketkv",
)
OWN_CACHE = ("reserve", "store", "reserve_prompt", "store_prompt")


@dataclasses.dataclass(frozen=True)
class Method:
    """A selector without its budget, and the page size it runs at."""

    name: str  # as the user wrote it; names its line in plots
    selector: Selector
    page_size: int = PAGE_SIZE

    @property
    def takes_budget(self) -> bool:
        """Whether a budget means anything to it."""
        return not isinstance(self.selector, Dense | DSA)  # how many DSA reads is its own option, k

    @property
    def keeps_all(self) -> bool:
        """Whether its cache is that of dense attention after the same tokens: it takes no part in storing them."""
        kind = type(self.selector)
        return all(getattr(kind, name) is getattr(Selector, name) for name in OWN_CACHE)

    def at(self, budget: Any, most: int) -> Selector:
        """The selector with a budget, an array of at most `most` tokens or a number."""
        return dataclasses.replace(self.selector, budget=budget, most=most) if self.takes_budget else self.selector


def default(model: str) -> list[str]:
    """The interesting methods of a model, a name for `checkpoints.resolve`."""
    config = checkpoints.read_config(checkpoints.resolve(model))
    if isinstance(config, DeepseekConfig):
        most = 0 if config.indexer is None else config.indexer.topk
        return ["dense", *(f"dsa:k={k}" for k in (most // 4, most // 2, most) if k)]
    return [name for name in INTERESTING if ALIASES.get(name, (name,))[0] in selectors.names()]


def parse(text: str) -> Method:
    """A method from `name:option=value:option=value`. Raises ValueError for an unknown name, option or value."""
    name, *options = text.strip().split(":")
    known, values = ALIASES.get(name, (name, {}))
    values = dict(values)
    for option in options:
        key, separator, value = option.partition("=")
        if not separator:
            raise ValueError(f"{text!r}: write options as name:option=value, got {option!r}")
        try:
            values[key.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[key.strip()] = value
    if "budget" in values or "most" in values:
        raise ValueError(f"{text!r}: budgets are given for all methods together")
    page_size = values.pop("page_size", None)
    if page_size is not None and not (type(page_size) is int and page_size >= 1):
        raise ValueError(f"{text!r}: page_size must be a whole number of at least 1")
    selector = selectors.get(known, **values)
    return Method(text.strip(), selector, page_size or selector.page_size or PAGE_SIZE)
