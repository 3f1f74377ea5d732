"""The books of a fleet that has worked balance, and scripts/check-books says so, and says which one does not."""

import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import books  # noqa: E402
from asking import ask  # noqa: E402
from fleet import BIN, SOURCE, Fleet, main, words, write_backs_done  # noqa: E402


def checked(fleet, run=None):
    return subprocess.run([str(SOURCE / "scripts/check-books"), str(run or fleet.run)], env=fleet.environment(),
                          capture_output=True, text=True, timeout=120)


def a_fleet_that_worked_balances_and_a_lost_entry_is_told():
    with Fleet("etc/local") as fleet:
        for seed in (1, 2, 1):
            ask(fleet, words(1500, seed=seed), max_tokens=8)
            write_backs_done(fleet)
        fleet.await_idle(60)
        told = checked(fleet)
        assert (told.returncode, told.stdout, told.stderr) == (0, "", ""), told
        rows = books.read(BIN / "di-ctl", fleet.run)
        for sentence, program, left, right in books.LAWS:
            for term in (left[0], right[0]):
                altered = [dict(row) for row in rows]
                row = next(row for row in altered if books.total([row], term) is not None)
                row["value"] += 1
                assert any(sentence in line for line in books.broken(altered)), (sentence, term)
        # Something was entered: not all are the equality of nothing.
        for term in ("di_meta_puts_total{outcome=committed}", "di_kv_writebacks_total", "di_kv_swapped_blocks_total"):
            assert books.total(rows, term) > 0, term
        assert checked(fleet, fleet.run / "nowhere").returncode == 2


if __name__ == "__main__":
    main([a_fleet_that_worked_balances_and_a_lost_entry_is_told])
