"""Packed integer columns come back bit for bit, whatever their range."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offpolicy_corr.records.packing import pack, unpack

FAR = torch.iinfo(torch.int64)
COLUMNS = {
    "nothing": (torch.zeros(0, dtype=torch.int64), 0),
    "one value": (torch.full((5,), -7), 0),
    "all true": (torch.ones(4, dtype=torch.bool), 0),
    "mixed flags": (torch.tensor([True, False, True]), 1),
    "a byte": (torch.tensor([-1, 254, 3]), 1),
    "two bytes": (torch.tensor([-1, 255, 3]), 2),
    "three bytes": (torch.tensor([0, 2**24 - 1], dtype=torch.int32), 3),
    "all of int32": (torch.tensor([-(2**31), 2**31 - 1, 0], dtype=torch.int32), 4),
    "far from zero": (torch.tensor([2**40, 2**40 + 1]), 1),
    "all of int64": (torch.tensor([FAR.min, FAR.max, 0]), 8),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_come_back_in_as_few_bytes_as_they_need(name: str) -> None:
    values, width = COLUMNS[name]
    about, packed = pack(values)
    assert about["width"] == width and (packed is None) == (width == 0)
    assert packed is None or (packed.dtype, packed.shape) == (torch.uint8, (len(values), width))
    back = unpack(about, packed)
    assert back.dtype == values.dtype and torch.equal(back, values)


@pytest.mark.parametrize("change", [{"size": 4}, {"width": 2}, {"width": 0}, {"dtype": "float32"}], ids=str)
def test_what_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    about, packed = pack(torch.tensor([0, 200, 3]))
    with pytest.raises(ValueError, match="cannot come from"):
        unpack(about | change, packed)
