"""Masks written as text, in the syntax of their repr.

The text is parsed and never evaluated. It may contain names of masks, literals, lists (arrays), names of `.npy` files,
and the operators `&`, `|` and `~`; anything else is an error.
"""

import ast
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from longspan.cli.library import library

MAX_CHARACTERS = 20_000
# A BigBird mask beyond these limits would take minutes: its blocks, the tokens of a block, the drawn random numbers.
MAX_BLOCKS, MAX_BLOCK_SIZE, MAX_DRAWN = 2**14, 2**14, 2**22
PATTERNS = ("bigbird", "longformer")


def parse(text: str, length: int | None = None) -> Any:
    """The mask that a text describes. `length` is the number of tokens of a `bigbird` without its length.

    Example:
        >>> parse("Causal() & Window(511, 0) | Global((0,))")
        Causal() & Window(511, 0) | Global((0,))
        >>> parse("os.system(1) & Causal()")
        Traceback (most recent call last):
        ValueError: 'os.system' is not the name of a mask.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"The expression must have at most {MAX_CHARACTERS:,} characters, got {len(text):,}. Put arrays into files."
        )
    text = " ".join(text.split())
    try:
        value = _Interpreter(_masks_by_name(), length).value(_syntax_tree(text))
    except RecursionError:
        raise ValueError("The expression is nested too deeply.") from None
    if not isinstance(value, library().Mask):
        raise ValueError(f"{_shorten(text)!r} is not a mask. Write one, such as 'Causal() & Window(511, 0)'.")
    return value


def _syntax_tree(text: str) -> ast.expr:
    """The syntax tree of the text, by Python's parser."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parser warns of expressions that are refused anyway
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{_shorten(text)!r} is not an expression: {_shorten(error.msg)}.") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"{_shorten(text)!r} is not UTF-8 text, at character {error.start}.") from None
    except MemoryError:  # the parser's own stack is full
        raise ValueError("The expression is nested too deeply.") from None


def _masks_by_name() -> dict[str, Callable[..., Any]]:
    """The exported masks by name, without `Custom`, which takes a function."""
    ls = library()
    named = {name: getattr(ls, name) for name in ls.__all__}
    leaves = {name: made for name, made in named.items() if isinstance(made, type) and issubclass(made, ls.Mask)}
    return {name: made for name, made in leaves.items() if made not in (ls.Mask, ls.Custom)}


class _Interpreter:
    """Computes the values of syntax trees."""

    def __init__(self, masks: dict[str, Callable[..., Any]], length: int | None):
        self.masks = masks | dict(bigbird=self.bigbird, longformer=self.longformer)
        self.length = length

    def value(self, node: ast.expr) -> Any:
        """A mask, or a value that an argument may have."""
        match node:
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() as op, right=right):
                a, b = self.mask(left), self.mask(right)
                if isinstance(op, ast.BitAnd):
                    return a & b
                return a | b
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return ~self.mask(operand)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                return self.call(function, arguments, keywords)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if (
                type(number) is not bool
            ):
                return -number
            case ast.Constant(value=str() as text):
                return _load_array(text)
            case ast.Constant(value=bool() | int() | float() | None as literal):
                return literal
            case ast.Tuple(elts=parts):
                return tuple(self.value(part) for part in parts)
            case ast.List():
                return _array(node)
        raise ValueError(_error_message(node))

    def mask(self, node: ast.expr) -> Any:
        """An operand of `&`, `|` or `~`."""
        value = self.value(node)
        if not isinstance(value, library().Mask):
            raise ValueError(
                f"{_shorten(ast.unparse(node))!r} is not a mask, and only masks compose with '&', '|' and '~'."
            )
        return value

    def call(self, function: ast.expr, arguments: list[ast.expr], keywords: list[ast.keyword]) -> Any:
        """A mask, made by its constructor."""
        name = _name(function)
        if name == "Custom":
            raise ValueError("Custom takes a function, which text cannot contain. Use Custom in Python.")
        if name not in self.masks:
            raise ValueError(f"{_shorten(name)!r} is not a mask. Masks are: {', '.join(sorted(self.masks))}.")
        if any(isinstance(argument, ast.Starred) for argument in arguments) or any(k.arg is None for k in keywords):
            raise ValueError(f"{name}: '*' is not allowed in arguments. Write them one by one.")
        repeated = [key for key, times in Counter(keyword.arg for keyword in keywords).items() if times > 1]
        if repeated:
            raise ValueError(f"{name}: {repeated[0]}= is given more than once. Give it once.")
        values = [self.value(argument) for argument in arguments]
        named = {str(keyword.arg): self.value(keyword.value) for keyword in keywords}
        try:
            return self.masks[name](*values, **named)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{name}: {_shorten(str(error), 600)}") from error

    def bigbird(
        self, seq_len: int | None = None, *, block_size: int = 64, rand_attn: Any = None, num_random_blocks: int = 3,
        num_heads: int = 1, seed: int = 0,
    ) -> Any:  # fmt: skip
        """`ls.bigbird`, with random blocks that are drawn if the text gives none."""
        ls = library()
        if seq_len is None:
            seq_len = self.length
        if seq_len is None:
            raise ValueError("its length is missing. Write bigbird(4096), or give -T.")
        _check_bigbird(seq_len, block_size, num_heads, num_random_blocks)
        if rand_attn is None:
            drawn = dict(block_size=block_size, num_random_blocks=num_random_blocks, num_heads=num_heads, seed=seed)
            rand_attn = ls.bigbird_random_blocks(seq_len, **drawn)
        return ls.bigbird(seq_len, block_size=block_size, rand_attn=rand_attn)

    def longformer(self, window: int, *, token_kinds: Any = None, dilation: int = 1, causal: bool = False) -> Any:
        """`ls.longformer`."""
        return library().longformer(window, token_kinds=token_kinds, dilation=dilation, causal=causal)


