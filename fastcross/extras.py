"""Optional dependencies: the extra that contains a package, and the command that installs it."""

import importlib.util
from pathlib import Path

EXTRAS = {
    "train": ("pyarrow", "safetensors", "tqdm", "matplotlib"),
    "sklearn": ("sklearn",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "serve": ("starlette", "uvicorn", "httptools", "uvloop", "prometheus_client"),
    "tune": ("optuna",),
    "distributed": ("torchrec", "fbgemm_gpu"),
}


def install_command(*extras: str) -> str:
    """The command that installs these extras, from any folder.

    In a checkout the command names the project's folder, because fastcross may not be installed. Otherwise pip reads
    the extras from the installed metadata.
    """
    if "distributed" in extras and _torch_is_for_cpus():
        # TorchRec requires fbgemm's CUDA build by name, so here it is installed without dependencies.
        return "pip install fbgemm-gpu-cpu tensordict pyre-extensions && pip install --no-deps torchrec"
    root = Path(__file__).parent.parent
    if not (root / "pyproject.toml").is_file():
        return f'pip install "fastcross[{",".join(extras)}]"'
    place = "." if root == Path.cwd() else str(root)
    return f'pip install -e "{place}[{",".join(extras)}]"'


def needs(what: str, *packages: str) -> str:
    """The text of an error: ``what`` needs these packages, with the command that installs them."""
    extras = dict.fromkeys(extra for package in packages if (extra := extra_of(package)))
    command = install_command(*extras) if extras else f"pip install {' '.join(packages)}"
    return f"{what} needs {' and '.join(packages)}; install with: {command}"


def require(what: str, extra: str) -> None:
    """Raise if a package of the extra is missing: before the work starts, not at the end, where it is used."""
    missing = [package for package in EXTRAS[extra] if importlib.util.find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(needs(what, *missing))


def extra_of(package: str | None) -> str | None:
    """The extra that contains a package; None if there is none."""
    top = (package or "").partition(".")[0]
    return next((extra for extra, packages in EXTRAS.items() if top in packages), None)


def _torch_is_for_cpus() -> bool:
    import torch  # here, because the rest of this file is used before PyTorch is imported

    return torch.version.cuda is None and torch.version.hip is None
