"""A small click log, its cache and a run, made once; every test in a folder of its own."""

import pytest
import torch

from fastcross.cli.main import main
from fastcross.data.generate import write_click_log
from tests.cli.helpers import SMALL


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "clicks.txt"
    write_click_log(path, 2000, largest_vocabulary=20)
    return path


@pytest.fixture(scope="session")
def cache(log):
    path = log.parent / "cache"
    assert main(["prepare", str(log), "--cache", str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def run(cache, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    assert main(["train", "--data", str(cache), "--run", str(path), *SMALL]) == 0
    return path


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail, with exit code 2, and returns the one line of its error."""

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:  # of argparse
            code = exit.code
        captured = capsys.readouterr()
        assert code == 2, captured
        lines = captured.err.strip().splitlines()
        assert lines[-1].startswith(f"fastcross {arguments[0]}: ")
        assert "Traceback" not in captured.err
        return lines[-1]

    return run
