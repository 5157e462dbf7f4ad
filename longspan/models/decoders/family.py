"""`DecoderConfig`: the fields of every decoder's config. `DecoderFamily`: the differences between families."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from longspan.checks import check_choice
from longspan.masks import Causal, Mask, Segments, Window
from longspan.models.activations import ACTIVATIONS
from longspan.models.common_keys import COMMON_KEYS
from longspan.models.decoders.mixture import Mixture
from longspan.models.decoders.rope import ROPE_KEYS, both_spellings, object_of, one_rope, override_rope
from longspan.models.decoders.runs import LayerRun, layer_runs
from longspan.models.family import Family, TensorSize
from longspan.models.fields import MAX_INT32, check_counts, check_flags, check_reals, is_count
from longspan.nn.rope import frozen
from longspan.rope import frequencies

# Keys of a `config.json` that change nothing here. No decoder has dropout, and `check_supported` reads the last key.
IGNORED_KEYS = COMMON_KEYS | {"attention_dropout", "pad_token_id", "pretraining_tp", "quantization_config"}
# Metadata of a config field that `config.json` does not have under this name.
NOT_IN_JSON = {"in_json": False}
FULL, SLIDING = "full_attention", "sliding_attention"  # Hugging Face's names for the kinds of layers


class LayerKind(NamedTuple):
    """The differences between the layers of one model. Consecutive layers of one kind are stacked and compiled once."""

    attention: str  # `FULL` or `SLIDING`, which selects the mask, the rotary frequencies and the cache
    rotates: bool = True  # whether queries and keys are rotated
    experts: bool = False  # whether the MLP is a mixture of experts


class Multipliers(NamedTuple):
    """The factors of a decoder's activations."""

    embeddings: float = 1.0
    branches: float = 1.0  # of the outputs of attention and MLP, before they are added
    logits_divisor: float = 1.0


