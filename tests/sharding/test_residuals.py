"""Residuals that an engine's forward pass keeps for its backward pass, when `jit` shards rows and heads."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import longspan as ls
from longspan.engines import ENGINES, Engine
from longspan.testing import Shape, make_qkv

SHAPE = Shape(B=4, T=19, S=19, N=4, K=2, H=5)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Named:
    array_axes: ClassVar = {"first": "BNT", "keys": "BSKH"}
    first: Any
    keys: Any = None


@dataclass(frozen=True)
class Keeping(Engine):
    """The xla engine, whose backward pass reads the residuals of its forward pass, if there are any."""

    kind: str
    seen: list
    name = "keeping"

    def __hash__(self):
        return id(self)

    def run(self, request, layout):
        return ENGINES["xla"].run(request, layout)

    def forward(self, request, layout):
        first = request.q[..., 0].swapaxes(1, 2)
        kinds = {"named": Named(first), "unnamed": (first,), "of a kv head": Named(first, request.k)}
        kinds["of one row for all"] = Named(first[:1])
        return ENGINES["xla"].forward(request, layout)._replace(residuals=kinds[self.kind])

    def backward(self, request, layout, result, delta, dout):
        self.seen.append(None if result.residuals is None else result.residuals.first.shape)
        dq, dk, dv, dbias = ENGINES["xla"].backward(request, layout, result, delta, dout)
        if result.residuals is None:
            return dq, dk, dv, dbias
        first = result.residuals.first.swapaxes(1, 2)  # this device's own
        return dq + (first - request.q[..., 0])[..., None], dk, dv, dbias


@pytest.mark.parametrize("kind", ["named", "unnamed", "of a kv head", "of one row for all"])
def test_residuals_that_name_rows_and_heads_are_kept_and_others_left_out(kind):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    here = NamedSharding(mesh, P("x", None, "y"))
    qkv = make_qkv(SHAPE, jnp.float32)
    engine = Keeping(kind, [])

    def gradients(*qkv, engine):
        return jax.grad(lambda *x: jnp.sin(ls.attention(*x, mask=ls.Causal(), engine=engine)).sum(), (0, 1, 2))(*qkv)

    program = jax.jit(lambda *x: gradients(*x, engine=engine)).lower(*(jax.device_put(x, here) for x in qkv)).compile()
    assert "all-gather" not in program.as_text()
    for got, want in zip(program(*qkv), gradients(*qkv, engine="reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert set(engine.seen) == ({(4, 4, 19), (2, 2, 19)} if kind == "named" else {None})
