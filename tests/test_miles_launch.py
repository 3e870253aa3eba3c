"""How a Miles launch is read: the YAML file, the launch line, and the functions that options name."""

from __future__ import annotations

import argparse
import ast
import importlib
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from offpolicy_corr.integrations.miles import SettingsError, check_main
from offpolicy_corr.integrations.miles.function_paths import path_problem
from offpolicy_corr.integrations.miles.launch import NEGATIONS, launch_problems, misspelled, parse_launch
from offpolicy_corr.integrations.miles.option_table import NAMES, OPTIONS, SWITCHES
from offpolicy_corr.integrations.miles.options import LOSS_PATH, Problem

import miles_double as double

yaml = pytest.importorskip("yaml")
GENERATE = "custom_generate_function_path"


def test_launch_arguments() -> None:
    assert parse_launch(["--a-b", "1", "--c", "--d=0.5", "--e", "x", "--f", "1", "2", "--g", "-1"]) == {
        "a_b": 1, "c": True, "d": 0.5, "e": "x", "f": [1, 2], "g": -1,
    }  # fmt: skip
    with pytest.raises(SettingsError, match="start with --"):
        parse_launch(["value"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--use-kl-loss", "true"], "--use-kl-loss is a switch, and true stands beside it"),
        (["--use-rollout-logprobs=false"], "or leave it out to turn it off"),
        (["--disable-grpo-std-normalization", "1"], "is a switch"),
        (["--rollout_top_k", "20"], "Write --rollout-top-k"),
        (["--rollout-top", "20"], "takes no abbreviations"),
        (["--rollout-temp", "1"], "Write --rollout-temperature in full"),
    ],
)
def test_what_miles_own_parser_would_refuse_is_refused(words: list[str], says: str) -> None:
    (problem,) = launch_problems(words)
    assert says in problem.text({})


def test_a_switch_that_turns_off_sets_what_miles_keeps() -> None:
    words = ["--disable-compute-advantages-and-returns", "--disable-grpo-std-normalization"]
    assert parse_launch(words) == {"compute_advantages_and_returns": False, "grpo_std_normalization": False}


@pytest.mark.skipif(not double.MILES_SRC, reason="MILES_SRC is not set")
def test_no_option_of_miles_is_taken_for_a_misspelled_one_and_switches_are_switches() -> None:
    source = (Path(double.MILES_SRC) / "miles" / "utils" / "arguments.py").read_text()
    actions: dict[str, Any] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            action = [ast.unparse(word.value).strip("'") for word in node.keywords if word.arg == "action"]
            for word in node.args:
                if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                    actions[str(word.value)] = action[0] if action else None
    assert len(actions) > 300
    names = {word[2:].replace("-", "_"): word for word in actions}
    assert misspelled(dict.fromkeys(names))[0] == []
    assert [problem for word in actions for problem in launch_problems([word])] == []
    assert names.keys() > NEGATIONS.keys()
    for name in names.keys() & NAMES:
        assert (name in SWITCHES) == (actions[names[name]] == "store_true"), name


LINES = [
    "--use-kl-loss true", "--use-kl-loss=true", "--use-kl-loss", "--rollout-top-k 20.0", "--rollout-top-k 1e3",
    "--rollout-top-k 20", "--rollout-top-k -1", "--rollout-top-k 1_0", "--rollout-temp 1", "--rollout_top_k 20",
    "--qkv-format sbhd", "--qkv-format bshd", "--advantage-estimator grpoo", "--rollout-temperature",
    "--rollout-temperature 1 2", "--rollout-top-p 0,9", "--rollout-top-p=.9", "--kl-loss-coef 1e-3",
    "--disable-grpo-std-normalization", "--kl-loss-type k4", "--train-backend fsdpp", "--use-rollout-logprobs",
]  # fmt: skip


