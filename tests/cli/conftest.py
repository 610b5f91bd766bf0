"""The command, run in this process, and a small job for it."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxrt.cli import app
from nxrt.memory.budget_sources import ENVIRONMENT_PREFIX

JOB = """
[job]
op = "pkg.nxrt::DsaIndexSelect"
trace = "trace.npz"
provider = "cpu"

[attributes]
top_k = 3
scale = 0.5
"""
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `nxrt` and gives exit code, output and error output."""
    for name in os.environ:
        if name.startswith(ENVIRONMENT_PREFIX):
            monkeypatch.delenv(name)

    def invoke(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nxrt", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            app.main()
        streams = capsys.readouterr()
        return int(done.value.code or 0), streams.out, streams.err

    return invoke


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return a small job without a budget."""
    rng = np.random.default_rng(5)

    def bits(*shape: int) -> Any:
        return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )  # fmt: skip

    tokens = np.array([f"t{i}" for i in range(40)])
    arrays = {"query": bits(5, 4, 8), "key": bits(40, 8), "weights": bits(5, 4), "tokens": tokens}
    np.savez(tmp_path / "trace.npz", **arrays)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path
