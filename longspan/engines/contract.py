"""The one contract between `attention` and its engines: `Engine` answers a `Request`."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import jax

from longspan.combine import Result
from longspan.engines.request import Request
from longspan.layout import BlockLayout


class Engine(ABC):
    """A way to compute attention. Engines never import each other; `attention(..., engine=)` takes one, or its name.

    Subclass it and define `name` and `run`; with `backward` its results can be differentiated. All else has a default.
    Instances are part of what is compiled, so they must be hashable: keep no arrays in them. `layout` is always
    `request.layout`: which tiles to visit, and both sides as rules see them.

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
    differentiable: ClassVar[bool] = False  # JAX can differentiate `run` by itself, also twice: `backward` is not used
    dense: ClassVar[bool] = False  # every pair is computed, whatever the mask allows: no advice about tiles is given

    def unsupported(self, request: Request) -> str | None:
        """Why this engine cannot run a request, in words that the user can act on; None if it can."""
        return None

    def tiles(self, request: Request) -> tuple[int, int]:
        """How many queries and how many keys a tile has, where the caller has not planned a layout."""
        return 128, 128

    def notes(self, request: Request) -> tuple[str, ...]:
        """What `explain` should tell of how this engine runs a request."""
        return ()

    def temporary_bytes(self, request: Request) -> int | None:
        """How much memory a forward pass takes for itself, at least; None if that is little or not cheaply known."""
        return None

    @abstractmethod
    def run(self, request: Request, layout: BlockLayout) -> tuple[jax.Array, jax.Array] | Result:
        """(out, lse): the output [B, T, N, Hv] in q's dtype, and lse [B, T, N] with the sinks included, float32 or 64.

        A query that sees no key gives zeros and the sink's logit (-inf without one). What no query may see, or a query
        that sees nothing, may hold NaN and must change nothing else. Every axis has at least one element: calls without
        queries, keys or heads are answered before. Positions are the layout's.
        """

    def forward(self, request: Request, layout: BlockLayout) -> Result:
        """`run` for a pass that is differentiated, by default the same: its result is handed to `backward`.

        There `out` may keep more bits, `lse_residual` is what lse lost by rounding (with scores near -1e9, as people
        mask with, a float32 lse holds nothing of the logarithm of the sum), and `residuals` are arrays of the engine's
        own. Where `jit` splits rows and heads over devices, residuals are kept if every array has all batch rows (B)
        and query heads (N) and says so in `array_axes`, as a dataclass with `array_axes = {"sums": "BNT"}` does.
        """
        return Result(*self.run(request, layout))

    def backward(
        self, request: Request, layout: BlockLayout, result: Result, delta: jax.Array, dout: jax.Array
    ) -> tuple[Any, Any, Any, Any]:
        """(dq, dk, dv, dbias), the last None without a bias, of weights exp(score - lse - lse_residual).

        lse, lse_residual and delta [B, T, N] are *given*: they may be those of more keys than the request's own (a ring
        over devices), and then `result.out` and `result.residuals` are None. delta is sum(dout · out) - dlse over all
        of them, and 0 where lse is not finite. Sinks need nothing here. dbias has the structure of the request's bias:
        the gradient of every array of floats in it, in its place.
        """
        raise NotImplementedError(f"engine={self.name!r} has no backward pass. Differentiate with engine='reference'.")

    def run_layer(self, request: Request, layout: BlockLayout, k: Any, v: Any, layer: Any) -> Any:
        """(out, lse) with the keys and values of one layer, a traced int, of stacks [layers, B, S, K, H].

        The request holds their shapes. A loop over layers then copies no cache. Without gradients, on one device. None,
        the default: the layer is copied out of its stack, and `run` computes with it.
        """
        return None
