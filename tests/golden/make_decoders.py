"""Writes the results of Hugging Face's decoders, for tests without torch. Run it where both are installed:

    python tests/golden/make_decoders.py [names]

A model is one file: logits of the cases in `decoder_peers`, greedy answers, summaries of gradients, and in the metadata
the config as `save_pretrained` writes it and the shapes of all tensors. `defaults.json` has the defaults of Hugging
Face's configs.
"""

import json
import sys
import tempfile
from pathlib import Path

import decoder_peers as peers
import numpy as np
from safetensors.numpy import load_file, save_file


def main() -> None:
    # Imported here, because the test suite collects doctests from every file and has neither.
    import torch
    import transformers

    torch.use_deterministic_algorithms(True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in sys.argv[1:] or [*peers.MODELS, *peers.VISIONS, peers.MXFP4]:
        with tempfile.TemporaryDirectory() as folder:
            arrays, metadata = golden(name, Path(folder))
        path = peers.HERE / f"{name}.safetensors"
        save_file(arrays, path, metadata={**metadata, **versions})
        print(f"{name}: {path.stat().st_size / 1024:.0f} KiB")
    names = dict.fromkeys(family for family, _ in peers.MODELS.values())
    defaults = {name: getattr(transformers, f"{name}Config")().to_dict() for name in names}
    (peers.HERE / "defaults.json").write_text(json.dumps(defaults, indent=1, sort_keys=True) + "\n")


def golden(name: str, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the metadata of a golden file."""
    model_of(name).save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    shapes = {k: list(v.shape) for k, v in load_file(folder / "model.safetensors").items()}
    if name == peers.MXFP4:
        raw["quantization_config"], shapes = dict(quant_method="mxfp4", modules_to_not_convert=[]), peers.packed(shapes)
    tensors = peers.weights(shapes, raw["model_type"])
    model = peers.hugging_face(peers.write(folder, raw, tensors))
    arrays = {f"logits.{case}": peers.run(model, inputs) for case, inputs in peers.cases().items()}
    if name in peers.WITH_HIDDEN_STATES:
        arrays |= {f"hidden.{case}": peers.hidden_states(model, inputs) for case, inputs in peers.cases().items()}
    for row, prompt in enumerate(peers.prompts()):
        fresh = peers.hugging_face(folder)  # the frequencies of some depend on the longest row so far
        arrays[f"answer.{row}"] = peers.answer(fresh, prompt).astype(np.int32)
        if name not in peers.BY_LENGTH:
            np.testing.assert_array_equal(peers.cached_answer(model, prompt), arrays[f"answer.{row}"])
    if name in (*peers.VISIONS, peers.MXFP4):
        return arrays, dict(config=json.dumps(raw), shapes=json.dumps(shapes))
    check_version_4(peers.hugging_face(peers.write(folder / "v4", peers.version_4(raw), tensors)), arrays)
    found = peers.gradients(model, peers.cases()["left"], tensors)
    arrays["gradients"] = np.stack([found[name] for name in shapes])  # one tensor, because every header takes 100 bytes
    return arrays, dict(config=json.dumps(raw), shapes=json.dumps(shapes))


def model_of(name: str):
    """A model with random weights."""
    import transformers

    if name in peers.VISIONS:
        alone, text, eyes, other = peers.VISIONS[name]
        text, eyes = {**peers.TINY, **peers.MODELS[alone][1], **text}, {**peers.EYES, **eyes}
        config = getattr(transformers, f"{name.title()}Config")(text_config=text, vision_config=eyes, **other)
        return getattr(transformers, f"{name.title()}ForConditionalGeneration")(config)
    if name == peers.MXFP4:
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**peers.TINY, **peers.MXFP4_SIZES}))
    family, changes = peers.MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**peers.TINY, **changes})
    return transformers.AutoModelForCausalLM.from_config(config)


def check_version_4(model, arrays: dict[str, np.ndarray]) -> None:
    """Checks that Hugging Face reads the old spelling as the same config."""
    for case, inputs in peers.cases().items():
        np.testing.assert_array_equal(peers.run(model, inputs), arrays[f"logits.{case}"])


if __name__ == "__main__":
    main()
