"""docs/ builds as a site without a warning: every link and anchor leads somewhere, every object of the API is found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastcross

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_in_the_api_pages():
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    names = {*fastcross.__all__, "DCNClassifier", "DCNRegressor"} - {"__version__", "DCNConfig"}
    assert not [name for name in names if f"::: fastcross.{name}\n" not in pages]


def test_site(tmp_path):
    pytest.importorskip("material", reason="the extra docs is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an announcement of Material's authors
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    layers = (tmp_path / "site" / "api" / "layers" / "index.html").read_text()
    assert 'id="fastcross.CrossNetwork"' in layers
    assert "in_features" in layers
    choosing = (tmp_path / "site" / "choosing" / "index.html").read_text()
    assert "The operator as a function" in choosing  # examples/function.py
