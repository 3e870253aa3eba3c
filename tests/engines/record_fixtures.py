"""Turn a small run of `run_vllm.py` into fixtures, so that the readers are tested without the engine.

python tests/engines/run_vllm.py --out DIR --samples 1 --length 6
python tests/engines/record_fixtures.py DIR tests/fixtures
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COMMAND = "python tests/engines/run_vllm.py --out DIR --samples 1 --length 6"
PYTHON = ("head", "head_flat", "sampled", "filtered", "filtered_flat", "relabeled")


def main(source: Path, target: Path) -> None:
    for part in ("processed", "raw", "http", "http_raw"):
        loaded = json.loads((source / f"{part}.json").read_text())
        answers: dict[str, Any] = loaded["answers"]
        if part.startswith("http"):
            answers = {name: answer for name, answer in answers.items() if not name.startswith("prompt_")}
        else:
            answers = {name: answers[name][:1] for name in PYTHON if name in answers}
        about = loaded["about"] | {"command": COMMAND, "top_p": 0.6, "top_k": 24, "vocab_size": 192}
        text = json.dumps({"about": about, "answers": answers}, separators=(",", ":"))
        (target / f"vllm_{part}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