@pytest.mark.skipif(not double.MILES_SRC, reason="MILES_SRC is not set")
@pytest.mark.parametrize("line", LINES)
def test_a_launch_line_is_read_as_miles_own_parser_reads_it(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["train.py", "--rollout-batch-size", "1"]
    )  # read while the parser is made
    double.install(double.single())
    try:
        arguments = importlib.import_module("miles.utils.arguments")
    except ImportError as error:
        pytest.skip(f"this Miles cannot be imported whole here: {error}")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.get_miles_extra_args_provider()(parser)
    words = line.split()
    read = parse_launch(words)
    refused = launch_problems(words) + [
        option.name for option in OPTIONS for name in read if option.name == name and option.fault(read[name])
    ]
    try:
        args, unknown = parser.parse_known_args(
            ["--rollout-batch-size", "1", "--rollout-num-gpus", "1", *words]
        )
    except SystemExit:
        assert refused
        return
    assert bool(unknown) == bool(refused)
    if not refused:
        assert {name: getattr(args, name) for name in read} == read


def test_yaml_is_named_by_its_extra_where_it_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("{}")
    program = (
        "import sys; sys.modules['yaml'] = None\n"
        "from offpolicy_corr.integrations.miles import check_main\n"
        f"sys.exit(check_main([{str(path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert "offpolicy-corr[miles]" in done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"loss_type: custom_loss\nloss_type: policy_loss\n", "loss_type stands twice, on lines 1 and 2"),
        (b"offpolicy_corr:\n  low: 0.5\n  low: 0.2\n", "low stands twice, on lines 2 and 3"),
        (b"loss_type: caf\xe9\n", "not UTF-8 (byte 0xe9 at position 14)"),
        (b"a:\n\tb: 1\n", "Indent with spaces, not tabs"),
        (b"- a\n", "must be a mapping"),
        (b"text\n", "must be a mapping"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a: [", "not YAML"),
        (b"a: " + b"[" * 5000, "not YAML"),
        (b"a: !!python/object:os.system 1\n", "not YAML"),
        (b"? [1, 2]\n: 3\n", "not YAML"),
        (b"a: {low: 1, low: 2}\n", "low stands twice"),
        (b"- {a: 1}\n", "must be a mapping of options, got list"),
        (b"3\n", "must be a mapping of options, got int"),
        (b"a: 1\n---\nb: 2\n", "not YAML"),
        (b"true: 3\n", "the key True is no text"),
        (b"1: 3\n", "the key 1 is no text"),
        (b"null: 3\n", "the key None is no text"),
        (b"a: &x [*x]\n? *x\n: 1\n", "not YAML"),
        (b"a: 2001-99-99\n", "not YAML"),
        (b"a: !!int text\n", "not YAML"),
        (b"a: !!timestamp text\n", "not YAML"),
        (b"a: !!binary '\xc3\xa4'\n", "not YAML"),
        (b"<<: 3\n", "not YAML"),
        (b"a: \x00\n", "not YAML"),
        (b"a: *b\n", "not YAML"),
        (b"%TAG ! x\n", "not YAML"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, capsys: Any, content: bytes, says: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert check_main([str(path)]) == 2
    assert says in capsys.readouterr().err


def test_a_folder_and_an_absent_file_are_named(tmp_path: Path, capsys: Any) -> None:
    assert check_main([str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert check_main([str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml cannot be read: No such file" in capsys.readouterr().err
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert check_main([str(empty)]) == 1  # no mapping of ours
    assert "no offpolicy_corr: mapping was given" in capsys.readouterr().out
    assert check_main([f"{tmp_path}/a\0b"]) == 2
    assert check_main([str(tmp_path / ("long" * 200))]) == 2


def test_a_file_without_permission_is_named(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("{}")

    def refused(self: Path) -> bytes:  # root reads every file, so its mode alone would not do
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert check_main([str(path)]) == 2
    assert "run.yaml cannot be read: Permission denied" in capsys.readouterr().err


def test_a_merged_key_is_no_duplicate(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("base: &b {low: 0.5, high: 2}\noffpolicy_corr:\n  <<: *b\n  low: 0.25\n")
    assert check_main([str(path)]) == 1
    assert "stands twice" not in capsys.readouterr().err
    path.write_text("offpolicy_corr: &b\n  low: 0.5\n  low: 2\nother:\n  <<: *b\n")
    assert check_main([str(path)]) == 2
    assert "low stands twice, on lines 2 and 3" in capsys.readouterr().err


def test_no_file_ends_in_a_traceback(tmp_path: Path) -> None:
    """Files broken at random: single bytes changed, cut out, or put in."""
    rng = random.Random(0)
    whole = (
        b"loss_type: custom_loss\ncustom_loss_function_path: " + LOSS_PATH.encode() + b"\nrollout_top_k: 20\n"
        b"a: &x {b: [1, '2', .5, 1e-4]}\noffpolicy_corr: {<<: {low: 0.5}, guards: {product: {low: 1, high: 2}}}\n"
    )
    path = tmp_path / "run.yaml"
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(content))
            content[at : at + rng.randrange(3)] = rng.choice(
                [
                    b"",
                    b"\t",
                    b"\xff",
                    b"{",
                    b"[",
                    b": ",
                    b"- ",
                    b"*x",
                    b"&y ",
                    b"!!",
                    b"?",
                    b"\n",
                    b"'",
                    b"%",
                    b"<<: ",
                ]
            )
        path.write_bytes(bytes(content))
        assert check_main([str(path), "--rollout-top-p", "0.9"]) in (0, 1, 2), bytes(content)


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this code must not run')\n")
    (package / "plain.py").write_text(
        "import os\nfrom json import loads as read\ndef generate(): pass\nclass Buffer:\n    def add(self): inner = 1\n"
        "a, (b, *c) = 1, (2, 3)\nd: int = 4\nif a:\n    try:\n        from nowhere import late\n"
        "    except ImportError:\n        def late(): pass\nfor loop in (): pass\nraise RuntimeError\n"
    )
    (package / "star.py").write_text("from json import *\n")
    (package / "lazy.py").write_text("def __getattr__(name): return print\n")
    (package / "broken.py").write_text("def f(:\n")
    (package / "latin.py").write_bytes(b"# caf\xe9\n")
    (package / "made.py").write_text("globals()['generate'] = print\n")
    (tmp_path / "open_folder").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", ["generate", "Buffer", "read", "os", "a", "b", "c", "d", "late", "loop"])
def test_a_name_of_a_module_is_found_without_running_it(modules: Path, name: str) -> None:
    assert path_problem(GENERATE, f"shop.plain.{name}", [modules]) is None


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("shop.plain.generat", "Did you mean shop.plain.generate?"),
        ("shop.plain.inner", "shop.plain has no inner"),
        ("shop.plain.Buffer.add", "there is no module shop.plain.Buffer"),
        ("shop.plan.generate", "there is no module shop.plan (custom_generate_function_path = "),
        ("shop.plan.generate", "Did you mean shop.plain?"),
        ("shop.broken.f", "shop.broken has a syntax error on line 1"),
        ("shop", "no dotted path with a module"),
        ("shop.", "no dotted path"),
        (".shop", "no dotted path"),
        ("", "no dotted path"),
        ("a b.c", "no dotted path"),
        ("shop/plain.py:generate", "splits at the last point"),
        (3, "names no function"),
        (["shop.plain.generate"], "names no function"),
        ("torch.utils.dta.foo", "there is no module torch.utils.dta"),
        ("torch.utils.data.foo", "torch.utils.data has no foo"),
    ],
)
def test_a_misspelled_function_is_refused(modules: Path, path: Any, says: str) -> None:
    problem = path_problem(GENERATE, path, [modules])
    assert isinstance(problem, Problem)
    assert says in problem.text({GENERATE: path})


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere_to_be_found.rollout.generate", "is not installed here"),
        ("shop.star.loads", "makes its names while it runs"),
        ("shop.lazy.generate", "makes its names while it runs"),
        ("shop.made.generate", "makes its names while it runs"),
        ("open_folder.rollout.generate", "is not installed here"),  # may go on in another place of the path
        ("math.sin", "has no Python source"),
    ],
)
def test_a_function_that_cannot_be_looked_up_is_a_note(modules: Path, path: str, says: str) -> None:
    note = path_problem(GENERATE, path, [modules])
    assert isinstance(note, str) and says in note


def test_a_source_in_another_encoding_is_no_traceback(modules: Path) -> None:
    found = path_problem(GENERATE, "shop.latin.generate", [modules])
    assert found is not None
