"""Compares whole decoders with Hugging Face's `generate`, and with llama.cpp if installed, by turns in one run.

    python -m benchmarks.decoders            # every case; torch and transformers here or in .venv-parity
    python -m benchmarks.decoders small      # 8 layers of 512 with windows of 1024
    python -m benchmarks.decoders wide       # 2 layers of 2048
    python -m benchmarks.decoders mixture    # a Qwen3-MoE: 4 layers of 1024 with 32 experts, of which 4 are chosen

Every implementation has its own process and the same number of threads, and waits while another one runs. The time of
an answer of one token counts as prefill, and the additional time of a longer answer as decoding. The first calls, which
compile, are timed separately. Hugging Face loads the weights that Longspan saved, and must give the same answer.
llama.cpp is `llama_cpp` (pip install llama-cpp-python gguf) in the same interpreter as torch. It reads a GGUF file with
other random weights, which is written here.
"""

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.encoders import Worker, peer_python
from benchmarks.measure import seconds as seconds_of
from benchmarks.measure import table

SMALL = dict(
    vocab_size=32000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, sliding_window=1024, max_position_embeddings=32768,
)  # fmt: skip
WIDE = SMALL | dict(
    vocab_size=8000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip
MIXTURE = dict(
    vocab_size=32000, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
    num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512, norm_topk_prob=True,
    max_position_embeddings=32768,
)  # fmt: skip


class Case(NamedTuple):
    family: str  # a `model_type`
    sizes: dict
    prompt: int  # tokens
    new: int  # tokens of the answer
    goals: dict[str, float]  # target ratios


CASES = {
    "small": Case("mistral", SMALL, 4096, 256, dict(decode=2.2, prefill=1.5, whole=1.8)),
    "wide": Case("mistral", WIDE, 512, 64, dict(decode=1.2)),
    "mixture": Case("qwen3_moe", MIXTURE, 128, 128, dict(decode=1.5)),
}
PEERS = {"hugging face": "theirs", "llama.cpp f32": "llama-f32", "llama.cpp q8_0": "llama-q8_0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", default=peer_python(), help="an interpreter with torch and transformers")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    os.environ |= dict(OMP_NUM_THREADS=str(options.threads))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    for name in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            print(compare(name, options.rounds, options.peer_python, Path(folder)), flush=True)


def compare(name: str, rounds: int, python: str | None, folder: Path) -> str:
    case = CASES[name]
    workers = {"longspan": DecoderWorker(sys.executable, "ours", name, folder)}
    workers["longspan"].ask("ready")  # its weights are saved
    for who, kind in PEERS.items():
        is_there = kind == "theirs" or (case.family == "mistral" and python and DecoderWorker.has_llama(python))
        if python is not None and is_there:
            workers[who] = DecoderWorker(python, kind, name, folder)
    first = {who: (worker.run(1), worker.run(case.new)) for who, worker in workers.items()}
    times: dict[str, dict[str, list[float]]] = {who: dict(prefill=[], decode=[], whole=[]) for who in workers}
    reads = []
    for _ in range(rounds):
        for who, worker in workers.items():
            time.sleep(0.25)  # the threads of the previous process spin for a while after their work is done
            prefill, whole = worker.run(1), worker.run(case.new)
            for what, seconds in (
                ("prefill", prefill),
                ("decode", (whole - prefill) / (case.new - 1)),
                ("whole", whole),
            ):
                times[who][what].append(seconds)
        reads.append(workers["longspan"].ask("bandwidth"))
    lines = [f"{name}: {case.prompt} prompt tokens and {case.new} new tokens, greedy, float32"]
    lines += [report(case, times, first), *ratios(case, times)]
    if "hugging face" in workers:
        lines.append(same_answer(workers["longspan"], workers["hugging face"], folder))
    else:
        lines.append("  torch and transformers are missing: `make parity` installs them, or give --peer-python")
    read, step = np.median(reads), np.array(times["longspan"]["decode"])
    shares = bytes_of(case.sizes) / np.array(reads) / step
    lines.append(
        f"  decoding reads {bytes_of(case.sizes) / 1e6:.0f} MB per token, at {np.median(shares):.2f} of the "
        f"{read / 1e9:.1f} GB/s of a program that sums all parameters (goal 0.6)"
    )
    if "num_experts" in case.sizes:
        ragged, grouped = workers["longspan"].ask("ragged_dot"), workers["longspan"].ask("grouped_products")
        lines.append(
            f"  the prompt's products with the experts of one matrix: {1e3 * grouped:.1f} ms by `grouped_products`, "
            f"{1e3 * ragged:.1f} ms by `jax.lax.ragged_dot`"
        )
    for worker in workers.values():
        worker.finish()
    return "\n".join(lines)


def report(case: Case, times: dict[str, dict[str, list[float]]], first: dict[str, tuple[float, float]]) -> str:
    """The medians of each implementation, and the compile time of ours."""
    rows = [["", "prefill, s", "decode, ms per token", "tokens per s", "whole, s", "first calls, s"]]
    for who, seconds in times.items():
        medians = {what: float(np.median(each)) for what, each in seconds.items()}
        decode, whole = medians["decode"], medians["whole"]
        steps = [f"{1e3 * decode:.2f}", f"{1 / decode:.0f}"]
        rows.append([who, f"{medians['prefill']:.3f}", *steps, f"{whole:.2f}", f"{sum(first[who]):.1f}"])
    ours = times["longspan"]
    compiling = sum(first["longspan"]) - float(np.median(ours["prefill"])) - float(np.median(ours["whole"]))
    return f"{table(rows)}\n  compile time of longspan: {compiling:.1f} s"


def ratios(case: Case, times: dict[str, dict[str, list[float]]]) -> list[str]:
    lines = []
    for what, goal in case.goals.items() if "hugging face" in times else ():
        found = np.array(times["hugging face"][what]) / np.array(times["longspan"][what])
        lines.append(f"  {what}: {np.median(found):.2f}x (rounds {found.min():.2f} to {found.max():.2f}; goal {goal}x)")
    return lines


def same_answer(longspan: "DecoderWorker", peer: "DecoderWorker", folder: Path) -> str:
    """Compares the tokens of both answers, and the logits of the prompt's last token."""
    longspan.ask("answer")
    peer.ask("answer")
    ours, theirs = np.load(folder / "ours.npz"), np.load(folder / "theirs.npz")
    distance = np.abs(ours["logits"] - theirs["logits"]).max() / np.abs(theirs["logits"]).max()
    same = int(np.cumprod(ours["tokens"] == theirs["tokens"]).sum())
    if distance > 1e-4:
        raise RuntimeError(f"The logits differ from Hugging Face's by {distance:.1e} of the greatest one.")
    return (
        f"  the first {same} of {len(ours['tokens'])} tokens equal Hugging Face's, and the logits differ by at most "
        f"{distance:.0e} of the greatest one"
    )


def bytes_of(sizes: dict[str, int]) -> int:
    """The bytes that a step must read: weight matrices, and the keys and values of the window."""
    wide, head = sizes["hidden_size"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if "num_experts" in sizes:
        inner = sizes["moe_intermediate_size"] * sizes["num_experts_per_tok"]
    else:
        inner = sizes["intermediate_size"]
    layer = wide * head * (2 * heads + 2 * kv_heads) + 3 * wide * inner + wide * sizes.get("num_experts", 0)
    cache = sizes.get("sliding_window", 0) * kv_heads * head * 2
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


def work(kind: str, name: str, folder: str) -> None:
    case = CASES[name]
    ids = np.random.default_rng(0).integers(0, case.sizes["vocab_size"], case.prompt)
    run, others = {"ours": ours, "theirs": theirs}.get(kind, llama)(case, ids, kind, Path(folder))
    for line in map(str.strip, sys.stdin):
        if line == "peak":
            print(0.0, flush=True)
            return
        if line == "ready":
            print(0.0, flush=True)
        elif line in others:
            print(others[line](), flush=True)
        else:
            start = time.perf_counter()
            run(int(line))
            print(time.perf_counter() - start, flush=True)


def ours(case: Case, ids, _: str, folder: Path):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import longspan as ls
    from longspan import hf, models

    config = {"mistral": models.MistralConfig, "qwen3_moe": models.Qwen3MoeConfig}[case.family]
    model = models.CausalLM(config(**case.sizes), rngs=nnx.Rngs(0))
    with warnings.catch_warnings(action="ignore"):  # there is no tokenizer
        hf.save(model, folder)
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

    def run(count: int) -> np.ndarray:
        length = case.prompt + case.new
        (tokens,) = ls.generate(model, [ids], max_new_tokens=count, max_length=length, stop_tokens=())
        return tokens

    def answer() -> float:
        logits = nnx.jit(lambda model, ids: model(ids).logits[0, -1])(model, ids[None])
        np.savez(folder / "ours.npz", logits=logits, tokens=run(case.new))
        return 0.0

    return run, dict(answer=answer, bandwidth=bandwidth) | expert_products(case)


def expert_products(case: Case) -> dict:
    """Functions that return the seconds of the products of a prompt's tokens with their experts, in two ways."""
    import jax

    from longspan.models.decoders.grouped import grouped_products

    if "num_experts" not in case.sizes:
        return {}
    rng, count = np.random.default_rng(0), case.sizes["num_experts"]
    pairs = case.prompt * case.sizes["num_experts_per_tok"]
    inputs, outputs = case.sizes["hidden_size"], case.sizes["moe_intermediate_size"]
    rows = jax.device_put(rng.standard_normal((pairs, inputs)).astype(np.float32))
    matrices = jax.device_put(rng.standard_normal((count, inputs, outputs)).astype(np.float32))
    chosen = jax.device_put(np.bincount(rng.integers(0, count, pairs), minlength=count).astype(np.int32))

    def timed(products) -> float:
        run = jax.jit(products)
        jax.block_until_ready(run(rows, matrices, chosen))
        return float(np.median([seconds_of(lambda: run(rows, matrices, chosen)) for _ in range(5)]))

    return {
        "ragged_dot": lambda: timed(jax.lax.ragged_dot),
        "grouped_products": lambda: timed(lambda x, matrices, sizes: grouped_products(x, [matrices], sizes)[0]),
    }


def theirs(case: Case, ids, _: str, folder: Path):
    import torch
    import transformers

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    prompt = torch.from_numpy(ids[None])

    def run(count: int) -> np.ndarray:
        with torch.no_grad():
            answer = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False
            )
        return answer[0, len(ids) :].numpy()

    def answer() -> float:
        with torch.no_grad():
            logits = model(prompt, logits_to_keep=1).logits[0, 0].numpy()
        np.savez(folder / "theirs.npz", logits=logits, tokens=run(case.new))
        return 0.0

    return run, dict(answer=answer)


def llama(case: Case, ids, kind: str, _: Path):
    import llama_cpp

    path = Path(tempfile.mkdtemp()) / "random.gguf"
    write_gguf(path, case.sizes, kind.removeprefix("llama-"))
    threads, length = int(os.environ["OMP_NUM_THREADS"]), case.prompt + case.new
    model = llama_cpp.Llama(str(path), n_ctx=length, n_threads=threads, n_threads_batch=threads, verbose=False)
    path.unlink()
    path.parent.rmdir()

    def run(count: int) -> None:
        model.reset()
        model.eval(ids.tolist())
        for _ in range(count - 1):
            # Not `model.scores`, which is filled only if the logits of all tokens are requested.
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), (case.sizes["vocab_size"],))
            model.eval([int(logits.argmax())])

    return run, {}


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
