"""The cache: the same prompt twice, across the death of every daemon, and isolated between users."""

import itertools
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from asking import BLOCK_TOKENS, ask, ask_cold, ask_hit, meanwhile, read_back  # noqa: E402
from faults import engine_overrides  # noqa: E402
from fleet import PATIENCE, SOURCE, SURE_HIT, Fleet, everybody_is_there, main, members, wait_for, words, write_backs_done  # noqa: E402
from spread import GrowingFleet  # noqa: E402
from stores import inventories_taken, nothing_is_wrong  # noqa: E402
from volume import SUPERBLOCK  # noqa: E402


# D03, D04: the prompt that was asked before, and once more when every process is another one.
def twice_and_after_killing_everything():
    fleet = Fleet(overrides=[*SURE_HIT])
    try:
        prompt = words(2000)
        cold = ask_cold(fleet, prompt, max_tokens=24)
        tokens = cold.usage["prompt_tokens"]
        assert tokens >= 2000, tokens
        hit = ask_hit(fleet, prompt, 0.9 * tokens, max_tokens=24)
        assert hit.text == cold.text
        sizes = fleet.ctl("show", "missratio")
        present = next(r for r in sizes if r["present"])
        # All of the store is room enough for one prompt: only its first time was a miss.
        assert present["capacity_bytes"] == fleet.metric("di-meta.0", "di_meta_capacity_bytes") > 0, sizes
        assert present["miss_ratio"] <= 0.5 < sizes[0]["miss_ratio"], sizes
        assert [r["capacity_bytes"] for r in sizes] == sorted({r["capacity_bytes"] for r in sizes}), sizes
        usage = hit.usage
        assert usage["prompt_cache_hit_tokens"] == hit.cached()
        assert usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"] == tokens
        write_backs_done(fleet)

        def arena(asked):
            row = next(r for r in fleet.ctl("-d", asked, "show", "kv") if r["place"] == "di-kvd.host0")
            return {name: row[name] for name in ("pages", "blocks", "bytes")}
        wait_for(lambda: arena("di-meta.0") == arena("di-kvd.host0"), "the directory and the host to count alike")
        assert arena("di-kvd.host0")["blocks"] > 0, arena("di-kvd.host0")
        fleet.kill_all()
        fleet.up()
        # The store's inventory is in the directory as soon as the prompt hits again.
        def warm():
            reply = ask(fleet, prompt, max_tokens=24)
            assert reply.text == cold.text, "another text from the store's pages"
            return reply.cached() > 0.9 * tokens
        wait_for(warm, "a hit after everything was killed", 60)
        fleet.await_idle(60)
    finally:
        fleet.close()


def a_volume_in_a_folder_is_found_again_after_killing_everything():
    with tempfile.TemporaryDirectory(prefix="di-far-") as far:
        volume = f'di-kvd.store0:store.volumes=["path:{far}/kv"]'
        with Fleet(overrides=[*SURE_HIT, volume, "di-kvd.store0:store.capacity=16MiB"]) as fleet:
            prompt = words(1000, seed=7)
            cold = ask(fleet, prompt, max_tokens=4)
            write_backs_done(fleet)
            row = fleet.ctl("show", "volumes")[0]
            assert row["path"] == f"path:{far}/kv" and row["state"] == "up" and row["columns"] > 0, row
            assert sorted(os.listdir(f"{far}/kv")) == ["lock", "part.0"] and os.listdir(far) == ["kv"]
            fleet.kill_all()
            fleet.up()

            def warm():
                reply = ask(fleet, prompt, max_tokens=4)
                assert reply.text == cold.text, "another text from the store's pages"
                return reply.cached() > 0.9 * cold.usage["prompt_tokens"]
            wait_for(warm, "a hit after everything was killed", 60)
            fleet.await_idle(60)


def cold_hit_and_sampled_are_equal_with_a_seed():
    with Fleet(overrides=[*SURE_HIT]) as fleet:
        prompt = words(700, seed=2)
        sampled = dict(temperature=2, seed=7, max_tokens=40, ignore_eos=True)
        cold = ask(fleet, prompt, **sampled)
        hit = ask_hit(fleet, prompt, 1, **sampled)
        assert cold.text == hit.text
        other = ask(fleet, prompt, **{**sampled, "seed": 8})
        assert other.text != cold.text, "the seed has no effect"


# D02: the same prompt of two tenants.
def users_and_salts_do_not_share():
    with Fleet(overrides=[*SURE_HIT]) as fleet:
        prompt = words(300, seed=3)
        assert fleet.chat(prompt, max_tokens=2).cached() == 0
        ask_hit(fleet, prompt, 1, max_tokens=2)
        assert fleet.chat(prompt, max_tokens=2, cache_salt="s").cached() == 0
        assert fleet.chat(prompt, max_tokens=2, user_id="u").cached() == 0
        ask_hit(fleet, prompt, 1, max_tokens=2, cache_salt="s")


