"""kill -9 at every fault point of decode, prefill, the host's di-kvd, the store and di-meta: every stream
is complete and equal to an undisturbed run, and gauges return to their base.

Run over the script engine and over the demo model, at temperature 0 and at temperature 1 with a seed.
The loop is over `di-ctl show faults`, so a new fault point is tested as soon as it exists.
"""

import concurrent.futures
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from fleet import Fleet, main, pieces, script, wait_for, words  # noqa: E402

# Which instance reaches a fault point, by its program and name.
INSTANCES = {
    "di-prefill": lambda name: "di-prefill.0",
    "di-decode": lambda name: "di-decode.0",
    "di-kvd": lambda name: "di-kvd.store0" if name.startswith("store_") or name == "kvd_mid_segment" else "di-kvd.host0",
    "di-meta": lambda name: "di-meta.0",
}
ANSWER = [f"w{i} " for i in range(48)]


def streams(fleet, real):
    """Four requests at a time, half of them sampled: what each client saw."""
    jobs = []
    for i in range(4):
        prompt = words(150 + 40 * i, seed=100 + i)
        fields = {"max_tokens": 48, "ignore_eos": True} if real else {}
        if i % 2:
            fields.update(temperature=1, seed=1000 + i)
        else:
            fields.update(temperature=0)
        jobs.append((prompt, fields))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda job: fleet.chat(job[0], **job[1]), jobs))


def fault_points(fleet):
    rows = fleet.ctl("show", "faults")
    names = {}
    for row in rows:
        names.setdefault(row["instance"].split(".")[0], set()).add(row["name"])
    return names


def engine_overrides(real, run):
    if real:
        return []
    path = script(run, [{"match": "", "pieces": pieces(*ANSWER, delay_ms=3)}])
    return [o for p in ("di-prefill", "di-decode") for o in (f"{p}:engine.backend=script", f"{p}:engine.script={path}")]


def loop(real, conf, supervise):
    import tempfile
    with Fleet(conf, engine_overrides(real, tempfile.mkdtemp(prefix="di-script-")), supervise=supervise) as fleet:
        expected = [r.text for r in streams(fleet, real)]
        assert all(expected), "an undisturbed stream is empty"
        if not real:
            assert expected[0] == "".join(ANSWER)
        points = fault_points(fleet)
        undisturbed = fleet.overrides
    for program in ("di-prefill", "di-decode", "di-kvd", "di-meta"):
        for name in sorted(points.get(program, ())):
            instance = INSTANCES[program](name)
            for hit in (1,) if real else (1, 3):
                print(f"  {instance} {name}:{hit}", flush=True)
                with Fleet(conf, [*undisturbed, f"{instance}:fault.at={name}:{hit}=kill"], supervise=supervise) as fleet:
                    fired = fleet.run / "faults" / f"{instance}.{name}"
                    for again in range(3):
                        if again == 2:
                            # What is not reached by computing and by arena hits is reached by a fetch from the store.
                            wait_for(lambda: not fleet.held(), "write-backs to be done", 60)
                            restart(fleet, "di-kvd.host0")
                        check(fleet, real, expected, (name, hit))
                        if fired.exists() or hit > 1:
                            break
                    assert fired.exists() or hit > 1, f"{name} was never reached"
                    fleet.await_idle(60)


def restart(fleet, instance):
    """Kills a supervised instance and waits until it is back and the fleet serves."""
    old = fleet.kill(instance)
    wait_for(lambda: fleet.pid(instance) != old and fleet.alive(instance), f"{instance} to be restarted")
    wait_for(lambda: fleet.request("GET", "/health")[0] == 200, "the fleet to serve")


def check(fleet, real, expected, what):
    for got, want in zip(streams(fleet, real), expected):
        assert got.status == 200 and got.done and not got.error, (what, got.status, got.error)
        assert got.text == want, (what, got.text, want)


def script_engine_supervised():
    loop(real=False, conf="etc/local", supervise=True)


def demo_model_supervised():
    loop(real=True, conf="etc/local", supervise=True)


def script_engine_two_of_each_unsupervised():
    two_of_each(real=False)


def demo_model_two_of_each_unsupervised():
    two_of_each(real=True)


def two_of_each(real):
    """Two prefill and two decode on one host, nobody restarts what dies: the other one takes over."""
    import tempfile
    conf = "tests/integration/two-of-each"
    overrides = engine_overrides(real, tempfile.mkdtemp(prefix="di-script-"))
    with Fleet(conf, overrides) as fleet:
        expected = [r.text for r in streams(fleet, real)]
        points = fault_points(fleet)
    for program in ("di-prefill", "di-decode"):
        for name in sorted(points.get(program, ())):
            print(f"  {program} {name}", flush=True)
            # Whichever of the two reaches the place first dies there; the other must not.
            with Fleet(conf, [*overrides, f"{program}.0:fault.at={name}=kill"]) as fleet:
                check(fleet, real, expected, name)
                fleet.await_idle(60)


if __name__ == "__main__":
    main([script_engine_supervised, script_engine_two_of_each_unsupervised, demo_model_supervised,
          demo_model_two_of_each_unsupervised])
