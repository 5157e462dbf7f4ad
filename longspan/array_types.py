"""The axis letters and array types used throughout the package.

One letter per axis, as in `jax.nn.dot_product_attention`: `B` batch, `T` queries, `S` keys/values, `N` query heads,
`K` key/value heads, `H` head size, `Hv` head size of the values (usually H).
"""

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

Array: TypeAlias = jax.Array | np.ndarray
if TYPE_CHECKING:
    Number: TypeAlias = int | np.integer | Array
else:
    Number = Any  # a Python int (static), or an int array of shape () or [B] (data); masks check it themselves
Real: TypeAlias = float | np.floating | np.integer | Float[Array, ""]  # a number, or an array of shape ()
Namespace: TypeAlias = ModuleType  # numpy or jax.numpy

Query: TypeAlias = Float[Array, "B T N H"]
Key: TypeAlias = Float[Array, "B S K H"]
Value: TypeAlias = Float[Array, "B S K Hv"]
Output: TypeAlias = Float[jax.Array, "B T N Hv"]
LogSumExp: TypeAlias = Float[jax.Array, "B T N"]
Positions: TypeAlias = Int[Array, "B_or_1 L"]
Scores: TypeAlias = Bool[Array, "B_or_1 N_or_1 T S"]
EngineName: TypeAlias = Literal["auto", "cpu", "pallas_tpu", "xla", "reference"]

F = TypeVar("F", bound=Callable[..., Any])


if TYPE_CHECKING:

    def no_type_check(function: F) -> F:
        """Returns the function unchanged, so that static checkers see its types."""
        return function

else:
    # Public functions check their own arguments, with better messages than the run-time checker. That checker
    # recognises the decorator by this name.
    from typing import no_type_check as no_type_check


def statistics_dtype(dtype: Any):
    """The dtype of softmax statistics: float64 for float64 inputs, else float32."""
    if dtype == np.float64:
        return np.dtype(np.float64)
    return np.dtype(np.float32)


# Positions lie within ±FAR, so that a position plus a distance never overflows int32. Positions outside of this range
# are an error if they are known, and are clipped if they are traced.
FAR = 2**30 - 1
