"""Small inputs for every op, and a run of all of them: what must be the same on every machine, and near the definition.

As a program it prints a digest of each result as JSON, for the tests that start it under other compiler settings.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np

from dotllm.gguf.reader import Tensor
from dotllm.gguf.types import GGMLType
from dotllm.ops.protocol import PAGE, KvLayer, Rows


def floats(seed: int, *shape: int, scale: float = 1.0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def rows_of(lengths: list[int], first: list[int], pages: int = 8) -> Rows:
    """Sequences of `lengths` rows that start at positions `first`; pages are dealt out backwards."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    count = len(lengths)
    return Rows(
        starts=starts,
        sequence=np.repeat(np.arange(count, dtype=np.int32), lengths),
        positions=np.concatenate([np.arange(p, p + n) for p, n in zip(first, lengths, strict=True)]).astype(np.int32),
        pages=np.arange(count * pages, dtype=np.int32)[::-1].reshape(count, pages).copy(),
        read=np.arange(count, dtype=np.int32) * 2,
        write=np.arange(count, dtype=np.int32) * 2 + 1,
    )


def slice_rows(rows: Rows, begin: int, end: int) -> Rows:
    """Rows begin .. end of a batch of one sequence."""
    return Rows(
        starts=i32(0, end - begin),
        sequence=rows.sequence[begin:end].copy(),
        positions=rows.positions[begin:end].copy(),
        pages=rows.pages,
        read=rows.read,
        write=rows.write,
    )


def f32_tensor(seed: int, *shape: int) -> Tensor:
    return Tensor("w", GGMLType.F32, shape, floats(seed, *shape, scale=0.2).reshape(-1).view(np.uint8))


