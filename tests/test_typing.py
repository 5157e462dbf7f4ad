"""Static types: pyright accepts good calls, infers the types of their results, and reports bad calls."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYRIGHT = shutil.which("pyright", path=str(Path(sys.executable).parent)) or shutil.which("pyright")

IMPORTS = """\
import jax
import jax.numpy as jnp
import numpy as np
import longspan as ls
from flax import nnx
from longspan.engines import Engine, Request
from typing import assert_type

q = k = v = jnp.ones((1, 16, 2, 4))
host = np.ones((1, 16, 2, 4), np.float32)
ids = np.zeros((1, 16), np.int32)
info = ls.MaskInfo.from_segments(ids)
blocks = ls.bigbird_random_blocks(16, block_size=2, num_random_blocks=1, num_heads=2, seed=0)
cache, view = ls.cache.init(ls.cache.plan(ls.Causal(), 16), 1, 2, 4, jnp.float32).append(k, v)
"""

GOOD = """\
assert_type(ls.attention(q, k, v), jax.Array)
assert_type(ls.attention(q, k, v, return_lse=False), jax.Array)
assert_type(ls.attention(q, k, v, return_lse=True), tuple[jax.Array, jax.Array])
ls.attention(q, k, v, mask=ls.Causal() & ~ls.Window(3, 0) | ls.Global((0,))).at[0].set(1.0).shape
ls.attention(host, host, host, mask=info, engine="xla").shape
ls.attention(q, k, v, mask=ls.Causal().layout(16, 16), bias=jnp.zeros((16, 16)), scale=0.5, soft_cap=30.0).dtype
ls.attention(q, k, v, mask=np.ones((16, 16), bool), sinks=jnp.zeros(2), q_positions=ids, kv_positions=ids).mean()
ls.attention(q, k, v, dropout_rate=0.1, dropout_key=jax.random.key(0)).reshape(-1)
out, lse = ls.attention(q, k, v, return_lse=True)
out.at[0].set(0.0), lse.shape
@ls.masks.rule
class Strided(ls.Mask):
    stride: int
assert_type(Strided(2) & ls.masks.Causal(), ls.Mask)
@ls.masks.rule
class Diagonal(ls.masks.Rule):
    shift: int
    def lower(self) -> ls.Mask:
        return ls.masks.Compare(ls.masks.position() + self.shift, "==", ls.masks.position())
