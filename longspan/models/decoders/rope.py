"""Rotary positions in a `config.json`, in both spellings."""

from collections.abc import Mapping
from typing import Any

from flax.core import FrozenDict, unfreeze

BESIDE = ("rope_theta", "rope_scaling", "rope_parameters")  # the keys that are read here
ORIGINAL = "original_max_position_embeddings"


def one_rope(content: Mapping[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """`rope_parameters` as Hugging Face's version 5 has them, from either spelling.

    As there, what `rope_scaling` says comes first, and what stands beside it stands in for what it leaves out.
    """
    given = dict(content.get("rope_scaling") or content.get("rope_parameters") or {})
    given["rope_type"] = given.get("rope_type") or given.pop("type", None) or "default"
    given.pop("type", None)
    given["rope_theta"] = given.get("rope_theta") or content.get("rope_theta") or theta
    share = given.get("partial_rotary_factor") or content.get("partial_rotary_factor")
    if share is not None:
        given["partial_rotary_factor"] = share
    if given["rope_type"] != "default" and content.get(ORIGINAL) is not None:
        given[ORIGINAL] = content[ORIGINAL]
    return given


def both_spellings(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `config.json` for one set of parameters: versions 4 and 5 of Hugging Face read them alike."""
    plain = unfreeze(rope) if isinstance(rope, FrozenDict) else dict(rope)
    scaled = plain.get("rope_type", "default") != "default"
    return dict(rope_parameters=plain, rope_theta=plain["rope_theta"], rope_scaling=plain if scaled else None)


def frozen(value: Any) -> Any:
    """The same parameters as a config keeps them, which hashes."""
    if isinstance(value, Mapping):
        return FrozenDict({name: frozen(inner) for name, inner in value.items()})
    return tuple(value) if isinstance(value, list) else value
