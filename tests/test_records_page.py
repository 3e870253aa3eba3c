"""docs/records.md: its code runs, and prints what its comments say."""

from __future__ import annotations

import pytest

import pages

pytest.importorskip("safetensors", reason="needs the records extra")
pytest.importorskip("pyarrow", reason="needs the records extra")

SAID = {
    "processed_logprobs and declare",
    "'top_logprobs_num': 128",
    "'logprobs': 512",
    "[41, 42] [False, False]",
    "[1, 2, 11, 42, 77, 78, 50]",
    "[False, False, True, True, False, False, True]",
    "mismatch: group b200-nvfp4",
    "outlier: group b200-nvfp4",
    "mean_ratio: group b200-nvfp4",
    "1 1",
    "['h100-fp8', 'b200-nvfp4']",
    "3 [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]",
    "[-1, -1, 41, 41, 42]",
    "[False, False, False, False, True]",
    "['rollout_log_probs', 'rollout_topk_token_ids', 'rollout_topk_log_probs']",
}


def test_the_pages_code_prints_what_the_page_says() -> None:
    names, printed = pages.run("docs/records.md")
    assert len(pages.blocks("docs/records.md", "python")) > 8
    assert {said for said in SAID if said not in printed} == set()
    assert names["again"].record.tokens.tolist() == names["batch"].record.tokens.tolist()
