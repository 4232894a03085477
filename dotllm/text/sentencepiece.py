"""Byte-pair merges of a SentencePiece vocabulary, derived from the scores of its tokens.

A SentencePiece model joins, again and again, the neighbouring pair whose joint text is the token with the highest
score; equal scores go from left to right. A merge list says the same once every way to cut a token in two is ranked by
the token's score.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SPACE", "merges_from_scores"]

SPACE = "\u2581"


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool]
) -> list[tuple[str, str]]:
    """Merges `(left, right)`, best first.

    `mergeable[i]` tells whether token i may come out of a merge: control and byte tokens may not, or typed text could
    turn into one. Where a text overlaps itself ("aaa" out of "aa" "a" "aa") the leftmost pair must win, and that is the
    one with the longer left part, so equal scores are ranked by it.
    """
    known = {text for text, allowed in zip(tokens, mergeable, strict=True) if allowed}
    last_id = {text: token_id for token_id, text in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for token_id in sorted(range(len(tokens)), key=lambda token_id: -scores[token_id]):
        text = tokens[token_id]
        if len(text) < 2 or text not in known or last_id[text] != token_id:
            continue
        for cut in range(len(text) - 1, 0, -1):
            if text[:cut] in known and text[cut:] in known:
                merges.append((text[:cut], text[cut:]))  # noqa: PERF401 - half a million of them, and it reads better
    return merges
