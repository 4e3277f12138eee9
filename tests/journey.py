"""The way of a batch: the files and functions of ours that a training, or one step of a DCN, enters, in order.

    python tests/journey.py            # fastcross train on 1,000 rows, then one step of a DCN
    python tests/journey.py --files    # files alone

Processes that the command starts are not followed; threads are. What runs at import is not counted.
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def entered(call: Callable[[], object]) -> dict[Path, list[str]]:
    """The files of ours in the order of their first call, each with its functions in the order of theirs."""
    found: dict[Path, dict[str, None]] = {}
    folders = str(ROOT / "fastcross"), str(ROOT / "kernels")

    def is_ours(frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(folders)

    def is_importing(frame: FrameType | None) -> bool:
        while frame is not None:
            if is_ours(frame) and frame.f_code.co_name == "<module>":
                return True
            frame = frame.f_back
        return False

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and is_ours(frame) and not is_importing(frame):
            path = Path(code.co_filename).resolve().relative_to(ROOT)
            found.setdefault(path, {}).setdefault(code.co_qualname)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {path: list(functions) for path, functions in found.items()}


def train(folder: Path) -> None:
    from fastcross.cli.main import main

    paths = ["--data", str(folder / "log.txt"), "--run", str(folder / "run"), "--cache", str(folder / "cache")]
    assert not main(["train", *paths, "--epochs", "1", "--deep-layers", "16", "--cross-layers", "2"])


def step() -> None:
    import torch

    from fastcross import DCN, optim

    model = DCN(cardinalities=[100, 20], num_dense=3, cross_layers=2, deep_layers=(16,))
    optimizer = optim.configure(model, lr=1e-3)
    logits = model(dense=torch.randn(32, 3), categorical=torch.randint(0, 20, (32, 2)))
    model.loss(logits, torch.ones(32)).backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="leave the functions out")
    options = parser.parse_args()
    from fastcross.data.generate import write_click_log

    with tempfile.TemporaryDirectory() as folder:
        write_click_log(Path(folder) / "log.txt", rows=1000, seed=0)
        journeys = {"fastcross train, 1,000 rows": lambda: train(Path(folder)), "one step of a DCN": step}
        for name, call in journeys.items():
            found = entered(call)
            functions = sum(map(len, found.values()))
            print(f"\n{name}: {len(found)} files, {functions} functions")
            for path, names in found.items():
                print(f"  {path}" if options.files else f"  {path}\n      " + ", ".join(names))


if __name__ == "__main__":
    main()
