"""Names for the contents of full blocks.

Engines hash a block's tokens with all that stands before them; hash values differ from
engine to engine and are never compared. A label says the same thing canonically: two
blocks have one label exactly when their tokens, all tokens before them and the salt agree.
"""

from __future__ import annotations

Parent = int | str | None
"""What stands before a block: the label of the block before it; for a first block, the salt."""


class ContentLabels:
    """Labels are dense integers in the order in which contents are first published.

    They outlive blocks, requests and cache resets: a log has one numbering.
    """

    __slots__ = ("_labels",)

    def __init__(self) -> None:
        self._labels: dict[tuple[Parent, tuple[int, ...]], int] = {}

    def find(self, parent: Parent, tokens: tuple[int, ...]) -> int | None:
        """The label of this content, or None if it was never published."""
        return self._labels.get((parent, tokens))

    def name(self, parent: Parent, tokens: tuple[int, ...]) -> int:
        """The label of this content, a new one if it had none."""
        return self._labels.setdefault((parent, tokens), len(self._labels))
