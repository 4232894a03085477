"""The operations in plain NumPy: the definition that every kernel is tested against, and the backend `--backend numpy`.

Clarity first: a formula here is the formula of the protocol. Matrices are held as float32 (dequantised once), each row
of a batch is multiplied by itself, so that its value cannot depend on its neighbours, and sums run in float64 where
that costs nothing. Nothing here is fast, and nothing here is called by the fast backends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dotllm.gguf.dequantize import dequantize
from dotllm.gguf.reader import Tensor
from dotllm.gguf.types import FORMATS, GGMLType
from dotllm.ops.protocol import PAGE, Activation, Array, KvLayer, Rows
from dotllm.ops.rope import cos_sin_table
from dotllm.ops.rounding import Rounded, quantize_rows

__all__ = ["NumpyOps"]

F32 = NDArray[np.float32]


def sigmoid(x: NDArray[Any]) -> NDArray[np.float64]:
    y: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-x.astype(np.float64)))
    return y


def silu(x: NDArray[Any]) -> NDArray[np.float64]:
    return x * sigmoid(x)


def gelu(x: NDArray[Any]) -> NDArray[np.float64]:
    """The tanh form; input and result rounded to float16, 0 below -10 and x above 10, as ggml's table has it."""
    y = x.astype(np.float16).astype(np.float64)
    y = 0.5 * y * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * y * (1.0 + 0.044715 * y * y)))
    return np.where(np.abs(x) < 10.0, y.astype(np.float16).astype(np.float64), np.maximum(x.astype(np.float64), 0.0))


def softplus(x: NDArray[Any]) -> NDArray[np.float64]:
    """log(1 + e^x), and x itself beyond 20."""
    y = x.astype(np.float64)
    return np.where(y > 20.0, y, np.log1p(np.exp(np.minimum(y, 20.0))))


ACTIVATIONS = {"silu": silu, "gelu": gelu}


def rms(x: NDArray[Any], weight: NDArray[Any], eps: float) -> NDArray[np.float64]:
    y: NDArray[np.float64] = x.astype(np.float64)
    y /= np.sqrt((y * y).mean(-1, keepdims=True) + eps)
    y *= weight
    return y


@dataclass(frozen=True, slots=True)
class NumpyWeight:
    """A matrix (N, K) or a stack (X, N, K) as float32, and how its activations are rounded.

    `mins` (..., N, K / 32) is kept for Q4_1 and Q5_1: ggml multiplies it by the block sums of the activations after
    rounding them to float16.
    """

    values: F32
    activation: str
    mins: F32 | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


class NumpyPrepared:
    """Rows (M, K) before rounding, and each rounding that was asked for."""

    def __init__(self, rows: F32) -> None:
        self.rows = rows
        self._rounded: dict[str, Rounded] = {}

    def rounded(self, kind: str) -> Rounded:
        if kind not in self._rounded:
            self._rounded[kind] = quantize_rows(self.rows, kind)
        return self._rounded[kind]


def _product(weight: NumpyWeight, x: Rounded, row: int, expert: int | None = None) -> F32:
    """One row through one matrix: (N,)."""
    values = weight.values if expert is None else weight.values[expert]
    y: F32 = values @ x.dequantized()[row]
    if weight.mins is not None:
        mins = weight.mins if expert is None else weight.mins[expert]
        y = y + mins @ x.sum_error()[row]
    return y


