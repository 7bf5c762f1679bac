import errno
import resource
import signal

import pytest
import torch

from grpo_recipes.errors import UserError
from grpo_recipes.job import only_job
from grpo_recipes.policy.hf.folder import write_safetensors
from grpo_recipes.runs.folder import create_run


def test_one_job_to_a_folder(tmp_path):
    folder = create_run(tmp_path / "run")
    with only_job(folder), pytest.raises(UserError, match="still going"), only_job(folder):
        pass
    with only_job(folder):  # free again
        pass


def test_a_refused_write_is_the_systems_error(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="model") as caught:
            write_safetensors({"w": torch.zeros(100_000)}, tmp_path / "model.safetensors", {"format": "pt"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
