"""`MaskInfo`: a mask bound to a batch, convertible between masks, ids, positions, lengths and offsets.

`bound` has the fields. `build`, `rules`, `views`, `sharding` and `picture` have the methods by subject; `info` combines
them in one class. `ids` computes ids, positions, lengths and offsets. `convert` has the functions of plain arrays.

Every public name here can also be imported from `longspan`.

Example:
    >>> ids = np.array([[0, 0, 1, -1]])  # two documents and one padding token
    >>> info = ls.MaskInfo.from_segments(ids)
    >>> ls.maskinfo.segment_ids_to_mask(ids).shape == info.attention_mask.shape
    True
"""

from longspan.maskinfo.convert import attention_mask_to_qkv_cu_seqlens as attention_mask_to_qkv_cu_seqlens
from longspan.maskinfo.convert import cu_seqlens_to_mask as cu_seqlens_to_mask
from longspan.maskinfo.convert import mask_to_segment_ids as mask_to_segment_ids
from longspan.maskinfo.convert import qkv_cu_seqlens_to_attention_mask as qkv_cu_seqlens_to_attention_mask
from longspan.maskinfo.convert import qkv_cu_seqlens_to_qkv_masks as qkv_cu_seqlens_to_qkv_masks
from longspan.maskinfo.convert import qkv_masks_to_cu_seqlens as qkv_masks_to_cu_seqlens
from longspan.maskinfo.convert import segment_ids_to_mask as segment_ids_to_mask
from longspan.maskinfo.convert import segment_ids_to_qkv_masks as segment_ids_to_qkv_masks
from longspan.maskinfo.debug import get_debug_mode as get_debug_mode
from longspan.maskinfo.debug import set_debug_mode as set_debug_mode
from longspan.maskinfo.info import MaskInfo as MaskInfo
from longspan.maskinfo.sharding import MaskSharding as MaskSharding
