"""`TrainableEmbedder`: an `Embedder` as an NNX module, so that `fit` trains its model and its Dense layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from longspan.models import CausalLM, Embedder
from longspan.models.pooling import PackedTexts


class TrainableEmbedder(nnx.Module):
    """The model of an `Embedder` and the modules after it, whose matrices are parameters.

    Args:
        embedder: for example from `hf.load_embedder`. Its model is trained in place.
        prompt: the text that was put before each text; only its number of tokens matters here.

    Example:
        >>> from flax import nnx
        >>> from longspan import models
        >>> from longspan.train.byte_level import ByteVocabulary
        >>> config = models.BertConfig(vocab_size=260, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
        >>> encoder = models.Encoder(config, rngs=nnx.Rngs(0))
        >>> embedder = models.Embedder(encoder, ByteVocabulary.of(True, None).tokenizer())
        >>> TrainableEmbedder(embedder)(np.ones((2, 5), np.int32), np.ones((2, 5), np.int32)).shape
        (2, 6)
    """

    def __init__(self, embedder: Embedder, prompt: str = ""):
        self.model = embedder.model
        arrays, self.structure = jax.tree.flatten(embedder.modules)
        self.arrays = nnx.List([nnx.Param(jnp.asarray(array)) for array in arrays])
        self.skipped = embedder.skipped(prompt)

    @property
    def modules_after(self) -> tuple[Any, ...]:
        """The Pooling, Dense and Normalize modules with their current matrices."""
        return jax.tree.unflatten(self.structure, [array[...] for array in self.arrays])

    def __call__(self, input_ids: Any, attention_mask: Any, **options: Any) -> Float[jax.Array, "B size"]:
        """The vectors of rows of one text each, whose padding is at the end."""
        ids, mask = jnp.asarray(input_ids), jnp.asarray(attention_mask) != 0
        if isinstance(self.model, CausalLM):
            own = {name: value for name, value in options.items() if name not in ("deterministic", "rngs")}
            hidden = self.model(ids, attention_mask=mask, logits=False, **own).last_hidden_state
        else:
            hidden = self.model(ids, mask, **options).last_hidden_state
        B, T = ids.shape
        lengths = jnp.sum(mask, axis=1, dtype=np.int32)
        place = jnp.where(mask, jnp.arange(T, dtype=np.int32)[None], np.int32(-1))[:, None]
        text = jnp.where(mask, np.int32(0), np.int32(-1))[:, None]
        starts, skip = jnp.zeros((B, 1), np.int32), jnp.full((B,), self.skipped, np.int32)
        texts = PackedTexts(ids[:, None], text, place, starts, lengths[:, None], skip)
        modules = self.modules_after

        def vector(x: jax.Array, texts: PackedTexts) -> jax.Array:
            for module in modules:
                x = module(x, texts)
            return x[0]

        return jax.vmap(vector)(hidden, texts)


def embedder_vectors(model: TrainableEmbedder, ids: Any, mask: Any, **options: Any) -> jax.Array:
    """The `vectors` of `EmbeddingTraining` for a `TrainableEmbedder`."""
    return model(ids, mask, **options)


def trained_embedder(trained: TrainableEmbedder, like: Embedder) -> Embedder:
    """An embedder with the parameters of a trained module, and the other settings of `like`."""
    embedder = Embedder(
        trained.model,
        like.tokenizer,
        jax.tree.map(np.asarray, trained.modules_after),
        prompts=like.prompts,
        default_prompt_name=like.default_prompt_name,
        max_seq_length=like.max_seq_length,
        truncate_dim=like.truncate_dim,
        similarity_fn_name=like.similarity_fn_name,
        truncation_side=like.truncation_side,
        do_lower_case=like.do_lower_case,
    )
    embedder.source = like.source
    return embedder