class NumpyOps:
    """Every op of `dotllm.ops.protocol.Ops`, in NumPy."""

    name = "numpy"

    def recorded(
        self, owner: Any, key: Hashable, build: Callable[..., Any], inputs: Sequence[Any], buffers: Sequence[Any] = ()
    ) -> Any:
        return build(*inputs)

    # ---- loading and moving
    def load(self, tensor: Tensor, rows: NDArray[np.int64] | None = None) -> NumpyWeight:
        matrix_shape = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
        raw = tensor.data.reshape(*matrix_shape[:-1], -1)
        if rows is not None:
            raw = raw[..., rows, :]
        values = dequantize(raw, tensor.type)
        mins = None
        if tensor.type in (GGMLType.Q4_1, GGMLType.Q5_1):
            blocks = raw.reshape(*raw.shape[:-1], -1, FORMATS[tensor.type].bytes)
            mins = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0].astype(np.float32)
        return NumpyWeight(values, FORMATS[tensor.type].activation, mins)

    def load_table(self, tensor: Tensor) -> NumpyWeight:
        return self.load(tensor)

    def load_vector(self, tensor: Tensor) -> F32:
        return dequantize(tensor.data.reshape(*tensor.shape[:-1], -1), tensor.type).reshape(tensor.shape)

    def empty(self, shape: tuple[int, ...]) -> F32:
        return np.empty(shape, np.float32)

    def zeros(self, shape: tuple[int, ...], dtype: str = "f32") -> NDArray[Any]:
        return np.zeros(shape, {"f32": np.float32, "f16": np.uint16}[dtype])

    def put(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(array)

    def get(self, array: Array) -> NDArray[Any]:
        return np.array(array)

    def gather(self, x: Array, index: NDArray[np.int32], out: Array) -> None:
        out[...] = x[index]

    def copy(self, source: Array, target: Array) -> None:
        target[...] = source

    # ---- rows in
    def embed(self, table: NumpyWeight, ids: NDArray[np.int32], scale: float, out: Array) -> None:
        out[...] = table.values[ids] * np.float32(scale)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, *, add: bool = False, column: int = 0) -> None:
        target = out[:, column : column + x.shape[1]]
        y = rms(x, weight, eps)
        target[...] = target + y if add else y

    def prepare(self, x: Array, norm: Array | None, eps: float, weights: Sequence[NumpyWeight]) -> NumpyPrepared:
        return NumpyPrepared(np.array(x) if norm is None else rms(x, norm, eps).astype(np.float32))

    def linear(
        self,
        x: NumpyPrepared,
        weights: Sequence[NumpyWeight],
        outs: Sequence[Array],
        biases: Sequence[Array | None] | None = None,
        *,
        add: bool = False,
    ) -> None:
        for j, (weight, out) in enumerate(zip(weights, outs, strict=True)):
            rounded = x.rounded(weight.activation)
            bias = None if biases is None else biases[j]
            for row in range(len(out)):
                y = _product(weight, rounded, row)
                y = y if bias is None else y + bias
                out[row] = out[row] + y if add else y

    def gated_linear(
        self, x: NumpyPrepared, gate: NumpyWeight, up: NumpyWeight, act: Activation, down: NumpyWeight
    ) -> NumpyPrepared:
        y, z = (np.empty((len(x.rows), gate.shape[0]), np.float32) for _ in range(2))
        self.linear(x, [gate, up], [y, z])
        return NumpyPrepared((ACTIVATIONS[act](y) * z).astype(np.float32))

    # ---- attention
    def rope_table(self, inverse_frequency: NDArray[np.float64], scale: float, length: int) -> F32:
        return cos_sin_table(inverse_frequency, scale, length)

    def qk_norm_rope(
        self,
        q: Array,
        k: Array,
        q_norm: Array | None,
        k_norm: Array | None,
        eps: float,
        positions: NDArray[np.int32],
        table: Array,
        *,
        adjacent: bool,
    ) -> None:
        pairs = table.shape[2]
        first = slice(0, 2 * pairs, 2) if adjacent else slice(0, pairs)
        second = slice(1, 2 * pairs, 2) if adjacent else slice(pairs, 2 * pairs)
        cos, sin = (table[i, positions][:, None, :].astype(np.float64) for i in range(2))
        for x, weight in ((q, q_norm), (k, k_norm)):
            if weight is not None:
                x[...] = rms(x, weight, eps)
            a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
            x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin

    def kv_store(self, kv: KvLayer, rows: Rows, k: Array, v: Array) -> None:
        page = rows.pages[rows.sequence, rows.positions // PAGE]
        slot = rows.positions % PAGE
        for cache, new in ((kv.k, k), (kv.v, v)):
            cache[page, :, slot] = new.astype(np.float16).view(np.uint16) if cache.dtype == np.uint16 else new

    def attention(
        self, q: Array, kv: KvLayer, rows: Rows, scale: float, window: int, gate: Array | None, out: Array
    ) -> None:
        heads_per_kv = q.shape[1] // kv.k.shape[1]
        for row, position in enumerate(rows.positions):
            first = max(0, position - window + 1) if window else 0
            at = np.arange(first, position + 1)
            page, slot = rows.pages[rows.sequence[row], at // PAGE], at % PAGE
            keys, values = (self._cached(cache[page, :, slot]) for cache in (kv.k, kv.v))  # (positions, G, D)
            for head in range(q.shape[1]):
                scores = keys[:, head // heads_per_kv] @ q[row, head].astype(np.float64) * scale
                p = np.exp(scores - scores.max())
                out[row, head] = p / p.sum() @ values[:, head // heads_per_kv]
        if gate is not None:
            out *= sigmoid(gate)

    @staticmethod
    def _cached(x: NDArray[Any]) -> NDArray[np.float64]:
        return (x.view(np.float16) if x.dtype == np.uint16 else x).astype(np.float64)

    # ---- Gated DeltaNet
    def conv_silu_l2(
        self, u: Array, taps: Array, conv: Array, rows: Rows, eps: float, q: Array, k: Array, v: Array
    ) -> None:
        before = taps.shape[1] - 1
        key_width = q.shape[1] * q.shape[2]
        for s, (start, end) in enumerate(zip(rows.starts[:-1], rows.starts[1:], strict=True)):
            n = end - start
            window = np.concatenate([conv[rows.read[s]], u[start:end]])
            c = silu(sum(window[j : j + n].astype(np.float64) * taps[:, j] for j in range(before + 1)))
            conv[rows.write[s]] = window[n:]
            for out, part in ((q, c[:, :key_width]), (k, c[:, key_width : 2 * key_width])):
                heads = part.reshape(n, *q.shape[1:])
                out[start:end] = heads / np.sqrt((heads * heads).sum(-1, keepdims=True) + eps)
            v[start:end] = c[:, 2 * key_width :].reshape(n, *v.shape[1:])

    def gdn_gates(self, alpha: Array, beta: Array, a: Array, dt: Array, g: Array, b: Array) -> None:
        g[...] = a * softplus(alpha + dt)
        b[...] = sigmoid(beta)

    def gated_delta(
        self,
        q: Array,
        k: Array,
        v: Array,
        g: Array,
        b: Array,
        key_head: NDArray[np.int32],
        state: Array,
        rows: Rows,
        out: Array,
    ) -> None:
        for s, (start, end) in enumerate(zip(rows.starts[:-1], rows.starts[1:], strict=True)):
            S = state[rows.read[s]].astype(np.float64)  # (HV, Dv, Dk)
            for row in range(start, end):
                key, query = k[row, key_head].astype(np.float64), q[row, key_head].astype(np.float64)
                S = S * np.exp(g[row].astype(np.float64))[:, None, None]
                d = b[row][:, None] * (v[row] - np.einsum("hvk,hk->hv", S, key))
                S = (S + d[:, :, None] * key[:, None, :]).astype(np.float32).astype(np.float64)
                out[row] = np.einsum("hvk,hk->hv", S, query) / np.sqrt(q.shape[2])
            state[rows.write[s]] = S

    def gated_norm(self, x: Array, weight: Array, z: Array, eps: float) -> None:
        x[...] = rms(x, weight, eps) * silu(z)

    # ---- experts
    def route(self, logits: Array, used: int, scale: float) -> tuple[NDArray[np.int32], F32]:
        p = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        ids = np.argsort(-p, axis=-1, kind="stable")[:, :used]
        chosen = np.take_along_axis(p, ids, -1)
        weights = chosen / np.maximum(chosen.sum(-1, keepdims=True), 6.103515625e-05) * scale
        return ids.astype(np.int32), weights.astype(np.float32)

    def experts(
        self,
        x: NumpyPrepared,
        gate: NumpyWeight,
        up: NumpyWeight,
        down: NumpyWeight,
        act: Activation,
        ids: Array,
        weights: Array,
        out: Array,
    ) -> None:
        for row in range(len(ids)):
            total = np.zeros(out.shape[1], np.float32)
            for expert, share in zip(ids[row], weights[row], strict=True):
                y = _product(gate, x.rounded(gate.activation), row, expert)
                z = _product(up, x.rounded(up.activation), row, expert)
                hidden = (ACTIVATIONS[act](y) * z).astype(np.float32)[None]
                total += share * _product(down, quantize_rows(hidden, down.activation), 0, expert)
            out[row] += total

    def gated_add(self, x: Array, gate: Array, out: Array) -> None:
        out += sigmoid(gate) * x

    # ---- rows out
    def softcap(self, x: Array, cap: float) -> None:
        x[...] = np.tanh(x.astype(np.float64) / cap) * cap