class QueryScaling(NamedTuple):
    """Queries are multiplied by 1 + beta · ln(1 + ⌊position / length⌋) after the rotation."""

    beta: float
    length: int


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The config fields that every decoder has, under the names of `config.json`; the defaults are Llama's."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: int | float = 0.02
    rms_norm_eps: int | float = 1e-6
    tie_word_embeddings: bool = False
    rope_parameters: Any = field(default=None, metadata=NOT_IN_JSON)
    extra: str = field(default="{}", metadata=NOT_IN_JSON)

    model_type: ClassVar[str]
    default_theta: ClassVar[float] = 10000.0  # the base of the rotary frequencies if none is given

    def __post_init__(self):
        check_counts(self, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        check_counts(self, "max_position_embeddings")
        optional = ("num_key_value_heads", "head_dim")
        check_counts(self, *(name for name in optional if getattr(self, name) is not None))
        if getattr(self, "sliding_window", None) is not None:
            check_counts(self, "sliding_window", minimum=0)  # if a layer is sliding, `mask` rejects 0
        check_reals(self, "rms_norm_eps", "initializer_range")
        check_flags(self, "tie_word_embeddings")
        check_choice("hidden_act", self.hidden_act, tuple(sorted(ACTIVATIONS)))
        heads, kv_heads, _ = self.heads
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}. Change one of them."
            )
        if self.head_dim is None and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads={heads}. Change one of "
                "them, or give `head_dim`."
            )
        rope = self.rope_parameters
        if rope is None:
            rope = dict(rope_type="default", rope_theta=self.default_theta)
        if not isinstance(rope, Mapping):
            raise ValueError(f"`rope_parameters` must be a mapping as in `ls.rope.frequencies`, got {rope!r:.200}.")
        object.__setattr__(self, "rope_parameters", frozen(rope))
        for kind in dict.fromkeys(self.kinds):
            self.mask(kind)
            self._check_rotary_factor(kind)
            self.frequencies(kind)

    def _check_rotary_factor(self, kind: str) -> None:
        factor = self.rope(kind).get("partial_rotary_factor")
        if not self.family.partial_rotation and factor not in (None, 1):
            raise ValueError(
                f"partial_rotary_factor={factor} is not supported: a {self.model_type} model rotates all features of a "
                "head. Hugging Face ignores the factor in some rope types. Leave the factor out."
            )

    @property
    def family(self) -> "DecoderFamily":
        """The record of the model family."""
        raise NotImplementedError

    @property
    def heads(self) -> tuple[int, int, int]:
        """The number of query heads, the number of key/value heads, and the head size."""
        heads, kv_heads, head_dim = self.num_attention_heads, self.num_key_value_heads, self.head_dim
        if kv_heads is None:
            kv_heads = heads
        if head_dim is None:
            head_dim = self.hidden_size // heads
        return heads, kv_heads, head_dim

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.heads[2] ** -0.5

    @property
    def soft_cap(self) -> float | None:
        """The soft cap of the scores; None: no cap."""
        return None

    @property
    def final_soft_cap(self) -> float | None:
        """The soft cap of the logits; None: no cap."""
        return None

    @property
    def multipliers(self) -> Multipliers:
        """The factors of embeddings, branches and logits."""
        return Multipliers()

    @property
    def query_scaling(self) -> QueryScaling | None:
        """The factor of the queries by position; None: no factor."""
        return None

    @property
    def mixture(self) -> Mixture | None:
        """The experts of layers with a mixture of experts; None if no layer has one."""
        return None

    @property
    def longest(self) -> int | None:
        """The maximum number of tokens; None if the rotary frequencies adapt to any length."""
        if all(self.rope(kind).get("rope_type") == "dynamic" for kind in self.kinds):
            return None
        return self.max_position_embeddings

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether there are biases: in the query, key and value projections; in the output projection; in the MLP."""
        return False, False, False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of attention of each layer, under Hugging Face's names."""
        return (FULL,) * self.num_hidden_layers

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer: its attention, and whatever else differs between layers."""
        return tuple(map(LayerKind, self.kinds))

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        """The layers by their repeating pattern."""
        return layer_runs(self.layer_kinds)

    def mask(self, kind: str) -> Mask:
        """The mask of a kind of layer."""
        if kind == FULL:
            return Causal()
        if kind != SLIDING:
            raise ValueError(f"`layer_types` has {kind!r}, which is not one of '{FULL}' and '{SLIDING}'.")
        window: Any = getattr(self, "sliding_window", None)
        if not is_count(window):
            raise ValueError(
                f"Layers of kind '{SLIDING}' need a `sliding_window`, an int from 1 to {MAX_INT32}, got {window!r}. "
                "Set `sliding_window`, which includes the query's own key. If these layers have no window, set their "
                f"entries in `layer_types` to '{FULL}' or, in a family without `layer_types`, set `sliding_window` to "
                "None (null in config.json)."
            )
        return Causal() & Window(window - 1, 0)

    def packed_mask(self, kind: str, ids: Any) -> Mask:
        """The mask of a kind of layer for packed rows with segment ids [B, T]: tokens attend to their own document."""
        return self.mask(kind) & Segments(ids)

    def frequencies(self, kind: str, seq_len: int | None = None) -> tuple[Any, float]:
        """The rotary frequencies and the attention factor of a kind of layer. Some types depend on the length."""
        limit = self.max_position_embeddings
        return frequencies(self.rope(kind), self.heads[2], max_position_embeddings=limit, seq_len=seq_len)

    def rope(self, kind: str) -> Mapping[str, Any]:
        """The rotary parameters of a kind of layer."""
        return self.rope_parameters


@dataclass(frozen=True, kw_only=True)
class LayerTypes(DecoderConfig):
    """A decoder whose `config.json` may list the kind of each layer."""

    layer_types: Sequence[str] | None = None

    def __post_init__(self):
        check_counts(self, "num_hidden_layers")
        check_layer_types(self)
        super().__post_init__()

    @property
    def kinds(self) -> tuple[str, ...]:
        if self.layer_types is not None:
            return tuple(self.layer_types)
        return tuple(self.default_kind(number) for number in range(self.num_hidden_layers))

    def default_kind(self, number: int) -> str:
        """The kind of a layer if `layer_types` is None."""
        raise NotImplementedError


def check_layer_types(config: Any) -> None:
    """Raises unless `layer_types` is None or has a name for each layer, which become a tuple."""
    kinds: Any = config.layer_types
    if kinds is None:
        return
    if not isinstance(kinds, Sequence) or isinstance(kinds, str) or not all(isinstance(k, str) for k in kinds):
        raise ValueError(f"`layer_types` must be a list of '{FULL}' and '{SLIDING}', got {kinds!r:.200}.")
    object.__setattr__(config, "layer_types", tuple(kinds))
    if len(kinds) != config.num_hidden_layers:
        raise ValueError(
            f"`layer_types` must have an entry for each of num_hidden_layers={config.num_hidden_layers} layers, "
            f"got {len(kinds)}."
        )


def check_ropes(rope: Any, model: str) -> None:
    """Raises unless `rope_parameters` has a set of rotary parameters for each kind of layer."""
    if not isinstance(rope, Mapping) or not all(isinstance(rope.get(kind), Mapping) for kind in (FULL, SLIDING)):
        raise ValueError(
            f"`rope_parameters` of {model} must have the keys '{FULL}' and '{SLIDING}', each with a set of rotary "
            f"parameters, got {rope!r:.200}."
        )


def read_rope(content: Mapping[str, Any], where: str, *, theta: float = DecoderConfig.default_theta) -> dict[str, Any]:
    """The rotary parameters, with `theta` if the file has no base. Raises for settings that are not supported."""
    check_supported(content, where)
    return dict(rope_parameters=one_rope(content, where, theta=theta))


def read_window(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`read_rope` and the sliding window: a null in the file means no window, not the default."""
    return read_rope(content, where) | dict(sliding_window=content.get("sliding_window"))


def check_supported(content: Mapping[str, Any], where: str) -> None:
    """Raises for quantized weights and for mixtures of experts."""
    check_quantization(content, where)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if content.get(name):
            raise ValueError(
                f"{where} has {name}={content[name]!r}, but Longspan does not support mixtures of experts in a "
                f"{content.get('model_type')}. Load a dense model of this family."
            )


