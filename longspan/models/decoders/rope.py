"""Rotary parameters in a `config.json`, in the spellings of Hugging Face's versions 4 and 5."""

from collections.abc import Mapping, Sequence
from typing import Any

from flax.core import FrozenDict, unfreeze

from longspan.models.fields import is_number, is_positive

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")  # the keys that this module reads
OLD_SPELLING = ("rope_scaling", "rope_theta", "rope_local_base_freq")  # version 4's keys for `rope_parameters`
ORIGINAL = "original_max_position_embeddings"
POSITIVE = (
    "rope_theta", "factor", "attention_factor", "partial_rotary_factor", "beta_fast", "beta_slow", "low_freq_factor",
    "high_freq_factor", ORIGINAL,
)  # fmt: skip
NONNEGATIVE = ("mscale", "mscale_all_dim")  # in Hugging Face, 0 means the same as a missing key
# Keys of one set of rotary parameters.
KNOWN = frozenset([*POSITIVE, *NONNEGATIVE, "type", "rope_type", "truncate", "short_factor", "long_factor"])


def unknown_rope_keys(content: Mapping[str, Any], more: Sequence[str] = ()) -> list[str]:
    """The keys of rotary parameters that neither this module nor a family (`more`) reads, with their paths."""
    sets = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = content.get(name)
        inner = {f"{name}.{key}": value for key, value in dict_of(given).items() if isinstance(value, Mapping)}
        sets |= inner or {name: given}
    return [f"{name}.{key}" for name, one in sets.items() for key in dict_of(one) if key not in {*KNOWN, *more}]


def dict_of(value: Any) -> Mapping[str, Any]:
    """A JSON object, or an empty dict for anything else."""
    return value if isinstance(value, Mapping) else {}


def one_rope(content: Mapping[str, Any], where: str, *, theta: float = 10000.0) -> dict[str, Any]:
    """`rope_parameters` in the form of Hugging Face's version 5, from either spelling.

    As in Hugging Face, `rope_scaling` takes precedence; top-level keys fill in what it omits, and `theta` is the base
    if the file has none.
    """
    scaling, parameters = object_of(content, "rope_scaling", where), object_of(content, "rope_parameters", where)
    if scaling:
        return standard_rope(scaling, "rope_scaling", content, where, theta=theta)
    return standard_rope(parameters, "rope_parameters", content, where, theta=theta)


def standard_rope(
    given: Mapping[str, Any],
    name: str,
    content: Mapping[str, Any],
    where: str,
    *,
    theta_key: str = "rope_theta",
    theta: float = 10000.0,
) -> dict[str, Any]:
    """One set of rotary parameters, complete and checked.

    Args:
        given: the set, as the file has it.
        name: its key in the file, for messages.
        content: the file's content, whose top-level keys fill in what the set omits.
        where: the file.
        theta_key: the top-level key of the base.
        theta: the base if the file has none.
    """
    rope = dict(given)
    old_type = rope.pop("type", None)
    rope["rope_type"] = _first(rope.get("rope_type"), old_type, "default")
    for key in (*POSITIVE, *NONNEGATIVE):
        _check_number(given.get(key), f"{name}.{key}", where, may_be_zero=key in NONNEGATIVE)
    for key in (theta_key, "partial_rotary_factor", ORIGINAL):
        _check_number(content.get(key), key, where)
    rope["rope_theta"] = _first(rope.get("rope_theta"), content.get(theta_key), theta)
    share = _first(rope.get("partial_rotary_factor"), content.get("partial_rotary_factor"))
    if share is not None:
        rope["partial_rotary_factor"] = share
    if rope["rope_type"] != "default" and content.get(ORIGINAL) is not None:
        rope[ORIGINAL] = content[ORIGINAL]
    return rope


def override_rope(
    raw: Mapping[str, Any], overrides: Mapping[str, Any], where: str, *, old_spelling: Sequence[str] = OLD_SPELLING
) -> dict[str, Any]:
    """A file's content with some keys overridden. Old keys that would take precedence over them are removed."""
    new, parameters = {**raw, **overrides}, "rope_parameters"
    old_keys = [key for key in old_spelling if key in overrides]
    if old_keys and new.get(parameters):
        raise ValueError(
            f"{where}: `{old_keys[0]}` is overridden, but the config also has `{parameters}`, which "
            f"contains the same setting. Override only `{parameters}`, with `rope_type` and `rope_theta`."
        )
    if overrides.get(parameters) is None:
        return new
    _check_complete(object_of(overrides, parameters, where), where)
    return {key: value for key, value in new.items() if key not in old_spelling}


def _check_complete(rope: Mapping[str, Any], where: str) -> None:
    """Raises if a set of parameters has no base: the file's base was removed with the old keys."""
    sets = [value for value in rope.values() if isinstance(value, Mapping)] or [rope]
    if any(one.get("rope_theta") is None for one in sets):
        raise ValueError(
            f"{where} has rope_parameters without `rope_theta`. Add `rope_theta`, because the parameters that you give "
            "replace all of those in the file."
        )


def object_of(content: Mapping[str, Any], key: str, where: str, path: str = "") -> dict[str, Any]:
    """The JSON object under a key; an empty dict for null and for a missing key."""
    value = content.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{where} has {path}{key}={value!r:.200}, which must be an object, {{...}}, or null.")
    return dict(value or {})


def both_spellings(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `config.json` for one set of parameters, for versions 4 and 5 of Hugging Face."""
    plain = unfreeze(rope) if isinstance(rope, FrozenDict) else dict(rope)
    scaling = None
    if plain.get("rope_type", "default") != "default":
        scaling = plain
    return dict(rope_parameters=plain, rope_theta=plain["rope_theta"], rope_scaling=scaling)


def _check_number(value: Any, key: str, where: str, *, may_be_zero: bool = False) -> None:
    """Raises unless a value is a valid number or null, which means the same as a missing key."""
    if value is None or is_positive(value) or (may_be_zero and is_number(value) and value == 0):
        return
    expected = "a number that is at least 0" if may_be_zero else "a positive number"
    raise ValueError(f"{where} has {key}={value!r:.200}, which must be {expected} and finite in float32.")


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)
