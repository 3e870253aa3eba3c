"""What is installed is what is imported: wheel, sdist and the console script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPORTS = (
    "import offpolicy_corr, offpolicy_corr.kernels, offpolicy_corr.integrations, offpolicy_corr.benchmarks\n"
    "import offpolicy_corr.benchmarks.cpu, offpolicy_corr.cli, pathlib\n"
    "package = pathlib.Path(offpolicy_corr.__file__).parent\n"
    "assert (package / 'py.typed').exists()\n"
    "for module in ('kernels', 'integrations', 'benchmarks'):\n"
    "    assert pathlib.Path(getattr(offpolicy_corr, module).__file__).parent == package / module, module\n"
    "print(package)"
)


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    words, environment = [str(word) for word in command], os.environ | environment
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=cwd, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_built_distributions_import_every_package(built: Path, kind: str, tmp_path: Path) -> None:
    (archive,) = built.glob(kind)
    target = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, archive)
    # from a folder of its own: Python looks in the current one first, and the repository's holds half the package
    where = run(sys.executable, "-c", IMPORTS, cwd=tmp_path, PYTHONPATH=str(target))
    assert Path(where) == target / "offpolicy_corr"


def test_this_installation_imports_every_package() -> None:
    where = IMPORTS.replace(
        "    assert pathlib", "    pathlib"
    )  # an import hook may serve them from elsewhere
    run(sys.executable, "-c", where)


def test_the_console_script_answers(tmp_path: Path) -> None:
    assert run(sys.executable, "-m", "offpolicy_corr.cli", "--version") == "offpolicy-corr 0.1.0"
    assert "bench" in run(sys.executable, "-m", "offpolicy_corr.cli", "--help")
    bad = subprocess.run([sys.executable, "-m", "offpolicy_corr.cli", "x"], capture_output=True, check=False)
    assert bad.returncode == 2 and b"usage" in bad.stderr


def test_the_core_imports_nothing_but_torch_and_numpy() -> None:
    code = (
        "import sys\n"
        "for name in 'triton transformers matplotlib yaml orjson pyarrow safetensors pybase64'.split():\n"
        "    sys.modules[name] = None\n"
        "import torch, offpolicy_corr as oc\n"
        "record = oc.SamplerRecord(torch.tensor([0]), torch.tensor([-0.7]))\n"
        "logits = torch.zeros(1, 2, requires_grad=True)\n"
        "oc.policy_loss(logits, record, torch.ones(1), correction=oc.Correction.from_name('mis')).loss.backward()\n"
    )
    run(sys.executable, "-c", code)