def check_quantization(content: Mapping[str, Any], where: str, *, readable: str | None = None) -> None:
    """Raises for quantized weights, except with the method `readable`."""
    quantization = object_of(content, "quantization_config", where)
    method = quantization.get("quant_method")
    if quantization and (readable is None or method != readable):
        formats = "floats only"
        if readable is not None:
            formats = f"only floats and {readable} for this family"
        raise ValueError(
            f"{where} has a quantization_config ({method}), but Longspan reads {formats}. Load the original "
            "checkpoint with float weights, or write a dequantized one."
        )


def write_rope(config: DecoderConfig) -> dict[str, Any]:
    """The rotary parameters in both spellings, and `write_sizes`."""
    return both_spellings(config.rope_parameters) | write_sizes(config)


def write_sizes(config: Any) -> dict[str, Any]:
    """The head sizes as numbers: a null does not mean the same in all versions of Hugging Face."""
    _, kv_heads, head_dim = config.heads
    return dict(num_key_value_heads=kv_heads, head_dim=head_dim)


# Our prefixes of a layer's parameters, and those of most families.
LAYER_NAMES = (
    ("attention.query.", "self_attn.q_proj."),
    ("attention.key.", "self_attn.k_proj."),
    ("attention.value.", "self_attn.v_proj."),
    ("attention.qkv.", "self_attn.qkv_proj."),
    ("attention.out.", "self_attn.o_proj."),
    ("attention.query_norm.", "self_attn.q_norm."),
    ("attention.key_norm.", "self_attn.k_norm."),
    ("mlp.gate.", "mlp.gate_proj."),
    ("mlp.up.", "mlp.up_proj."),
    ("mlp.gate_up.", "mlp.gate_up_proj."),
    ("mlp.down.", "mlp.down_proj."),
)
PRE_NORM_NAMES = (("attention_norm.", "input_layernorm."), ("mlp_norm.", "post_attention_layernorm."))


def names_of(*layer: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """The names of a body's parameters, from those of a layer."""
    inside = tuple((f"layers.{ours}", f"layers.{{}}.{theirs}") for ours, theirs in layer)
    return (("embed.", "embed_tokens."), *inside, ("norm.", "norm."))


# The sizes that all decoders have.
SIZES = (
    TensorSize(("vocab_size",), "embed_tokens.weight", 0),
    TensorSize(("hidden_size",), "embed_tokens.weight", 1),
    TensorSize(("num_attention_heads", "head_dim"), "layers.0.self_attn.o_proj.weight", 1),
    TensorSize(("num_key_value_heads", "head_dim"), "layers.0.self_attn.k_proj.weight", 0),
)


def decoder_sizes(*of_mlp: TensorSize) -> tuple[TensorSize, ...]:
    """The sizes of a family whose MLP has these."""
    return (*SIZES[:2], *of_mlp, *SIZES[2:])


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderFamily(Family):
    """A family of decoders: how its layers differ from Llama's."""

    prefix: str = "model."
    names: tuple[tuple[str, str], ...] = names_of(*LAYER_NAMES, *PRE_NORM_NAMES)
    word_embeddings: str = "embed_tokens.weight"
    layers: str = "layers.{}."
    sizes: tuple[TensorSize, ...] = decoder_sizes(
        TensorSize(("intermediate_size",), "layers.0.mlp.down_proj.weight", 1)
    )
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    float32_on_cpu: bool = True
    renamed_keys: tuple[str, ...] = ROPE_KEYS
    read: Callable[[Mapping[str, Any], str], dict[str, Any]] = read_rope
    write: Callable[[Any], dict[str, Any]] = write_rope
    override: Callable[[Mapping[str, Any], Mapping[str, Any], str], dict[str, Any]] = override_rope

    norm_adds_one: bool = False  # norms multiply by 1 + weight; otherwise by the weight
    norm_rounds_first: bool = True  # norms round to the dtype before they multiply; otherwise after
    input_norms: bool = True  # the inputs of attention and MLP are normalised
    branch_norms: bool = False  # the outputs of attention and MLP are normalised before they are added
    sinks: bool = False  # a learned logit per head takes part in the softmax
    qk_norm: bool = False  # queries and keys are normalised, per head
    joint_qk_norm: bool = False  # queries and keys are normalised, all heads together
    scaled_embeddings: bool = False  # embeddings are multiplied by √hidden_size
    partial_rotation: bool = False  # a config may rotate only a share of a head's features
    fused: bool = False  # one matrix for queries, keys and values, and one for the MLP's gate and up projections

    def layers_of(self, config: DecoderConfig, path: tuple) -> tuple[str, range | None]:
        """As in `Family`; layers are stacked by their place in a repeating pattern."""
        if path[0] != "layers":
            return super().layers_of(config, path)
        stacks = [run.numbers(place) for run in config.runs for place in range(len(run.kinds))]
        return ".".join(map(str, (path[0], *path[2:]))), stacks[path[1]]
