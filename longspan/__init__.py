"""Longspan: long-context attention for JAX.

Write a mask once; the same object runs block-sparse attention, explains itself and draws itself.
"""

from longspan import testing as testing
from longspan._version import __version__ as __version__
from longspan.attention import Explanation as Explanation
from longspan.attention import attention as attention
from longspan.attention import explain as explain
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
from longspan.masks import Blocks as Blocks
from longspan.masks import Causal as Causal
from longspan.masks import Chunk as Chunk
from longspan.masks import Custom as Custom
from longspan.masks import Dense as Dense
from longspan.masks import Empty as Empty
from longspan.masks import Full as Full
from longspan.masks import Global as Global
from longspan.masks import KvLengths as KvLengths
from longspan.masks import Mask as Mask
from longspan.masks import PerHead as PerHead
from longspan.masks import Prefix as Prefix
from longspan.masks import Segments as Segments
from longspan.masks import TokenTypes as TokenTypes
from longspan.masks import Window as Window
from longspan.patterns import bigbird as bigbird
from longspan.patterns import bigbird_random_blocks as bigbird_random_blocks
from longspan.patterns import longformer as longformer
from longspan.recipes import bigbird_attention as bigbird_attention
from longspan.recipes import longformer_attention as longformer_attention
