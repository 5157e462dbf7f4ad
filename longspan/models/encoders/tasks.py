"""Encoders with a task's head: masked LM, sequence and token classification, question answering."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int, Shaped

from longspan.array_types import Array as AnyArray
from longspan.axes import BATCH_AXES, HEAD_AXIS
from longspan.models.activations import ACTIVATIONS
from longspan.models.encoders.encoder import Encoder, FeedForward, drops_any
from longspan.models.encoders.family import EncoderConfig
from longspan.models.encoders.inputs import check_inputs
from longspan.models.layers import LayerNorm, dropout, linear
from longspan.models.output import Output
from longspan.models.placed import columns_of, placed
from longspan.models.rngs import Drawn, Rngs, check_call_rngs, dropout_stream, next_key
from longspan.parallel.sequence_sharding import SequenceSharding


class Model(nnx.Module):
    """An encoder in `encoder`, and a head after it. Calls take the arguments of `Encoder`, and it has its attributes.

    Example:
        >>> from longspan import models
        >>> issubclass(models.MaskedLM, models.Model)
        True
    """

    task: ClassVar[str]  # as in `Encoder`
    suffixes: ClassVar[tuple[str, ...]]

    config: Any  # of the family: BigBird's and Longformer's have more than BERT's

    def __init__(self, config: EncoderConfig, *, pooler: bool, dtype, param_dtype, rngs: nnx.Rngs):
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
        attention_type: str | None = None,
        remat: bool = False,
        rngs: Rngs | None = None,
        mesh: Any = None,
        axis: str = "sp",
        order: str = "contiguous",
        batch_axes: str | Sequence[str] = BATCH_AXES,
        head_axis: str | None = HEAD_AXIS,
    ) -> Output:
        """See `Encoder`. The output has the encoder's fields and the head's."""
        arrays: dict[str, Any] = dict(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            global_attention_mask=global_attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
        )
        check_inputs(self.config, **arrays)
        check_call_rngs(rngs)
        deterministic = self.deterministic if deterministic is None else deterministic
        drops = not deterministic and max(self.config.hidden_dropout_prob, self.config.head_dropout) > 0
        rngs = dropout_stream(rngs) if drops else rngs
        # Drawn here, before anything is computed under `jit`, where the caller's stream could not count on.
        own = next_key(dropout_stream(rngs)) if drops_any(self.config, deterministic) else None
        arrays["keys"] = own, next_key(dropout_stream(rngs)) if drops else None
        sharding = SequenceSharding(mesh, axis, order, batch_axes, head_axis)
        options: dict[str, Any] = dict(attention_type=attention_type, remat=remat, sharding=sharding)
        return self._answered(arrays, deterministic=deterministic, **options)

    @placed
    def _answered(
        self, input_ids, attention_mask, token_type_ids, global_attention_mask, position_ids, inputs_embeds, keys, *,
        deterministic: bool, sharding: SequenceSharding, **options,
    ) -> Output:  # fmt: skip
        shape = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        at = sharding.positions(shape[1])
        if global_attention_mask is None and self.config.family.attention.has_globals:
            global_attention_mask = self.default_globals(input_ids, shape, at)
        if token_type_ids is None:
            token_type_ids = self.default_token_types(input_ids, at)
        own, of_head = keys
        output = self.encoder(
            input_ids,
            attention_mask,
            token_type_ids,
            global_attention_mask,
            position_ids,
            inputs_embeds,
            deterministic,
            rngs=None if own is None else Drawn(own),
            **sharding.options,
            **options,
        )
        keys = [None, None] if of_head is None else jax.random.split(of_head, 2)
        return dataclasses.replace(output, **self.head(output, input_ids, keys, at))

    @property
    def _columns(self) -> Any:
        """The mesh axes that its logits are split over, besides those of tokens."""
        return None

    # `at`: which token lies in each slot, int [T]; None where it is the slot's own.
    def head(self, output: Output, input_ids, keys, at) -> dict[str, jax.Array]:
        raise NotImplementedError

    def default_globals(self, input_ids, shape: tuple[int, int], at):
        """Global tokens, in a family that has them, where the caller names none."""
        return None

    def default_token_types(self, input_ids, at):
        return None


class MaskedLM(Model):
    """An encoder that predicts the token at each place: `logits` [B, T, vocab_size].

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
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(config, pooler=pooler, **kinds)
        self.dense = linear(config, config.hidden_size, config.hidden_size, **kinds)
        self.norm = LayerNorm(config, **kinds)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size, param_dtype))
        tied, shape = config.tie_word_embeddings, (config.hidden_size, config.vocab_size)
        self.decoder = nnx.data(None) if tied else linear(config, *shape, use_bias=False, **kinds)

    @property
    def _columns(self) -> Any:
        return columns_of(self.decoder, self.encoder.embeddings.word)

    def head(self, output, input_ids, keys, at):
        act = self.config.family.lm_activation or self.config.hidden_act
        x = self.norm(ACTIVATIONS[act](self.dense(output.last_hidden_state)))
        logits = self.encoder.embeddings.word.attend(x) if self.decoder is None else self.decoder(x)
        return dict(logits=logits + jnp.asarray(self.bias[...], logits.dtype)[None, None])


