"""Refits out of a Megatron trainer that is cut over two processes: to copies of the model in its own processes, and by
each transport to a receiver that is no vLLM. What is sent is compared with a second gather; planted faults are found."""

from __future__ import annotations

import threading

import pytest

from gloo import on_processes
from policy_models import policy_config, write_llama

pytestmark = pytest.mark.timeout(400)
LAYOUTS = {
    "tp2.sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}


def work(rank, folder, layout):
    import torch
    import torch.distributed as dist

    from grpo_recipes.generation.megatron.sampler import MegatronSampler
    from grpo_recipes.generation.sync.checksum import Checksums, differences
    from grpo_recipes.generation.sync.link import Address, Receiver
    from grpo_recipes.policy.megatron.trainer import MegatronPolicy
    from grpo_recipes.policy.megatron.whole_model import WholeModel
    from grpo_recipes.proof.refit_certificate.worker import RefitWorker

    policy = policy_config(folder, megatron_cfg={"optimizer": {"lr": 1e-2}, **LAYOUTS[layout]})
    trainer = MegatronPolicy(
        policy, temperature=1.0, total_optimizer_steps=10, model_folder=folder, needs_reference=False, seed=0
    )
    copy = WholeModel(policy, folder)
    worker = RefitWorker(trainer)
    worker._sampler = MegatronSampler(
        copy.decoder, max_batch_size=4, max_positions=64, take_weights=copy.take, device="cpu"
    )
    worker._copied = copy.held
    found = {}

    def embedded(plant):
        changed = worker.step()
        worker.plant = plant
        report = worker.refit(1, certify=True)
        worker.plant = None
        digest = worker.sum_weights()
        wanted = worker.weight_sums()
        faults = [differences(wanted, sums) for sums in (report.handed, report.live)]
        return len(changed), report.tensors, digest, [[f.split(" ")[0] for f in part] for part in faults]

    for plant in (None, "old_weights", "swapped_rows"):
        found["embedded", plant] = embedded(plant)

    def sent(transport, plant):
        worker.step()
        worker.plant = plant
        address, sums, thread = worker.open_link(transport, 1, "127.0.0.1"), Checksums(), None
        if rank == 0:

            def receive():
                Receiver(Address(*address), torch.device("cpu")).load(lambda tensors: list(sums.over(tensors)))

            thread = threading.Thread(target=receive)
            thread.start()
        worker.send_weights()
        worker.plant = None
        worker.sum_weights()
        if thread is None:
            return None
        thread.join(60)
        return [f.split(" ")[0] for f in differences(worker.weight_sums(), sums.result())]

    for transport in ("ipc", "broadcast"):
        for plant in (None, "swapped_tensors"):
            found[transport, plant] = sent(transport, plant)
    probe = worker.probe_logprobs([[1, 2, 3, 4], [5, 6]])
    found["probe"] = [len(s) for s in probe]
    dist.barrier()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_arrives_is_what_the_ranks_hold(tmp_path, layout):
    """Covers: the second refit corrupts weights; a refit sends what the trainer no longer holds."""
    write_llama(tmp_path / "model")
    (tmp_path / "out").mkdir()
    first, second = on_processes(2, work, tmp_path / "out", tmp_path / "model", layout)
    for plant, faults in ((None, 0), ("old_weights", 21), ("swapped_rows", 1)):
        for found in (first, second):
            changed, tensors, _, (handed, live) = found["embedded", plant]
            assert changed == tensors == 21 and handed == live and len(handed) == faults
        assert first["embedded", plant][2] == second["embedded", plant][2]  # both ranks hold the same
    for transport in ("ipc", "broadcast"):
        assert first[transport, None] == [] and len(first[transport, "swapped_tensors"]) == 2
        assert second[transport, None] is None
    assert first["probe"] == [3, 1] and second["probe"] == []
