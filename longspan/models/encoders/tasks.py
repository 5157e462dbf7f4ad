"""Encoders with a head: masked LM, sequence and token classification, question answering."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from longspan.array_types import Array as AnyArray
from longspan.axes import BATCH_AXES, HEAD_AXIS
from longspan.models.activations import ACTIVATIONS
from longspan.models.encoders.encoder import Encoder, FeedForward, first_tokens, uses_dropout
from longspan.models.encoders.family import EncoderConfig, HeadTransform
from longspan.models.encoders.inputs import check_inputs
from longspan.models.explicit_axes import accepts_explicit_axes, vocab_axes_of
from longspan.models.layers import LayerNorm, dropout, linear
from longspan.models.output import Output
from longspan.models.rngs import Rngs, SingleKey, check_call_rngs, dropout_stream, next_key
from longspan.parallel.sequence_sharding import SequenceSharding


class Model(nnx.Module):
    """An encoder, the attribute `encoder`, and a head. It has the call arguments and the attributes of `Encoder`.

    Example:
        >>> from longspan import models
        >>> issubclass(models.MaskedLM, models.Model)
        True
    """

    task: ClassVar[str]  # as in `Encoder`
    suffixes: ClassVar[tuple[str, ...]]
    packs: ClassVar[bool] = True  # whether a row may contain several documents

    config: Any  # `Any`: some families add fields
    dense: Any  # None without a transform
    norm: Any

    def __init__(self, config: EncoderConfig, *, pooler: bool, dtype, param_dtype, rngs: nnx.Rngs):
        supported = tuple(task.model for task in config.family.tasks)
        if not isinstance(self, supported):
            raise ValueError(
                f"{type(self).__name__} does not support a {config.model_type}, which has no such head in Hugging "
                f"Face. Longspan has {', '.join(model.__name__ for model in supported)} for it."
            )
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.deterministic = True
        self.source: str | None = None
        self.encoder = Encoder(config, pooler=pooler, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def __call__(
        self,
        input_ids: Int[AnyArray, "B T"] | None = None,
        attention_mask: Shaped[AnyArray, "B T"] | None = None,
        token_type_ids: Int[AnyArray, "B T"] | None = None,
        global_attention_mask: Shaped[AnyArray, "B T"] | None = None,
        position_ids: Int[AnyArray, "B_or_1 T"] | None = None,
        inputs_embeds: Float[AnyArray, "B T D"] | None = None,
        deterministic: bool | None = None,
        *,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        attention_type: str | None = None,
        remat: bool = False,
        rngs: Rngs | None = None,
        mesh: Any = None,
        axis: str = "sp",
        order: str = "contiguous",
        batch_axes: str | Sequence[str] = BATCH_AXES,
        head_axis: str | None = HEAD_AXIS,
    ) -> Output:
        """The output of the encoder and of the head. `Encoder` explains the arguments."""
        arrays: dict[str, Any] = dict(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            global_attention_mask=global_attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            segment_ids=segment_ids,
        )
        check_inputs(self.config, **arrays)
        check_call_rngs(rngs)
        if deterministic is None:
            deterministic = self.deterministic
        arrays["keys"] = self._dropout_keys(deterministic, rngs)
        sharding = SequenceSharding(mesh, axis, order, batch_axes, head_axis)
        options: dict[str, Any] = dict(attention_type=attention_type, remat=remat, sharding=sharding)
        return self._forward(arrays, deterministic=deterministic, **options)

    def _dropout_keys(self, deterministic: bool, rngs: Rngs | None) -> tuple[Any, Any]:
        """A key for the encoder and one for the head; None where nothing is dropped.

        They are drawn before anything is computed under `jit`, where the caller's stream could not count them.
        """
        encoder_key = head_key = None
        head_drops = not deterministic and self.config.max_head_dropout > 0
        if head_drops:
            rngs = dropout_stream(rngs)
        if uses_dropout(self.config, deterministic):
            encoder_key = next_key(dropout_stream(rngs))
        if head_drops:
            head_key = next_key(dropout_stream(rngs))
        return encoder_key, head_key

    @accepts_explicit_axes
    def _forward(
        self, input_ids, attention_mask, token_type_ids, global_attention_mask, position_ids, inputs_embeds,
        segment_ids, keys, *, deterministic: bool, sharding: SequenceSharding, **options,
    ) -> Output:  # fmt: skip
        if segment_ids is not None and not self.packs:
            raise ValueError(
                f"`segment_ids` was given, but a {type(self).__name__} gives one result per row, not one per document. "
                "Put each document into its own row."
            )
        shape = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        positions = sharding.positions(shape[1])
        if global_attention_mask is None and self.config.family.attention.has_globals:
            global_attention_mask = self.default_globals(input_ids, shape, positions)
        if token_type_ids is None:
            token_type_ids = self.default_token_types(input_ids, positions)
        encoder_key, head_key = keys
        output = self.encoder(
            input_ids,
            attention_mask,
            token_type_ids,
            global_attention_mask,
            position_ids,
            inputs_embeds,
            deterministic,
            segment_ids=segment_ids,
            rngs=None if encoder_key is None else SingleKey(encoder_key),
            **sharding.options,
            **options,
        )
        head_keys = [None, None] if head_key is None else jax.random.split(head_key, 2)
        return dataclasses.replace(output, **self.head(output, input_ids, attention_mask, head_keys, positions))

    @property
    def _vocab_axes(self) -> Any:
        """The mesh axes that shard the vocabulary axis of the logits."""
        return None

    # `positions`, int [T], are those of the tokens in each slot; None if slots and positions are equal.
    def head(self, output: Output, input_ids, attention_mask, keys, positions) -> dict[str, jax.Array]:
        """The head's fields of `Output`."""
        raise NotImplementedError

    def add_transform(self, transform: HeadTransform | None, **options: Any) -> None:
        """Adds the layers of a transform: `dense` and, if it has one, `norm`."""
        self.dense = self.norm = nnx.data(None)
        if transform is None:
            return
        size = self.config.hidden_size
        self.dense = linear(self.config, size, size, use_bias=transform.use_bias, **options)
        if transform.has_norm:
            self.norm = LayerNorm(self.config, use_bias=transform.norm_bias, **options)

    def transformed(self, transform: HeadTransform | None, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """norm(activation(dense(x))); x without a transform."""
        if transform is None:
            return x
        x = ACTIVATIONS[transform.activation](self.dense(x))
        if self.norm is None:
            return x
        return self.norm(x)

    def default_globals(self, input_ids, shape: tuple[int, int], positions):
        """The default `global_attention_mask`, in families that have global tokens."""
        return None

    def default_token_types(self, input_ids, positions):
        """The default `token_type_ids`."""
        return None


class MaskedLM(Model):
    """An encoder that predicts the token at each position: `logits` [B, T, vocab_size].

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> models.MaskedLM(config, rngs=nnx.Rngs(0))(jnp.ones((1, 5), int)).logits.shape
        (1, 5, 11)
    """

    task = "masked_lm"
    suffixes = ("ForMaskedLM", "ForPreTraining")

    def __init__(
        self, config: EncoderConfig, *, pooler: bool = False, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs
    ):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(config, pooler=pooler, **options)
        self.add_transform(config.lm_transform, **options)
        self.bias = nnx.data(None)
        if config.lm_bias:
            self.bias = nnx.Param(jnp.zeros(config.vocab_size, param_dtype))
        if config.tie_word_embeddings:
            self.decoder = nnx.data(None)
        else:
            self.decoder = linear(config, config.hidden_size, config.vocab_size, use_bias=False, **options)

    @property
    def _vocab_axes(self) -> Any:
        return vocab_axes_of(self.decoder, self.encoder.embeddings.word)

    def head(self, output, input_ids, attention_mask, keys, positions):
        x = self.transformed(self.config.lm_transform, output.last_hidden_state)
        if self.decoder is None:
            logits = self.encoder.embeddings.word.attend(x)
        else:
            logits = self.decoder(x)
        if self.bias is None:
            return dict(logits=logits)
        return dict(logits=logits + jnp.asarray(self.bias[...], logits.dtype)[None, None])


class SequenceClassifier(Model):
    """An encoder that labels whole inputs: `logits` [B, num_labels].

    The logits are computed from the first token. In a ModernBERT or EuroBERT, `classifier_pooling` of the config
    selects the first token or the mean over tokens. In a Longformer the first token is global by default, without
    `global_attention_mask`.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> models.SequenceClassifier(config, rngs=nnx.Rngs(0))(jnp.ones((1, 5), int)).logits.shape
        (1, 2)
    """

    task = "sequence_classification"
    suffixes = ("ForSequenceClassification",)
    packs = False

    def __init__(
        self,
        config: EncoderConfig,
        *,
        pooler: bool | None = None,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        reads_pooler = config.family.classifier_reads_pooler
        super().__init__(config, pooler=reads_pooler or bool(pooler), **options)
        self.add_transform(config.classifier_transform, **options)
        self.classifier = linear(config, config.hidden_size, config.num_labels, **options)

    def head(self, output, input_ids, attention_mask, keys, positions):
        x = output.pooler_output
        if not self.config.family.classifier_reads_pooler:
            x = self.pooled(output.last_hidden_state, attention_mask, positions)
        rate, transform = self.config.head_dropout, self.config.classifier_transform
        if transform is not None and transform.drops_input:
            x = dropout(x, rate, keys[0])
        logits = self.classifier(dropout(self.transformed(transform, x), rate, keys[1]))
        if self.config.pooling == "late":
            logits = mean_over_tokens(logits, attention_mask)
        return dict(logits=logits)

    def pooled(self, x: Float[Array, "B T D"], attention_mask, positions) -> Float[Array, "..."]:
        """The vector of each row by the config's `pooling`; all tokens if only the logits are pooled."""
        pooling = self.config.pooling
        if pooling == "late":
            return x
        if pooling == "mean":
            return mean_over_tokens(x, attention_mask)
        if pooling == "slot_0" or attention_mask is None:
            return x[:, 0]
        return first_tokens(x, jnp.asarray(attention_mask).astype(bool), positions)

    def default_globals(self, input_ids, shape, positions):
        return jnp.broadcast_to(jnp.arange(shape[1])[None] == 0, shape)


class TokenClassifier(Model):
    """An encoder that labels every token: `logits` [B, T, num_labels].

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> models.TokenClassifier(config, rngs=nnx.Rngs(0))(jnp.ones((1, 5), int)).logits.shape
        (1, 5, 2)
    """

    task = "token_classification"
    suffixes = ("ForTokenClassification",)

    def __init__(
        self, config: EncoderConfig, *, pooler: bool = False, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs
    ):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(config, pooler=pooler, **options)
        self.add_transform(config.token_transform, **options)
        self.classifier = linear(config, config.hidden_size, config.num_labels, **options)

    def head(self, output, input_ids, attention_mask, keys, positions):
        x = self.transformed(self.config.token_transform, output.last_hidden_state)
        return dict(logits=self.classifier(dropout(x, self.config.head_dropout, keys[0])))


class QuestionAnswering(Model):
    """An encoder that predicts where an answer starts and ends: `start_logits` and `end_logits`, [B, T] each.

    The question ends at the first `sep_token_id`. In a Longformer the tokens before it are global by default, without
    `global_attention_mask`. In a BigBird the question and its separator have token type 0 and the other tokens 1. No
    answer lies in the question, so its logits are lowered by 1e6, except that of the first token.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> models.QuestionAnswering(config, rngs=nnx.Rngs(0))(jnp.ones((1, 5), int)).start_logits.shape
        (1, 5)
    """

    task = "question_answering"
    suffixes = ("ForQuestionAnswering",)

    def __init__(
        self, config: EncoderConfig, *, pooler: bool = False, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs
    ):
        options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(config, pooler=pooler, **options)
        if config.family.answers_have_layer:
            self.feed_forward = FeedForward(config, **options)
        else:
            self.feed_forward = nnx.data(None)
        self.add_transform(config.token_transform, **options)
        self.outputs = linear(config, config.hidden_size, 2, **options)

    def head(self, output, input_ids, attention_mask, keys, positions):
        x = output.last_hidden_state
        if self.feed_forward is not None:
            x = self.feed_forward(dropout(x, self.config.hidden_dropout_prob, keys[0]), x, keys[1])
        if self.config.token_transform is not None:
            x = dropout(self.transformed(self.config.token_transform, x), self.config.head_dropout, keys[0])
        logits = self.outputs(x)
        if self.config.family.answers_follow_question and input_ids is not None:
            question = self.question(input_ids, positions).at[:, 0].set(False)
            logits = logits - jnp.where(question, 1e6, 0.0).astype(logits.dtype)[..., None]
        return dict(start_logits=logits[..., 0], end_logits=logits[..., 1])

    def default_globals(self, input_ids, shape, positions):
        if input_ids is None:
            return None
        return self.question(input_ids, positions)

    def default_token_types(self, input_ids, positions):
        if self.config.family.answers_follow_question and input_ids is not None:
            return 1 - self.question(input_ids, positions).astype(jnp.int32)
        return None

    def question(self, input_ids, positions=None) -> jax.Array:
        """Whether each token belongs to the question, bool [B, T]: the tokens before the first separator.

        In families whose answers follow the question, the separator belongs to it too. In a row without a separator
        the question ends at position 0.

        Args:
            input_ids: [B, T].
            positions: int [T], the position of the token in each slot; by default the slot's index.
        """
        ids = jnp.asarray(input_ids, jnp.int32)
        if positions is None:
            positions = jnp.arange(ids.shape[1], dtype=jnp.int32)
        positions = positions[None]
        separators = ids == self.config.sep_token_id
        first = jnp.where(separators, positions, ids.shape[1]).min(axis=1, keepdims=True)
        end = jnp.where(separators.any(axis=1, keepdims=True), first, 0)
        if self.config.family.answers_follow_question:
            end = end + 1
        return positions < end


def mean_over_tokens(x: Float[Array, "B T D"], attention_mask) -> Float[Array, "B D"]:
    """The mean over the tokens of each row, computed in float32; 0 for a row without tokens."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if attention_mask is None:
        return jnp.mean(wide, axis=1).astype(x.dtype)
    valid = jnp.asarray(attention_mask).astype(bool)[..., None]
    count = jnp.maximum(jnp.sum(valid, axis=1), 1).astype(wide.dtype)
    # `where`, not a product: the outputs at padding may be NaN, and 0 * NaN is NaN.
    return (jnp.sum(jnp.where(valid, wide, 0), axis=1) / count).astype(x.dtype)
