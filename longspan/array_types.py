"""The axis vocabulary and array types that every other file speaks.

One letter per axis, as in `jax.nn.dot_product_attention`: `B` batch, `T` queries, `S` keys/values, `N` query heads,
`K` key/value heads, `H` head size, `Hv` that of values (most often H).
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
    Number = Any  # a Python int (static), or an int array of shape () or [B] (data); rules check it themselves
Real: TypeAlias = float | np.floating | np.integer | Float[Array, ""]  # one number: of Python, of NumPy, or shape ()
Namespace: TypeAlias = ModuleType  # numpy or jax.numpy

Query: TypeAlias = Float[Array, "B T N H"]
Key: TypeAlias = Float[Array, "B S K H"]
Value: TypeAlias = Float[Array, "B S K Hv"]
Output: TypeAlias = Float[jax.Array, "B T N Hv"]
LogSumExp: TypeAlias = Float[jax.Array, "B T N"]
Positions: TypeAlias = Int[Array, "B_or_1 L"]
Scores: TypeAlias = Bool[Array, "B_or_1 N_or_1 T S"]
EngineName: TypeAlias = Literal["auto", "cpu", "xla", "reference"]

F = TypeVar("F", bound=Callable[..., Any])


if TYPE_CHECKING:

    def no_type_check(function: F) -> F:
        """The function itself: static checkers see its types."""
        return function

else:
    # Public functions check their arguments themselves, and their messages come before those of the run-time checker,
    # which goes by this very name.
    from typing import no_type_check as no_type_check


def statistics_dtype(dtype: Any):
    """What softmax statistics are kept in: float32, or float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


# Positions lie within ±FAR, so that the sum of a position and a distance never overflows int32: what lies further is
# refused where it is known, and clipped where it is traced.
FAR = 2**30 - 1
