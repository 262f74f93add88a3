"""What `transformers` computes, in a process of its own, so that torch never meets JAX.

    python oracle.py DIRECTORY

DIRECTORY/jobs.json maps names to jobs, whose inputs and answers lie in DIRECTORY/name: `inputs.npz` comes in,
`answer.json` and `answer.npz` come out, with `error` in the former where `transformers` refused. Jobs:

- load: the model at `model`, read as it is; its logits, and what the reading found missing or unexpected.
- create: a model of `config` with random weights, written to the job's directory; its logits.
- gradients: the loss of the model at `model`, whose gradients are written as if they were its weights, so that
  they have the names and the layout of its checkpoint.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import numpy as np
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"{sys.executable} can't import {error.name}")

# Attention with sinks or softcaps exists in this form alone; experts are summed in a fixed order.
EAGER = dict(attn_implementation="eager", dtype=torch.float32)


def eager_experts(model) -> Any:
    """Experts one after the other, in evaluation mode."""
    model.set_experts_implementation("eager")
    return model.eval()


def buffers(model) -> dict[str, torch.Tensor]:
    """Buffers that a checkpoint holds: state that no gradient trains."""
    stored = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def randomize(model, seed: int) -> None:
    """Weights of which no norm, bias or sink is trivial, and logits of about the size 2."""
    generator = torch.Generator().manual_seed(seed)
    width = model.config.hidden_size
    for tensor in [*model.parameters(), *buffers(model).values()]:
        noise = torch.randn(tensor.shape, generator=generator)
        # Vectors keep the zeros or ones that their meaning starts from.
        tensor.copy_(tensor + 0.25 * noise if tensor.ndim == 1 else noise * 1.7 / width**0.5)


def logits(model, inputs) -> dict[str, Any]:
    """Logits [B, T, V] of the tokens."""
    return {"logits": model(input_ids=inputs["tokens"], use_cache=False).logits.numpy()}


@torch.no_grad()
def load(job, directory: Path, inputs) -> tuple[dict, dict]:
    """(what the reading reported, logits) of an existing directory."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(job["model"], output_loading_info=True, **EAGER)
    return {name: sorted(map(str, found)) for name, found in report.items()}, logits(eager_experts(model), inputs)


@torch.no_grad()
def create(job, directory: Path, inputs) -> tuple[dict, dict]:
    """(nothing, logits) of a new model, which is saved."""
    config = transformers.AutoConfig.for_model(**job["config"])
    model = eager_experts(transformers.AutoModelForCausalLM.from_config(config, **EAGER))
    randomize(model, job["seed"])
    model.save_pretrained(directory)
    return {}, logits(model, inputs)


def gradients(job, directory: Path, inputs) -> tuple[dict, dict]:
    """(loss and names of what has no gradient, nothing) of an existing directory; its gradients are saved."""
    model = eager_experts(transformers.AutoModelForCausalLM.from_pretrained(job["model"], **EAGER))
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(directory)
    return {"loss": loss.item(), "frozen": sorted(buffers(model))}, {}


def answer(job, directory: Path) -> None:
    """Runs one job and writes its answer."""
    with np.load(directory / "inputs.npz") as arrays:
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    try:
        found, arrays = {"load": load, "create": create, "gradients": gradients}[job["kind"]](job, directory, inputs)
    except Exception:
        found, arrays = {"error": traceback.format_exc()}, {}
    np.savez(directory / "answer.npz", **arrays)
    (directory / "answer.json").write_text(json.dumps(found))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    root = Path(sys.argv[1])
    for job_name, what in json.loads((root / "jobs.json").read_text()).items():
        answer(what, root / job_name)