# D05: the router's blocks are those of the ranks that are there, here of 64 tokens; a rank with others does not join.
def ranks_with_other_blocks_do_not_join():
    rows = [*engine_overrides(False), *SURE_HIT,
            *(f"{i}:engine.script_layout=v3" for i in ("di-prefill.0", "di-prefill.1", "di-decode"))]
    other = {"di-prefill.2": ("di-prefill.1", {'name = "1"': 'name = "2"'})}
    with GrowingFleet(SOURCE / "tests/integration/two-of-each", rows, spare=other) as fleet:
        prompt = words(200, seed=8)
        cold = ask_cold(fleet, prompt, max_tokens=4)

        def hits():
            hit = ask_hit(fleet, prompt, 1, max_tokens=4)
            assert hit.cached() == (hit.usage["prompt_tokens"] - 1) // 64 * 64 and hit.text == cold.text, hit.usage
        hits()
        fleet.list_spare("di-prefill.2")
        error = fleet.up_fails()
        assert "already: this one has layout" in error, error
        assert "di-prefill.2" not in members(fleet)
        hits()


# The router knows the weights from the ranks; it took those of the first one for ever.
def new_weights_behind_a_running_router_do_not_find_the_pages_of_the_old_ones():
    def weights(digit):
        return [f"{program}:model.revision={digit * 64}" for program in ("di-prefill", "di-decode")]
    engine = [*engine_overrides(False), *SURE_HIT]
    ranks = ("di-prefill.0", "di-decode.0")
    with Fleet(overrides=[*engine, *weights("1")]) as fleet:
        prompt = words(300, seed=9)
        kept = fleet.pid("di-router.0")
        ask_cold(fleet, prompt, max_tokens=4)
        full = ask_hit(fleet, prompt, 1, max_tokens=4).cached()
        for digit, found in (("2", 0), ("1", full)):
            for rank in ranks:
                fleet.kill(rank, signal.SIGTERM)
            wait_for(lambda: not any(fleet.alive(rank) for rank in ranks), "the ranks to end")
            fleet.overrides = [*engine, *weights(digit)]
            fleet.up()
            assert fleet.pid("di-router.0") == kept
            # Once more with the old ones: what they wrote is theirs.
            assert ask(fleet, prompt, max_tokens=4).cached() == found, digit
            ask_hit(fleet, prompt, full, max_tokens=4)
        fleet.await_idle(60)


def a_hosts_news_comes_before_the_question_of_who_has_heard_of_it():
    """di-meta finds both when it looks up again, the host's pages and a match for them: it reads its peers in turns."""
    with Fleet(overrides=[*SURE_HIT]) as fleet:
        pid = fleet.pid("di-meta.0")
        # What an instrumented engine reads in the seconds after which a silent di-meta is lost.
        length = 1500 if PATIENCE == 1 else 200
        prompt = words(length, seed=6)
        replies = {}

        def client(name):
            replies[name] = ask(fleet, prompt, max_tokens=2)
        first = threading.Thread(target=client, args=["first"])
        first.start()
        wait_for(lambda: fleet.metric("di-meta.0", "di_meta_matches_total") == 1, "the first match")
        os.kill(pid, signal.SIGSTOP)
        try:
            first.join()
            second = threading.Thread(target=client, args=["second"])
            second.start()
            wait_for(lambda: fleet.ctl("-d", "di-router.0", "show", "requests"), "the second request to be there")
        finally:
            os.kill(pid, signal.SIGCONT)
        second.join()
        assert replies["first"].cached() == 0 and replies["second"].cached() >= 0.6 * length, [r.usage for r in replies.values()]


