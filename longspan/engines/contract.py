"""`Engine`: the base class of all implementations of attention."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import jax

from longspan.combine import Result
from longspan.engines.request import Request
from longspan.layout import BlockLayout


class Engine(ABC):
    """An implementation of attention. `attention(..., engine=)` takes an instance, or the name of a built-in one.

    Subclasses define `name` and `run`, and `backward` for gradients. Every other method has a default.
    `jit` treats an engine as static, so an instance must hash and must not hold arrays. The `layout` argument of the
    methods is `request.layout`: the tiles to visit, and the positions of queries and keys.

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
    differentiable: ClassVar[bool] = False  # whether JAX differentiates `run`, also twice, without `backward`
    platform: ClassVar[str | None] = None  # engine="auto" tries it on this platform only; None: on every platform
    dense: ClassVar[bool] = False  # whether every pair is computed; `explain` then gives no advice about tiles

    def unsupported(self, request: Request) -> str | None:
        """The reason why this engine cannot run a request, and what to do; None if it can."""
        return None

    def unproven(self, request: Request) -> str | None:
        """The reason why engine="auto" does not choose this engine, although it can run the request; None if it may."""
        return None

    def tiles(self, request: Request) -> tuple[int, int]:
        """(q_tile, kv_tile) for a request without a layout from the caller."""
        return 128, 128

    def notes(self, request: Request) -> tuple[str, ...]:
        """Notes for `explain` about how this engine runs a request."""
        return ()

    def temporary_bytes(self, request: Request) -> int | None:
        """A lower bound of the temporary memory of a forward pass; None if it is small or expensive to compute."""
        return None

    @abstractmethod
    def run(self, request: Request, layout: BlockLayout) -> tuple[jax.Array, jax.Array] | Result:
        """(out, lse): the output [B, T, N, Hv] in q's dtype, and lse [B, T, N] with the sinks included, float32 or 64.

        A query that sees no key gives zeros, and the sink's logit as lse (-inf without sinks). Masked keys and values,
        and queries that see no key, may hold NaN and must not change any other result. Every axis has at least one
        element, because `attention` itself handles empty calls. Positions come from the layout.
        """

    def forward(self, request: Request, layout: BlockLayout) -> Result:
        """The forward pass of a differentiated call; `backward` receives its result. By default the result of `run`.

        `out` may have a wider dtype. `lse_residual` is the rounding error of lse: with scores near -1e9, a common mask
        value, a float32 lse loses the logarithm of the sum. `residuals` are further arrays for `backward`. Where `jit`
        splits rows and heads over devices, residuals are kept only if every array has all batch rows (B) and query
        heads (N) and names these axes, as a dataclass with `array_axes = {"sums": "BNT"}` does.
        """
        return Result(*self.run(request, layout))

    def backward(
        self, request: Request, layout: BlockLayout, result: Result, delta: jax.Array, dout: jax.Array
    ) -> tuple[Any, Any, Any, Any]:
        """(dq, dk, dv, dbias), the last None without a bias, of weights exp(score - lse - lse_residual).

        Use lse, lse_residual and delta [B, T, N] as given: in a ring over devices they cover more keys than the
        request has, and then `result.out` and `result.residuals` are None. delta is sum(dout · out) - dlse over all
        these keys, and 0 where lse is not finite. `attention` computes the gradient of sinks itself. dbias is the
        request's bias with each float array replaced by its gradient.
        """
        raise NotImplementedError(f"engine={self.name!r} has no backward pass. Differentiate with engine='reference'.")

    def run_layer(
        self, request: Request, layout: BlockLayout, k: Any, v: Any, layer: Any, *, heads_first: bool = False
    ) -> Any:
        """(out, lse) for one layer of stacked keys and values [layers, B, S, K, H], read in place; None: not supported.

        `layer` is a traced int, and the request has the shapes of one layer. A loop over layers then copies no cache.
        Called on one device only. JAX cannot differentiate it. By default the caller copies the layer and calls `run`.

        With `heads_first`, the stacks are [layers, B, K, S, H]. The request still has keys [B, S, K, H] and values
        [B, S, K, Hv], as `ShapeDtypeStruct`. Queries and results have the same order in both cases.
        """
        return None
