"""The report from a machine with a TPU, tried with the interpreter, and the reader of the compiler's dumps."""

import json

import pytest

from benchmarks.tpu import dump, rows, run, visits


def test_the_report_is_written_as_json_and_as_text(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert run.main([str(path), "--interpret", "--only", "causal, toy"]) == 0
    assert run.main([str(path), "--interpret", "--only", "mask: block causal"]) == 0
    found = json.loads(path.read_text())
    assert [result["verdict"] for result in found["parity"]] == ["ok"]
    assert set(found["parity"][0]["errors"]) == {"out", "lse", "dq", "dk", "dv"}
    text = path.with_suffix(".txt").read_text()
    assert "Parity with float64: 1 of 1 cases are ok" in text
    assert text in capsys.readouterr().out


def test_a_wrong_engine_is_reported(tmp_path):
    result = run.parity.ParityResult("case", "wrong: dq", {"dq": 2.0, "out": float("nan")}, {"dq": 1.0, "out": 1.0})
    report = run.Report(tmp_path / "report.json", dict(times="none"))
    report.add(result)
    assert not report.is_right()
    assert "0 of 1 cases are ok" in report.text() and "nan" in report.text()


def test_without_a_tpu_the_report_must_be_interpreted(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run.main([str(tmp_path / "report.json")])
    assert "JAX runs on 'cpu', not on a TPU. Try the program with --interpret." in capsys.readouterr().err


# The bundle of a branch begins a stretch. This is a loop over the grid with a loop over visits: one FULL visit, one
# that masks, and one that also clears NaN.
BUNDLES = """
     0   :  { %s0 = input }
   0x1 LB: > { %s1 = sadd.s32 1, %s0 }
   0x2   : > { %s2 = smov 0 }
   0x3 LB: >> { %s3 = smov 0  ;;  %4 = sbr.rel (%p1) target = $region1 }
   0x4   : >> { %v1 = vmatmul }
   0x5   : >> { %5 = sbr.rel (%p2) target = $region2 }
   0x6   : >> { %v2 = vmatmul }
   0x7   : >> { %v3 = vsel }
   0x8 PF: >> { %v4 = vmatmul }
   0x9   : >> { %v4 = vsel }
   0xa   : >> { %v4 = vsel }
   0xb   : >> { %v4 = vsel }
   0xc PF: >> { %6 = sbr.rel (%p3) target = $region3 }
   0xd PF: > { %7 = sbr.rel (%p4) target = $region4 }
   0xe PF:  { %8 = halt }
"""
MATRIX = (0x4, 0x6, 0x8)


def made() -> dump.Kernel:
    used = "\n".join("1 0 0 0 0 0 0 0 0 0" if n in MATRIX else "0 0 1 0 0 0 0 0 0 2" for n in range(15))
    return dump.parse("longspan_forward", BUNDLES.splitlines(), f"== CAPACITY:\n4 4\n== UTILIZATION:\n{used}\n")


def test_visits_are_the_stretches_with_matrix_products():
    kernel = made()
    assert [visit.bundles for visit in kernel.visits()] == [2, 3, 4]
    assert kernel.full_and_partial() == (2, 3)
    assert sum(stretch.bundles for stretch in kernel.stretches) == 15


def test_rows_cost_what_is_outside_the_loop_over_visits():
    assert made().row() == 3  # 0x1, 0x2 and 0xd


def test_dumps_are_read_by_kernel(tmp_path):
    used = "\n".join(["1 0 0 0 0 0 0 0 0 0"] * 15)
    (tmp_path / "17-longspan_dq.1-72-final_bundles.txt").write_text(BUNDLES)
    (tmp_path / "17-longspan_dq.1-71-schedule-analysis_final_bundles.txt").write_text("another text")
    (tmp_path / "17-longspan_dq.1-73-final_hlo-static-per-bundle-utilization.txt").write_text(
        f"== UTILIZATION:\n{used}"
    )
    assert list(dump.read(tmp_path)) == ["longspan_dq"]


def test_figures_above_their_goals_say_by_how_much():
    goal = visits.GOALS["v5e"]["dq"]
    good = visits.Visit("v5e", "dq", goal[0], round(goal[1] * 1.02), splash=1494, row=600)
    bad = good._replace(partial=round(goal[1] * 1.1))
    assert good.verdict() == "ok"
    assert bad.verdict() == "10.0% too many"


def test_rows_cost_less_if_their_first_copies_start_early():
    forward = visits.Visit("v5e", "forward", 1134, 1168, splash=1172, row=600)
    window = rows.measure([forward])[0]
    assert window.mask == "window 512"
    assert window.rows < 0.30 < 0.5 < window.unhidden
    assert window.verdict() == "ok, at most 30%"
