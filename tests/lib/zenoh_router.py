"""A router of zenoh, run by the Python of build/zenoh: `zenoh_router.py CONFIG` routes until a signal.

It is the library of zenoh that its authors publish on PyPI (eclipse-zenoh), opened in the mode that zenohd opens it in: "router", with a
settings file of zenohd. It takes seconds to install; tests/span_zenohd.py has zenohd itself, which takes ten minutes to build.
"""

import signal
import sys

import zenoh


def main():
    zenoh.init_log_from_env_or("error")
    with zenoh.open(zenoh.Config.from_file(sys.argv[1])) as session:
        print(f"router {session.info.zid()}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
