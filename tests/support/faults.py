"""What the tests that kill daemons share: four streams at a time, what they must be, and the loop over all
fault points.
"""

import atexit
import concurrent.futures
import shutil
import tempfile

from asking import told
from fleet import PATIENT_FETCH, Fleet, pieces, script, script_rows, wait_for, words

ANSWER = [f"w{i} " for i in range(48)]
# A stream that only the router's patience would heal (request.next_token_wait) has hung.
HUNG_AFTER_S = 45.0


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
        return list(pool.map(lambda job: fleet.chat(job[0], timeout=HUNG_AFTER_S, **job[1]), jobs))


def undisturbed(fleet, real):
    """The texts of streams() when nothing happens."""
    expected = [r.text for r in streams(fleet, real)]
    assert all(expected), "an undisturbed stream is empty"
    if not real:
        assert expected[0] == "".join(ANSWER)
    return expected


def check(fleet, real, expected, what):
    compare(fleet, streams(fleet, real), expected, what)


def compare(fleet, replies, expected, what):
    for got, want in zip(replies, expected):
        if got.status == 200 and got.done and not got.error and got.text == want:
            continue
        raise AssertionError(f"{what}: {got.status} {got.error} cut={got.cut}\n got {got.text!r}\nwant {want!r}\n{told(fleet, got)}")


def fault_points(fleet):
    """The names of the fault points, by program."""
    names = {}
    for row in fleet.ctl("show", "faults"):
        names.setdefault(row["instance"].split(".")[0], set()).add(row["name"])
    return names


def engine_overrides(real):
    if real:
        return []
    folder = tempfile.mkdtemp(prefix="di-script-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return script_rows(script(folder, [{"match": "", "pieces": pieces(*ANSWER, delay_ms=3)}]))


def loop(real, conf, instances, host, steer=lambda fleet: None, hits=(1,), at_a_time=1):
    """kill -9 at every fault point under a supervisor.

    instances: by program, which instance reaches a point of that name.  host: the di-kvd whose arena is emptied, so
    that the next request reads the store.  steer: places requests, once the fleet is up.
    """
    overrides = [*engine_overrides(real), PATIENT_FETCH]
    with Fleet(conf, overrides, supervise=True) as fleet:
        steer(fleet)
        expected = undisturbed(fleet, real)
        points = fault_points(fleet)

    def one(case):
        instance, name, hit = case
        print(f"  {instance} {name}:{hit}", flush=True)
        with Fleet(conf, [*overrides, f"{instance}:fault.at={name}:{hit}=kill"], supervise=True) as fleet:
            steer(fleet)
            for again in range(3):
                if again == 2:
                    # What is not reached by computing and by arena hits is reached by a fetch from the store.
                    wait_for(lambda: not fleet.held(), "write-backs to be done", 60)
                    if not fleet.fired(instance, name):  # else it may have been the host, which is on its way back
                        fleet.ctl("kv", "drop", "arena", host)
                check(fleet, real, expected, (name, hit))
                if fleet.fired(instance, name) or hit > 1:
                    break
            assert fleet.fired(instance, name) or hit > 1, f"{name} was never reached"
            fleet.await_idle(60)

    cases = [(instances[program](name), name, hit) for program in ("di-prefill", "di-decode", "di-kvd", "di-meta")
             for name in sorted(points.get(program, ())) for hit in hits]
    run_all(one, cases, at_a_time)


def run_all(one, cases, at_a_time):
    """one(case) for all, so many at a time; raises the first failure when all are through."""
    with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
        for done in [pool.submit(one, case) for case in cases]:
            done.result()
