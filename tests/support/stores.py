"""The stores of a fleet as the directory and they themselves tell of them: who is there, what is known of them, what is
being repaired, and whether what they have is right.
"""

from fleet import wait_for


def stores(fleet):
    return [i for i in fleet.instances() if i.startswith("di-kvd.") and not i.startswith("di-kvd.host")]


def inventories_taken(fleet):
    """The directory knows every column of every store that is there."""
    def known():
        places = {row["place"]: row for row in fleet.ctl("-d", "di-meta.0", "show", "kv") if row["tier"] == "store"}
        return all(i in places and places[i]["state"] == "up" and places[i]["complete"] for i in stores(fleet))
    wait_for(known, "the inventories to be taken", 60)


def repair(fleet):
    return fleet.ctl("-d", "di-meta.0", "kv", "repair")[0]


def repairs_done(fleet, some=False, seconds=60):
    """Nothing waits to be repaired; `some`: and something has been."""
    def over():
        row = repair(fleet)
        return row["waiting"] == row["running"] == 0 and (not some or row["columns_repaired"] > 0)
    wait_for(over, "repairs to be done", seconds)


def nothing_is_wrong(fleet):
    """fsck of every store: each volume serves, and its columns are readable, right and known to the directory."""
    for store in stores(fleet):
        for row in fleet.ctl("kv", "fsck", store):
            assert row["state"] == "up" and row["compared_with_di_meta"] and row["slots"] > 0, row
            assert row["corrupt"] == row["unreadable"] == row["orphans"] == 0, row
