"""The form of every error of the command: one line on stderr and exit code 2."""


def assert_one_line(result, words):
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert words in err
    assert "Traceback" not in err
