"""A paged cache in plain Python, to compare the real one with: a lease is an object, and identity needs no counter."""

import dataclasses

EMPTY, UNKNOWN = 0.0, None  # a token that reads as absent; bytes that nobody has written under this lease


@dataclasses.dataclass(eq=False)
class Page:
    """One lease. `holders` 0: given back, and every reference to it is stale for ever."""

    tokens: list  # of each offset: its value or UNKNOWN
    holders: int = 1


class Model:
    """Requests are served one after the other; that is the whole meaning of `reserve`."""

    def __init__(self, pages: int, page_size: int, requests: int, table_width: int):
        self.free, self.page_size, self.table_width = pages, page_size, table_width
        self.tables: list[list[Page]] = [[] for _ in range(requests)]
        self.lengths, self.failed = [0] * requests, [False] * requests

    def take(self, tokens=None) -> Page:
        self.free -= 1
        return Page(list(tokens) if tokens else [UNKNOWN] * self.page_size)

    def drop(self, page: Page) -> None:
        assert page.holders > 0
        page.holders -= 1
        self.free += page.holders == 0

    def reserve(self, counts) -> list[list[tuple[Page, int]]]:
        """The (page, offset) of each new token of each request; none for a request that failed."""
        return [self._reserve(request, count) for request, count in enumerate(counts)]

    def _reserve(self, request, count):
        if count == 0:
            return []
        table, start = self.tables[request], self.lengths[request]
        needed = -(-(start + count) // self.page_size) - len(table)
        copy = start % self.page_size and table[-1].holders > 1
        self.failed[request] = len(table) + needed > self.table_width or needed + bool(copy) > self.free
        if self.failed[request]:
            return []
        if copy:
            shared, table[-1] = table[-1], self.take(table[-1].tokens)
            self.drop(shared)
        table += [self.take() for _ in range(needed)]
        self.lengths[request] += count
        return [(table[p // self.page_size], p % self.page_size) for p in range(start, start + count)]

    def write(self, places, values) -> int:
        """Returns how many were ignored: the lease is over, or the page has other holders."""
        stale = 0
        for (page, offset), value in zip(places, values):
            if page.holders == 1:
                page.tokens[offset] = value
            else:
                stale += 1
        return stale

    def share(self, source, target, tokens) -> bool:
        if source == target or self.lengths[target]:
            return False
        tokens = min(tokens, self.lengths[source])
        self.tables[target] = self.tables[source][: -(-tokens // self.page_size)]
        self.lengths[target] = tokens
        for page in self.tables[target]:
            page.holders += 1
        return True

    def release(self, request) -> None:
        for page in self.tables[request]:
            self.drop(page)
        self.tables[request], self.lengths[request], self.failed[request] = [], 0, False

    def read(self, request) -> list:
        tokens = [token for page in self.tables[request] for token in page.tokens][: self.lengths[request]]
        return tokens + [EMPTY] * (self.table_width * self.page_size - len(tokens))