def what_a_stores_write_budget_does_not_allow_stays_in_the_arena():
    budget = 1 << 20  # a day
    with Fleet(overrides=[*SURE_HIT, "di-kvd.store0:store.service_life=1d",
                          f"di-kvd.store0:store.endurance={budget * 11 // 10}B"]) as fleet:
        inventories_taken(fleet)  # before that a put is answered with busy, and tried again
        volume = lambda: fleet.ctl("show", "volumes")[0]
        prompts = [words(1000, seed=20 + i) for i in range(16)]
        asked = []
        for prompt in prompts:
            asked.append(ask(fleet, prompt, max_tokens=2))
            write_backs_done(fleet)
            if volume()["vetoes"]:
                break
        row = volume()
        assert row["vetoes"] and row["vetoed_bytes"] and row["budget_spent"] and row["state"] == "up", row
        assert row["budget_bytes_per_day"] in (budget, budget - 1) and row["budget_left_bytes"] < budget, row
        assert 0 < row["written_bytes"] < budget * 11 // 10 and row["columns"] > 0 and row["days_of_life"] < 36500, row
        # di-meta places nothing there any more, nobody tries again, and nothing is evicted.
        ask(fleet, words(1000, seed=19), max_tokens=2)
        write_backs_done(fleet)
        assert volume()["vetoes"] == row["vetoes"], volume()
        counts = {(r["name"], r.get("labels") or ""): r["value"] for r in fleet.ctl("show", "metrics")
                  if r["name"].startswith(("di_kv_writebacks", "di_meta_puts", "di_meta_stripes_total"))}
        of = lambda name, label: sum(v for (n, l), v in counts.items() if n == name and label in l)
        assert of("di_kv_writebacks_dropped_total", "over_budget") > row["vetoes"], counts
        assert of("di_meta_puts_total", "over_budget") > 0 and of("di_meta_stripes_total", "evicted") == 0, counts
        assert of("di_kv_writebacks_retried_total", "") == 0, counts
        for prompt, cold in zip(prompts, asked):
            hit = ask_hit(fleet, prompt, 0.9 * cold.usage["prompt_tokens"], max_tokens=2)
            assert hit.text == cold.text
        # A restart gives no new day, and forgets nothing of what was written but the page of the last superblock, which
        # says what was written before it.  Whether it came before `row` was read depends on the machine.
        fleet.kill("di-kvd.store0", signal.SIGTERM)
        wait_for(lambda: not fleet.alive("di-kvd.store0"), "the end of di-kvd.store0")
        fleet.up()
        again = volume()
        assert again["written_bytes"] >= row["written_bytes"] - SUPERBLOCK and again["budget_left_bytes"] < budget // 2, (row, again)
        fleet.await_idle(60)


def post(fleet, path, **body):
    status, _, data = fleet.request("POST", path, json.dumps({"model": "demo", **body}))
    assert status == 200, data
    return json.loads(data)


def stored_blocks(fleet):
    return sum(row["blocks"] for row in fleet.ctl("-d", "di-meta.0", "show", "kv") if row["tier"] == "store")


