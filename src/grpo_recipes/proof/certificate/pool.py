"""The processes of a certificate: started when first needed, and again after a layout has ended them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, Self
from unittest.mock import patch

if TYPE_CHECKING:
    from grpo_recipes.cluster.process import ProcessGroup
    from grpo_recipes.proof.certificate.verdict import Cut, Measured
    from grpo_recipes.proof.certificate.worker import Job

TIME_LIMIT_S = 300  # of one layout, and of a start


class Pool:
    """Of so many processes; a job may use fewer."""

    def __init__(self, processes: int, device: Literal["cpu", "cuda"]) -> None:
        self.processes, self.device = processes, device
        self._workers: ProcessGroup | None = None
        self._jobs = 0

    def next_job(self) -> int:
        """A number that no other job of this pool has."""
        self._jobs += 1
        return self._jobs

    def run(self, job: Job) -> list[dict[Cut, Measured]]:
        """What each process of the job measured. Raises whatever a process raised, after which all are ended."""
        try:
            found = self._started().call("run", job)
        except BaseException:
            self.close()
            raise
        return [parts for parts in found if parts is not None]

    def _started(self) -> ProcessGroup:
        from grpo_recipes.cluster.process import ProcessGroup
        from grpo_recipes.proof.certificate.worker import CertifyWorker

        if self._workers is None:
            with patch.dict(os.environ, self._environment()):  # the processes inherit it
                self._workers = ProcessGroup(
                    CertifyWorker, self.processes, device=self.device, time_limit_s=TIME_LIMIT_S
                )
        return self._workers

    def _environment(self) -> dict[str, str]:
        """The trainer computes on a GPU wherever it sees one, so for the CPU it must see none; Megatron's notes on what
        is not installed would bury the certificate."""
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        return {"PYTHONWARNINGS": "ignore", **hidden}

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.shutdown()
        self._workers = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
