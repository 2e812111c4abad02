"""What the shipped models promise, checked on the report of `models.training.quality`; their cards show it."""

from typing import Any


def ouro(result: dict[str, Any]) -> dict[str, bool]:
    """Whether a report keeps the promises of ouro-tiny (see its model card), as far as it holds the tasks and texts."""
    measured, texts = result["tasks"], result["text"]

    def exact(name: str) -> float:
        return min(at["exact"][-1] for at in measured[name].values())

    def ce(name: str) -> tuple[float, ...]:
        return texts[name][max((length for length in texts[name] if int(length) <= 2048), key=int)]["ce"]

    kept = {}
    if "passkey" in measured:
        kept["passkey >= 0.98 at every length"] = exact("passkey") >= 0.98
    if "keys4" in measured:
        kept["4 keys >= 0.95 at every length"] = exact("keys4") >= 0.95
    if texts.get("kjv"):
        kept["KJV at most 1.06 nats per byte at the last loop"] = ce("kjv")[-1] <= 1.06
    for name in filter(texts.get, texts):
        kept[f"{name}: the last loop is not worse than loop 2"] = ce(name)[-1] <= ce(name)[1]
    gains = [
        at["exact"][-1] - at["exact"][1]
        for name, lengths in measured.items()
        if name.startswith("chain")
        for at in lengths.values()
    ]
    if gains:
        kept["chains gain at least 0.1 from loop 2 to the last"] = max(gains) >= 0.1
    return kept


def latent(result: dict[str, Any]) -> dict[str, bool]:
    """Whether a report keeps the promises of deepseek-tiny, up to the 2,048 tokens that most of its training saw."""
    kept = {}
    for column, way in enumerate(("dense", "through the indexer")):
        for name, least in (("passkey", 0.98), ("keys4", 0.95)):
            if name in result["tasks"]:
                exact = [at["exact"][column] for size, at in result["tasks"][name].items() if int(size) <= 2048]
                kept[f"{name} >= {least} up to 2,048 bytes, {way}"] = min(exact) >= least
    for name, by_length in result["text"].items():
        if measured := [at["ce"] for size, at in by_length.items() if int(size) <= 2048]:
            text = f"{name}: at most 0.02 nats a byte worse through the indexer, up to 2,048 bytes"
            kept[text] = max(sparse - dense for dense, sparse in measured) <= 0.02
    return kept
