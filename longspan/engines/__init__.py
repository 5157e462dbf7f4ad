"""Ways to compute attention, under one contract: `Engine` answers a `Request`.

`reference` is dense and defines what is correct, `xla` is block-sparse in plain JAX, `cpu` a native kernel. Engines
never import each other; what differentiating them has in common is in `_gradient`.
"""

from longspan._checks import check_choice
from longspan._merge import Result as Result
from longspan.engines._contract import Engine as Engine
from longspan.engines._request import Request as Request
from longspan.engines.cpu import ENGINE as _CPU
from longspan.engines.reference import ENGINE as _REFERENCE
from longspan.engines.xla import ENGINE as _XLA

# In the order in which "auto" tries them: the fastest first. `python -m benchmarks crossover` measures it: `cpu` was
# ahead of `xla` at every size and with every feature, by 1.1 (one query, 32 keys; `Custom`) to 7 times. Only the
# gradients of some 16 tokens come sooner from the reference: 0.2 ms do not pay for an engine that needs T×S memory.
ENGINES: dict[str, Engine] = {engine.name: engine for engine in (_CPU, _XLA, _REFERENCE)}


def choose(engine: str | Engine, request: Request) -> tuple[Engine, dict[str, str]]:
    """The engine that runs a request, and why each one tried before it was refused.

    Example:
        >>> x = jax.ShapeDtypeStruct((2, 7, 6, 5), jnp.float32)
        >>> choose("xla", Request.of(q=x, k=x, v=x, mask=ls.Causal()))[0].name
        'xla'
    """
    if isinstance(engine, str):
        check_choice("engine", engine, ("auto", *ENGINES))
        if engine == "auto":
            return _first(request)
        engine = ENGINES[engine]
    _check_engine(engine)
    reason = engine.unsupported(request)
    if reason:
        raise NotImplementedError(f"engine={engine.name!r} cannot run this: {reason}")
    return engine, {}


def _first(request: Request) -> tuple[Engine, dict[str, str]]:
    refused: dict[str, str] = {}
    for name, engine in ENGINES.items():
        reason = engine.unsupported(request)
        if reason is None:
            return engine, refused
        refused[name] = reason
    raise NotImplementedError(f"No engine can run this: {refused}")


def _check_engine(engine: object) -> None:
    """An instance of a subclass of `Engine` that can be part of a compiled program."""
    if not isinstance(engine, Engine) or not isinstance(getattr(engine, "name", None), str):
        wanted = f"one of {', '.join(map(repr, ('auto', *ENGINES)))}, or a longspan.engines.Engine"
        raise TypeError(f"`engine` must be {wanted}, got {engine!r}.")
    try:
        hash(engine)
    except TypeError:
        raise TypeError(
            f"engine={engine!r} does not hash, and an engine is part of what is compiled. Make it a frozen dataclass, "
            "or give it no `__eq__`."
        ) from None
