"""A checkpoint written under any layout is read under any other, element by element, without processes.

The pieces that each rank would write are laid out here as Megatron lays out its buffers: the parameters of a rank end to
end, cut evenly over the ranks that hold the same parameters. The whole tensors are the reference.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from grpo_recipes.errors import UserError
from grpo_recipes.policy.hf.mapping import Heads, merge, shard, split
from grpo_recipes.policy.megatron.shards import (
    MODEL_FILE,
    ModelHeader,
    Part,
    SavedState,
    Shard,
    difference,
    rank_file,
    rank_header,
)
from grpo_recipes.policy.safetensors_stream import write_stream

HEADS = Heads(query=4, groups=2, width=4)
VOCAB, HIDDEN, FFN, LAYERS, EXPERTS = 17, 8, 12, 4, 4
STATES = ("param", "exp_avg")


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups; `data` is that of data and context parallelism together."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    interleaved: bool = False  # virtual pipeline stages: layers in turn

    @property
    def of_stage(self) -> int:
        return self.tensor * self.data

    @property
    def world(self) -> int:
        return self.of_stage * self.pipeline

    def stage(self, layer: int) -> int:
        return layer % self.pipeline if self.interleaved else layer * self.pipeline // LAYERS


LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tensor=2),
    "pp2": Layout(pipeline=2),
    "vpp": Layout(pipeline=2, interleaved=True),
    "dp2, cp2": Layout(data=2),
    "dp2.cp2, cp4": Layout(data=4),
    "ep2": Layout(data=2, expert=2),
    "tp2.pp2": Layout(tensor=2, pipeline=2),
    "tp2.cp2": Layout(tensor=2, data=2),
    "pp2.cp2": Layout(pipeline=2, data=2),
    "ep2.tp2": Layout(tensor=2, data=2, expert=2),
    "ep2.etp2": Layout(tensor=2, data=2, expert=2, expert_tensor=2),
    "etp2": Layout(tensor=2, expert_tensor=2),
    "tp4": Layout(tensor=4),
}
ATTENTION = ("q", "k", "v")


def parameters(layer: int) -> Iterator[tuple[tuple[str, ...], str, int | None, list[tuple[int, ...]], int | None]]:
    """(names, kind, cut along, shapes of the Hugging Face tensors, expert)."""
    prefix = f"layers.{layer}."
    rows, groups = HEADS.query * HEADS.width, HEADS.groups * HEADS.width
    yield (prefix + "norm",), "copy", None, [(HIDDEN,)], None
    qkv = tuple(prefix + name for name in ATTENTION)
    yield qkv, "qkv", 0, [(rows, HIDDEN), (groups, HIDDEN), (groups, HIDDEN)], None
    yield (prefix + "o",), "copy", 1, [(HIDDEN, rows)], None
    yield (prefix + "router",), "copy", None, [(EXPERTS, HIDDEN)], None
    for expert in range(EXPERTS):
        here = f"{prefix}experts.{expert}."
        yield (here + "gate", here + "up"), "gate_up", 0, [(FFN, HIDDEN), (FFN, HIDDEN)], expert
        yield (here + "down",), "copy", 1, [(HIDDEN, FFN)], expert


def everything():
    """(stage of a layout -> whether the parameter is there, the parameter)."""
    first, last = (lambda layout: 0), (lambda layout: layout.pipeline - 1)
    yield first, (("embed",), "vocab", 0, [(VOCAB, HIDDEN)], None)
    for layer in range(LAYERS):
        for parameter in parameters(layer):
            yield (lambda layout, layer=layer: layout.stage(layer)), parameter
    yield last, (("final",), "copy", None, [(HIDDEN,)], None)
    yield last, (("head",), "vocab", 0, [(VOCAB, HIDDEN)], None)


def hf_tensors(state):
    draw = torch.Generator().manual_seed(STATES.index(state))
    return {
        name: torch.randn(shape, generator=draw)
        for _, (names, _, _, shapes, _) in everything()
        for name, shape in zip(names, shapes, strict=True)
    }


TENSORS = {state: hf_tensors(state) for state in STATES}


def part_of(layout, parameter, rank_in_stage):
    """What a rank holds of a parameter, or None; and its content by state."""
    names, kind, cut_along, _, expert = parameter
    size = layout.tensor if expert is None else layout.expert_tensor
    rank = rank_in_stage % size
    if expert is not None and rank_in_stage // size % layout.expert != expert * layout.expert // EXPERTS:
        return None
    rows = -(-VOCAB // size) * size
    content = {}
    for state in STATES:
        whole = merge(kind, [TENSORS[state][name] for name in names], HEADS, rows)
        content[state] = whole if cut_along is None else shard(kind, whole, cut_along, rank, size)
    if cut_along is None:
        rank, size = 0, 1
    return Part(names, kind, cut_along, rank, size, tuple(content["param"].shape)), content


@functools.cache
def owned(layout, rank):
    """(shard, content by state, whether this rank is the one that writes it) of a rank."""
    stage, here = divmod(rank, layout.of_stage)
    pieces = []
    for experts in (False, True):
        size = layout.expert_tensor if experts else layout.tensor
        copies = layout.of_stage // (size * layout.expert) if experts else layout.data
        copy = here // (size * layout.expert) if experts else here // size
        held = [
            part_of(layout, parameter, here)
            for at, parameter in everything()
            if at(layout) == stage and (parameter[-1] is not None) == experts
        ]
        held = [found for found in held if found is not None]
        total = sum(part.elements for part, _ in held)
        share = -(-total // copies)
        offset = 0
        for part, content in held:
            start = min(max(copy * share - offset, 0), part.elements)
            stop = min(max((copy + 1) * share - offset, 0), part.elements)
            offset += part.elements
            if start < stop:
                cut = {state: tensor.reshape(-1)[start:stop] for state, tensor in content.items()}
                mine = part.cut_along is not None or here % size == 0
                pieces.append((Shard(part, start, stop), cut, mine))
    return pieces


def write(folder, layout):
    folder.mkdir()
    plan = tuple(
        (name, shape, "bfloat16")
        for _, (names, _, _, shapes, _) in everything()
        for name, shape in zip(names, shapes, strict=True)
    )
    header = ModelHeader(layout.world, 5, HEADS, VOCAB, "bfloat16", plan)
    (folder / MODEL_FILE).write_text(header.to_json())
    for rank in range(layout.world):
        written = [(piece, content) for piece, content, mine in owned(layout, rank) if mine]
        tensors = {f"{s}/{n}": content[s] for n, (_, content) in enumerate(written) for s in STATES}
        write_stream(folder / rank_file(rank), tensors, rank_header([piece for piece, _ in written], 5))
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: SavedState(write(folder / name, layout)) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize("source", LAYOUTS)
def test_reads_under_every_other_layout(source, checkpoints):
    saved = checkpoints[source]
    for layout, state in itertools.product(LAYOUTS.values(), STATES):
        for rank in range(layout.world):
            for piece, content, _ in owned(layout, rank):
                saved.check(state, piece.part, piece.start, piece.stop)
                found = saved.read(state, piece.part, piece.start, piece.stop)
                assert torch.equal(found, content[state]), (layout, rank, piece, state)


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_element_is_written_once(source, checkpoints):
    saved = checkpoints[source]
    stored = sum(
        file.get_slice(key).get_shape()[0]
        for file in saved.files
        for key in file.keys()  # noqa: SIM118 (not a dict)
        if key.startswith("param/")
    )
    padding = 2 * (-VOCAB % LAYOUTS[source].tensor) * HIDDEN
    assert stored == sum(tensor.numel() for tensor in TENSORS["param"].values()) + padding


@pytest.mark.parametrize("source", LAYOUTS)
def test_exports_whole_tensors_in_the_order_of_the_plan(source, checkpoints):
    saved = checkpoints[source]
    saved.check_weights()
    found = dict(saved.exported())
    assert list(found) == [name for name, _, _ in saved.model.plan] == list(TENSORS["param"])
    for name, tensor in TENSORS["param"].items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16))


def test_the_mapping_used_above_takes_a_parameter_apart_again():
    qkv = [TENSORS["param"][f"layers.0.{name}"] for name in ATTENTION]
    again = split("qkv", merge("qkv", qkv, HEADS, 0), HEADS, VOCAB)
    assert all(torch.equal(left, right) for left, right in zip(again, qkv, strict=True))


def test_a_rank_that_is_missing_is_missed(tmp_path):
    folder = write(tmp_path / "c", LAYOUTS["dp2.cp2, cp4"])
    (folder / rank_file(2)).unlink()
    with pytest.raises(UserError, match=r"rank-00002\.safetensors"):
        SavedState(folder)


def test_in_what_models_differ():
    plan = (("a", (4, 2), "float32"), ("b", (4,), "float32"))
    header = ModelHeader(1, 0, HEADS, VOCAB, "float32", plan)
    assert difference(header, replace(header, world_size=8, scheduler_steps=3, dtype="bfloat16")) is None
    assert difference(header, replace(header, plan=plan[:1])) == "it has b"
    assert difference(replace(header, plan=plan[:1]), header) == "it lacks b"
    other = replace(header, plan=(("a", (2, 2), "float32"), plan[1]))
    assert difference(header, other) == "a is 4 x 2 in the checkpoint, 2 x 2 in the model"
    assert "attention" in difference(header, replace(header, heads=Heads(2, 2, 8)))


def test_a_checkpoint_of_the_earlier_format_is_refused(tmp_path):
    write_stream(tmp_path / rank_file(0), {}, {"state": '{"format": 1}'})
    with pytest.raises(UserError, match=r"earlier format than 2\n.*version of grpo-recipes that wrote it"):
        SavedState(tmp_path)
