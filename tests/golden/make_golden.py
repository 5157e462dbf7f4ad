"""Writes the results of Hugging Face's PyTorch models, for tests without torch. Run it where both are installed:

    python tests/golden/make_golden.py

Each model is a directory with a checkpoint as `save_pretrained` writes it and a `cases.safetensors`: inputs, outputs
and gradients as `<case>.input.x`, `<case>.output.x`, `<case>.cotangent.x` and `<case>.grad.x`. `spellings.json` has
what Hugging Face reads from the spellings in `peers.SPELLINGS`. Names of models as arguments make only those.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import peers
from safetensors.numpy import save_file

HERE = Path(__file__).parent


def main() -> None:
    # Imported here, because the test suite collects doctests from every file and has neither.
    import torch
    import transformers

    torch.use_deterministic_algorithms(True)
    spelled = {family: [peers.spelled(family, raw) for raw in raws] for family, raws in peers.SPELLINGS.items()}
    (HERE / "spellings.json").write_text(json.dumps(spelled) + "\n")
    for name in sys.argv[1:] or peers.names():
        model, directory = peers.make_model(name), HERE / name
        shutil.rmtree(directory, ignore_errors=True)
        model.save_pretrained(directory)
        arrays = {}
        for case in peers.cases(name):
            got = peers.run(model, case, peers.has_gradients(name, case))
            got |= {f"input.{k}": v for k, v in case.inputs.items()}
            arrays |= {f"{case.name}.{k}": np.ascontiguousarray(v) for k, v in got.items()}
        made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
        save_file(arrays, directory / "cases.safetensors", metadata=made_with)
        print(f"{name}: {sum(f.stat().st_size for f in directory.iterdir()) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
