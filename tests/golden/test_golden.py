"""Our encoders agree with Hugging Face's to 2e-5: outputs and gradients, compared with golden files."""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from longspan import hf
from longspan.hf.save import tensors_of
from longspan.models.encoders.bigbird import random_blocks
from tests.golden import peers

HERE = Path(__file__).parent
TOLERANCE = 2e-5
CASES = [pytest.param(name, case, id=f"{name}-{case.name}") for name in peers.names() for case in peers.cases(name)]


FIRST = {param.values[0]: param for param in reversed(CASES)}  # one case of each checkpoint


def _in_make_test(param):
    """`make test` runs each family's encoder and one of its heads."""
    name = param.values[0]
    chosen = name.endswith(("Model", "ForQuestionAnswering")) and FIRST[name] is param
    return param if chosen else pytest.param(*param.values, id=param.id, marks=pytest.mark.check)


@pytest.mark.parametrize(("name", "case"), [_in_make_test(p) for p in CASES])
def test_outputs_agree_with_hugging_face(name, case):
    want, model = golden(name, case.name), load(name, case.training)
    got = call(model, case)
    compare(name, case, got, want)


# Hugging Face's classes for these types have RoBERTa's computation and tensors (`make parity` compares them).
ALIASES = {"xlm-roberta": "XLMRoberta", "camembert": "Camembert"}


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        pytest.param(alias, name, id=f"{alias}-{name}", marks=[] if name == "robertaModel" else [pytest.mark.check])
        for alias in ALIASES
        for name in peers.names()
        if name.startswith("roberta")
    ],
)
def test_robertas_of_other_names_agree_with_hugging_face(alias, name, tmp_path):
    hf.save(load_alias(alias, name, tmp_path / "theirs"), tmp_path / "ours")
    raw = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (raw["model_type"], raw["architectures"]) == (alias, [ALIASES[alias] + peers.family_and_task(name)[1]])
    model, cases = hf.load(tmp_path / "ours"), {case.name: case for case in peers.cases(name)}
    for case in [cases[key] for key in ("right13", "left13", "task") if key in cases]:
        compare(name, case, call(model, case), golden(name, case.name))


def load_alias(alias, name, directory):
    """A RoBERTa's golden checkpoint under another family's names."""
    directory.mkdir()
    raw = json.loads((HERE / name / "config.json").read_text())
    raw |= dict(model_type=alias, architectures=[ALIASES[alias] + peers.family_and_task(name)[1]])
    (directory / "config.json").write_text(json.dumps(raw))
    shutil.copy(HERE / name / "model.safetensors", directory)
    model = hf.load(directory)
    assert model.config.model_type == alias
    return model


def _slow_heads(case):
    """Heads share their encoder's gradient, so `make test` runs one head per family."""
    name = case.values[0]
    slow = not name.endswith(("Model", "ForMaskedLM"))
    first = name == "longformerModel" and FIRST[name] is case
    return pytest.param(
        *case.values, id=case.id, marks=[pytest.mark.slow] if slow else [] if first else [pytest.mark.check]
    )


@pytest.mark.parametrize(("name", "case"), [_slow_heads(p) for p in CASES if peers.has_gradients(*p.values)])
def test_gradients_agree_with_hugging_face(name, case):
    want, model = golden(name, case.name), load(name, case.training)

    def loss(model):
        got = call(model, case)
        fields = names_in(want, "cotangent.")
        pairs = [[comparable(name, case, f, x) for x in (getattr(got, f), want[f"cotangent.{f}"])] for f in fields]
        return sum(jnp.sum(ours * theirs) for ours, theirs in pairs)

    gradient = nnx.jit(nnx.grad(loss))(model)
    if len(comparable_rows(name, case)) < case_rows(case):
        # Hugging Face's gradient includes the row that differs, so ours is only checked to be finite.
        assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradient))
        return
    bearer = nnx.clone(model)
    nnx.update(bearer, gradient)
    for key, ours in tensors_of(bearer).items():
        theirs = want.get(f"grad.{key}", np.zeros_like(ours))
        if key.endswith(("word_embeddings.weight", "tok_embeddings.weight", "position_embeddings.weight")):
            # torch never trains the row of the padding token; ours has a gradient like every other.
            keep = np.arange(len(ours)) != model.config.pad_token_id
            ours, theirs = ours[keep], theirs[keep]
        # A key bias adds the same number to all scores of a query, so its gradient is 0. Both sides have rounding
        # errors of terms as large as those of the key weights.
        terms = want[f"grad.{key.removesuffix('bias')}weight"] if key.endswith("self.key.bias") else theirs
        scale = max(1.0, float(np.abs(terms).max()))
        np.testing.assert_allclose(ours / scale, theirs / scale, atol=TOLERANCE, rtol=TOLERANCE, err_msg=key)