def _check_bigbird(seq_len: Any, block_size: Any, heads: Any, random_blocks: Any) -> None:
    """Refuses sizes that would take minutes. `ls.bigbird` refuses wrong types and sizes that are too small."""
    numbers = seq_len, block_size, heads, random_blocks
    if not all(type(number) is int for number in numbers) or min(seq_len, block_size, heads) < 1 or random_blocks < 0:
        return
    blocks = seq_len // block_size
    drawn = blocks * heads * (2 * random_blocks + 5)
    if block_size > MAX_BLOCK_SIZE:
        raise ValueError(f"block_size must be at most {MAX_BLOCK_SIZE:,}, got {block_size:,}. Give a smaller one.")
    if blocks > MAX_BLOCKS:
        sizes = range(-(-seq_len // MAX_BLOCKS), MAX_BLOCK_SIZE + 1)
        fitting = next((f"block_size={size}, or " for size in sizes if seq_len % size == 0), "")
        raise ValueError(
            f"{seq_len:,} tokens in blocks of {block_size:,} are {blocks:,} blocks, more than {MAX_BLOCKS:,}. Give "
            f"{fitting}fewer tokens."
        )
    if drawn > MAX_DRAWN:
        raise ValueError(
            f"{heads:,} heads of {blocks:,} blocks with {random_blocks:,} random blocks each draw {drawn:,} numbers, "
            f"more than {MAX_DRAWN:,}. Give fewer heads or random blocks, or a larger block_size."
        )


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="ls" | "longspan"), attr=name):
            return name
    raise ValueError(f"{_shorten(ast.unparse(function))!r} is not the name of a mask.")


def _load_array(text: str) -> Any:
    """The array in a .npy file. Other strings are returned as they are, such as `zero="q"` of `TokenTypes`."""
    if not text.endswith(".npy"):
        return text
    path, why = Path(text), "it is not a file of `np.save`, or it contains Python objects"
    try:
        if path.exists() and not path.is_file():
            why = "it is not a file"
        else:
            array = np.load(path, allow_pickle=False)
            if isinstance(array, np.ndarray):
                return array
    except FileNotFoundError:
        why = "the file does not exist"
    except MemoryError:
        why = "its array does not fit into memory"
    except OSError as error:
        why = error.strerror or why
    except (ValueError, EOFError):
        pass
    raise ValueError(f"{_shorten(text, 600)}: {why}.")


def _array(node: ast.List) -> np.ndarray:
    """A list of numbers or bools, or of such lists."""
    try:
        array = np.array(ast.literal_eval(node))
    except (ValueError, TypeError):
        array = np.array([], object)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{_shorten(ast.unparse(node))} is not an array. Write numbers or bools, in rows of equal length."
        )
    if array.dtype.kind == "i" and np.abs(array).max(initial=0) < 2**31:
        return array.astype(np.int32)
    return array


def _error_message(node: ast.expr) -> str:
    text = _shorten(ast.unparse(node))
    if isinstance(node, ast.Subscript):
        return (
            f"{text!r} is the printed form of an array, without its values. Give a file, 'ids.npy', or a list, "
            "[[0, 0, 1]]."
        )
    if isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
        return f"{text!r}: masks compose with '&', '|' and '~', not with 'and', 'or' and 'not'."
    if isinstance(node, ast.Name):
        return f"{text!r} is a name without arguments. Write the arguments in parentheses: Causal(), Window(511, 0)."
    return f"{text!r} is neither a mask nor a number, a string, a tuple or a list."


def _shorten(text: str, max_length: int = 80) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."
