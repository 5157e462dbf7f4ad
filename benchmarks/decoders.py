"""Compares whole decoders with Hugging Face's `generate`, and with llama.cpp if installed, by turns in one run.

    python -m benchmarks.decoders            # both sizes; torch and transformers here or in .venv-parity
    python -m benchmarks.decoders small      # 8 layers of 512 with windows of 1024
    python -m benchmarks.decoders wide       # 2 layers of 2048

Every implementation has its own process, which waits while another one runs. The time of an answer of one token counts
as prefill, and the additional time of a longer answer as decoding. llama.cpp is `llama_cpp` (pip install
llama-cpp-python gguf) in the same interpreter as torch; it reads a GGUF file with random weights that is written here.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.encoders import Worker, peer_python
from benchmarks.measure import table

SMALL = dict(
    vocab_size=32000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, sliding_window=1024, max_position_embeddings=32768,
)  # fmt: skip
WIDE = SMALL | dict(
    vocab_size=8000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip
# Name -> sizes, tokens of the prompt and of the answer, and the target ratios.
CASES = {
    "small": (SMALL, 4096, 256, dict(decode=2.2, prefill=1.5, whole=1.8)),
    "wide": (WIDE, 512, 64, dict(decode=1.2)),
}
PEERS = {"hugging face": "theirs", "llama.cpp f32": "llama-f32", "llama.cpp q8_0": "llama-q8_0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", default=peer_python(), help="an interpreter with torch and transformers")
    options = parser.parse_args()
    for name in options.cases:
        print(compare(name, options.rounds, options.peer_python), flush=True)


def compare(name: str, rounds: int, python: str | None) -> str:
    sizes, prompt, new, goals = CASES[name]
    workers = {"longspan": DecoderWorker(sys.executable, "ours", name)}
    for who, kind in PEERS.items():
        if python is not None and (kind == "theirs" or DecoderWorker.has_llama(python)):
            workers[who] = DecoderWorker(python, kind, name)
    first = {who: (worker.run(1), worker.run(new))[0] for who, worker in workers.items()}
    times: dict[str, dict[str, list[float]]] = {who: dict(prefill=[], decode=[], whole=[]) for who in workers}
    reads = []
    for _ in range(rounds):
        for who, worker in workers.items():
            time.sleep(0.25)  # the threads of the previous process spin for a while after their work is done
            prefill, whole = worker.run(1), worker.run(new)
            for what, seconds in (("prefill", prefill), ("decode", (whole - prefill) / (new - 1)), ("whole", whole)):
                times[who][what].append(seconds)
        reads.append(workers["longspan"].ask("bandwidth"))
    rows = [["", "prefill, s", "decode, ms per token", "whole, s", "first call, s"]]
    for who in workers:
        medians = {what: float(np.median(seconds)) for what, seconds in times[who].items()}
        prefill, decode = f"{medians['prefill']:.2f}", f"{1e3 * medians['decode']:.2f}"
        rows.append([who, prefill, decode, f"{medians['whole']:.2f}", f"{first[who]:.1f}"])
    lines = [f"{name}: {prompt} prompt tokens and {new} new tokens, greedy, float32", table(rows)]
    for what, goal in goals.items() if "hugging face" in workers else ():
        ratios = np.array(times["hugging face"][what]) / np.array(times["longspan"][what])
        lines.append(
            f"  {what}: {np.median(ratios):.2f}x (rounds {ratios.min():.2f} to {ratios.max():.2f}; goal {goal}x)"
        )
    read, step = np.median(reads), np.array(times["longspan"]["decode"])
    shares = bytes_of(sizes) / np.array(reads) / step
    lines.append(
        f"  decoding reads {bytes_of(sizes) / 1e6:.0f} MB per token, at {np.median(shares):.2f} of the "
        f"{read / 1e9:.1f} GB/s of a program that sums all parameters (goal 0.6)"
    )
    for worker in workers.values():
        worker.finish()
    return "\n".join(lines)


def bytes_of(sizes: dict[str, int]) -> int:
    """The bytes that a step must read: weight matrices, and the keys and values of the window."""
    wide, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    layer = wide * head * (2 * heads + 2 * kv_heads) + 3 * wide * inner
    cache = sizes["sliding_window"] * kv_heads * head * 2
    return 4 * (sizes["num_hidden_layers"] * (layer + cache) + wide * sizes["vocab_size"])


class DecoderWorker(Worker):
    """A process that generates, for each line, that number of tokens from a prompt, and prints the seconds."""

    module = "benchmarks.decoders"

    def run(self, count: int) -> float:
        return self.ask(str(count))

    @staticmethod
    def has_llama(python: str) -> bool:
        import subprocess

        command = [python, "-c", "import gguf, llama_cpp"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def work(kind: str, name: str) -> None:
    sizes, prompt, new, _ = CASES[name]
    ids = np.random.default_rng(0).integers(0, sizes["vocab_size"], prompt)
    run, bandwidth = {"ours": ours, "theirs": theirs}.get(kind, llama)(sizes, ids, new, kind)
    for line in sys.stdin:
        if line.strip() == "peak":
            print(0.0, flush=True)
            return
        if line.strip() == "bandwidth":
            print(bandwidth(), flush=True)
            continue
        start = time.perf_counter()
        run(int(line))
        print(time.perf_counter() - start, flush=True)


def ours(sizes, ids, new: int, _: str):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import longspan as ls
    from longspan import models

    model = models.CausalLM(models.MistralConfig(**sizes), rngs=nnx.Rngs(0))
    arrays = jax.tree.leaves(nnx.state(model))
    total = jax.jit(lambda arrays: sum(jnp.sum(x) for x in arrays))

    def bandwidth() -> float:
        """The bytes per second of a program that reads all parameters."""
        seconds = []
        for _ in range(7):
            start = time.perf_counter()
            jax.block_until_ready(total(arrays))
            seconds.append(time.perf_counter() - start)
        return sum(x.nbytes for x in arrays) / float(np.median(seconds))

    def run(count: int) -> None:
        ls.generate(model, [ids], max_new_tokens=count, max_length=len(ids) + new, stop_tokens=())

    return run, bandwidth


def theirs(sizes, ids, new: int, _: str):
    import torch
    import transformers

    config = transformers.MistralConfig(**sizes, eos_token_id=None, bos_token_id=None)
    model = transformers.MistralForCausalLM(config).eval()
    prompt = torch.from_numpy(ids[None])

    def run(count: int) -> None:
        with torch.no_grad():
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)

    return run, None


def llama(sizes, ids, new: int, kind: str):
    import llama_cpp

    path = Path(tempfile.mkdtemp()) / "random.gguf"
    write_gguf(path, sizes, kind.removeprefix("llama-"))
    model = llama_cpp.Llama(str(path), n_ctx=len(ids) + new, n_threads=2, n_threads_batch=2, verbose=False)
    path.unlink()
    path.parent.rmdir()

    def run(count: int) -> None:
        model.reset()
        model.eval(ids.tolist())
        for _ in range(count - 1):
            # Not `model.scores`, which is filled only if the logits of all tokens are requested.
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), (sizes["vocab_size"],))
            model.eval([int(logits.argmax())])

    return run, None


def write_gguf(path: Path, sizes: dict[str, int], kind: str) -> None:
    """Writes a Llama of these sizes with random weights. llama.cpp does not support windows for Mistral."""
    import gguf

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads, head = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    wide, inner, words = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(wide)
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(words)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(words)])
    writer.add_token_scores([0.0] * words)
    writer.add_token_types([gguf.TokenType.NORMAL] * words)
    shapes = {"token_embd": (words, wide), "output": (words, wide), "output_norm": (wide,)}
    for i in range(sizes["num_hidden_layers"]):
        shapes |= {f"blk.{i}.{n}": (wide,) for n in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.attn_q": (heads * head, wide), f"blk.{i}.attn_output": (wide, heads * head)}
        shapes |= {f"blk.{i}.attn_{n}": (kv_heads * head, wide) for n in "kv"}
        shapes |= {f"blk.{i}.ffn_gate": (inner, wide), f"blk.{i}.ffn_up": (inner, wide)}
        shapes |= {f"blk.{i}.ffn_down": (wide, inner)}
    for name, shape in shapes.items():
        weights = (0.02 * rng.standard_normal(shape)).astype(np.float32)
        if kind == "q8_0" and len(shape) == 2:
            type_ = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, type_), raw_dtype=type_)
        else:
            writer.add_tensor(f"{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(*sys.argv[2:])
    else:
        main()
