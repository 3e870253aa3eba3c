"""The launches themselves, on a driver that runs nothing: what a GPU would compile, from the arguments it would get."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_every_kernel_is_launched_from_real_calls_and_reads_128_bits_at_a_time(architecture: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("launch_without_gpu.py")
    done = subprocess.run(
        [sys.executable, str(program), str(architecture)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    launched = json.loads(done.stdout)
    names = [launch["kernel"] for launch in launched]
    assert set(names) == {"fused_loss", "row_stats", "row_gradient", "scale_rows"}
    assert all(launch["grid"] == [2, 1, 1] for launch in launched)
    # a vocabulary of 50,257 puts rows where wide accesses would not be aligned
    odd = [launch for launch in launched if 128 not in launch["bits"]]
    assert [launch["columns"] for launch in odd] == [50_257]
