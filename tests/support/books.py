"""The conservation laws of a fleet's counters, and what is read to check them: of scripts/check-books and of every test
that waits for a fleet at rest.

A law holds in one daemon, from its start, whenever nothing is on its way; both sides are sums of metrics of di-ctl
`show metrics`.  A term is a metric's name, of which all labels are summed, or name{label=value}.
"""

import json
import re
import subprocess

# What the law says; the program; the left side; the right side.  They are equal.
LAWS = [
    ("blocks that requests matched were fetched or lost", "di-kvd",
     ["di_kv_matched_blocks_total"],
     ["di_kv_fetched_blocks_total", "di_kv_lost_blocks_total"]),
    ("blocks that were fetched were swapped in or not used", "di-kvd",
     ["di_kv_fetched_blocks_total"],
     ["di_kv_swapped_blocks_total", "di_kv_unused_blocks_total"]),
    ("pages queued for the store were published, were there, were dropped or wait", "di-kvd",
     ["di_kv_writebacks_queued_total"],
     ["di_kv_writebacks_total", "di_kv_writebacks_existed_total", "di_kv_writebacks_dropped_total",
      "di_held{what=pending_writebacks}"]),
    ("puts that were opened were committed, given up, found needless or full, or are open", "di-meta",
     ["di_meta_puts_total{outcome=opened}"],
     ["di_meta_puts_total{outcome=committed}", "di_meta_puts_total{outcome=duplicate}",
      "di_meta_puts_total{outcome=no_space}", "di_meta_puts_total{outcome=aborted}",
      "di_meta_puts_total{outcome=lapsed}", "di_held{what=open_puts}"]),
]


def labels(row):
    """The labels of a row of `show metrics`, as printed: {a="b",c="d"}."""
    return dict(re.findall(r'(\w+)="([^"]*)"', row.get("labels") or ""))


def total(rows, term):
    """The sum over a daemon's rows that a term names; None when there is none."""
    name, _, picked = term.rstrip("}").partition("{")
    wanted = dict(part.split("=", 1) for part in picked.split(",") if part)
    found = [row["value"] for row in rows if row["name"] == name and wanted.items() <= labels(row).items()]
    return sum(found) if found else None


def entries(rows):
    """Each law in each daemon that it is about: the instance, the sentence, both sides as terms with amounts.  A host's
    laws are not about a store: it has no metric of the left side."""
    for instance in sorted({row["instance"] for row in rows}):
        mine = [row for row in rows if row["instance"] == instance]
        for sentence, program, *sides in LAWS:
            if instance.split(".")[0] == program and total(mine, sides[0][0]) is not None:
                yield instance, sentence, [[(term, total(mine, term)) for term in side] for side in sides]


def broken(rows):
    """What does not balance, a sentence each, with both sides."""
    out = []
    for instance, sentence, sides in entries(rows):
        missing = [term for side in sides for term, amount in side if amount is None]
        if missing:
            out.append(f"{instance}: {sentence}: no metric {', '.join(missing)}")
        elif sum(amount for _, amount in sides[0]) != sum(amount for _, amount in sides[1]):
            left, right = (" + ".join(f"{term} {amount:g}" for term, amount in side) for side in sides)
            out.append(f"{instance}: {sentence}: {left} is not {right}")
    return out


def unread(rows):
    """The laws that no daemon has a book for: its program does not run here, or its metrics have other names."""
    missed = {law[0] for law in LAWS} - {sentence for _, sentence, _ in entries(rows)}
    return [f"no daemon has a book for: {sentence}" for sentence in sorted(missed)]


def read(di_ctl, run):
    """The rows of `show metrics` of all daemons of a run directory; raises OSError when one does not answer."""
    done = subprocess.run([str(di_ctl), "-r", str(run), "-j", "show", "metrics"], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise OSError(done.stderr.strip() or f"di-ctl ended with {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.strip()]
