"""The block pool: which pages are free, and how many tables name each of the others.

    free -- take --> 1 reference -- share --> 2, 3, ... -- release --> ... 1 -- release --> free

A page that more than one table names is never written: whoever has to write it takes a copy first (copy-on-write).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dotllm.errors import OutOfMemory, StateError
from dotllm.ops.protocol import PAGE

__all__ = ["BlockPool", "pages_for"]


def pages_for(positions: int) -> int:
    """Pages that hold this many positions."""
    return -(-positions // PAGE)


class BlockPool:
    """Hands out page numbers 0 .. pages - 1; `name` is what messages call them."""

    def __init__(self, pages: int, name: str) -> None:
        if pages < 1:
            raise StateError(f"{name}: a pool of {pages} pages cannot hold a sequence; give it at least 1")
        self.name = name
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def pages(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.pages - self.free

    def references(self, page: int) -> int:
        return self._references[page]

    def shared(self, page: int) -> bool:
        """Whether a write must go to a copy of this page."""
        return self._references[page] > 1

    def take(self, count: int) -> tuple[int, ...]:
        """`count` free pages with one reference each, or OutOfMemory and no change."""
        if count > len(self._free):
            raise OutOfMemory(
                f"{self.name}: {count} pages of {PAGE} positions are needed and {self.free} of {self.pages} are free; "
                f"run fewer or shorter sequences at once, release snapshots, or ask for a larger context"
            )
        if count == 0:
            return ()
        taken = tuple(reversed(self._free[-count:]))
        for page in taken:
            self._references[page] = 1
        del self._free[-count:]
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more table names these pages."""
        for page in pages:
            if self._references[page] < 1:
                raise StateError(f"{self.name}: page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One table fewer names these pages; a page that no table names is free."""
        for page in pages:
            if self._references[page] < 1:
                raise StateError(f"{self.name}: page {page} is free already")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def recount(self, tables: Iterable[Sequence[int]]) -> None:
        """Rebuild counts and free list from the tables that are durable: every reservation beside them is forgotten."""
        references = [0] * self.pages
        for table in tables:
            for page in table:
                references[page] += 1
        free = [page for page in range(self.pages - 1, -1, -1) if references[page] == 0]
        self._references, self._free = references, free