class SequenceClassifier(Model):
    """An encoder that labels whole inputs by their first token: `logits` [B, num_labels].

    In a Longformer the first token is global unless `global_attention_mask` says otherwise.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> config = models.BertConfig(vocab_size=11, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> models.SequenceClassifier(config, rngs=nnx.Rngs(0))(jnp.ones((1, 5), int)).logits.shape
        (1, 2)
    """

    task = "sequence_classification"
    suffixes = ("ForSequenceClassification",)

    def __init__(
        self,
        config: EncoderConfig,
        *,
        pooler: bool | None = None,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        reads_pooler = config.family.classifier_reads_pooler
        super().__init__(config, pooler=reads_pooler or bool(pooler), **kinds)
        size = config.hidden_size
        self.dense = nnx.data(None) if reads_pooler else linear(config, size, size, **kinds)
        self.classifier = linear(config, size, config.num_labels, **kinds)

    def head(self, output, input_ids, keys, at):
        rate, x = self.config.head_dropout, output.pooler_output
        if self.dense is not None:
            act = self.config.family.classifier_activation or self.config.hidden_act
            x = ACTIVATIONS[act](self.dense(dropout(output.last_hidden_state[:, 0], rate, keys[0])))
        return dict(logits=self.classifier(dropout(x, rate, keys[1])))

    def default_globals(self, input_ids, shape, at):
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
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(config, pooler=pooler, **kinds)
        self.classifier = linear(config, config.hidden_size, config.num_labels, **kinds)

    def head(self, output, input_ids, keys, at):
        return dict(logits=self.classifier(dropout(output.last_hidden_state, self.config.head_dropout, keys[0])))


class QuestionAnswering(Model):
    """An encoder that marks where an answer starts and ends: `start_logits` and `end_logits`, [B, T] each.

    In a Longformer the tokens before the first `sep_token_id`, the question, are global unless
    `global_attention_mask` says otherwise. In a BigBird the first separator ends the question: its tokens have token
    type 0, the others 1, and no answer lies in it (their logits are lowered by 1e6, the first token's excepted).

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
        kinds: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        super().__init__(config, pooler=pooler, **kinds)
        self.feed_forward = FeedForward(config, **kinds) if config.family.answers_have_layer else nnx.data(None)
        self.outputs = linear(config, config.hidden_size, 2, **kinds)

    def head(self, output, input_ids, keys, at):
        x = output.last_hidden_state
        if self.feed_forward is not None:
            x = self.feed_forward(dropout(x, self.config.hidden_dropout_prob, keys[0]), x, keys[1])
        logits = self.outputs(x)
        if self.config.family.answers_follow_question and input_ids is not None:
            question = self.question(input_ids, at).at[:, 0].set(False)
            logits = logits - jnp.where(question, 1e6, 0.0).astype(logits.dtype)[..., None]
        return dict(start_logits=logits[..., 0], end_logits=logits[..., 1])

    def default_globals(self, input_ids, shape, at):
        return None if input_ids is None else self.question(input_ids, at)

    def default_token_types(self, input_ids, at):
        if self.config.family.answers_follow_question and input_ids is not None:
            return 1 - self.question(input_ids, at).astype(jnp.int32)
        return None

    def question(self, input_ids, at=None) -> jax.Array:
        """The tokens before the first separator, and in some families the separator too.

        Args:
            input_ids: [B, T].
            at: which token lies in each slot, if it is not the slot's own, int [T].
        """
        config = self.config
        ids = jnp.asarray(input_ids, jnp.int32)
        place = (jnp.arange(ids.shape[1], dtype=jnp.int32) if at is None else at)[None]
        separators = ids == config.sep_token_id
        first = jnp.where(separators, place, ids.shape[1]).min(axis=1, keepdims=True)
        first = jnp.where(separators.any(axis=1, keepdims=True), first, 0)
        past = first + 1 if config.family.answers_follow_question else first
        return place < past