def q8_tensor(seed: int, *shape: int) -> Tensor:
    """Random Q8_0 blocks: a float16 scale, then 32 signed bytes."""
    random = np.random.default_rng(seed)
    blocks = np.empty((int(np.prod(shape)) // 32, 34), np.uint8)
    blocks[:, :2] = (random.random((len(blocks), 1)) * 0.01).astype(np.float16).view(np.uint8)
    blocks[:, 2:] = random.integers(-127, 128, (len(blocks), 32)).astype(np.int8).view(np.uint8)
    return Tensor("w", GGMLType.Q8_0, shape, blocks.reshape(-1))


def run_norms(ops: Any) -> dict[str, Any]:
    results = {}
    for width in (64, 40):
        out = floats(1, 3, width + 8)
        ops.rms_norm(floats(2, 3, width), floats(3, width), 1e-6, out, column=4)
        results[f"rms_norm {width}"] = out
        more = floats(4, 3, width)
        ops.rms_norm(floats(5, 3, width), floats(6, width), 1e-6, more, add=True)
        results[f"rms_norm add {width}"] = more
    x = floats(7, 3, 2, 32)
    ops.gated_norm(x, floats(8, 32), floats(9, 3, 2, 32, scale=4.0), 1e-6)
    return results | {"gated_norm": x}


def run_rope(ops: Any) -> dict[str, Any]:
    results = {}
    table = ops.rope_table(10000.0 ** (-np.arange(8) / 8.0), 0.5, 200)
    for adjacent in (False, True):
        for norm in (False, True):
            q, k = floats(1, 3, 4, 24), floats(2, 3, 2, 24)
            weights = (floats(3, 24), floats(4, 24)) if norm else (None, None)
            ops.qk_norm_rope(q, k, *weights, 1e-6, i32(3, 199, 0), table, adjacent=adjacent)
            results[f"rope q adjacent={adjacent} norm={norm}"] = q
            results[f"rope k adjacent={adjacent} norm={norm}"] = k
    return results


def run_attention(ops: Any) -> dict[str, Any]:
    results = {}
    for width, dtype, window, gated in (
        (16, "f32", 0, True),
        (32, "f16", 0, False),
        (40, "f32", 20, True),
        (20, "f16", 40, True),
        (80, "f32", 0, False),
    ):
        rows = rows_of([70, 3], [0, 0])
        kv = KvLayer(*(ops.zeros((16, 2, PAGE, width), dtype) for _ in range(2)))
        k, v = floats(1, 73, 2, width), floats(2, 73, 2, width)
        ops.kv_store(kv, rows, k, v)
        pick = np.array([0, 1, 31, 32, 69, 70, 72])
        some = Rows(
            starts=i32(0, 5, 7), sequence=rows.sequence[pick], positions=rows.positions[pick], pages=rows.pages,
            read=rows.read, write=rows.write,
        )  # fmt: skip
        out = np.empty((7, 4, width), np.float32)
        gate = floats(3, 7, 4, width) if gated else None
        ops.attention(floats(4, 7, 4, width), kv, some, 0.3, window, gate, out)
        results[f"attention {width} {dtype} window={window}"] = out
        results[f"cache {width} {dtype}"] = kv.k
    return results


def run_recurrence(ops: Any) -> dict[str, Any]:
    results = {}
    for taps, size, lengths in ((4, 16, [5, 1, 2]), (2, 32, [1, 3]), (8, 16, [3, 9])):
        rows, count, heads, values = rows_of(lengths, [0] * len(lengths)), sum(lengths), 2, 4
        width = (2 * heads + values) * size
        conv = floats(1, 2 * len(lengths), taps - 1, width)
        q, k, v = (np.empty((count, n, size), np.float32) for n in (heads, heads, values))
        ops.conv_silu_l2(floats(2, count, width), floats(3, width, taps), conv, rows, 1e-6, q, k, v)
        results |= {f"conv {part} {taps}": a for part, a in (("q", q), ("k", k), ("v", v), ("window", conv))}
        g, b = (np.empty((count, values), np.float32) for _ in range(2))
        alpha, beta, a = floats(4, count, values), floats(5, count, values), -np.abs(floats(6, values))
        ops.gdn_gates(alpha, beta, a, floats(7, values), g, b)
        state, out = (
            floats(8, 2 * len(lengths), values, size, size, scale=0.3),
            np.empty((count, values, size), np.float32),
        )
        ops.gated_delta(q, k, v, g, b, i32(0, 1, 0, 1), state, rows, out)
        results |= {f"gates {taps}": np.stack([g, b]), f"delta {taps}": out, f"state {taps}": state}
    return results


def run_experts(ops: Any) -> dict[str, Any]:
    ids, weights = ops.route(floats(1, 3, 20, scale=2.0), 4, 1.5)
    results = {"route ids": ids, "route weights": weights}
    for name, tensor in (("f32", f32_tensor), ("q8_0", q8_tensor)):
        gate, up, down = (ops.load(tensor(s, 20, n, m)) for s, n, m in ((2, 32, 64), (3, 32, 64), (4, 64, 32)))
        x, out = floats(5, 3, 64), floats(6, 3, 64)
        ops.experts(ops.prepare(x, None, 1e-6, [gate, up]), gate, up, down, "silu", ids, weights, out)
        results[f"experts {name}"] = out
    x = floats(7, 3, 20)
    ops.gated_add(floats(8, 3, 20), floats(9, 3, 1), x)
    return results | {"gated_add": x}


def run_matrices(ops: Any) -> dict[str, Any]:
    results = {}
    for name, tensor in (("f32", f32_tensor), ("q8_0", q8_tensor)):
        w, one, down = ops.load(tensor(1, 24, 64)), ops.load(tensor(2, 64)), ops.load(tensor(3, 64, 96))
        x = ops.prepare(floats(4, 3, 64), floats(5, 64), 1e-6, [w, one])
        outs = [floats(6, 3, 24), floats(7, 3, 1)]
        ops.linear(x, [w, one], outs, [floats(8, 24), None], add=True)
        results |= {f"linear {name}": outs[0], f"linear one {name}": outs[1]}
        for act in ("silu", "gelu"):
            gate, up, out = ops.load(tensor(9, 96, 64)), ops.load(tensor(10, 96, 64)), np.empty((3, 64), np.float32)
            ops.linear(ops.gated_linear(x, gate, up, act, down), [down], [out])
            results[f"gated_linear {act} {name}"] = out
        picked, out = ops.load(tensor(1, 24, 64), np.array([23, 0, 7])), np.empty((3, 3), np.float32)
        ops.linear(ops.prepare(floats(4, 3, 64), None, 1e-6, [picked]), [picked], [out])
        results[f"linear picked {name}"] = out
        table, rows = ops.load_table(tensor(11, 10, 64)), np.empty((3, 64), np.float32)
        ops.embed(table, i32(9, 0, 9), 1.5, rows)
        results[f"embed {name}"] = rows
    x = floats(12, 3, 20, scale=30.0)
    ops.softcap(x, 30.0)
    return results | {"softcap": x}


def run_all(ops: Any) -> dict[str, Any]:
    """Every result by name."""
    runs = (run_norms, run_rope, run_attention, run_recurrence, run_experts, run_matrices)
    return {name: value for run in runs for name, value in run(ops).items()}


def digests(ops: Any) -> dict[str, str]:
    """A digest of each result's bytes."""
    return {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in run_all(ops).items()}


if __name__ == "__main__":
    from dotllm.kernels_cpu.cache import prepare_cache

    prepare_cache()
    from dotllm.kernels_cpu.backend import CpuOps

    json.dump(digests(CpuOps(int(sys.argv[1]), least_work=0)), sys.stdout)
