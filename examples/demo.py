"""Draws three masks, attends with each of them, and shows what that costs. Run it with `make demo`."""

import jax
import jax.numpy as jnp

import longspan as ls

LENGTH = 16


def main() -> None:
    q, k, v = (jax.random.normal(key, (1, LENGTH, 2, 8)) for key in jax.random.split(jax.random.key(0), 3))
    attend = jax.jit(lambda q, k, v, mask: ls.attention(q, k, v, mask=mask))

    # Three documents of 5, 7 and 2 tokens share one row; the last two slots are padding.
    documents = jnp.repeat(jnp.array([0, 1, 2, -1]), jnp.array([5, 7, 2, 2]), total_repeat_length=LENGTH)[None]
    masks = {
        "A decoder with a short memory: itself and the 3 tokens before": ls.Causal() & ls.Window(3, 0),
        "Packed documents: causal, and nobody reads the neighbour's": ls.Causal() & ls.Segments(documents),
        "A long-document encoder: 2 keys on each side, token 0 is global": ls.Window(2, 2) | ls.Global((0,)),
    }

    for title, mask in masks.items():
        out = attend(q, k, v, mask)
        blind = int((out == 0).all(axis=(0, 2, 3)).sum())
        print(f"{title}\n\n{indent(mask.show(LENGTH, LENGTH))}\n")
        print(f"    attention: {out.shape}, {blind} of {LENGTH} queries see nothing and get zeros\n")

    print("What it would cost for 32768 tokens, 8 heads of 64, from the shapes alone:\n")
    shape = jax.ShapeDtypeStruct((1, 32768, 8, 64), jnp.float32)
    print(indent(ls.explain(shape, shape, shape, mask=ls.Causal() & ls.Window(511, 0))))


def indent(text: object) -> str:
    return "\n".join("    " + line for line in str(text).splitlines())


if __name__ == "__main__":
    main()
