"""llama.cpp's own answers on tiny random models of every family and tensor type (tools/make_goldens.py made them).

Float files must agree closely. On quantised files a rounding of an activation can fall to the other side of a tie,
which random weights amplify: there tokens that stand alone must be sharp, but for a tie now and then, and the rest
close in distribution.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Run, open_model
from make_goldens import CASES, DATA

from dotllm.ops.protocol import Ops
from dotllm.ops.reference import NumpyOps
from dotllm.ops.select import select_ops

FLOAT = [name for name, (_, kind, _) in CASES.items() if kind == "F32"]
QUANTISED = [name for name in CASES if name not in FLOAT]
FIRST_TOKEN = {"F16": 2e-2, "BF16": 2e-2}


@pytest.fixture(params=["cpu", "numpy"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return NumpyOps() if request.param == "numpy" else select_ops("cpu", 2)


def case(name: str, tiny_gguf: Any) -> tuple[Path, dict[str, Any]]:
    arch, kind, options = CASES[name]
    path: Path = tiny_gguf(arch, kind, **options)
    golden = dict(np.load(DATA / f"{name}.npz"))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == str(golden["sha256"]), "run tools/make_goldens.py"
    return path, golden


@pytest.mark.parametrize("name", FLOAT)
def test_float_files_agree(name: str, ops: Ops, tiny_gguf: Any) -> None:
    path, golden = case(name, tiny_gguf)
    run = Run.of(open_model(path, ops), ops)
    tokens = golden["tokens"].tolist()
    close = 1e-2 if name == "gemma3" else 2e-3  # llama.cpp's GELU is a float16 table
    np.testing.assert_allclose(run.logits(tokens), golden["logits"], rtol=0, atol=close)
    assert run.greedy(tokens[:8], len(golden["greedy"])) == golden["greedy"].tolist()
    assert ("mtp_logits" in golden) == (run.model.mtp is not None)
    if run.model.mtp is not None:
        np.testing.assert_allclose(run.mtp_logits(tokens), golden["mtp_logits"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_files_agree(name: str, ops: Ops, tiny_gguf: Any) -> None:
    path, golden = case(name, tiny_gguf)
    run = Run.of(open_model(path, ops), ops)
    tokens = golden["tokens"].tolist()
    for ours, theirs in (
        (run.logits(tokens), golden["logits"]),
        (run.mtp_logits(tokens), golden["mtp_logits"]),
    ):
        assert np.sqrt(np.mean((ours - theirs) ** 2)) <= 0.1 * theirs.std()
        assert np.mean(ours.argmax(-1) == theirs.argmax(-1)) >= 0.85
    firsts = np.concatenate([run.logits([token]) for token in tokens[: len(golden["firsts"])]])
    sharp = np.abs(firsts - golden["firsts"]).max(-1) <= FIRST_TOKEN.get(CASES[name][1], 5e-3)
    assert sharp.sum() >= len(sharp) - 2