# F22: the blocks of the answer too, to the last full one, and out of the store.
def the_next_turn_of_a_conversation_hits_the_answer_too():
    with Fleet(overrides=[*SURE_HIT]) as fleet:
        greedy = dict(temperature=0, ignore_eos=True)
        for seed in range(4, 20):
            prompt = words(100, seed=seed)
            write_backs_done(fleet)
            before = stored_blocks(fleet)
            answer = post(fleet, "/v1/completions", prompt=prompt, max_tokens=200, **greedy)
            turn = prompt + answer["choices"][0]["text"]
            tokens = answer["usage"]["total_tokens"]
            # Not every answer of the demo model is read as the tokens that it was written in.
            if post(fleet, "/tokenize", prompt=turn)["count"] == tokens:
                break
        else:
            raise AssertionError("no answer is read as it was written")
        write_backs_done(fleet)
        stored = stored_blocks(fleet) - before
        fleet.ctl("kv", "drop", "arena", "di-kvd.host0")
        next_turn = post(fleet, "/v1/completions", prompt=turn + words(20, seed=1), max_tokens=4, **greedy)
        cached = next_turn["usage"]["prompt_tokens_details"]["cached_tokens"]
        # The last token was sampled and never computed with.
        assert cached == (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS, (cached, tokens)
        assert stored == cached // BLOCK_TOKENS, (stored, cached)


# F10: a file that is gone.  What is flipped or cut short: damage_test.py, fleet_test.py, and beside the code.
def a_volume_that_was_deleted_is_made_anew_and_its_keys_are_misses():
    store, host = "di-kvd.store0", "di-kvd.host0"
    with Fleet(overrides=[*SURE_HIT]) as fleet:
        texts = {prompt: ask_cold(fleet, prompt, max_tokens=8).text for prompt in [words(900, seed=30 + i) for i in range(2)]}
        write_backs_done(fleet)
        ranks = {i: fleet.pid(i) for i in fleet.instances() if i != store}
        fleet.kill(store)
        wait_for(lambda: not fleet.alive(store), "the end of the store")
        (fleet.run / f"{store}.volume").unlink()
        fleet.up()
        inventories_taken(fleet)
        assert fleet.metric("di-meta.0", "di_meta_stripes_total{event=missing}") > 0
        fleet.ctl("kv", "drop", "arena", host)
        for prompt, text in texts.items():
            assert ask_cold(fleet, prompt, max_tokens=8).text == text
        write_backs_done(fleet)
        read_back(fleet, texts, host, max_tokens=8)
        assert {i: fleet.pid(i) for i in ranks if fleet.alive(i)} == ranks
        fleet.await_idle(60)


# F08.
def kills_in_the_middle_of_writes_leave_no_file_behind():
    store, host = "di-kvd.store0", "di-kvd.host0"
    fleet = Fleet(expect_failure=True, overrides=[*SURE_HIT])
    # What a start left that was killed before its volume was whole.
    (fleet.run / f"{store}.volume.new").write_bytes(bytes(1 << 20))
    with fleet.up():
        files = lambda: {path.name: path.stat().st_size for path in fleet.run.glob(f"{store}.volume*")}
        one = files()
        assert set(one) == {f"{store}.volume"}, one
        texts = {}
        seeds = itertools.count(40)

        def client():
            prompt = words(500, seed=next(seeds))
            texts[prompt] = ask(fleet, prompt, max_tokens=8).text
        for _ in range(10):
            with meanwhile(client):
                put = fleet.metric(store, "di_store_puts_total{outcome=done}")
                wait_for(lambda: fleet.metric(store, "di_store_puts_total{outcome=done}") > put + 1, "writes")
                fleet.kill(store)
            wait_for(lambda: not fleet.alive(store), "the end of the store")
            fleet.up()
            everybody_is_there(fleet)
            assert files() == one, files()
        inventories_taken(fleet)
        write_backs_done(fleet)
        read_back(fleet, texts, host, whole=False, max_tokens=8)
        nothing_is_wrong(fleet)
        fleet.await_idle(60)


# G03, G04: there is no standby; a lost di-meta means cold service, and nobody is restarted for it.
def the_directory_away_means_cold_not_down():
    with Fleet(overrides=[*SURE_HIT]) as fleet:
        prompt = words(300, seed=5)
        warm = ask(fleet, prompt, max_tokens=8)
        pids = {i: fleet.pid(i) for i in fleet.instances() if i != "di-meta.0"}
        fleet.kill("di-meta.0")
        assert fleet.request("GET", "/health/live", headers={})[0] == 200
        cold = ask(fleet, prompt, max_tokens=8)
        assert cold.text == warm.text, cold.text
        assert fleet.request("GET", "/health/live", headers={})[0] == 200
        assert all(fleet.alive(i) and fleet.pid(i) == pid for i, pid in pids.items()), pids


def a_store_without_parity_is_emptied_while_it_can_be_read():
    full, empty, host = "di-kvd.store0", "di-kvd.store1", "di-kvd.host0"
    with GrowingFleet(SOURCE / "tests/integration/two-of-each", SURE_HIT, spare={empty: (full, {"store0": "store1"})}) as fleet:
        texts = {prompt: ask_cold(fleet, prompt, max_tokens=8).text for prompt in [words(900, seed=seed) for seed in range(3)]}
        write_backs_done(fleet)
        columns = fleet.metric(full, "di_store_slots")
        assert columns > 0
        fleet.add_spare(empty)
        wait_for(lambda: empty in members(fleet), "the other store to come")
        fleet.ctl("kv", "drain", full)
        wait_for(lambda: fleet.ctl("kv", "drain")[0]["columns"] == 0, "the store to be empty", 60)
        assert fleet.metric(empty, "di_store_slots") == columns
        assert fleet.metric(host, "di_kv_repair_copies_total") == columns
        wait_for(lambda: fleet.metric(full, "di_store_slots") == 0, "what it had to be freed", 60)
        fleet.kill(full)
        wait_for(lambda: full not in members(fleet), "the store to be missed")
        read_back(fleet, texts, host, max_tokens=8)
        fleet.await_idle(60)


if __name__ == "__main__":
    main([twice_and_after_killing_everything, a_volume_in_a_folder_is_found_again_after_killing_everything,
          cold_hit_and_sampled_are_equal_with_a_seed, users_and_salts_do_not_share,
          ranks_with_other_blocks_do_not_join,
          new_weights_behind_a_running_router_do_not_find_the_pages_of_the_old_ones, a_store_without_parity_is_emptied_while_it_can_be_read,
          what_a_stores_write_budget_does_not_allow_stays_in_the_arena,
          a_hosts_news_comes_before_the_question_of_who_has_heard_of_it,
          the_next_turn_of_a_conversation_hits_the_answer_too,
          a_volume_that_was_deleted_is_made_anew_and_its_keys_are_misses, kills_in_the_middle_of_writes_leave_no_file_behind,
          the_directory_away_means_cold_not_down])
