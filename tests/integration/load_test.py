"""64 streams at a time: each complete and equal to its single run; idle daemons do not burn CPU."""

import concurrent.futures
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from fleet import Fleet, main, wait_for, words  # noqa: E402

STREAMS = 64


def sixty_four_streams_equal_their_single_runs():
    with Fleet() as fleet:
        jobs = [(words(20 + i, seed=200 + i), dict(max_tokens=24, temperature=i % 2, seed=i, ignore_eos=True))
                for i in range(STREAMS)]
        single = [fleet.chat(prompt, **fields) for prompt, fields in jobs]
        assert all(r.status == 200 and r.done for r in single)
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            together = list(pool.map(lambda job: fleet.chat(job[0], **job[1]), jobs))
        for i, (alone, among) in enumerate(zip(single, together)):
            assert among.status == 200 and among.done, (i, among.status, among.error)
            assert among.text == alone.text, (i, among.text, alone.text)
            assert among.usage["completion_tokens"] == 24
        fleet.await_idle()


def cpu_ticks(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def idle_daemons_use_little_cpu():
    with Fleet() as fleet:
        fleet.chat("What does di-meta do?", max_tokens=4)
        fleet.await_idle()
        pids = {i: fleet.pid(i) for i in fleet.instances()}

        def ticks():
            return {i: cpu_ticks(p) for i, p in pids.items()}
        # What belongs to a start is no idling: a store pins the arena that it was just given.  A second without it.
        mark, since = ticks(), time.monotonic()

        def settled():
            nonlocal mark, since
            now = ticks()
            if any(now[i] - mark[i] > 1 for i in now):
                mark, since = now, time.monotonic()
            return time.monotonic() - since >= 1
        wait_for(settled, "every daemon to come to rest", 30)
        before = ticks()
        start = time.monotonic()
        window = 5.0
        wait_for(lambda: time.monotonic() - start >= window, "the window to pass", 60)
        elapsed = time.monotonic() - start
        used = {i: (cpu_ticks(p) - before[i]) / os.sysconf("SC_CLK_TCK") / elapsed for i, p in pids.items()}
        for instance, share in used.items():
            print(f"  {instance}: {share * 100:.2f} % CPU idle")
        # Ticks are 10 ms: one of them in the window is 0.2 %.
        assert all(share < 0.02 for share in used.values()), used


if __name__ == "__main__":
    main([sixty_four_streams_equal_their_single_runs, idle_daemons_use_little_cpu])
