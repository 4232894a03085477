"""The arithmetic of tools/compare_peer.py; neither model nor llama.cpp is needed for it."""

from __future__ import annotations

import math

import compare_peer
import numpy as np
import pytest


def test_difference() -> None:
    theirs = np.array([[0.0, 1.0, 2.0], [3.0, 1.0, 0.0]], np.float32)
    ours = theirs + np.array([[0.0, 0.0, -1.5], [0.0, 0.5, 0.0]], np.float32)
    found = compare_peer.Difference.of(ours, theirs)
    assert (found.rows, found.largest, found.same_argmax) == (2, 1.5, 1)
    assert found.rms == pytest.approx(math.sqrt((1.5**2 + 0.5**2) / 6))
    assert found.scale == pytest.approx(theirs.std())


def test_surprise_is_that_of_the_tokens_that_came() -> None:
    p = np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]])
    logits = (np.log(p) + 7).astype(np.float32)  # a constant changes nothing
    assert compare_peer.surprise(logits, [0, 1, 2]) == pytest.approx(-math.log(0.25) - math.log(0.8), rel=1e-6)


def test_a_uniform_guess_has_the_perplexity_of_the_vocabulary() -> None:
    assert math.exp(compare_peer.surprise(np.zeros((5, 64), np.float32), [1, 2, 3, 4, 5]) / 4) == pytest.approx(64)


def test_arguments_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_peer.main(["model.gguf", "--window", "1"])
    assert "--window takes 2 to" in capsys.readouterr().err
