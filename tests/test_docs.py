"""The pages: their code runs, their links lead somewhere, and the reference leaves out no public name."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import offpolicy_corr as oc
import pages

REFERENCE = sorted(page for page in pages.PAGES if page.startswith("docs/reference/"))
DIRECTIVES = [
    name for page in REFERENCE for name in re.findall(r"^::: (\S+)$", pages.text(page), re.MULTILINE)
]
MODULES = ("offpolicy_corr.guards", "offpolicy_corr.metrics", "offpolicy_corr.integrations.sglang",
           "offpolicy_corr.integrations.vllm", "offpolicy_corr.integrations.miles.transport")  # fmt: skip
NEEDS = {"README.md": ["transformers"], "docs/records.md": ["safetensors", "pyarrow"]}


def resolve(name: str) -> Any:
    """The object behind a dotted path."""
    module, _, attribute = name.rpartition(".")
    parent = importlib.import_module(module)
    return getattr(parent, attribute) if hasattr(parent, attribute) else importlib.import_module(name)


@pytest.mark.parametrize("page", [page for page in pages.PAGES if pages.blocks(page, "python")])
def test_the_code_of_a_page_runs_in_order(page: str) -> None:
    for module in NEEDS.get(page, []):
        pytest.importorskip(module)
    pages.run(page)


def test_the_pages_with_code_are_these() -> None:
    """So that a page whose fences are misspelled does not drop out of the test above."""
    with_code = {page for page in pages.PAGES if pages.blocks(page, "python")}
    assert with_code >= {
        "README.md", "docs/algorithms.md", "docs/guide.md", "docs/miles.md", "docs/records.md"
    }  # fmt: skip
    for page in pages.PAGES:
        fences = re.findall(r"^ *```(\S*)", pages.text(page), re.MULTILINE)
        assert set(fences) <= {"", "python", "bash", "yaml", "console", "text"}, page


def test_the_readmes_values_are_those_of_its_code() -> None:
    pytest.importorskip("transformers")
    names, _ = pages.run("README.md")
    assert names["weights"].tolist() == pytest.approx([1.105, 0.0], abs=5e-4)
    log_ratio = names["trainer_logprobs"] - names["sampler_logprobs"]
    assert oc.MaskedIS().weight(log_ratio, log_ratio).equal(names["weights"])


def test_the_readme_is_short() -> None:
    assert len(pages.text("README.md").split()) <= 1300


@pytest.mark.parametrize("page", pages.PAGES)
def test_links_of_a_page_lead_to_files(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", pages.text(page)):
        if not target.startswith(("http://", "https://")):
            assert ((pages.ROOT / page).parent / target).exists(), target


def test_every_public_name_is_in_the_reference() -> None:
    documented = [resolve(name) for name in DIRECTIVES]
    missing = [name for name in oc.__all__ if not any(getattr(oc, name) is thing for thing in documented)]
    assert not missing
    miles = importlib.import_module("offpolicy_corr.integrations.miles")
    assert not [
        name for name in miles.__all__ if not any(getattr(miles, name) is thing for thing in documented)
    ]


@pytest.mark.parametrize("name", MODULES)
def test_modules_stand_in_the_reference_whole(name: str) -> None:
    module = importlib.import_module(name)
    assert name in DIRECTIVES
    own = [
        thing for attribute, thing in vars(module).items()
        if not attribute.startswith("_") and inspect.isfunction(thing) and thing.__module__ == name
    ]  # fmt: skip
    assert own and all(inspect.getdoc(thing) for thing in own)


@pytest.mark.parametrize("name", DIRECTIVES)
def test_the_reference_names_what_exists_and_is_described(name: str) -> None:
    assert inspect.getdoc(resolve(name))


def test_every_page_is_in_the_navigation() -> None:
    nav = (pages.ROOT / "mkdocs.yml").read_text()
    nav = nav[nav.index("nav:") : nav.index("markdown_extensions:")]
    listed = re.findall(r"(\S+\.md)$", nav, re.MULTILINE)
    found = [Path(page).relative_to("docs").as_posix() for page in pages.PAGES if page.startswith("docs/")]
    assert sorted(listed) == sorted(found)


def test_ci_runs_the_script_that_gates_a_change() -> None:
    workflow = (pages.ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.search(r"^      - run: \.ci/run$", workflow, re.MULTILINE)
    assert (pages.ROOT / ".ci" / "run").stat().st_mode & 0o111
