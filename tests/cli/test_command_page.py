"""The output in docs/command.md is the output of the command."""

import re
import shlex
from pathlib import Path

import pytest

from longspan.cli import main

PAGE = Path(__file__).parent.parent.parent / "docs" / "command.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CALLS = [
    (command, "".join(f"{line}\n" for line in printed.splitlines()))
    for block in BLOCK.findall(PAGE.read_text("utf-8"))
    for command, printed in re.findall(r"^\$ longspan (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]


@pytest.mark.parametrize(("command", "printed"), CALLS, ids=[command for command, _ in CALLS])
def test_the_page_shows_what_is_printed(command, printed, capsys):
    main(shlex.split(command))
    captured = capsys.readouterr()
    assert printed and (captured.out + captured.err).startswith(printed)


def test_the_page_names_every_command():
    from longspan.cli.app import app

    names = {command.callback.__name__ for command in app.registered_commands}
    assert names == set(re.findall(r"^\| `(\w+)[` ]", PAGE.read_text("utf-8"), re.MULTILINE))