def test_the_cases_are_those_the_files_were_made_for():
    for name in peers.names():
        for case in peers.cases(name):
            stored = golden(name, case.name)
            for key, value in case.inputs.items():
                np.testing.assert_array_equal(stored[f"input.{key}"], value)


def test_the_weights_are_wide_enough_to_tell_masks_apart():
    for name in peers.names():
        weights = load_file(HERE / name / "model.safetensors")
        assert np.std(np.concatenate([w.ravel() for w in weights.values()])) >= 0.25


def test_at_1024_tokens_a_random_block_repeats_the_last_one():
    (case,) = peers.cases("big_bird1024")
    assert (random_blocks(load("big_bird1024", case.training).config, 1024) == 15).any()


def test_golden_files_are_small():
    assert sum(f.stat().st_size for f in HERE.rglob("*") if f.is_file()) < 3e6


def call(model, case):
    inputs = {k: jnp.asarray(v) for k, v in case.inputs.items()}
    return _full(model, inputs) if case.full else _jitted(model, inputs)


# Compiled once for all cases of a model that have the same shapes.
@nnx.jit
def _jitted(model, inputs):
    return model(**inputs)


@nnx.jit
def _full(model, inputs):
    return model(**inputs, attention_type="original_full")


@functools.cache
def load(name, training):
    return hf.load(HERE / name, random_blocks="trained" if training else "hf_eval")


@functools.cache
def _cases_of(name):
    return load_file(HERE / name / "cases.safetensors")


def golden(name, case):
    return {k.removeprefix(case + "."): v for k, v in _cases_of(name).items() if k.startswith(case + ".")}


def names_in(arrays, prefix):
    return [k.removeprefix(prefix) for k in arrays if k.startswith(prefix)]


def case_rows(case):
    return len(next(iter(case.inputs.values())))


def comparable_rows(name, case):
    """All rows; with full attention only those with a token: for others we give 0, and Hugging Face an average."""
    family, _ = peers.family_and_task(name)
    dense = family in ("bert", "roberta") or (family == "big_bird" and case_length(case) <= 36)
    rows = np.arange(case_rows(case))
    if dense and "attention_mask" in case.inputs:
        return rows[case.inputs["attention_mask"].any(axis=1)]
    return rows


def comparable(name, case, field, x):
    """The part of an output that is compared: the rows above, and only tokens if outputs at padding are meaningless."""
    family, _ = peers.family_and_task(name)
    mask = case.inputs.get("attention_mask")
    if family in peers.ROTARY and mask is not None and x.shape[:2] == mask.shape:
        return x[mask.astype(bool)]
    if family in peers.ROTARY and mask is not None and field == "pooler_output":
        return x[mask[:, 0].astype(bool)]  # ours reads the first token, Hugging Face's the first slot
    return x[comparable_rows(name, case)]


def compare(name, case, got, want):
    for field in names_in(want, "output."):
        ours, theirs = np.asarray(getattr(got, field)), want[f"output.{field}"]
        np.testing.assert_allclose(
            comparable(name, case, field, ours),
            comparable(name, case, field, theirs),
            atol=TOLERANCE,
            rtol=TOLERANCE,
            err_msg=field,
        )


def case_length(case):
    return next(iter(case.inputs.values())).shape[1]
