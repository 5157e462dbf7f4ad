"""How tests run commands inside their own process, and the checkpoints that these read."""

import pytest

from longspan.cli import main
from tests.cli import checkpoints


@pytest.fixture
def run(capsys):
    """Runs a command; (exit code, stdout, stderr)."""

    def command(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that gives the directory of a checkpoint, made once."""
    made = {}

    def directory(name):
        if name not in made:
            made[name] = getattr(checkpoints, name)(tmp_path_factory.mktemp(name))
        return made[name]

    return directory
