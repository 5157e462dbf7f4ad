"""Fixtures that run commands inside the test process, and that save checkpoints for them."""

import pytest

from longspan.cli import main
from tests.cli import checkpoints


@pytest.fixture
def run(capsys):
    """A function that runs a command and returns (exit code, stdout, stderr)."""

    def command(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that returns the directory of a checkpoint, saved once per module."""
    made = {}

    def directory(name):
        if name not in made:
            made[name] = getattr(checkpoints, name)(tmp_path_factory.mktemp(name))
        return made[name]

    return directory
