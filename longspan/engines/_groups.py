"""Keys and values for every query head, and its transpose, the sum over the queries of a group, on several devices.

XLA splits the first by itself. The second it gathers, if heads are split and a group is torn; told of rows and heads by
name, each device sums its own, and devices that share a group add up. Two primitives of JAX, since only those may be
differentiated in every way, as often as asked, and be told how to split.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from longspan.engines._partition import Pass, on_several_devices, run_apart


def repeat_heads(x: jax.Array, heads: int) -> jax.Array:
    """Keys or values [B, S, K, H] as [B, S, heads, H]: each for its group of queries."""
    group = heads // x.shape[2]
    if x.shape[2] in (1, heads) or not on_several_devices():
        return jnp.repeat(x, group, axis=2)
    # Twice: the second says, in the transpose, how kv heads are split.
    return _bind(_repeat, x, jax.lax.stop_gradient(x), group=group, names="BSKH")


def _repeated(x, like, group: int, names: str):
    return jnp.repeat(x, group, axis=names.index("K"))


def _summed(x, like, group: int, names: str):
    axis = names.index("K")

    def run(x, like):
        kv_heads = like.shape[axis]
        split = *x.shape[:axis], kv_heads, x.shape[axis] // kv_heads, *x.shape[axis + 1 :]
        return [x.reshape(split).sum(axis + 1)]

    return run_apart(Pass(run, (names.replace("K", "N"), names), (names,)), (x, like))[0]


def _bind(of: Primitive, x, like, **params):
    """The primitive's value. Its program is a parameter: JAX looks into it for what is to be split, to know devices."""
    program = jax.make_jaxpr(partial(_RUNS[of.name], **params))(x, like)
    return of.bind(x, like, program=program, **params)


def _primitive(name: str) -> Primitive:
    made = Primitive(name)
    made.def_impl(_value)
    made.def_abstract_eval(lambda x, like, *, program, **_: x.update(shape=program.out_avals[0].shape))
    mlir.register_lowering(made, mlir.lower_fun(_value, multiple_results=False))
    ad.primitive_jvps[made] = partial(_tangent, made)
    batching.primitive_batchers[made] = partial(_mapped, made)
    return made


def _value(x, like, *, program, **_):
    return jaxpr_as_fun(program)(x, like)[0]


def _tangent(of: Primitive, primals, tangents, *, program, **params):
    (x, like), (dx, _) = primals, tangents
    y = _bind(of, x, like, **params)
    return y, ad.Zero(jax.typeof(y).to_tangent_aval()) if type(dx) is ad.Zero else _bind(of, dx, like, **params)


def _transposed(into: Primitive, cotangent, x, like, *, program, **params) -> tuple[Any, None]:
    return ad.Zero(x.aval) if type(cotangent) is ad.Zero else _bind(into, cotangent, like, **params), None


def _mapped(of: Primitive, operands, axes, *, program, group: int, names: str) -> tuple[Any, int]:
    """Mapped axes come first, each with a digit for a name."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)

    def first(x, axis):
        return jnp.broadcast_to(x[None], (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)

    name = str(sum(letter.isdigit() for letter in names))
    return _bind(of, *map(first, operands, axes), group=group, names=name + names), 0


_RUNS = dict(repeat_heads=_repeated, sum_heads=_summed)
_repeat, _sum = map(_primitive, _RUNS)
ad.primitive_transposes[_repeat] = partial(_transposed, _sum)
ad.primitive_transposes[_sum] = partial(_transposed, _repeat)
