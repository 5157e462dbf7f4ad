"""Longspan: long-context attention for JAX.

Write a mask once: `attention` runs it block-sparse, `explain` reports the cost, `mask.show` draws it.
"""

import importlib as _importlib
from collections.abc import Callable as _Callable
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING

from longspan.tested_jax import note_untested as _note_untested

try:
    from longspan import parallel as parallel  # loads everything that uses JAX internals
except (AttributeError, ImportError) as error:
    _note_untested(error)
    raise

from longspan import cache as cache
from longspan import engines as engines
from longspan import maskinfo as maskinfo
from longspan import masks as masks
from longspan import rope as rope
from longspan import testing as testing
from longspan.attend import attention as attention
from longspan.biases import Bias as Bias
from longspan.biases import ScoreBias as ScoreBias
from longspan.biases import alibi as alibi
from longspan.biases import relative_bias as relative_bias
from longspan.combine import merge as merge
from longspan.cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from longspan.explanation import Explanation as Explanation
from longspan.explanation import explain as explain
from longspan.layout import BlockLayout as BlockLayout
from longspan.maskinfo import MaskInfo as MaskInfo
from longspan.maskinfo import MaskSharding as MaskSharding
from longspan.maskinfo import attention_mask_to_qkv_cu_seqlens as attention_mask_to_qkv_cu_seqlens
from longspan.maskinfo import cu_seqlens_to_mask as cu_seqlens_to_mask
from longspan.maskinfo import get_debug_mode as get_debug_mode
from longspan.maskinfo import mask_to_segment_ids as mask_to_segment_ids
from longspan.maskinfo import qkv_cu_seqlens_to_attention_mask as qkv_cu_seqlens_to_attention_mask
from longspan.maskinfo import qkv_cu_seqlens_to_qkv_masks as qkv_cu_seqlens_to_qkv_masks
from longspan.maskinfo import qkv_masks_to_cu_seqlens as qkv_masks_to_cu_seqlens
from longspan.maskinfo import segment_ids_to_mask as segment_ids_to_mask
from longspan.maskinfo import segment_ids_to_qkv_masks as segment_ids_to_qkv_masks
from longspan.maskinfo import set_debug_mode as set_debug_mode
from longspan.masks import Band as Band
from longspan.masks import Between as Between
from longspan.masks import BlockCausal as BlockCausal
from longspan.masks import Blocks as Blocks
from longspan.masks import Causal as Causal
from longspan.masks import Chunk as Chunk
from longspan.masks import Custom as Custom
from longspan.masks import Dense as Dense
from longspan.masks import Empty as Empty
from longspan.masks import FirstOfSegment as FirstOfSegment
from longspan.masks import Full as Full
from longspan.masks import Global as Global
from longspan.masks import KvLengths as KvLengths
from longspan.masks import Mask as Mask
from longspan.masks import PerHead as PerHead
from longspan.masks import Prefix as Prefix
from longspan.masks import QLengths as QLengths
from longspan.masks import Segments as Segments
from longspan.masks import TokenTypes as TokenTypes
from longspan.masks import Window as Window
from longspan.masks import positions_from_segments as positions_from_segments
from longspan.optional import is_installed as _is_installed
from longspan.patterns import bigbird as bigbird
from longspan.patterns import bigbird_attention as bigbird_attention
from longspan.patterns import bigbird_random_blocks as bigbird_random_blocks
from longspan.patterns import longformer as longformer
from longspan.patterns import longformer_attention as longformer_attention
from longspan.version import __version__ as __version__

if TYPE_CHECKING:
    from longspan import hf as hf
    from longspan import models as models
    from longspan import nn as nn
    from longspan import train as train
    from longspan.models.generate import generate as generate

# `MaskSharding`, MaskInfo's conversions and debug switches are importable from here, but listed in `longspan.maskinfo`.
__all__ = [  # noqa: RUF022 (sorted as a reader would)
    "alibi",
    "attention",
    "Band",
    "Between",
    "Bias",
    "bigbird",
    "bigbird_attention",
    "bigbird_random_blocks",
    "BlockCausal",
    "BlockLayout",
    "Blocks",
    "cache",
    "Causal",
    "Chunk",
    "chunked_cross_entropy",
    "Custom",
    "Dense",
    "Empty",
    "engines",
    "explain",
    "Explanation",
    "FirstOfSegment",
    "Full",
    "Global",
    "KvLengths",
    "longformer",
    "longformer_attention",
    "Mask",
    "maskinfo",
    "MaskInfo",
    "masks",
    "merge",
    "parallel",
    "PerHead",
    "positions_from_segments",
    "Prefix",
    "QLengths",
    "relative_bias",
    "rope",
    "ScoreBias",
    "Segments",
    "testing",
    "TokenTypes",
    "Window",
]

# Names that need an optional dependency, and its module. They are imported on first use.
_LAZY = {"generate": "flax", "hf": "flax", "models": "flax", "nn": "flax", "train": "optax"}


if not TYPE_CHECKING:  # static checkers would accept any attribute of a module that defines `__getattr__`

    def __getattr__(name: str) -> _ModuleType | _Callable:
        if name == "generate":
            return _importlib.import_module("longspan.models.generate").generate
        if name in _LAZY:
            return _importlib.import_module(f"longspan.{name}")
        raise AttributeError(f"module 'longspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, without those whose optional dependency is not installed."""
    absent = {name for name, needed in _LAZY.items() if not _is_installed(needed)}
    return sorted({*__all__, *_LAZY, "__version__"} - absent)
