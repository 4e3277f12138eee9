"""Optional dependencies: which extra brings a package, and the one command that installs it."""

import importlib.util
from pathlib import Path

EXTRAS = {
    "train": ("pyarrow", "safetensors", "tqdm", "matplotlib"),
    "sklearn": ("sklearn",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "tune": ("optuna",),
    "distributed": ("torchrec", "fbgemm_gpu"),
}


def install_command(*extras: str) -> str:
    """The command that installs these extras, from whatever folder it is typed in.

    In a checkout pip has to be told where the project is, for fastcross may not be installed at all; elsewhere it is
    installed, and pip reads from its metadata what the extras are.
    """
    if "distributed" in extras and _torch_is_for_cpus():
        # TorchRec asks for fbgemm's CUDA build by name, so it comes without its dependencies here.
        return "pip install fbgemm-gpu-cpu tensordict pyre-extensions && pip install --no-deps torchrec"
    root = Path(__file__).parent.parent
    if not (root / "pyproject.toml").is_file():
        return f'pip install "fastcross[{",".join(extras)}]"'
    place = "." if root == Path.cwd() else str(root)
    return f'pip install -e "{place}[{",".join(extras)}]"'


def needs(what: str, *packages: str) -> str:
    """An error's text: ``what`` needs these packages, and how to get them."""
    extras = dict.fromkeys(extra for package in packages if (extra := extra_of(package)))
    command = install_command(*extras) if extras else f"pip install {' '.join(packages)}"
    return f"{what} needs {' and '.join(packages)}; install with: {command}"


def require(what: str, extra: str) -> None:
    """Raise before the work where a package of the extra is missing, rather than at the end, where it is used."""
    missing = [package for package in EXTRAS[extra] if importlib.util.find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(needs(what, *missing))


def extra_of(package: str | None) -> str | None:
    """The extra that brings a package, None for one that no extra brings."""
    top = (package or "").partition(".")[0]
    return next((extra for extra, packages in EXTRAS.items() if top in packages), None)


def _torch_is_for_cpus() -> bool:
    import torch  # here, for the rest of this file is needed where PyTorch would take too long to import

    return torch.version.cuda is None and torch.version.hip is None
