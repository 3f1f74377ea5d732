"""Two hosts and a store in network namespaces, messages under CURVE, pages over TCP in the clear and sealed: what
is true on one machine (two_hosts_test.py), and what becomes of requests when the link between the hosts is cut
in both directions or in one, slow, or loses packets.  The links to the store and the router stay.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import ask, ask_cold, ask_hit  # noqa: E402
from faults import HUNG_AFTER_S, check, compare, streams, undisturbed  # noqa: E402
from fleet import SOURCE, SURE_HIT, main, members, wait_for, words, write_backs_done  # noqa: E402
from keys import Stranger, keygen, refused  # noqa: E402
from network import Network, Unavailable  # noqa: E402
from spread import SpreadFleet  # noqa: E402

SAMPLE = SOURCE / "etc/local-2p2d"
SHORT = dict(max_tokens=24, ignore_eos=True)


class TwoHosts(SpreadFleet):
    def peers_of(self, instance):
        return {row["peer"] for row in self.ctl("-d", instance, "show", "peers")}

    def linked(self):
        return "di-kvd.hostb" in self.peers_of("di-kvd.hosta") and "di-kvd.hosta" in self.peers_of("di-kvd.hostb")


@contextlib.contextmanager
def spread_fleet(*overrides, **kwargs):
    with Network(["a", "b", "s"]) as network, TwoHosts(network, SAMPLE, overrides, **kwargs) as fleet:
        wait_for(fleet.linked, "the hosts to meet")
        yield fleet, network


# ---- As on one machine -------------------------------------------------------------------------------------

def a_prefix_survives_its_host(sealed):
    with spread_fleet(*SURE_HIT, sealed=sealed) as (fleet, network):
        prompts = [words(2000, seed=11), words(2000, seed=12)]
        fleet.place("a", "a")
        cold = [ask_cold(fleet, prompt, **SHORT) for prompt in prompts]
        tokens = [reply.usage["prompt_tokens"] for reply in cold]
        assert min(tokens) >= 2000, tokens
        write_backs_done(fleet)
        fleet.place("b", "b")
        hit = ask_hit(fleet, prompts[0], 0.9 * tokens[0], **SHORT)
        assert hit.text == cold[0].text
        assert fleet.metric("di-kvd.hostb", "di_kv_read_bytes_total") > 0
        assert fleet.message_sockets() == [], "a message went past the network"
        for instance in fleet.host_of:
            assert set(refused(fleet, instance).values()) == {0}, (instance, refused(fleet, instance))
        fleet.kill_host("a")
        # b has never seen the second prompt, and nobody but the store has it any more.
        hit = ask_hit(fleet, prompts[1], 0.9 * tokens[1], **SHORT)
        assert hit.text == cold[1].text
        fleet.await_idle(60)


def a_prefix_survives_its_host_in_the_clear():
    a_prefix_survives_its_host(sealed=False)


def a_prefix_survives_its_host_sealed():
    a_prefix_survives_its_host(sealed=True)


def a_di_kvd_with_a_wrong_key_does_not_join():
    with spread_fleet() as (fleet, network):
        wrong = keygen(pathlib.Path(tempfile.mkdtemp(prefix="other-", dir=fleet.keys.folder)), "di-kvd.hostb")
        assert wrong != fleet.keys.public["di-kvd.hostb"]
        other = next(fleet.keys.folder.glob("other-*"))
        keygen(fleet.keys.folder, "di-kvd.hostc")
        fleet.keys.list_only(lambda name: name != "di-kvd.hostc")
        for instance in fleet.host_of:
            fleet.ctl("-d", instance, "reload")
        before = members(fleet)
        there = dict(config="etc/local-2p2d/di-kvd.host.toml", address=network.address("b"),
                     prefix=["ip", "netns", "exec", network.namespace("b")])
        rows = [f"transfer.bind={network.address('b')}:0"]
        fleet.place("a", "b")
        # Not in the list; and with a key that is nobody's, under a name that is in the list.
        with Stranger(fleet, fleet.keys, "di-kvd.hostc", "net.host=c", *rows, **there) as unlisted, \
                Stranger(fleet, fleet.keys, "di-kvd.hostd", "net.host=b", f"net.secret_key={other}/di-kvd.hostb.secret",
                         *rows, **there) as liar:
            for stranger in (unlisted, liar):
                wait_for(lambda: stranger.log().count("its net.public_keys does not have our key") >= 3, "three tries")
            assert refused(fleet, "di-meta.0")["key"] >= 6, refused(fleet, "di-meta.0")
            reply = ask(fleet, words(700, seed=61), **SHORT)
            assert fleet.metric("di-kvd.hosta", "di_kv_pushed_bytes_total") > 0
            assert members(fleet) == before
        fleet.await_idle(60)


# ---- The link between the hosts ----------------------------------------------------------------------------

def resume_all(fleet, but=""):
    for instance in fleet.host_of:
        if instance.startswith(("di-prefill.", "di-decode.")) and instance != but:
            fleet.ctl("resume", instance)


def events(fleet, reply):
    return [row.get("event") for row in fleet.explain(reply.request_id)]


def the_link_is_cut(cuts, sealed=False):
    """At the moment of the hand-over: whoever hears of it first, requests go elsewhere and lose nothing."""
    with spread_fleet("di-prefill.a:fault.at=prefill_before_handover=stop", sealed=sealed) as (fleet, network):
        fleet.place("b", "b")
        expected = undisturbed(fleet, True)
        fleet.place("a", "b")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(streams, fleet, True)
            wait_for(lambda: fleet.stopped_at("di-prefill.a", "prefill_before_handover"), "a hand-over to be due")
            for source, target in cuts:
                network.set(source, target, drop=True)
            resume_all(fleet, but="di-prefill.a")  # which would not answer
            os.kill(fleet.pid("di-prefill.a"), signal.SIGCONT)
            replies = asked.result()
        compare(fleet, replies, expected, cuts)
        fleet.ctl("resume", "di-prefill.a")
        assert any({"handover_failed", "reentry"} & set(events(fleet, reply)) for reply in replies), "nobody missed the link"
        wait_for(lambda: not fleet.linked(), "the hosts to miss each other")
        # Without the link, as long as it takes.
        check(fleet, True, expected, ("cut", cuts))
        fleet.await_idle(60)
        # And with it again.
        network.between("a", "b")
        wait_for(fleet.linked, "the hosts to meet again")
        fleet.place("a", "b")
        pushed = fleet.metric("di-kvd.hosta", "di_kv_pushed_bytes_total")
        reply = ask(fleet, words(700, seed=62), **SHORT)
        assert fleet.metric("di-kvd.hosta", "di_kv_pushed_bytes_total") > pushed
        fleet.await_idle(60)


def the_link_is_cut_in_both_directions():
    the_link_is_cut([("a", "b"), ("b", "a")])


def the_link_is_cut_from_a_to_b():
    the_link_is_cut([("a", "b")], sealed=True)


def the_link_is_cut_from_b_to_a():
    the_link_is_cut([("b", "a")])


def on_a_slow_link_a_hand_over_waits():
    with spread_fleet() as (fleet, network):
        rate = slow_rate(network)
        fleet.place("b", "b")
        prompt = words(2000, seed=71)
        alone = ask(fleet, prompt, cache_salt="alone", **SHORT)
        network.between("a", "b", bytes_per_s=rate)
        fleet.place("a", "b")
        apart = ask(fleet, prompt, timeout=HUNG_AFTER_S, **SHORT)
        assert apart.text == alone.text, (apart.text, alone.text)
        assert not {"handover_failed", "reentry"} & set(events(fleet, apart)), fleet.explain(apart.request_id)
        assert fleet.metric("di-kvd.hosta", "di_kv_pushed_bytes_total") > 1 << 20
        fleet.await_idle(60)


def slow_rate(network):
    """A twentieth of what goes through otherwise, and at most as much as makes 2 MiB take seconds."""
    return min(network.bytes_per_s("a", "b") / 20, 600e3)


def a_link_that_is_too_slow_is_given_up():
    """The rule of kv.handover_wait: the prompt is read again where its seat is, and explain says why."""
    rows = ["di-kvd:kv.handover_wait=500ms", "di-prefill.a:fault.at=prefill_before_handover=stop"]
    with spread_fleet(*rows) as (fleet, network):
        rate = slow_rate(network)
        fleet.place("b", "b")
        prompt = words(2000, seed=72)
        alone = ask(fleet, prompt, cache_salt="alone", **SHORT)
        network.between("a", "b", bytes_per_s=rate)
        fleet.place("a", "b")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(lambda: ask(fleet, prompt, timeout=HUNG_AFTER_S, **SHORT))
            wait_for(lambda: fleet.stopped_at("di-prefill.a", "prefill_before_handover"), "the hand-over to be due")
            fleet.ctl("resume", "di-prefill.b")
            os.kill(fleet.pid("di-prefill.a"), signal.SIGCONT)
            apart = asked.result()
        assert apart.text == alone.text, (apart.text, alone.text)
        rows = [(row.get("event"), row.get("detail") or "") for row in fleet.explain(apart.request_id)]
        assert any(event == "handover_failed" and "code=timeout" in detail for event, detail in rows), rows
        bound = [detail.split()[0] for event, detail in rows if event == "bound"]
        assert bound == ["rank=di-prefill.a/0", "rank=di-prefill.b/0"], rows
        assert [event for event, _ in rows].count("reentry") == 1, rows
        assert fleet.metric("di-kvd.hosta", "di_kv_handovers_gave_up_total") == 1
        fleet.await_idle(60)


def where_nobody_reads_near_the_seat_the_pages_wait_for_the_link():
    """Only a reads and only b writes, as where the two are machines of different kinds."""
    with spread_fleet("di-kvd:kv.handover_wait=300ms") as (fleet, network):
        fleet.place("b", "b")
        prompt = words(2000, seed=73)
        alone = ask(fleet, prompt, cache_salt="alone", **SHORT)
        # So slow that not even one page gets through before the rule gives up: what did would not be sent again.
        network.between("a", "b", bytes_per_s=100e3)
        fleet.place("a", "b")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(lambda: ask(fleet, prompt, timeout=HUNG_AFTER_S, **SHORT))
            # More often than a request may have attempts; then the link is what it was.
            gave_up = "di_kv_handovers_gave_up_total"
            wait_for(lambda: asked.done() or fleet.metric("di-kvd.hosta", gave_up) >= 6, "hand-overs to be given up")
            network.between("a", "b")
            apart = asked.result()
        assert apart.text == alone.text, (apart.text, alone.text)
        happened = events(fleet, apart)
        assert happened.count("handover_failed") >= 6 and "reentry" not in happened, happened
        fleet.await_idle(60)


def a_link_that_loses_packets(handover_wait):
    with spread_fleet(f"di-kvd:kv.handover_wait={handover_wait}", sealed=True) as (fleet, network):
        fleet.place("b", "b")
        expected = undisturbed(fleet, True)
        network.between("a", "b", loss=0.3)
        for prefill, decode in (("a", "b"), ("b", "a")):
            fleet.place(prefill, decode)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                asked = pool.submit(streams, fleet, True)
                wait_for(lambda: asked.done() or {"handover", "decoding"} & {r["state"] for r in fleet.ctl("show", "requests")},
                         "a hand-over")
                # Whether packets get through in time is chance; where they do not, there is another way.
                resume_all(fleet)
                replies = asked.result()
            compare(fleet, replies, expected, "30 % lost")
            gave_up = sum("handover_failed" in events(fleet, reply) for reply in replies)
            print(f"  {prefill} to {decode}: {gave_up} of {len(replies)} hand-overs were given up", flush=True)
        network.between("a", "b")
        fleet.await_idle(60)


def a_link_that_loses_packets_is_waited_for():
    a_link_that_loses_packets("10s")


def a_link_that_loses_packets_is_given_up():
    a_link_that_loses_packets("1s")


def pages_behind_a_cut_link_are_computed_again():
    """b is told to read pages out of the arena of a, and hears nothing."""
    with spread_fleet(*SURE_HIT, "di-kvd:kv.admit=second_sighting") as (fleet, network):
        # So short that decode fills no page: what an answer is made of always goes to the store.
        fields = {**SHORT, "max_tokens": 4}
        fleet.place("a", "a")
        prompts = [words(1000, seed=81), words(1000, seed=82)]
        cold = [ask(fleet, prompt, **fields) for prompt in prompts]
        fleet.place("b", "b")
        network.between("a", "b", drop=True)
        # The first one finds the link so; with the second both hosts know.
        for i, prompt in enumerate(prompts):
            reply = ask(fleet, prompt, timeout=HUNG_AFTER_S, **fields)
            assert reply.text == cold[i].text, (reply.text, cold[i].text)
            if i == 0:
                wait_for(lambda: not fleet.linked(), "the hosts to miss each other")
        assert fleet.metric("di-kvd.hosta", "di_kv_served_pages_total") == 0
        network.between("a", "b")
        wait_for(fleet.linked, "the hosts to meet again")
        fleet.await_idle(60)


def a_host_is_cut_off_in_the_middle_of_its_streams():
    """It lives, nobody hears it, and it comes back with what nobody wants any more."""
    with spread_fleet("di-decode.b:fault.at=decode_mid_step:20=stop") as (fleet, network):
        fleet.place("a", "a")
        expected = undisturbed(fleet, True)
        fleet.place("a", "b")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(streams, fleet, True)
            wait_for(lambda: fleet.stopped_at("di-decode.b", "decode_mid_step"), "the middle of the streams")
            for other in ("a", "s"):
                network.between("b", other, drop=True)
            os.kill(fleet.pid("di-decode.b"), signal.SIGCONT)
            fleet.ctl("resume", "di-decode.a")
            replies = asked.result()
        compare(fleet, replies, expected, "cut off")
        assert any("reentry" in events(fleet, reply) for reply in replies), "nobody missed b"
        check(fleet, True, expected, "without b")
        for other in ("a", "s"):
            network.between("b", other)
        wait_for(lambda: members(fleet) == set(fleet.host_of) and fleet.linked(), "b to be back", 60)
        fleet.place("b", "b")
        check(fleet, True, expected, "b is back")
        fleet.await_idle(60)


# G11: the first packet of every new connection is swallowed, for longer than a peer may be silent.
def a_directory_that_swallows_packets_is_found_again():
    with spread_fleet() as (fleet, network):
        of_b = {instance for instance, host in fleet.host_of.items() if host == "b"}

        def misses(instance):
            # Whoever waits for a connection still answers.
            return "di-meta.0" not in fleet.peers_of(instance)
        network.between("b", "s", drop=True)
        wait_for(lambda: all(misses(instance) for instance in of_b) and not of_b & members(fleet), "both sides to know", 60)
        since = time.monotonic()
        wait_for(lambda: all(misses(instance) for instance in of_b) and time.monotonic() - since >= 10, "ten seconds of tries", 60)
        network.between("b", "s")
        since = time.monotonic()
        # The system's own patience with a connection would be two minutes.
        wait_for(lambda: of_b <= members(fleet), "b to be back", 20)
        print(f"  back after {time.monotonic() - since:.1f} s", flush=True)
        wait_for(fleet.linked, "the hosts to meet", 60)
        fleet.place("b", "b")
        reply = ask(fleet, words(300, seed=111), **SHORT)
        fleet.await_idle(60)


def one_bit_is_wrong(*overrides, encrypted, **kwargs):
    """On its way from a to b, past the checksums of TCP: found, counted, and the request completes."""
    with spread_fleet(*overrides, **kwargs) as (fleet, network):
        fleet.place("b", "b")
        prompt = words(2000, seed=91)
        alone = ask(fleet, prompt, cache_salt="alone", **SHORT)
        fleet.place("a", "b")
        apart = ask(fleet, prompt, cache_salt="apart", **SHORT)
        assert apart.text == alone.text, (apart.text, alone.text)

        def found():
            """Frames by what is wrong with them, pages, and how many reads were given up.

            When pages of the prompt are in the directory before its hand-over begins, b has asked for them, and no longer
            wants those that are on their way when the hand-over brings them: their frames are late, or nobody looks at them.
            """
            frames = {why: count for why, count in fleet.metric_by("di-kvd.hostb", "di_transfer_refused_total", "why").items()
                      if count}
            pages = sum(fleet.metric("di-kvd.hostb", name)
                        for name in ("di_kv_handover_pages_corrupt_total", "di_kv_reads_corrupt_total"))
            frames.pop("late", None)
            return frames, pages, fleet.metric("di-kvd.hostb", "di_kv_reads_cancelled_total")
        frames, pages, given_up = found()
        assert (frames, pages) == ({}, 0), (frames, pages)
        for again in range(5):
            network.set("a", "b", flip=1, port=fleet.data_port("di-kvd.hostb"))
            reply = ask(fleet, prompt, timeout=HUNG_AFTER_S, cache_salt=f"wrong {again}", **SHORT)
            assert reply.text == alone.text, (reply.text, alone.text)
            before, (frames, pages, given_up) = given_up, found()
            if frames or pages:
                break
            # A seal is looked at in any case.
            assert given_up > before and not encrypted, "a wrong bit went unnoticed"
        if encrypted:
            assert list(frames) == ["seal"] and pages == 0, (frames, pages)
        else:
            # A frame in the clear has nothing but its header to be wrong; the page shows it.
            assert "seal" not in frames and (frames or pages > 0), (frames, pages)
        fleet.await_idle(60)


def one_bit_of_a_page_is_wrong():
    one_bit_is_wrong(encrypted=False)


def one_bit_of_a_sealed_frame_is_wrong():
    one_bit_is_wrong(sealed=True, encrypted=True)


def one_bit_of_what_goes_between_zones_is_wrong():
    """It is sealed, whatever transfer.seal says."""
    one_bit_is_wrong("di-kvd.hosta:net.zone=north", "di-kvd.hostb:net.zone=south", encrypted=True)


if __name__ == "__main__":
    try:
        Network(["a"]).close()
    except Unavailable as why:
        print(f"[SKIP] network namespaces: {why}", flush=True)
        sys.exit(77)
    main([a_prefix_survives_its_host_in_the_clear, a_prefix_survives_its_host_sealed,
          a_di_kvd_with_a_wrong_key_does_not_join,
          the_link_is_cut_in_both_directions, the_link_is_cut_from_a_to_b, the_link_is_cut_from_b_to_a,
          on_a_slow_link_a_hand_over_waits, a_link_that_is_too_slow_is_given_up,
          where_nobody_reads_near_the_seat_the_pages_wait_for_the_link,
          a_link_that_loses_packets_is_waited_for, a_link_that_loses_packets_is_given_up,
          pages_behind_a_cut_link_are_computed_again, a_host_is_cut_off_in_the_middle_of_its_streams,
          a_directory_that_swallows_packets_is_found_again,
          one_bit_of_a_page_is_wrong, one_bit_of_a_sealed_frame_is_wrong,
          one_bit_of_what_goes_between_zones_is_wrong])
