"""Prints a digest of the logits of model files under the CPU kernels: run in processes with different settings."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from harness import Run, open_model

from dotllm.ops.select import select_ops


def main(threads: int, paths: list[str]) -> None:
    ops = select_ops("cpu", threads)
    for path in paths:
        run = Run.of(open_model(Path(path), ops), ops)
        tokens = [3, 141, 59, 26, 53]
        parts = [run.logits(tokens)]
        if run.model.mtp is not None:
            parts.append(run.mtp_logits(tokens))
        sys.stdout.write(hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest() + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
