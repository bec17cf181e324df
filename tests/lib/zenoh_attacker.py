"""A machine that speaks zenoh itself, run by the Python of build/zenoh: `zenoh_attacker.py KEYS NAME ENDPOINT WHAT SECONDS`.

It proves to be NAME with the keys of that folder, and does one thing for some seconds:
  listen  subscribes to everything that it can, and prints the key of each message
  forge   speaks under other names: calls, ends of those that it hears, changes, tokens, answers; and a bad change under its own, each time
  flood   opens connections for calls without end, and sends garbage below its own name; prints how many it opened, and how each one that it
          hears of was ended
  stall   opens connections, and reads nothing
"""

import collections
import json
import os
import signal
import struct
import sys
import time

import zenoh

BASE = "tombolo/default"
OTHERS = ("node-1", "node-2")
# Why a connection ended, as in crates/span/src/stream.rs.
ENDINGS = ("closed", "absent", "full", "unknown", "lost", "broken", "gone")


def opened(keys, name, endpoint):
    config = zenoh.Config()
    tls = {"root_ca_certificate": f"{keys}/ca.pem", "enable_mtls": True, "verify_name_on_connect": False,
           "connect_certificate": f"{keys}/{name}.pem", "connect_private_key": f"{keys}/{name}.key"}
    for key, value in (("mode", "client"), ("connect/endpoints", [endpoint]), ("connect/timeout_ms", 0), ("connect/exit_on_failure", True),
                       ("scouting/multicast/enabled", False), ("transport/link/tls", tls)):
        config.insert_json5(key, json.dumps(value))
    return zenoh.open(config)


def message(kind, number, content=b"", side=0):
    """As in crates/span/src/stream.rs: 1 open, 3 data, 5 end."""
    return b"TSC\x01" + struct.pack("<BBBBQQ", kind, side, 0, 0, number, 0) + content


def say(text):
    """A line as a whole, whichever of zenoh's threads says it."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


def until(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


def listen(session, name, seconds):
    handlers = [session.declare_subscriber(key, lambda sample: say(f"heard {sample.key_expr}"))
                for key in (f"{BASE}/**", f"{BASE}/*/calls/*", *(f"{BASE}/*/calls/{other}" for other in OTHERS), f"{BASE}/*/change")]
    handlers.append(session.liveliness().declare_subscriber(f"{BASE}/*/here", lambda sample: say(f"heard {sample.key_expr}"), history=True))
    say("begins")
    time.sleep(seconds)
    del handlers


def forge(session, name, seconds):
    def cut(sample):
        """Ends a connection in the name of the machine that speaks."""
        head = bytes(sample.payload.to_bytes())
        if head[4] != 5:
            session.put(sample.key_expr, message(5, *struct.unpack("<Q", head[8:16]), side=head[5]))

    kept = [session.declare_subscriber(f"{BASE}/*/calls/*", cut)]
    for other in OTHERS:
        kept.append(session.liveliness().declare_token(f"{BASE}/{other}/here"))
        kept.append(session.declare_queryable(f"{BASE}/{other}/state", lambda query: query.reply(query.key_expr, b"x" * 64), complete=True))
    say("begins")
    for _ in until(seconds):
        for one, two in (OTHERS, OTHERS[::-1]):
            session.put(f"{BASE}/{one}/calls/{two}", message(1, 7))
            session.put(f"{BASE}/{one}/change", b"x" * 64)
        # So that the same words under its own name show that they arrive.
        session.put(f"{BASE}/{name}/change", b"x" * 64)
        time.sleep(0.001)


def flood(session, name, seconds):
    ends = collections.Counter()

    def ended(sample):
        head = bytes(sample.payload.to_bytes())
        if head[4] == 5:
            ends[ENDINGS[head[6]]] += 1

    kept = [session.declare_subscriber(f"{BASE}/{other}/calls/{name}", ended) for other in OTHERS]
    # As calls have it.
    publishers = [session.declare_publisher(f"{BASE}/{name}/calls/{other}", congestion_control=zenoh.CongestionControl.BLOCK,
                                            priority=zenoh.Priority.INTERACTIVE_HIGH, express=True) for other in OTHERS]
    say("begins")
    number = 0
    for _ in until(seconds):
        for publisher in publishers:
            number += 1
            publisher.put(message(1, number))
            publisher.put(message(3, number, b"\xa5" * 32768))
            publisher.put(message(3, number + (1 << 60), b"\xa5" * 1000))
            publisher.put(os.urandom(3000))
    print(json.dumps({"opened": number, **ends}), flush=True)
    del kept


def stall(session, name, seconds):
    say("begins")
    for number in range(2000):
        session.put(f"{BASE}/{name}/calls/{OTHERS[0]}", message(1, number))
        # A message of no connection has an answer.
        session.put(f"{BASE}/{name}/calls/{OTHERS[0]}", message(3, number + (1 << 60), b"x"))
    # Answers to these are sent by the thread of zenoh itself.
    for _ in range(2000):
        session.liveliness().get(f"{BASE}/*/here", lambda reply: None)
        # Answers to these by a thread of the machine's own; no more than 256 of them wait for it.
        session.get(f"{BASE}/{OTHERS[0]}/state", lambda reply: None, payload=b"x")
    # All threads stop, so the link's buffers fill.
    os.kill(os.getpid(), signal.SIGSTOP)


def main():
    keys, name, endpoint, what, seconds = sys.argv[1:]
    zenoh.init_log_from_env_or("off")
    try:
        session = opened(keys, name, endpoint)
    except zenoh.ZError as error:
        sys.exit(f"refused: {error}")
    with session:
        {"listen": listen, "forge": forge, "flood": flood, "stall": stall}[what](session, name, float(seconds))


if __name__ == "__main__":
    main()
