"""kill -9 at every fault point of decode, prefill, the host's di-kvd, the store and di-meta: every stream
is complete and equal to an undisturbed run, and gauges return to their base.

Run over the script engine and over the demo model, at temperature 0 and at temperature 1 with a seed.
The loop is over `di-ctl show faults`, so a new fault point is tested as soon as it exists.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from faults import check, engine_overrides, fault_points, loop, undisturbed  # noqa: E402
from fleet import Fleet, main  # noqa: E402

# Which instance reaches a fault point, by its program and name.
INSTANCES = {
    "di-prefill": lambda name: "di-prefill.0",
    "di-decode": lambda name: "di-decode.0",
    "di-kvd": lambda name: "di-kvd.store0" if name.startswith("store_") or name == "kvd_mid_segment" else "di-kvd.host0",
    "di-meta": lambda name: "di-meta.0",
}


def script_engine_supervised():
    loop(False, "etc/local", INSTANCES, "di-kvd.host0", hits=(1, 3))


def demo_model_supervised():
    loop(True, "etc/local", INSTANCES, "di-kvd.host0")


def script_engine_two_of_each_unsupervised():
    two_of_each(real=False)


def demo_model_two_of_each_unsupervised():
    two_of_each(real=True)


def two_of_each(real):
    """Two prefill and two decode on one host, nobody restarts what dies: the other one takes over."""
    conf = "tests/integration/two-of-each"
    overrides = engine_overrides(real)
    with Fleet(conf, overrides) as fleet:
        expected = undisturbed(fleet, real)
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
