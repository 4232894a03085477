"""Ask llama.cpp for the answers that tests/golden compares with; needs the extra `bench` (xllamacpp).

    python tools/make_goldens.py [NAME ...]      # all cases, or some

Each answer file holds the SHA-256 of the model that it is of; the generator writes the same bytes anywhere.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from make_tiny_gguf import make
from peer_llamacpp import Peer

__all__ = ["CASES", "DATA", "main"]

DATA = Path(__file__).parent.parent / "tests" / "golden" / "data"

QUANTISED = (
    *("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0"),
)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "F32", {}),
    "llama_rope_freqs": ("llama", "F32", {"rope_freqs": True}),
    "qwen2": ("qwen2", "F32", {}),
    "qwen3": ("qwen3", "F32", {}),
    "gemma3": ("gemma3", "F32", {}),
    "qwen35": ("qwen35", "F32", {}),
    "qwen35_r3_untied": ("qwen35", "F32", {"interval": 4, "v_per_k": 3, "untied": True, "head_norm": False}),
    "qwen35_own_head": ("qwen35", "F32", {"v_per_k": 1, "own_head": True}),
    "qwen35_sections": ("qwen35", "F32", {"sections": (2, 3, 3, 0)}),
    "qwen35_predictive": ("qwen35", "F32", {"predictive": 0.02}),
    "qwen35moe": ("qwen35moe", "F32", {}),
    "qwen3next": ("qwen3next", "F32", {}),
    **{f"qwen35_{kind}": ("qwen35", kind, {"layers": 2}) for kind in QUANTISED},
}
"""Name: architecture, type, options of make_tiny_gguf."""

TOKENS, FIRSTS, GREEDY = 20, 8, 24


def answers(path: Path, seed: int) -> dict[str, Any]:
    """Logits (and MTP logits) of random tokens, of some of them standing alone, and a greedy continuation."""
    tokens = np.random.default_rng(seed).integers(0, 256, TOKENS).astype(np.int32)
    found: dict[str, Any] = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "tokens": tokens}
    with Peer(path) as peer:
        if peer.has_mtp:
            found["logits"], found["mtp_logits"] = peer.logits(tokens.tolist(), mtp=True)
        else:
            found["logits"] = peer.logits(tokens.tolist())
        found["firsts"] = np.concatenate([peer.logits([token]) for token in tokens[:FIRSTS].tolist()])
        found["greedy"] = np.array(peer.greedy(tokens[:8].tolist(), GREEDY), np.int32)
    return found


def main(names: list[str]) -> None:
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for seed, (name, (arch, kind, options)) in enumerate(CASES.items()):
            if not names or name in names:
                path = make(Path(folder) / f"{name}.gguf", arch, kind, **options)
                np.savez_compressed(DATA / f"{name}.npz", **answers(path, seed))
                print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