assert_type(Diagonal(1).lower(), ls.Mask)
assert_type(ls.masks.Compare(ls.masks.slot() // 2 % 3, "<=", ls.masks.number(4)), ls.masks.Compare)
assert_type(ls.masks.array(ids, valid=">=0") - 1, ls.masks.Term)
assert_type(ls.masks.member((0, 7)), ls.masks.Term)
assert_type(Diagonal(1).unbounded(), tuple[ls.Mask, ...])
assert_type(ls.engines.choose("xla", Request.of(q=q, k=k, v=v))[0], Engine)
assert_type(ls.mask_to_segment_ids(ids), tuple[jax.Array, jax.Array])
assert_type(ls.maskinfo.mask_to_segment_ids(ids), tuple[jax.Array, jax.Array])
assert_type(ls.parallel.attention(q, k, v, mesh=ls.parallel.mesh()), jax.Array)
assert_type(ls.merge([out, out], (lse, lse), sinks=jnp.zeros(2)), tuple[jax.Array, jax.Array])
assert_type(ls.explain(q, k, v, mask=ls.Causal(), engine="reference").engine, str)
ls.explain(jax.ShapeDtypeStruct((1, 16, 2, 4), jnp.float32), k, v).useful_flops
assert_type(ls.Causal().dense(3, 4), jax.Array)
assert_type(ls.Causal().show(3), str)
assert_type(ls.Causal().show(3, 4), str)
assert_type(ls.Causal().layout(3, 4), ls.BlockLayout)
assert_type(ls.Causal().dense(3), jax.Array)
assert_type(ls.Causal().show(3), str)
assert_type(ls.Causal().layout(3), ls.BlockLayout)
assert_type(ls.Causal() & ls.Chunk(4), ls.Mask)
assert_type(info.apply_causal().apply_sliding_window((3, 0)), ls.MaskInfo)
assert_type(info.replace(q_segment_ids=ids), ls.MaskInfo)
assert_type(info.attention_mask, jax.Array)
assert_type(ls.bigbird_attention(q, k, v, block_size=2, rand_attn=blocks, engine="cpu"), jax.Array)
assert_type(ls.longformer_attention(q, k, v, None, None, None, window=2), jax.Array)
assert_type(ls.bigbird(16, block_size=2, rand_attn=blocks), ls.Mask)
assert_type(ls.longformer(3, token_kinds=ids, dilation=(1, 2)), ls.Mask)
ls.hf.load("d", dtype=jnp.bfloat16, param_dtype="float32", config=dict(hidden_dropout_prob=0)).config.vocab_size
assert_type(ls.hf.load("d"), ls.models.Encoder | ls.models.Model | ls.models.CausalLM)
assert_type(ls.hf.load("d", task="encoder"), ls.models.Encoder)
assert_type(ls.hf.load("d", task="masked_lm", dtype="bfloat16"), ls.models.MaskedLM)
assert_type(ls.hf.load("d", task="sequence_classification", num_labels=3), ls.models.SequenceClassifier)
assert_type(ls.hf.load("d", task="token_classification", rngs=nnx.Rngs(0)), ls.models.TokenClassifier)
assert_type(ls.hf.load("d", task="question_answering"), ls.models.QuestionAnswering)
assert_type(ls.hf.load("d", task="causal_lm"), ls.models.CausalLM)
ls.generate(ls.hf.load("d", task="causal_lm"), [[1, 2]], max_new_tokens=3)[0].tolist()
assert_type(ls.attention(q, **view.of(ls.Causal())), jax.Array)
view.of(ls.Causal())["kv_positions"].shape
layer = ls.nn.nnx.SelfAttention(num_heads=2, in_features=8, rngs=nnx.Rngs(0))
layer(jnp.ones((1, 4, 8)), mask=ls.Causal()).shape
class Mine(Engine):
    name = "mine"
    def run(self, request: Request, layout: ls.BlockLayout) -> tuple[jax.Array, jax.Array]:
        return request.q, request.q[..., 0]
ls.attention(q, k, v, engine=Mine())
"""

BAD = """\
ls.attention("nonsense", k, v)
ls.attention(q, 3, v)
ls.attention(q, k, None)
ls.attention(q, k, v, mask=17)
ls.attention(q, k, v, mask="causal")
ls.attention(q, k, v, engine=4)
ls.attention(q, k, v, engine="fastest")
ls.attention(q, k, v, q, engine="xla")
ls.attention(q, k, v, is_cusal=True)
ls.attention(q, k, v, is_causal=True)
ls.parallel.attention(q, k, v, mesh=ls.parallel.mesh(), is_causal=True)
ls.attention(q, k, v, soft_cap="high")
ls.attention(q, k, v, dropout_rate="0.1")
ls.attention(q, k, v, return_lse=True).shape
ls.attention(q, k, v)[0].append(1)
ls.explain(q, k, v, engine="fastest")
ls.merge(q)
ls.merge([q], [q], sinks="none")
ls.Causal().dense("3", 4)
ls.Causal().show("3")
ls.Causal().show()
ls.Causal().layout(kv_len=3)
ls.Causal() & 3
ls.masks.Compare(ls.masks.position(), "=", ls.masks.position())
ls.masks.Compare(3, "<=", ls.masks.position())
ls.masks.array(ids, valid="positive")
ls.masks.number("3")
ls.masks.member("07")
ls.Window(3)
ls.PerHead(3)
info.apply_causal(ofset=1)
info.apply_sliding_window("wide")
ls.MaskInfo.from_segments("ids")
ls.MaskInfo.from_attention_mask(ids, mask_is_valid="no").nothing
ls.bigbird_attention(q, k, v, rand_attn=blocks)
ls.bigbird_attention(q, k, v, block_size="2", rand_attn=blocks)
ls.longformer_attention(q, k, v, window=2)
ls.longformer("wide")
ls.bigbird_random_blocks(16, block_size=2)
ls.mask_to_segment_ids("mask")
ls.hf.load("d", task="encoder", dtyp="bfloat16")
ls.hf.load("d", task="causal_lm").pooler
ls.generate(ls.hf.load("d", task="encoder"), [[1]], max_new_tokens=1)
view.of(ls.Causal())["positions"]
ls.attention(q, k, **view.of(ls.Causal()))
ls.nothing
"""


def complaints(folder: Path, code: str) -> dict[int, str]:
    """pyright's errors in a file of imports and this code, by the code's line."""
    file = folder / "calls.py"
    file.write_text(IMPORTS + code)
    run = subprocess.run(
        [str(PYRIGHT), "--outputjson", "--pythonpath", sys.executable, str(file)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    report = json.loads(run.stdout)["generalDiagnostics"]
    first = IMPORTS.count("\n")
    return {d["range"]["start"]["line"] - first: d["message"] for d in report if d["severity"] == "error"}


@pytest.mark.skipif(PYRIGHT is None, reason="pyright is not installed")
def test_good_calls_are_accepted_and_their_results_have_types(tmp_path):
    found = complaints(tmp_path, GOOD)
    assert not found, "\n".join(f"{(GOOD.splitlines())[line]}: {message}" for line, message in found.items())


@pytest.mark.skipif(PYRIGHT is None, reason="pyright is not installed")
def test_bad_calls_are_errors_each(tmp_path):
    found = complaints(tmp_path, BAD)
    missed = [line for number, line in enumerate(BAD.splitlines()) if number not in found]
    assert not missed, "pyright accepts:\n" + "\n".join(missed)
