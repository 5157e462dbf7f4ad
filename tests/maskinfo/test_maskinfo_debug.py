"""Debug mode logs the calls through `logging`."""

import logging
import subprocess
import sys

import numpy as np
import pytest

from longspan import MaskInfo, get_debug_mode, mask_to_segment_ids, set_debug_mode

PROGRAM = "import longspan; print(longspan.get_debug_mode())"


@pytest.fixture
def debugging():
    set_debug_mode(True)
    yield
    set_debug_mode(False)


def test_calls_are_logged_with_class_and_method(debugging, caplog):
    assert get_debug_mode()
    info = MaskInfo.from_segments(np.array([[0, 0, 1]])).apply_causal(offset=1)
    mask_to_segment_ids(np.ones((2, 2)))
    assert caplog.messages[0] == "MaskInfo.from_segments(MaskInfo, int64[1, 3])"
    assert caplog.messages[1].startswith("MaskInfo.apply_causal(MaskInfo(batch=1")
    assert caplog.messages[1].endswith("offset=1)")
    assert caplog.messages[-1] == "mask_to_segment_ids(float64[2, 2])"
    assert {r.name for r in caplog.records} == {"longspan.maskinfo"}
    assert {r.levelno for r in caplog.records} == {logging.DEBUG}
    assert info.q_len == 3


def test_nothing_is_logged_by_default(caplog):
    assert not get_debug_mode()
    with caplog.at_level(logging.DEBUG):
        MaskInfo.from_segments(np.array([[0, 0, 1]])).apply_causal()
    assert not [r for r in caplog.records if r.name == "longspan.maskinfo"]


@pytest.mark.parametrize(("value", "wanted"), [("1", "True"), ("0", "False"), ("", "False")])
def test_the_environment_variable_switches_it_on(value, wanted, monkeypatch):
    monkeypatch.setenv("LONGSPAN_MASK_DEBUG", value)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == wanted
