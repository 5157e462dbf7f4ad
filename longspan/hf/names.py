"""What Hugging Face calls our parameters, and what its files hold besides."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from flax import nnx

from longspan.models import Encoder, MaskedLM, QuestionAnswering, SequenceClassifier, TokenClassifier

# The attribute that holds the encoder in a model with a head.
PREFIX = {"bert": "bert.", "roberta": "roberta.", "longformer": "longformer.", "big_bird": "bert."}

# A model's class name in `architectures` is the family's name and one of these.
TASKS = {
    "Model": Encoder,
    "ForMaskedLM": MaskedLM,
    "ForSequenceClassification": SequenceClassifier,
    "ForTokenClassification": TokenClassifier,
    "ForQuestionAnswering": QuestionAnswering,
}
FAMILY = {"bert": "Bert", "roberta": "Roberta", "longformer": "Longformer", "big_bird": "BigBird"}

# Names that start like this belong to a head.
HEADS = ("cls.", "lm_head.", "classifier.", "qa_outputs.", "qa_classifier.")
# Tables of constants that older versions saved with the parameters.
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")

_BODY = (
    (r"^embeddings\.(word|position|token_type)\.", r"embeddings.\1_embeddings."),
    (r"^embeddings\.norm\.", r"embeddings.LayerNorm."),
    (r"^layers\.attention\.", r"encoder.layer.{}.attention.self."),
    (r"^layers\.out\.", r"encoder.layer.{}.attention.output.dense."),
    (r"^layers\.out_norm\.", r"encoder.layer.{}.attention.output.LayerNorm."),
    (r"^layers\.feed_forward\.up\.", r"encoder.layer.{}.intermediate.dense."),
    (r"^layers\.feed_forward\.down\.", r"encoder.layer.{}.output.dense."),
    (r"^layers\.feed_forward\.norm\.", r"encoder.layer.{}.output.LayerNorm."),
)
_BERT_LM = (("dense.", "cls.predictions.transform.dense."), ("norm.", "cls.predictions.transform.LayerNorm."),
            ("bias", "cls.predictions.bias"), ("decoder.", "cls.predictions.decoder."))  # fmt: skip
_ROBERTA_LM = (("dense.", "lm_head.dense."), ("norm.", "lm_head.layer_norm."), ("bias", "lm_head.bias"),
               ("decoder.", "lm_head.decoder."))  # fmt: skip
_TWO_LAYERS = (("dense.", "classifier.dense."), ("classifier.", "classifier.out_proj."))
_ONE_LAYER = (("classifier.", "classifier."),)
_ANSWER = (("outputs.", "qa_outputs."),)
_BIGBIRD_ANSWER = (("outputs.", "qa_classifier.qa_outputs."),
                   ("feed_forward.up.", "qa_classifier.intermediate.dense."),
                   ("feed_forward.down.", "qa_classifier.output.dense."),
                   ("feed_forward.norm.", "qa_classifier.output.LayerNorm."))  # fmt: skip

_HEAD = {
    MaskedLM: {"bert": _BERT_LM, "big_bird": _BERT_LM, "roberta": _ROBERTA_LM, "longformer": _ROBERTA_LM},
    SequenceClassifier: {"bert": _ONE_LAYER, **dict.fromkeys(("big_bird", "roberta", "longformer"), _TWO_LAYERS)},
    TokenClassifier: dict.fromkeys(PREFIX, _ONE_LAYER),
    QuestionAnswering: {**dict.fromkeys(("bert", "roberta", "longformer"), _ANSWER), "big_bird": _BIGBIRD_ANSWER},
}


class Parameter(NamedTuple):
    """A tensor of a file: its Hugging Face name (for the encoder's without prefix) and where it lives in our model."""

    name: str
    path: tuple
    layer: int | None  # its place on the first axis of a parameter that all layers share
    shape: tuple[int, ...]
    in_head: bool
    transposed: bool  # torch keeps a linear layer's weight as [outputs, inputs]


def kind_of(model: Any) -> type:
    """Which of our models it is, or is made from."""
    for kind in TASKS.values():
        if isinstance(model, kind):
            return kind
    known = ", ".join(kind.__name__ for kind in TASKS.values())
    raise TypeError(f"Expected one of longspan.models' {known}, got {type(model).__name__}.")


def parameters(model: Any) -> Iterator[Parameter]:
    """All tensors that a file of this model has, layer by layer."""
    family, task = model.config.model_type, kind_of(model)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        ours, shape, transposed = ".".join(map(str, path)), tuple(variable.shape), path[-1] == "kernel"
        in_head = task is not Encoder and path[0] != "encoder"
        stacked = not in_head and "layers" in path
        shape = shape[1:] if stacked else shape
        for layer in range(variable.shape[0]) if stacked else [None]:
            if in_head:
                name = _head_name(ours, _HEAD[task][family])
            else:
                name = _body_name(ours.removeprefix("encoder."), family, layer)
            name = re.sub(r"(^|\.)(kernel|scale|embedding)$", r"\1weight", name)
            yield Parameter(name, path, layer, shape[::-1] if transposed else shape, in_head, transposed)


def prefix(model: Any) -> str:
    """What the encoder's names begin with in a file of this model."""
    return "" if isinstance(model, Encoder) else PREFIX[model.config.model_type]


def head_prefixes(model: Any) -> tuple[str, ...]:
    """What the names of this model's own head begin with."""
    return tuple({p.name.partition(".")[0] + "." for p in parameters(model) if p.in_head})


def _body_name(ours: str, family: str, layer: int | None) -> str:
    if ours.startswith("pooler."):
        return ours if family == "big_bird" else ours.replace("pooler.", "pooler.dense.")
    for pattern, theirs in _BODY:
        ours, hits = re.subn(pattern, theirs, ours)
        if hits:
            return ours.format(layer)
    raise AssertionError(f"no Hugging Face name for {ours}")


def _head_name(ours: str, table) -> str:
    for start, theirs in table:
        if ours.startswith(start):
            return theirs + ours.removeprefix(start)
    raise AssertionError(f"no Hugging Face name for {ours}")
