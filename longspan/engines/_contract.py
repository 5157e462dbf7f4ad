"""The one contract between `attention` and its engines: `Request`, what is asked, and `Engine`, who answers."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from longspan._types import statistics_dtype
from longspan.dropout import Dropout
from longspan.layout import BlockLayout
from longspan.masks import Mask

ENGINE_METHODS = ("unsupported", "tiles", "notes", "run", "backward")  # what every engine must have


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Request:
    """One call of `attention`: its arrays and numbers, checked. It is built once per call.

    Engines judge it by shapes, dtypes and what is there (`unsupported`, `tiles`, `notes`: arrays may then be
    `jax.ShapeDtypeStruct`s), and run it.

    Example:
        >>> x = jax.ShapeDtypeStruct((2, 7, 6, 5), jnp.float32)
        >>> Request(x, x, x, ls.Causal(), scale=1.0).dims
        {'B': 2, 'T': 7, 'S': 7, 'N': 6, 'K': 6, 'H': 5, 'Hv': 5}
    """

    array_axes: ClassVar = {
        **dict(q="BTNH", k="BSKH", v="BSKH", bias="BNTS", sinks="N"),
        **dict(q_positions="BT", kv_positions="BS", rows="B", heads="N"),
    }

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    mask: Mask
    bias: Any = None  # floats [B or 1, N or 1, T or 1, S or 1], a `Bias`, or a tuple of them, summed (`biases.terms`)
    sinks: Any = None  # floats, [N]
    dropout: Dropout | None = None
    q_positions: Any = None  # int32 [T] or [B or 1, T]; None: each slot's index
    kv_positions: Any = None
    # int32 [B], [N]: the numbers of batch rows and heads, if they are some of a whole's (a shard's); None: from 0. An
    # engine reads them off the layout (`layout.sides`) and the dropout.
    rows: Any = None
    heads: Any = None
    layout: BlockLayout | None = None  # planned by the caller; None: `attention` plans with the engine's own tiles
    scale: float = field(default=1.0, metadata=dict(static=True))
    soft_cap: float | None = field(default=None, metadata=dict(static=True))
    platform: str = field(default="cpu", metadata=dict(static=True))

    @property
    def dims(self) -> dict[str, int]:
        """The size of every axis, by its letter."""
        (batch, q_len, heads, size), (_, kv_len, kv_heads, _) = self.q.shape, self.k.shape
        return dict(B=batch, T=q_len, S=kv_len, N=heads, K=kv_heads, H=size, Hv=self.v.shape[3])

    @property
    def has_positions(self) -> bool:
        """Whether tokens have positions other than their slots' indices."""
        return self.q_positions is not None or self.kv_positions is not None


@runtime_checkable
class Engine(Protocol):
    """A way to compute attention. Engines never import each other; `attention(..., engine=)` takes one, or its name.

    Subclass it and define `name` and `run`; with `backward` its results can be differentiated. Instances are part of
    what is compiled, so they must be hashable: keep no arrays in them. An engine may also have

    - `forward(request, layout) -> (out, lse, low)`: `run` for a pass that is differentiated. There `out` may keep more
      bits, and `low` is what lse lost by rounding: with scores near -1e9, as people mask with, a float32 lse holds
      nothing of the logarithm of the sum.
    - `run_layer(request, layout, k, v, layer) -> (out, lse)`: `run` with the keys and values of one layer, a traced
      int, of stacks [layers, B, S, K, H], of which the request holds shapes: a loop over layers then copies no cache.
      Without gradients, on one device.
    - `temporary_bytes(request) -> int | None`: how much memory a forward pass takes for itself, at least, as `explain`
      tells; None if that is little or not cheaply known.
    - `differentiable = True`: JAX can differentiate `run` by itself, also twice, and `backward` is not used for it.
    - `dense = True`: every pair is computed, whatever the mask allows. `explain` then gives no advice about tiles.

    Example:
        >>> from longspan.engines import ENGINES
        >>> class Mine(Engine):
        ...     name = "mine"
        ...     def run(self, request, layout):
        ...         return ENGINES["reference"].run(request, layout)
        >>> q = k = v = jnp.ones((1, 8, 2, 4))
        >>> ls.attention(q, k, v, mask=ls.Causal(), engine=Mine()).shape
        (1, 8, 2, 4)
    """

    name: str

    def unsupported(self, request: Request) -> str | None:
        """Why this engine cannot run a request, in words that the user can act on; None if it can."""
        return None

    def tiles(self, request: Request) -> tuple[int, int]:
        """How many queries and how many keys a tile has, where the caller has not planned a layout."""
        return 128, 128

    def notes(self, request: Request) -> tuple[str, ...]:
        """What `explain` should tell of how this engine runs a request."""
        return ()

    def run(self, request: Request, layout: BlockLayout) -> tuple[jax.Array, jax.Array]:
        """(out, lse): the output [B, T, N, Hv] in q's dtype, and lse [B, T, N] with the sinks included, float32 or 64.

        A query that sees no key gives zeros and the sink's logit (-inf without one). What no query may see, or a query
        that sees nothing, may hold NaN and must change nothing else. Every axis has at least one element: calls without
        queries, keys or heads are answered before. Positions are the layout's.
        """
        ...

    def backward(self, request: Request, layout: BlockLayout, lse, low, delta, dout) -> tuple[Any, Any, Any, Any]:
        """(dq, dk, dv, dbias), the last None without a bias, of weights exp(score - lse - low) that are *given*.

        dbias has the structure of the request's bias: the gradient of every array of floats in it, in its place.
        lse and delta [B, T, N] may be those of more keys than the request's own (a ring over devices): delta is
        sum(dout · out) - dlse over all of them, and 0 where lse is not finite. Sinks need nothing here.
        """
        return _no_backward(self)


def _no_backward(engine: Engine) -> Any:
    raise NotImplementedError(f"engine={engine.name!r} has no backward pass. Differentiate with engine='reference'.")


def temporary_bytes(engine: Engine, request: Request) -> int | None:
    """How much memory an engine's forward pass takes for itself, at least, if it says so."""
    of = getattr(engine, "temporary_bytes", None)
    return None if of is None else of(request)


def is_differentiable(engine: Engine) -> bool:
    """Whether JAX differentiates an engine by itself."""
    return getattr(engine, "differentiable", False)


def has_no_pairs(request: Request) -> bool:
    """Whether a call has no queries, no keys or no heads, or is of no batch rows."""
    return 0 in (request.dims[axis] for axis in "BTSNK")


def with_features(request: Request) -> Request:
    """The request with a feature of zeros in heads that have none: all their scores are 0, as those of none are."""
    wide = {name: getattr(request, name) for name in "qkv"}
    wide = {name: jnp.zeros((*x.shape[:3], 1), x.dtype) for name, x in wide.items() if x.shape[3] == 0}
    return replace(request, **wide) if wide else request


def is_dense(engine: Engine) -> bool:
    """Whether an engine computes every pair, whatever the mask allows."""
    return getattr(engine, "dense", False)


def without_pairs(request: Request) -> tuple[jax.Array, jax.Array]:
    """The result of a call without queries, keys or heads: zeros, and the sinks' logits as lse."""
    B, T, N, _ = request.q.shape
    dtype = statistics_dtype(request.q.dtype)
    sink = jnp.full((N,), -jnp.inf, dtype) if request.sinks is None else request.sinks.astype(dtype)
    return jnp.zeros((B, T, N, request.dims["Hv"]), request.q.dtype), jnp.broadcast_to(sink.reshape(1, 1, N), (B, T, N))
