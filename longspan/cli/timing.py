"""What `bench` measures: our engines and what is installed beside them, one after the other, round by round."""

import functools
import importlib
import operator
import os
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from longspan.cli.library import library
from longspan.optional import is_installed

SETTLE = 0.05  # seconds between two contestants: thread pools spin for a while after their work is done
MOST_DENSE = 1 << 30  # bytes of scores up to which what is dense takes part


class Problem(NamedTuple):
    """What everybody computes."""

    mask: Any
    length: int
    heads: int
    head_dim: int
    backward: bool

    @property
    def dense_bytes(self) -> int:
        return 4 * self.heads * self.length**2


class Contestant(NamedTuple):
    """Somebody who can compute it, and the bytes that it takes for itself, if they are known."""

    run: Callable[[], Any]
    temporary_bytes: int | None


def machine() -> dict[str, Any]:
    """What this runs on."""
    import jax

    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), model)
    return dict(
        cpu=model,
        cores=os.cpu_count() or 1,
        device=jax.devices()[0].device_kind,
        python=platform.python_version(),
        longspan=library().__version__,
        jax=jax.__version__,
    )


def contestants(problem: Problem, engines: list[str], *, peers: bool) -> dict[str, Contestant | str]:
    """Everybody by name, or why somebody does not take part."""
    import jax.numpy as jnp

    from longspan.testing import Shape, make_qkv

    sizes = Shape(1, problem.length, problem.length, problem.heads, problem.heads, problem.head_dim)
    qkv = make_qkv(sizes, jnp.float32)
    found: dict[str, Contestant | str] = {name: _engine(problem, name, qkv) for name in engines}
    if peers:
        found |= {"jax.nn": _jax_nn(problem, qkv), "torch sdpa": _torch_sdpa(problem, qkv)}
        found |= {"FlexAttention": _flex_attention(problem, qkv)}
    return found


def _engine(problem: Problem, name: str, qkv: Any) -> Contestant | str:
    ls = library()
    from longspan.engines import ENGINES, Request

    q, k, v = qkv
    reason = ENGINES[name].unsupported(Request.of(q=q, k=k, v=v, mask=problem.mask))
    if reason is not None:
        return reason
    if name == "reference" and problem.dense_bytes > MOST_DENSE:
        return "dense scores would be too large"
    return _compiled(problem, qkv, lambda q, k, v, mask: ls.attention(q, k, v, mask=mask, engine=name), problem.mask)


def _jax_nn(problem: Problem, qkv: Any) -> Contestant | str:
    """`jax.nn.dot_product_attention` under the dense mask."""
    import jax

    if problem.dense_bytes > MOST_DENSE:
        return "dense scores would be too large"
    mask = problem.mask.dense(problem.length, problem.length)
    return _compiled(problem, qkv, lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask), mask)


def _compiled(problem: Problem, qkv: Any, attend: Callable[..., Any], mask: Any) -> Contestant:
    import jax

    def both(q, k, v, mask):
        return jax.grad(lambda *x: attend(*x, mask).sum(), argnums=(0, 1, 2))(q, k, v)

    program = jax.jit(both if problem.backward else attend).lower(*qkv, mask).compile()
    analysis = program.memory_analysis()
    temporary = getattr(analysis, "temp_size_in_bytes", None)
    return Contestant(lambda: jax.block_until_ready(program(*qkv, mask)), temporary)


def _torch_sdpa(problem: Problem, qkv: Any) -> Contestant | str:
    """PyTorch's `scaled_dot_product_attention` under the dense mask."""
    if not is_installed("torch"):
        return "not installed"
    if problem.dense_bytes > MOST_DENSE:
        return "dense scores would be too large"
    torch = importlib.import_module("torch")
    q, k, v = (x.requires_grad_(problem.backward) for x in _tensors(torch, qkv))
    mask = torch.from_numpy(np.array(problem.mask.dense(problem.length, problem.length)))

    def run() -> Any:
        with torch.set_grad_enabled(problem.backward):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum()
            return torch.autograd.grad(out, (q, k, v)) if problem.backward else out.item()

    return Contestant(run, None)


def _tensors(torch: Any, qkv: Any) -> list[Any]:
    return [torch.from_numpy(np.asarray(x).swapaxes(1, 2).copy()) for x in qkv]


def _flex_attention(problem: Problem, qkv: Any) -> Contestant | str:
    """PyTorch's FlexAttention, compiled, under blocks that it makes of the mask."""
    if not is_installed("torch"):
        return "not installed"
    if problem.backward:
        return "has no backward pass on CPUs"
    torch, flex = (importlib.import_module(name) for name in ("torch", "torch.nn.attention.flex_attention"))
    function, heads, length = _as_function(torch, problem), problem.mask.heads, problem.length
    if function is None:
        return "the mask would be a table, and too large"
    q, k, v = _tensors(torch, qkv)
    blocks = flex.create_block_mask(function, None, heads if heads > 1 else None, length, length, device="cpu")
    compiled = torch.compile(flex.flex_attention)

    def run() -> Any:
        with torch.no_grad():
            return compiled(q, k, v, block_mask=blocks)

    try:
        run()
    except Exception as error:  # compilers fail in many ways: the row says in which
        return f"torch.compile: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return Contestant(run, None)


class _Slots(NamedTuple):
    """What a rule by position reads of a side, of PyTorch's tensors: so FlexAttention gets the rule as arithmetic."""

    index: Any

    @property
    def position(self) -> Any:
        return self.index

    def number(self, value: int) -> int:
        return value

    def is_one_of(self, positions: tuple[int, ...]) -> Any:
        return functools.reduce(operator.or_, (self.index == position for position in positions)) * 1


def _as_function(torch: Any, problem: Problem) -> Callable[..., Any] | None:
    """The mask as FlexAttention wants it: the rule itself, or a look into a table where it holds arrays or heads."""
    import jax

    from longspan.masks import Empty, Full

    mask = problem.mask
    if isinstance(mask, Full):
        return lambda b, h, q, kv: q == q
    constant = any(isinstance(part, Full | Empty) for part in mask.atoms().walk())
    if not jax.tree.leaves(mask) and not constant and mask.heads == 1 and mask.reads <= {"position"}:
        return lambda b, h, q, kv: mask.allowed(_Slots(q), _Slots(kv))
    if mask.heads * problem.length**2 > MOST_DENSE:
        return None
    table = torch.from_numpy(np.array(mask.dense(problem.length, problem.length))[0])
    return lambda b, h, q, kv: table[h if mask.heads > 1 else 0, q, kv]


def seconds_of(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median of each one's seconds, all of them in every round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(SETTLE)
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(found)) for name, found in times.items()}
