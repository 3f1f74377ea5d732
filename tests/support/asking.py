"""What tests ask of a fleet, and how it has to come back: whole, the same text as before, out of the cache as far as
anything can be, and meanwhile.
"""

import concurrent.futures
import contextlib
import threading

BLOCK_TOKENS = 32  # of the demo model


def ask(fleet, prompt, **fields):
    """An answer that came whole; greedy unless `fields` say otherwise."""
    reply = fleet.chat(prompt, **{"temperature": 0, **fields})
    assert reply.status == 200 and reply.done and not reply.cut and not reply.error, (reply.status, reply.error)
    return reply


def ask_cold(fleet, prompt, **fields):
    """The same of a prompt that was never asked before."""
    reply = ask(fleet, prompt, **fields)
    assert reply.cached() == 0, reply.usage
    return reply


def ask_hit(fleet, prompt, at_least, **fields):
    """The same of a prompt of which so many tokens are cached by now: the directory knows a page before the answer that
    made it is over.  For fleets with SURE_HIT."""
    reply = ask(fleet, prompt, **fields)
    assert reply.cached() >= at_least, f"{reply.cached()} tokens cached, expected {at_least}\n{told(fleet, reply)}"
    return reply


def cacheable(reply):
    """What a cache that lost nothing serves: all full blocks before the last token, which is always computed."""
    return (reply.usage["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def told(fleet, reply):
    """The life of a request, for whoever reads that a test failed."""
    return "\n".join(str(row) for row in fleet.ctl("explain", reply.request_id, check=False)) if reply.request_id else ""


def read_back(fleet, texts, host, what="", whole=True, **fields):
    """Every prompt of `texts` with nothing of it in the arena of `host`: the text as it was and, whole, every block of
    it was cached.  The replies."""
    replies = []
    for prompt, text in texts.items():
        fleet.ctl("kv", "drop", "arena", host)
        reply = ask(fleet, prompt, **fields)
        assert reply.text == text, f"{what}: another text"
        replies.append(reply)
    for reply in replies if whole else ():
        assert reply.cached() == cacheable(reply), (what, [(r.cached(), cacheable(r)) for r in replies], told(fleet, reply))
    return replies


@contextlib.contextmanager
def meanwhile(*clients):
    """Each of them again and again, in a thread of its own; what one raised is raised when all are through."""
    stop = threading.Event()

    def go_on(client):
        while not stop.is_set():
            client()
    with concurrent.futures.ThreadPoolExecutor(len(clients)) as pool:
        running = [pool.submit(go_on, client) for client in clients]
        try:
            yield
        finally:
            stop.set()
    for one in running:
        one.result()
