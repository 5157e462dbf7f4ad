"""Masks written as text, in the algebra's own syntax: their repr.

The text is parsed, never evaluated: names are those of masks, arguments are literals, lists (arrays) and `.npy` files,
and `&`, `|` and `~` compose. Nothing else means anything.
"""

import ast
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from longspan.cli.library import library

MOST_CHARACTERS = 20_000
# A BigBird beyond these would take minutes to draw and to look at: blocks, tokens in one, and numbers that are drawn.
MOST_BLOCKS, MOST_BLOCK_SIZE, MOST_DRAWN = 2**14, 2**14, 2**22
PATTERNS = ("bigbird", "longformer")


def parse(text: str, length: int | None = None) -> Any:
    """The mask that a text describes; `length` is the number of tokens where a pattern must know it.

    Example:
        >>> parse("Causal() & Window(511, 0) | Global((0,))")
        Causal() & Window(511, 0) | Global((0,))
        >>> parse("os.system(1) & Causal()")
        Traceback (most recent call last):
        ValueError: 'os.system' is not the name of a mask.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"The expression has {len(text):,} characters, over {MOST_CHARACTERS:,}. Put arrays in files.")
    text = " ".join(text.split())
    try:
        value = _Reader(_masks(), length).value(_parsed(text))
    except RecursionError:
        raise ValueError("The expression is nested too deeply.") from None
    if not isinstance(value, library().Mask):
        raise ValueError(f"{_cut(text)!r} is not a mask. Write one, such as 'Causal() & Window(511, 0)'.")
    return value


def _parsed(text: str) -> ast.expr:
    """The text as Python's parser reads it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's parser, about what is refused anyway
            return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{_cut(text)!r} is not an expression: {_cut(error.msg)}.") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"{_cut(text)!r} is not UTF-8 text, at character {error.start}.") from None
    except MemoryError:  # how the parser says that its own stack is full
        raise ValueError("The expression is nested too deeply.") from None


def _masks() -> dict[str, Callable[..., Any]]:
    """The masks that literals can make, by name: all that are exported but the one that takes a function."""
    ls = library()
    named = {name: getattr(ls, name) for name in ls.__all__}
    leaves = {name: made for name, made in named.items() if isinstance(made, type) and issubclass(made, ls.Mask)}
    return {name: made for name, made in leaves.items() if made not in (ls.Mask, ls.Custom)}


class _Reader:
    """What each piece of an expression means."""

    def __init__(self, masks: dict[str, Callable[..., Any]], length: int | None):
        self.masks = masks | dict(bigbird=self.bigbird, longformer=self.longformer)
        self.length = length

    def value(self, node: ast.expr) -> Any:
        """A mask, or what an argument may be."""
        match node:
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() as op, right=right):
                a, b = self.mask(left), self.mask(right)
                return a & b if isinstance(op, ast.BitAnd) else a | b
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return ~self.mask(operand)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                return self.call(function, arguments, keywords)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if (
                type(number) is not bool
            ):
                return -number
            case ast.Constant(value=str() as text):
                return _loaded(text)
            case ast.Constant(value=bool() | int() | float() | None as literal):
                return literal
            case ast.Tuple(elts=parts):
                return tuple(self.value(part) for part in parts)
            case ast.List():
                return _array(node)
        raise ValueError(_refusal(node))

    def mask(self, node: ast.expr) -> Any:
        """A mask among those that are composed."""
        value = self.value(node)
        if not isinstance(value, library().Mask):
            raise ValueError(
                f"{_cut(ast.unparse(node))!r} is not a mask, and only masks compose with '&', '|' and '~'."
            )
        return value

    def call(self, function: ast.expr, arguments: list[ast.expr], keywords: list[ast.keyword]) -> Any:
        """A mask by its name."""
        name = _name(function)
        if name not in self.masks:
            also = " Custom takes a function, which no text can hold: use Python." if name == "Custom" else ""
            names = ", ".join(sorted(self.masks))
            raise ValueError(f"{_cut(name)!r} is not a mask.{also} Masks are: {names}.")
        if any(isinstance(argument, ast.Starred) for argument in arguments) or any(k.arg is None for k in keywords):
            raise ValueError(f"{name}: arguments are written one by one, without '*'.")
        repeated = [key for key, times in Counter(keyword.arg for keyword in keywords).items() if times > 1]
        if repeated:
            raise ValueError(f"{name}: {repeated[0]}= is given more than once. Give it once.")
        values = [self.value(argument) for argument in arguments]
        named = {str(keyword.arg): self.value(keyword.value) for keyword in keywords}
        try:
            return self.masks[name](*values, **named)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{name}: {_cut(str(error), 600)}") from error

    def bigbird(
        self, seq_len: int | None = None, *, block_size: int = 64, rand_attn: Any = None, num_random_blocks: int = 3,
        num_heads: int = 1, seed: int = 0,
    ) -> Any:  # fmt: skip
        """`ls.bigbird`, which draws its random blocks where a text names none."""
        ls = library()
        seq_len = self.length if seq_len is None else seq_len
        if seq_len is None:
            raise ValueError("how long is it? Write bigbird(4096), or give -T.")
        _check_bigbird(seq_len, block_size, num_heads, num_random_blocks)
        if rand_attn is None:
            drawn = dict(block_size=block_size, num_random_blocks=num_random_blocks, num_heads=num_heads, seed=seed)
            rand_attn = ls.bigbird_random_blocks(seq_len, **drawn)
        return ls.bigbird(seq_len, block_size=block_size, rand_attn=rand_attn)

    def longformer(self, window: int, *, token_kinds: Any = None, dilation: int = 1, causal: bool = False) -> Any:
        """`ls.longformer`."""
        return library().longformer(window, token_kinds=token_kinds, dilation=dilation, causal=causal)


