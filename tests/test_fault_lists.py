"""Every fault number in a test's name or title stands in FAULTS.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
RECORDS, KERNELS = (
    {int(number) for number in re.findall(r"^\| (\d+) \|", part, re.MULTILINE)}
    for part in (TESTS / "FAULTS.md").read_text().split("## Kernels")
)


@pytest.mark.parametrize("file", sorted(TESTS.glob("test_*.py")), ids=lambda file: file.stem)
def test_fault_numbers_refer_to_the_list(file: Path) -> None:
    text = file.read_text()
    assert {int(number) for number in re.findall(r"def test_fault_(\d+)_", text)} <= KERNELS
    if file.stem in ("test_faults", "test_faults_accepted"):
        used = re.findall(r'^    "(\d+) ', text, re.MULTILINE) + re.findall(r"def test_(\d+)_", text)
        assert used and {int(number) for number in used} <= RECORDS
