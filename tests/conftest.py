"""What every test runs under: few threads, no network, files of NeMo-Run in a folder of their own; skips are counted."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# Before torch is imported anywhere, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["PYTHONPATH"] = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session", autouse=True)
def _nemorun_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["NEMORUN_HOME"] = str(tmp_path_factory.mktemp("nemorun"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's folder is its marker; tests are skipped without what they need: CUDA, vLLM."""
    for item in items:
        for kind in ("parity", "integration", "gpu", "vllm_cpu"):
            if item.path.parent.name == kind:
                item.add_marker(kind)
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not _cuda():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm_cpu"):
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make vllm"))


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _skips(config: pytest.Config) -> tuple[int, int]:
    """Skips for want of a GPU, and all others."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")  # absent from the workers of pytest-xdist
    reports = reporter.stats.get("skipped", []) if reporter else []
    gpu = sum("gpu" in getattr(report, "keywords", {}) for report in reports)
    return gpu, len(reports) - gpu


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """STRICT=1 (CI): every test that this machine could run has to run."""
    if os.environ.get("STRICT") == "1" and exitstatus == 0 and _skips(session.config)[1]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    gpu, other = _skips(config)
    strict = ", which STRICT=1 forbids" if other and os.environ.get("STRICT") == "1" else ""
    terminalreporter.write_line(f"skips: {gpu} for want of a GPU, {other} for other reasons{strict}")
