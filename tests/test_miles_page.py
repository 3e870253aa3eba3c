"""docs/miles.md: its files pass the check, the check prints what it says, its code runs, and no key is left out."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from offpolicy_corr.integrations.miles import Settings, check_main
from offpolicy_corr.integrations.miles.metrics import Metrics

import miles_double as double
import pages
from offpolicy_corr.settings import GUARDS

yaml = pytest.importorskip("yaml")
PAGE = pages.text("docs/miles.md")
blocks = partial(pages.blocks, "docs/miles.md")


@pytest.mark.parametrize("block", blocks("console"))
def test_the_check_prints_what_the_page_says(
    block: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, said = block.split("\n", 1)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(blocks("yaml")[0])
    words = shlex.split(command)
    assert words[:5] == ["$", "offpolicy-corr", "miles", "check", "run.yaml"]
    assert check_main(words[4:]) == (1 if "error" in said else 0)
    assert capsys.readouterr().out == said


def test_every_file_of_the_page_passes_the_check(tmp_path: Path) -> None:
    base, transport, hook = (yaml.safe_load(block) for block in blocks("yaml"))
    for options in (base, {**base, **transport}, hook):
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(options))
        assert check_main([str(path), "--rollout-top-logprobs-num", "128"]) == 0


def test_the_code_is_one_block_which_test_docs_runs() -> None:
    assert len(blocks("python")) == 1


def test_every_setting_and_metric_is_described() -> None:
    known = [field.name for field in fields(Settings)] + ["low", "high", "cap", "tail_floor", *GUARDS]
    table = PAGE[PAGE.index("## The mapping") : PAGE.index("## What carries")]
    assert [key for key in known if f"`{key}`" not in table] == []
    metrics = PAGE[PAGE.index("## Metrics") : PAGE.index("## Without")]
    words = set(re.findall(r"\w+", metrics))
    for filters in ({}, {"rollout_top_p": 0.9, "rollout_top_k": 4}):
        own = {"groups": ["b200"], "guards": {"behind_newest_sampler": {"max_lag": 4}}}
        args = double.make_args(use_kl_loss=True, offpolicy_corr=own, **filters)
        keys = Metrics.of(args, Settings.of(own)).keys()
        for key in keys:
            assert key.rsplit("/", 1)[-1] in words, key
