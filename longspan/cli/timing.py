"""What `bench` measures: our engines and what is installed beside them, one after the other, round by round."""

import importlib
import os
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from longspan._optional import is_there
from longspan.cli._library import library

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
    return found


def _engine(problem: Problem, name: str, qkv: Any) -> Contestant | str:
    ls = library()
    from longspan.engines import ENGINES, Request

    q, k, v = qkv
    reason = ENGINES[name].unsupported(Request(q, k, v, problem.mask))
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
    if not is_there("torch"):
        return "not installed"
    if problem.dense_bytes > MOST_DENSE:
        return "dense scores would be too large"
    torch = importlib.import_module("torch")
    q, k, v = (torch.from_numpy(np.asarray(x).swapaxes(1, 2).copy()).requires_grad_(problem.backward) for x in qkv)
    mask = torch.from_numpy(np.array(problem.mask.dense(problem.length, problem.length)))

    def run() -> Any:
        with torch.set_grad_enabled(problem.backward):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum()
            return torch.autograd.grad(out, (q, k, v)) if problem.backward else out.item()

    return Contestant(run, None)


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
