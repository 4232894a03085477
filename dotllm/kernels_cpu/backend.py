"""The CPU backend: every op of `dotllm.ops.protocol.Ops` as a checked call of a kernel.

Ops check what they are given, flatten it, and choose the number of threads by the amount of work; neither that choice
nor the number itself changes a bit of the result. Buffers are plain NumPy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dotllm.errors import UsageError
from dotllm.gguf.dequantize import dequantize
from dotllm.gguf.reader import Tensor
from dotllm.gguf.types import GGMLType
from dotllm.kernels_cpu import activation, attention, conv, gated_delta, moe, norm, rope
from dotllm.kernels_cpu.checks import check_kv_rows, check_recurrent_rows, floats, ids, require
from dotllm.kernels_cpu.matmul import CpuWeight, load_weight, matmul, matmul_gathered
from dotllm.kernels_cpu.quantize import quantize
from dotllm.kernels_cpu.threads import choose_layer, set_threads
from dotllm.ops.protocol import PAGE, Activation, KvLayer, Rows
from dotllm.ops.rope import cos_sin_table
from dotllm.ops.rounding import Rounded

__all__ = ["CpuOps", "CpuPrepared", "CpuTable"]

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

_NO_FLOATS: F32 = np.empty(0, np.float32)
_NO_HALVES: NDArray[np.uint16] = np.empty(0, np.uint16)
_DTYPES = {"f32": np.float32, "f16": np.uint16}

THREADED_WORK = 1 << 15
"""Multiply-adds (or the like) below which starting threads costs more than it saves."""


ATTENTION_ROWS = 8
"""Rows that share one pass over the cache: enough to hide its traffic, few enough to stay in the first cache."""


@dataclass(frozen=True, slots=True)
class CpuTable:
    """A token embedding as it lies in the file: its rows are dequantised when they are looked up."""

    shape: tuple[int, ...]
    type: GGMLType
    raw: NDArray[np.uint8]  # (V, bytes of a row)


@dataclass(frozen=True, slots=True)
class CpuPrepared:
    """Rows (M, K) in every rounding that was asked for, by kind."""

    shape: tuple[int, int]
    rounded: dict[str, Rounded]

    def of(self, kind: str) -> Rounded:
        """The rows rounded as `kind`; raises UsageError if the rows were not prepared for such weights."""
        try:
            return self.rounded[kind]
        except KeyError:
            raise UsageError(f"these rows were prepared as {', '.join(self.rounded)}, not as {kind}") from None


class CpuOps:
    """Ops in Numba kernels on `n_threads` threads (None: one per physical core)."""

    name = "cpu"

    def __init__(self, n_threads: int | None = None, threaded_work: int = THREADED_WORK) -> None:
        choose_layer()
        self.n_threads = set_threads(n_threads)
        self._threaded_work = threaded_work
        self._buffers: dict[str, F32] = {}

    def _threads(self, work: int) -> int:
        return self.n_threads if work >= self._threaded_work else 1

    def _run(self, part: Callable[..., None], whole: Callable[..., None], work: int, *arguments: Any) -> None:
        """The kernel's serial form, or its threaded form where there is enough work."""
        threads = self._threads(work)
        if threads == 1:
            part(*arguments, 0, 1)
        else:
            whole(*arguments, threads)

    def _scratch(self, name: str, size: int) -> F32:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, np.float32)
        return buffer[:size]

    # ---- loading and moving
    def load(self, tensor: Tensor, rows: NDArray[np.int64] | None = None) -> CpuWeight:
        matrices = tensor.shape[:-1] or (1,)
        raw = tensor.data.reshape(*matrices, tensor.row_bytes)
        return load_weight(tensor.type, raw if rows is None else raw[..., rows, :])

    def load_table(self, tensor: Tensor) -> CpuTable:
        return CpuTable(tensor.shape, tensor.type, tensor.data.reshape(tensor.rows, tensor.row_bytes))

    def load_vector(self, tensor: Tensor) -> F32:
        values = dequantize(tensor.data.reshape(tensor.rows, tensor.row_bytes), tensor.type)
        return np.array(values, np.float32, order="C").reshape(tensor.shape)

    def empty(self, shape: tuple[int, ...]) -> F32:
        return np.empty(shape, np.float32)

    def zeros(self, shape: tuple[int, ...], dtype: str = "f32") -> NDArray[Any]:
        return np.zeros(shape, _DTYPES[dtype])

    def put(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.array(array, order="C")

    def get(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.array(array, order="C")

    def gather(self, x: F32, index: I32, out: F32) -> None:
        require(
            out.shape == (len(index), *x.shape[1:]), "gather: {} rows of {} into {}", len(index), x.shape, out.shape
        )
        np.take(x, ids("gather: index", index, len(x)), axis=0, out=out, mode="clip")

    def copy(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        require(source.shape == target.shape, "copy: {} into {}", source.shape, target.shape)
        np.copyto(target, source)

    # ---- rows in
    def embed(self, table: CpuTable, token_ids: I32, scale: float, out: F32) -> None:
        floats("embed: out", out, (len(token_ids), table.shape[1]))
        rows = dequantize(table.raw[ids("embed: token ids", token_ids, table.shape[0])], table.type)
        np.multiply(rows, np.float32(scale), out=out)

    def rms_norm(self, x: F32, weight: F32, eps: float, out: F32, *, add: bool = False, column: int = 0) -> None:
        rows, width = x.shape
        require(out.ndim == 2 and 0 <= column <= out.shape[1] - width, "rms_norm: column {} of {}", column, out.shape)
        self._run(
            norm.rms_norm_part, norm.rms_norm, 4 * x.size,
            floats("rms_norm: x", x, (rows, width)), floats("rms_norm: weight", weight, (width,)), eps,
            floats("rms_norm: out", out, (rows, out.shape[1])), out.shape[1], column, add, rows,
        )  # fmt: skip

    def prepare(self, x: F32, norm: F32 | None, eps: float, weights: Sequence[CpuWeight]) -> CpuPrepared:
        rows: F32 = x
        if norm is not None:
            rows = self._scratch("prepare", x.size).reshape(x.shape)
            self.rms_norm(x, norm, eps, rows)
        return self._rounded(rows, weights)

    def _rounded(self, rows: F32, weights: Sequence[CpuWeight]) -> CpuPrepared:
        floats("prepare: x", rows, (len(rows), weights[0].shape[-1]))
        kinds = dict.fromkeys(weight.activation for weight in weights)
        return CpuPrepared(rows.shape, {kind: quantize(rows, kind, self.n_threads) for kind in kinds})

    def linear(
        self,
        x: CpuPrepared,
        weights: Sequence[CpuWeight],
        outs: Sequence[F32],
        biases: Sequence[F32 | None] | None = None,
        *,
        add: bool = False,
    ) -> None:
        for j, (weight, out) in enumerate(zip(weights, outs, strict=True)):
            bias = None if biases is None else biases[j]
            floats("linear: out", out, (x.shape[0], weight.shape[0]))
            if bias is not None:
                floats("linear: bias", bias, weight.shape[:1])
            matmul(weight, x.of(weight.activation), out, bias, add, self.n_threads)

    def gated_linear(
        self, x: CpuPrepared, gate: CpuWeight, up: CpuWeight, act: Activation, down: CpuWeight
    ) -> CpuPrepared:
        shape = (x.shape[0], gate.shape[0])
        y, z = (self._scratch(name, math.prod(shape)).reshape(shape) for name in ("gate", "up"))
        self.linear(x, [gate, up], [y, z])
        self._gate_up(y, z, act)
        return self._rounded(y, [down])

    def _gate_up(self, gate: F32, up: F32, act: Activation) -> None:
        y, z = gate.reshape(-1), up.reshape(-1)
        self._run(activation.gate_up_part, activation.gate_up, 16 * y.size, y, z, y, act == "gelu")

    # ---- attention
    def rope_table(self, inverse_frequency: NDArray[np.float64], scale: float, length: int) -> F32:
        return cos_sin_table(inverse_frequency, scale, length)

    def qk_norm_rope(
        self,
        q: F32,
        k: F32,
        q_norm: F32 | None,
        k_norm: F32 | None,
        eps: float,
        positions: I32,
        table: F32,
        *,
        adjacent: bool,
    ) -> None:
        rows, heads, width = q.shape
        length, pairs = table.shape[1:]
        require(2 * pairs <= width, "rope: {} pairs do not fit in a head of {}", pairs, width)
        require(len(positions) == rows, "rope: {} positions for {} rows", len(positions), rows)
        self._run(
            rope.qk_norm_rope_part, rope.qk_norm_rope, 8 * (q.size + k.size),
            floats("rope: q", q, q.shape), floats("rope: k", k, (rows, k.shape[1], width)), heads, k.shape[1], width,
            _NO_FLOATS if q_norm is None else floats("rope: q_norm", q_norm, (width,)),
            _NO_FLOATS if k_norm is None else floats("rope: k_norm", k_norm, (width,)), eps,
            ids("rope: positions", positions, length), floats("rope: table", table, (2, length, pairs)),
            length, pairs, adjacent,
        )  # fmt: skip

    def kv_store(self, kv: KvLayer, rows: Rows, k: F32, v: F32) -> None:
        count, heads, width = k.shape
        check_kv_rows(rows, count, 1, kv.k.shape[0])
        for name, cache, new in (("k", kv.k, k), ("v", kv.v, v)):
            require(cache.shape[1:] == (heads, PAGE, width), "kv_store: {} into {}", k.shape, cache.shape)
            attention.kv_store(
                floats(f"kv_store: {name}", new, k.shape), *_cache(cache, kv.k.shape),
                rows.pages, rows.sequence, rows.positions, heads, width,
            )  # fmt: skip

    def attention(self, q: F32, kv: KvLayer, rows: Rows, scale: float, window: int, gate: F32 | None, out: F32) -> None:
        count, heads, width = q.shape
        kv_heads = kv.k.shape[1]
        require(
            kv.k.shape[2:] == (PAGE, width) and heads % kv_heads == 0,
            "attention: queries {} do not fit a cache of {}",
            q.shape,
            kv.k.shape,
        )
        check_kv_rows(rows, count, window, kv.k.shape[0])
        (k, k_half), (v, v_half) = (_cache(cache, kv.k.shape) for cache in (kv.k, kv.v))
        reach = int(rows.positions[-1]) + 1
        work = 2 * count * heads * width * (min(reach, window) if window else reach)
        threads = self._threads(work)
        shared = heads // kv_heads if count * kv_heads >= threads else 1
        block = max(1, min(ATTENTION_ROWS, count * kv_heads // threads))
        self._run(
            attention.attention_part, attention.attention, work,
            floats("attention: q", q, q.shape), k, v, k_half, v_half,
            _NO_FLOATS if gate is None else floats("attention: gate", gate, q.shape),
            rows.pages, rows.sequence, rows.positions, heads, kv_heads, block, shared, width, scale, window,
            self._scratch("attention", threads * attention.scratch_size(block * shared, width)),
            floats("attention: out", out, q.shape),
        )  # fmt: skip

    # ---- Gated DeltaNet
    def conv_silu_l2(self, u: F32, taps: F32, conv_window: F32, rows: Rows, eps: float, q: F32, k: F32, v: F32) -> None:
        count, width = u.shape
        heads, size = q.shape[1:]
        length = taps.shape[1]
        require(size % 16 == 0 and length >= 2, "convolution: heads of {} (not of 16) or {} taps", size, length)
        require((width - 2 * heads * size) % size == 0, "convolution: {} channels in heads of {}", width, size)
        check_recurrent_rows(rows, count, len(conv_window))
        self._run(
            conv.conv_silu_l2_part, conv.conv_silu_l2, 8 * u.size,
            floats("convolution: u", u, (count, width)), floats("convolution: taps", taps, (width, length)),
            floats("convolution: window", conv_window, (len(conv_window), length - 1, width)),
            rows.starts, rows.read, rows.write, eps,
            floats("convolution: q", q, (count, heads, size)), floats("convolution: k", k, (count, heads, size)),
            floats("convolution: v", v, (count, width // size - 2 * heads, size)), length, heads, size,
            self._scratch("convolution", self.n_threads * length * size),
        )  # fmt: skip

    def gdn_gates(self, alpha: F32, beta: F32, a: F32, dt: F32, g: F32, b: F32) -> None:
        shape = (len(alpha), len(a))
        arrays = (floats("gdn_gates: alpha, beta, g, b", array, shape) for array in (alpha, beta, g, b))
        flat_alpha, flat_beta, flat_g, flat_b = arrays
        a, dt = floats("gdn_gates: a", a, (len(a),)), floats("gdn_gates: dt", dt, (len(a),))
        activation.gates(flat_alpha, flat_beta, a, dt, flat_g, flat_b)

    def gated_delta(
        self, q: F32, k: F32, v: F32, g: F32, b: F32, key_head: I32, state: F32, rows: Rows, out: F32
    ) -> None:
        count, key_heads, key_width = q.shape
        heads, value_width = v.shape[1:]
        require(
            key_width % 16 == 0 and value_width % gated_delta.TILE == 0, "gated_delta: heads {} {}", q.shape, v.shape
        )
        require(len(key_head) == heads, "gated_delta: {} key heads named for {} heads", len(key_head), heads)
        check_recurrent_rows(rows, count, len(state))
        self._run(
            gated_delta.gated_delta_part, gated_delta.gated_delta, 2 * v.size * key_width,
            floats("gated_delta: q", q, q.shape), floats("gated_delta: k", k, q.shape),
            floats("gated_delta: v", v, (count, heads, value_width)), floats("gated_delta: g", g, (count, heads)),
            floats("gated_delta: b", b, (count, heads)), ids("gated_delta: key_head", key_head, key_heads),
            floats("gated_delta: state", state, (len(state), heads, value_width, key_width)),
            rows.starts, rows.read, rows.write, floats("gated_delta: out", out, v.shape),
            key_heads, key_width, value_width, 1.0 / math.sqrt(key_width),
        )  # fmt: skip

    def gated_norm(self, x: F32, weight: F32, z: F32, eps: float) -> None:
        require(x.shape[-1] % 16 == 0, "gated_norm: heads of {}, not a multiple of 16", x.shape[-1])
        self._run(
            norm.gated_norm_part, norm.gated_norm, 16 * x.size,
            floats("gated_norm: x", x, x.shape), floats("gated_norm: weight", weight, x.shape[-1:]),
            floats("gated_norm: z", z, x.shape), eps, x.size // x.shape[-1],
        )  # fmt: skip

    # ---- experts
    def route(self, logits: F32, used: int, scale: float) -> tuple[I32, F32]:
        rows, experts = logits.shape
        require(0 < used <= experts, "route: {} of {} experts", used, experts)
        chosen, weights = np.empty((rows, used), np.int32), np.empty((rows, used), np.float32)
        flat = floats("route: logits", logits, logits.shape)
        moe.route(flat, experts, used, scale, self._scratch("route", experts), chosen.reshape(-1), weights.reshape(-1))
        return chosen, weights

    def experts(
        self,
        x: CpuPrepared,
        gate: CpuWeight,
        up: CpuWeight,
        down: CpuWeight,
        act: Activation,
        expert_ids: I32,
        weights: F32,
        out: F32,
    ) -> None:
        rows, used = ids("experts: ids", expert_ids, gate.shape[0], 2).shape
        pairs, hidden, width = rows * used, gate.shape[1], down.shape[1]
        y, z = (self._scratch(name, pairs * hidden).reshape(pairs, hidden) for name in ("gate", "up"))
        row = np.repeat(np.arange(rows, dtype=np.int32), used)
        expert = expert_ids.reshape(-1)
        for weight, target in ((gate, y), (up, z)):
            matmul_gathered(weight, x.of(weight.activation), row, expert, target, self.n_threads)
        self._gate_up(y, z, act)
        results = self._scratch("experts", pairs * width).reshape(pairs, width)
        each = np.arange(pairs, dtype=np.int32)
        rounded = self._rounded(y, [down]).of(down.activation)
        matmul_gathered(down, rounded, each, expert, results, self.n_threads)
        self._run(
            moe.sum_experts_part, moe.sum_experts, 2 * results.size, results.reshape(-1),
            floats("experts: weights", weights, (rows, used)), used, width, floats("experts: out", out, (rows, width)),
        )  # fmt: skip

    def gated_add(self, x: F32, gate: F32, out: F32) -> None:
        flat_gate = floats("gated_add: gate", gate, (len(x), 1))
        activation.gated_add(floats("gated_add: x", x, x.shape), flat_gate, floats("gated_add: out", out, x.shape))

    # ---- rows out
    def softcap(self, x: F32, cap: float) -> None:
        activation.softcap(floats("softcap: x", x, x.shape), cap)


def _cache(cache: NDArray[Any], shape: tuple[int, ...]) -> tuple[F32, NDArray[np.uint16]]:
    """One half of a KvLayer as kernels take it: float32 values or float16 bits, the other empty."""
    if cache.dtype == np.uint16 and cache.shape == shape and cache.flags.c_contiguous:
        return _NO_FLOATS, cache.reshape(-1)
    return floats("cache", cache, shape), _NO_HALVES
