"""Biases that are functions of more than the distance: the function itself runs in the kernel.

Parts of it that need only the batch row, the head and the bias's arrays run outside of the kernel, once for each row
and head: `slopes[h]` becomes a scalar. A TPU kernel cannot gather from an array at computed indices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longspan.biases import Bias
from longspan.engines.door import Answer
from longspan.engines.pallas_tpu.gradient_sums import GradientSum
from longspan.engines.pallas_tpu.operands import Operands
from longspan.engines.pallas_tpu.plan import TpuPlan
from longspan.layout import BlockLayout


@dataclass(frozen=True)
class RuleTerm:
    answers: Sequence[Answer]

    @classmethod
    def of(cls, bias: Bias, plan: TpuPlan, layout: BlockLayout, place: int, name: str) -> "RuleTerm":
        raise NotImplementedError
