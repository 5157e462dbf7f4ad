"""Prints what compiled TPU programs contain, with their goals: `python -m benchmarks.tpu`. Nothing runs on a TPU.

The exit status is 1 if a program exceeds its goal.
"""

import os
import subprocess
import sys

from benchmarks.tpu import memory, rows, sent, visits
from benchmarks.tpu.chips import ENVIRONMENT


def main() -> int:
    os.environ.update(ENVIRONMENT)
    from benchmarks.measure import table

    found = visits.measure()
    print("\nBundles of a visit of 512 queries and 512 keys: causal, heads of 128, bfloat16")
    print(table(visits.rows(found)), flush=True)
    shares = rows.measure(found)
    print("\nShare of the modelled cycles that rows cost apart from their visits: forward, 65,536 tokens")
    print(table(rows.rows(shares)), flush=True)
    used = memory.measure()
    print(f"\nTemporary memory on one {memory.CHIP}, and the largest results inside each program")
    print(table(memory.rows(used)), flush=True)
    # In a process of its own: after v5e:2x2 and v5e:4x4 in one process, libtpu crashed when the process ended.
    subprocess.run([sys.executable, "-m", sent.__name__], check=True)
    verdicts = [each.verdict() for each in (*found, *shares, *used)]
    excesses = [verdict for verdict in verdicts if not verdict.startswith("ok")]
    print(f"\n{len(verdicts) - len(excesses)} of {len(verdicts)} figures are within their goals.")
    return int(bool(excesses))


if __name__ == "__main__":
    sys.exit(main())