def _check_bigbird(seq_len: Any, block_size: Any, heads: Any, random_blocks: Any) -> None:
    """Refuses what would take minutes. What is no number, or too small, is left to `ls.bigbird` to refuse."""
    numbers = seq_len, block_size, heads, random_blocks
    if not all(type(number) is int for number in numbers) or min(seq_len, block_size, heads) < 1 or random_blocks < 0:
        return
    blocks = seq_len // block_size
    drawn = blocks * heads * (2 * random_blocks + 5)
    if block_size > MOST_BLOCK_SIZE:
        raise ValueError(f"block_size={block_size:,} is over {MOST_BLOCK_SIZE:,}. Give a smaller one.")
    if blocks > MOST_BLOCKS:
        sizes = range(-(-seq_len // MOST_BLOCKS), MOST_BLOCK_SIZE + 1)
        fitting = next((f"block_size={size}, or " for size in sizes if seq_len % size == 0), "")
        raise ValueError(
            f"{seq_len:,} tokens in blocks of {block_size:,} are {blocks:,} blocks, over {MOST_BLOCKS:,}. Give "
            f"{fitting}fewer tokens."
        )
    if drawn > MOST_DRAWN:
        raise ValueError(
            f"{heads:,} heads of {blocks:,} blocks with {random_blocks:,} random blocks each draw {drawn:,} numbers, "
            f"over {MOST_DRAWN:,}. Give fewer heads or random blocks, or a larger block_size."
        )


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="ls" | "longspan"), attr=name):
            return name
    raise ValueError(f"{_cut(ast.unparse(function))!r} is not the name of a mask.")


def _loaded(text: str) -> Any:
    """The array in a file; other strings are themselves, such as the side of `TokenTypes(zero="q")`."""
    if not text.endswith(".npy"):
        return text
    path, why = Path(text), "it holds no array that `np.save` wrote, or one of Python objects"
    try:
        if path.exists() and not path.is_file():
            why = "it is not a file"
        else:
            array = np.load(path, allow_pickle=False)
            if isinstance(array, np.ndarray):
                return array
    except FileNotFoundError:
        why = "there is no such file"
    except MemoryError:
        why = "its array does not fit into memory"
    except OSError as error:
        why = error.strerror or why
    except (ValueError, EOFError):
        pass
    raise ValueError(f"{_cut(text, 600)}: {why}.")


def _array(node: ast.List) -> np.ndarray:
    """A list of numbers or bools, or of such lists."""
    try:
        array = np.array(ast.literal_eval(node))
    except (ValueError, TypeError):
        array = np.array([], object)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{_cut(ast.unparse(node))} is not an array: write numbers or bools, rows of equal length.")
    return array.astype(np.int32) if array.dtype.kind == "i" and np.abs(array).max(initial=0) < 2**31 else array


def _refusal(node: ast.expr) -> str:
    text = _cut(ast.unparse(node))
    if isinstance(node, ast.Subscript):
        return f"{text!r} is how an array prints, not what is in it: give a file, 'ids.npy', or a list, [[0, 0, 1]]."
    if isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
        return f"{text!r}: masks compose with '&', '|' and '~', not with 'and', 'or' and 'not'."
    if isinstance(node, ast.Name):
        return f"{text!r} is a name, and names are followed by arguments: Causal(), Window(511, 0)."
    return f"{text!r} is neither a mask nor a number, a string, a tuple, a list or a file."


def _cut(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
