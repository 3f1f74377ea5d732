"""Tenants in the store: what is above a quota is refused or evicts, loudly, and nobody else is held up by it."""

import contextlib
import hashlib
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask  # noqa: E402
from fleet import BIN, SOURCE, SURE_HIT, Fleet, main, wait_for, words, write_backs_done  # noqa: E402
from stores import inventories_taken  # noqa: E402

KEYS = {tenant: f"sk-di-{(tenant * 8)[:8]}-{hashlib.sha256(tenant.encode()).hexdigest()[:43]}"
        for tenant in ("lab", "own", "work")}
QUOTA = 3 << 20  # a prompt of 1,000 tokens takes about 2 MB


def number(tenant):
    """That of kv/chain.h, as hexadecimal text."""
    def field(data):
        return struct.pack("<I", len(data)) + data
    digest = hashlib.sha256(field(b"DIKV0 tenant") + field(tenant.encode())).digest()
    return "%016x" % struct.unpack("<Q", digest[:8])


@contextlib.contextmanager
def fleet_with_tenants():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="di-tenants-"))
    try:
        shutil.copytree(SOURCE / "etc" / "local", folder / "local")
        (folder / "model-demo").symlink_to(SOURCE / "etc" / "model-demo")
        with open(folder / "local" / "di-router.toml", "a") as file:
            for tenant, key in KEYS.items():
                file.write(f'\n[[auth.keys]]\nkey = "{key}"\ntenant = "{tenant}"\n')
        with open(folder / "local" / "di-meta.toml", "a") as file:
            file.write(f'\n[[kv.tenants]]\nname = "lab"\nquota = "{QUOTA}B"\n')
            file.write(f'\n[[kv.tenants]]\nname = "own"\nquota = "{QUOTA}B"\nover = "evict_own"\n')
        with Fleet(str(folder / "local"), overrides=[*SURE_HIT]) as fleet:
            yield fleet
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ask_as(fleet, tenant, seed):
    return ask(fleet, words(1000, seed=seed), max_tokens=2, headers={"Authorization": f"Bearer {KEYS[tenant]}"})


def tenants(fleet):
    return {row["tenant"]: row for row in fleet.ctl("show", "tenants")}


def written_back(fleet):
    wait_for(lambda: fleet.metric("di-kvd.host0", "di_kv_writebacks_queued_total") > 0, "write-backs to begin", 60)
    write_backs_done(fleet)


def lines(fleet, instance, text):
    return [line for line in fleet.log(instance).splitlines() if text in line]


def over_the_quota_is_refused_or_evicts_and_is_loud():
    with fleet_with_tenants() as fleet:
        for seed in range(6):
            for tenant in KEYS:
                ask_as(fleet, tenant, seed)
        # A refused page is cached all the same, as long as the arena has it.
        reply = ask_as(fleet, "lab", 5)
        assert reply.cached() > 900, reply.usage
        written_back(fleet)

        rows = tenants(fleet)
        work = rows[number("work")]
        assert work["bytes"] > 5 << 20 and work["refused"] == work["evicted"] == work["quota_bytes"] == 0, work
        lab, own = rows["lab"], rows["own"]
        assert lab["refused"] > 0 and lab["evicted"] == 0, lab
        assert own["evicted"] > 0 and own["refused"] == 0, own
        for row in (lab, own):
            assert QUOTA // 2 < row["bytes"] <= QUOTA == row["quota_bytes"], row
        assert sorted(rows) == sorted(["lab", "own", number("work")]), rows

        assert fleet.metric("di-meta.0", "di_meta_tenant_puts_refused_total{tenant=lab}") == lab["refused"]
        assert fleet.metric("di-meta.0", "di_meta_tenant_stripes_evicted_total{tenant=own}") == own["evicted"]
        assert fleet.metric("di-meta.0", "di_meta_tenant_bytes{tenant=own}") == own["bytes"]
        assert fleet.metric("di-meta.0", "di_meta_puts_total{outcome=over_quota}") == lab["refused"]
        assert fleet.metric("di-kvd.host0", "di_kv_writebacks_dropped_total{reason=over_quota}") >= lab["refused"]
        for tenant in ("lab", "own"):
            wait_for(lambda name=tenant: lines(fleet, "di-meta.0", f"tenant over its quota tenant={name}"), f"a line of {tenant}")
        assert not lines(fleet, "di-meta.0", "tenant over its quota tenant=work")
        assert lines(fleet, "di-kvd.host0", "not written to the store: a tenant is over its quota")
        text = subprocess.run([str(BIN / "di-ctl"), "-r", str(fleet.run), "show", "tenants"], capture_output=True, text=True, check=True)
        assert [line.split("\t")[-6:] for line in text.stdout.splitlines()][0] == [
            "tenant", "bytes", "stripes", "quota_bytes", "refused", "evicted"], text.stdout
        fleet.await_idle(60)

        # Whose a stripe is stands on the disk, and in the catalogue.
        def held():
            return {name: (row["bytes"], row["stripes"]) for name, row in tenants(fleet).items()}
        before = held()
        fleet.kill_all()
        fleet.up()
        inventories_taken(fleet)
        assert held() == before, (held(), before)
        ask_as(fleet, "lab", 17)
        wait_for(lambda: tenants(fleet)["lab"]["refused"] > 0, "a refusal after the restart", 60)
        written_back(fleet)
        assert held() == before, (held(), before)


# What was stored before there was a catalogue, or with one that was lost.
def the_disk_alone_says_whose_a_stripe_is():
    with fleet_with_tenants() as fleet:
        for tenant in KEYS:
            ask_as(fleet, tenant, 1)
        written_back(fleet)

        def held():
            return {name: (row["bytes"], row["stripes"]) for name, row in tenants(fleet).items()}
        before = held()
        assert sorted(before) == sorted(["lab", "own", number("work")]) and all(size for size, _ in before.values()), before
        fleet.kill_all()
        for path in fleet.run.glob("di-meta.0.catalogue*"):
            path.unlink()
        fleet.up()
        inventories_taken(fleet)
        assert held() == before, (held(), before)


if __name__ == "__main__":
    main([over_the_quota_is_refused_or_evicts_and_is_loud, the_disk_alone_says_whose_a_stripe_is])
