"""vLLM's joined parameters cut back to Hugging Face names, on its own layers before its CPU build packs them away."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from grpo_recipes.generation.vllm.live_parameters import LiveParameters, parts_of

HIDDEN, HEAD, HEADS, KV_HEADS, INNER, VOCAB = 12, 4, 4, 2, 10, 9
SHAPES = {
    "layers.0.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
    "layers.0.self_attn.q_proj.bias": (HEADS * HEAD,),
    "layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "layers.0.self_attn.k_proj.bias": (KV_HEADS * HEAD,),
    "layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "layers.0.self_attn.v_proj.bias": (KV_HEADS * HEAD,),
    "layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    "layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
    "layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
    "layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    "layers.0.norm.weight": (HIDDEN,),
}
SHARDS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": 0, "up_proj": 1}
JOINED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)


@pytest.fixture
def model(monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))
    alone = {"disable_tp": True}
    with set_current_vllm_config(VllmConfig()):
        attention, mlp, layer, model = (torch.nn.Module() for _ in range(4))
        attention.qkv_proj = QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, bias=True, **alone)
        attention.o_proj = RowParallelLinear(HEADS * HEAD, HIDDEN, bias=False, **alone)
        mlp.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [INNER, INNER], bias=False, **alone)
        mlp.down_proj = RowParallelLinear(INNER, HIDDEN, bias=False, **alone)
    layer.self_attn, layer.mlp, layer.norm = attention, mlp, torch.nn.Module()
    layer.norm.weight = torch.nn.Parameter(torch.zeros(HIDDEN))
    model.layers = torch.nn.ModuleList([layer])
    return model


def load(model, tensors):
    """As vLLM's models load: by each parameter's own loader."""
    for name, tensor in tensors.items():
        path, module, kind = name.rsplit(".", 2)
        parameter = model.get_parameter(f"{path}.{JOINED.get(module, module)}.{kind}")
        loader = getattr(parameter, "weight_loader", None)
        if loader is None:
            parameter.data.copy_(tensor)
        elif module in SHARDS:
            loader(parameter, tensor, SHARDS[module])
        else:
            loader(parameter, tensor)


def test_every_tensor_is_found_where_vllm_put_it_and_a_wrong_row_is_named(model):
    draw = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    assert set(dict(parts_of(model))) == set(SHAPES)
    live = LiveParameters(model)
    for name, tensor in tensors.items():
        live.expect(name, tensor)
    live.expect("lm_head.weight", torch.zeros(2))
    load(model, tensors)
    assert live.compare() == ([], ["lm_head.weight"])
    rows = model.layers[0].self_attn.qkv_proj.weight.data
    rows[[HEADS * HEAD, HEADS * HEAD + 1]] = rows[[HEADS * HEAD + 1, HEADS * HEAD]]
    model.layers[0].mlp.gate_up_proj.weight.data[INNER, 0] += 1
    assert live.compare()[0] == ["layers.0.self_attn.k_proj.weight", "layers.0.mlp.up_proj.weight"]


def test_a_worker_of_several_holds_its_part_of_each_tensor(model):
    """The second of two, its sizes halved as vLLM halves them; the one key-value head of two is its own."""
    layer = model.layers[0]
    qkv, out, up = layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj
    for module in (qkv, out, up):
        module.tp_rank = 1
    qkv.num_heads, qkv.num_kv_heads = HEADS // 2, KV_HEADS // 2
    out.input_size_per_partition = HEADS * HEAD // 2
    up.output_partition_sizes = [INNER // 2, INNER // 2]
    parts = dict(parts_of(model))

    def cut(name):
        shape = SHAPES[f"layers.0.{name}.weight"]
        whole = torch.arange(shape[0])[:, None] * 1000 + torch.arange(shape[1])
        part = parts[f"layers.0.{name}.weight"].cut(whole)
        return part[0, 0].item(), part[-1, -1].item()

    assert cut("self_attn.q_proj") == (8000, 15011)
    assert cut("self_attn.k_proj") == (4000, 7011)
    assert cut("self_attn.o_proj") == (8, 11015)
    assert cut("mlp.up_proj") == (5000, 9011)
    assert parts["layers.0.self_attn.k_proj.weight"].live().shape == (HEAD, HIDDEN)
    qkv.num_kv_head_replicas = 2  # more workers than heads: both hold the first
    assert dict(parts_of(model))["layers.0.self_attn.v_proj.weight"].cut(torch.arange(8)).tolist() == [0, 1, 2, 3]


def test_experts_are_cut_back_where_the_kernel_leaves_them():
    class Backend:
        name = "TRITON"

    class Method:
        unquantized_backend = Backend()

    experts = torch.nn.Module()
    experts.w13_weight = torch.nn.Parameter(torch.arange(2 * 6 * 2.0).view(2, 6, 2))
    experts.w2_weight = torch.nn.Parameter(torch.arange(2 * 2 * 3.0).view(2, 2, 3))
    experts.quant_method, experts.tp_rank = Method(), 1
    experts.expert_map = torch.tensor([-1, 0, -1, 1])
    mlp, model = torch.nn.Module(), torch.nn.Module()
    mlp.experts, model.mlp = experts, mlp
    parts = {name: part for name, part in parts_of(model) if "_proj" in name}
    assert set(parts) == {f"mlp.experts.{e}.{n}_proj.weight" for e in (1, 3) for n in ("gate", "up", "down")}
    assert parts["mlp.experts.3.up_proj.weight"].live().tolist() == experts.w13_weight[1, 3:].tolist()
    assert parts["mlp.experts.1.gate_proj.weight"].live().tolist() == experts.w13_weight[0, :3].tolist()
    assert parts["mlp.experts.3.down_proj.weight"].live().tolist() == experts.w2_weight[1].tolist()
    assert parts["mlp.experts.1.gate_proj.weight"].cut(torch.arange(6)).tolist() == [3, 4, 5]
    assert parts["mlp.experts.1.down_proj.weight"].cut(torch.arange(6)[None]).tolist() == [[3, 4, 5]]
    Backend.name = "FlashInfer CUTLASS"
    assert not [name for name, _ in parts_of(model) if "_proj" in name]
