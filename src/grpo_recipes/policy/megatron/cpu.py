"""What Megatron-Core 0.19 needs so as to run on CPU tensors and gloo. The only place that patches it.

Megatron-Core names CUDA directly in many places. Each row of PATCHES replaces one attribute of one module, says which
upstream code needs it, and has a test that takes the row away and sees Megatron fail; a row whose test no longer fails
is to be deleted. With a GPU nothing is patched.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Patch:
    owner: str  # dotted path of the patched module or class
    attribute: str
    replacement: Any
    upstream: str  # the code that needs it
    reason: str
    layout: str = "one process"  # where it is met: "one process", "experts" (on one process), "expert parallel", "sequence parallel" …

    def __str__(self) -> str:
        return f"{self.owner}.{self.attribute}"


class _Module(types.ModuleType):
    """A module with some names replaced; every other name is the real module's."""

    def __init__(self, real: types.ModuleType, **replaced: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class _Stream:
    """CPU work is in order already."""

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _nothing(*_: Any, **__: Any) -> None: ...


def _as_numpy(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


# The name `torch` inside a patched module. Patching torch itself would reach everybody else in the process.
TORCH = _Module(
    torch,
    cuda=_Module(
        torch.cuda,
        Stream=_Stream,
        current_device=lambda: CPU,
        current_stream=lambda *_: _Stream(),
        stream=lambda *_: contextlib.nullcontext(),
        synchronize=_nothing,
        manual_seed=torch.manual_seed,
        get_rng_state=_rng_state,
        random=_Module(torch.cuda.random, get_rng_state=_rng_state),
    ),
    **{name: _on_cpu(getattr(torch, name)) for name in ("empty", "zeros", "ones", "tensor")},
)

_plain_type, _plain_cuda = torch.Tensor.type, torch.Tensor.cuda


def _called_by_megatron() -> bool:
    return sys._getframe(2).f_globals["__name__"].startswith("megatron.core.")


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Tensor.type, whose bare form answers Megatron-Core with the CUDA name of the dtype."""
    if args or kwargs or not _called_by_megatron():
        return _plain_type(self, *args, **kwargs)
    return _plain_type(self).replace("torch.", "torch.cuda.")


def _cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self if _called_by_megatron() else _plain_cuda(self, *args, **kwargs)


PATCHES = (
    Patch(
        "megatron.core.tensor_parallel.random",
        "torch",
        TORCH,
        "CudaRNGStatesTracker.add: torch.cuda.get_rng_state(), torch.cuda.manual_seed(seed)",
        "the model-parallel random streams are states of the CUDA generator",
    ),
    Patch(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        lambda state, *_, **__: torch.set_rng_state(state),
        "_set_cuda_rng_state: _lazy_call(cb)",
        "restoring a stream is put off until CUDA is initialised, which never happens: seeds would leak",
    ),
    Patch(
        "megatron.core.distributed.param_and_grad_buffer",
        "torch",
        TORCH,
        "_ParamAndGradBuffer: device=torch.cuda.current_device(); start_grad_sync: torch.cuda.current_stream()",
        "parameter and gradient buffers are allocated on the current CUDA device",
    ),
    Patch(
        "megatron.core.optimizer.optimizer",
        "torch",
        TORCH,
        "MixedPrecisionOptimizer.__init__: torch.tensor([1.0], device='cuda')",
        "the loss scale lives on the GPU",
    ),
    Patch(
        "torch.Tensor",
        "type",
        _type,
        "distrib_optimizer: model_param.type() == 'torch.cuda.FloatTensor'; the same in clip_grads",
        "parameters are told apart by the names of CUDA tensor types",
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules",
        "torch",
        TORCH,
        "forward_backward_no_pipelining: torch.zeros([], dtype=torch.int, device='cuda')",
        "the count of tokens is summed on the GPU",
    ),
    Patch(
        "megatron.core.optimizer.clip_grads",
        "torch",
        TORCH,
        "get_grad_norm_fp32: torch.zeros(1, dtype=torch.float, device='cuda')",
        "the gradient norm is summed on the GPU",
    ),
    Patch(
        "megatron.core.utils",
        "torch",
        TORCH,
        "local_multi_tensor_l2_norm: torch.tensor([float(norm)], dtype=torch.float, device='cuda')",
        "norms without Apex are moved to the GPU",
    ),
    Patch(
        "megatron.core.tensor_parallel.mappings",
        "torch",
        TORCH,
        "_reduce_scatter_along_first_dim: torch.empty(..., device=torch.cuda.current_device())",
        "what the tensor-parallel collectives fill is allocated on the GPU",
        "sequence parallel",
    ),
    Patch(
        "megatron.core.tensor_parallel.layers",
        "torch",
        TORCH,
        "LinearWithGradAccumulationAndAsyncCommunication.backward: device=torch.cuda.current_device()",
        "the scattered gradient of the input is allocated on the GPU",
        "sequence parallel",
    ),
    Patch(
        "megatron.core.pipeline_parallel.p2p_communication",
        "torch",
        TORCH,
        "P2PCommunicator: device=torch.cuda.current_device(), torch.cuda.synchronize()",
        "activations are received on the GPU",
        "pipeline",
    ),
    Patch(
        "torch.Tensor",
        "cuda",
        _cuda,
        "LanguageModule.setup_embeddings_and_output_layer: weight.data.cuda()",
        "the embedding that the first and last stage share is moved to the GPU before it is compared",
        "tied pipeline",
    ),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher",
        "torch",
        TORCH,
        "MoEAlltoAllTokenDispatcher.__init__: torch.cuda.Stream()",
        "counts of tokens per expert travel to the CPU on a stream of their own",
        "experts",
    ),
    Patch(
        "megatron.core.transformer.moe.router",
        "torch",
        TORCH,
        "Router.gating: self.weight.data.to(device=torch.cuda.current_device())",
        "a router's weight found on the CPU is moved to the GPU",
        "experts",
    ),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _as_numpy,
        "_maybe_dtoh_and_synchronize: maybe_move_tensor_to_cpu(self.input_splits, as_numpy=True)",
        "only what lies on a GPU is made the plain numbers that all-to-all takes as sizes",
        "expert parallel",
    ),
)

_originals: dict[Patch, Any] = {}


def install() -> None:
    """Apply every patch once. Does nothing where CUDA is available."""
    if torch.cuda.is_available():
        return
    with _uncompiled():
        for module in ("distributed", "models.gpt", "optimizer", "pipeline_parallel", "transformer.moe.moe_layer"):
            importlib.import_module(f"megatron.core.{module}")
    for patch in PATCHES:
        if patch not in _originals:
            owner = _find(patch.owner)
            _originals[patch] = getattr(owner, patch.attribute)
            setattr(owner, patch.attribute, patch.replacement)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Megatron-Core passes its fused functions to torch.compile while it is imported, which loads Dynamo and Inductor:
    seconds of every start, for kernels that model.py leaves off."""
    real = torch.compile
    torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = real


@contextlib.contextmanager
def without(patch: Patch) -> Iterator[None]:
    """For tests: upstream's own attribute for a while."""
    owner = _find(patch.owner)
    setattr(owner, patch.attribute, _originals[patch])
    try:
        yield
    finally:
        setattr(owner, patch.attribute, patch.replacement)


def _find(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        return getattr(importlib.import_module(parent), name)
