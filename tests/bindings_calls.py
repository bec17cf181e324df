"""Calls between Rust, C, C++ and Python: the calculator of each language with that of each other, and each binding by itself.

What is called is in build/bindings (tools/bindings.py)."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from lib import Process, scratch, timeout, until

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build/bindings"
PYTHON = BUILT / "venv/bin/python"
CALCULATORS = {
    "rust": [BUILT / "calculator-rust"],
    "c": [BUILT / "calculator-c"],
    "c++": [BUILT / "calculator-cpp"],
    "python": [PYTHON, ROOT / "bindings/examples/calculator.py"],
}
PATIENCE_S = 120
# Time enough for any machine: what is late is so by far.
IN_TIME = ["--within-ms", 200000]
# What is asked, the code that the client ends with, and what it prints.
QUESTIONS = [
    (["6 * 7", *IN_TIME], 0, "42"),
    (["1 / 3", *IN_TIME], 0, "0.333333"),
    (["-2.50 + 1e3", *IN_TIME], 0, "997.5"),
    (["6 times 7", *IN_TIME], 1, 'code 1: expected "A + B", with + - * or /'),
    (["inf + 0x10", *IN_TIME], 1, 'code 1: expected "A + B", with + - * or /'),
    (["1 / 0", *IN_TIME], 1, "code 2: division by zero"),
    (["6 * 7", "--within-ms", 0], 2, "error: deadline-exceeded"),
]


@contextlib.contextmanager
def services():
    """A folder for services, as environment."""
    with scratch() as folder:
        yield {"TOMBOLO_RUNTIME": str(folder)}


def calculator(language, *words, environment):
    return Process([*CALCULATORS[language], *words], name=f"calculator in {language}", env=environment)


def connections(environment):
    """How many clients are connected to the service of that folder: the ends of sockets that are bound there, without the one that listens."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    # Flags 00010000: it listens (__SO_ACCEPTCON).
    return sum(environment["TOMBOLO_RUNTIME"] in line and line.split()[3] != "00010000" for line in lines)


def ends(client, code, line):
    """The client ends so; what else it says is for people."""
    found = client.wait(PATIENCE_S)
    assert found == code and line in client.text.splitlines(), f"{client.name} ended with {found}, expected {code} and {line!r}:\n{client.tail()}"


@timeout(600)
def test_each_language_calls_each():
    """16 pairs: results, codes of the application, a deadline that had passed."""
    with services() as environment:
        for serving in CALCULATORS:
            with calculator(serving, environment=environment) as service:
                service.wait_line(lambda line: line == "serving", PATIENCE_S)
                for calling in CALCULATORS:
                    for words, code, line in QUESTIONS:
                        with calculator(calling, *words, environment=environment) as client:
                            ends(client, code, line)
                    print(f"{calling} called {serving}")


@timeout(600)
def test_each_language_is_late_and_loses_each():
    """16 pairs: a deadline that passes while the request waits, and a provider that is killed while it serves or has yet to."""
    with services() as environment:
        for serving in CALCULATORS:
            with contextlib.ExitStack() as stack:
                start = lambda language, *words: stack.enter_context(calculator(language, *words, environment=environment))  # noqa: E731,B023
                service = start(serving, "--delay-ms", 600000)
                service.wait_line(lambda line: line == "serving", PATIENCE_S)
                # The first two are being served, by both workers, when the others come.
                clients = [start(calling, "6 * 7", *IN_TIME) for calling in CALCULATORS]
                _, _, first = service.wait_line(lambda line: line == "working", PATIENCE_S)
                service.wait_line(lambda line: line == "working", PATIENCE_S, first + 1)
                until("all clients to be connected", lambda: connections(environment) == len(clients))
                for calling in CALCULATORS:
                    ends(start(calling, "6 * 7", "--within-ms", 50), 2, "error: deadline-exceeded")
                service.kill()
                killed = time.monotonic()
                for client in clients:
                    ends(client, 2, "error: provider-gone")
                assert time.monotonic() - killed < 20, "told at once"
                # The next service of the name replaces the socket, in whichever language it is.
                ends(start("rust", "6 * 7"), 2, "error: no-service")
                print(f"all were late at and lost {serving}")


def test_a_python_service_that_is_interrupted_ends_without_a_traceback():
    with services() as environment, calculator("python", environment=environment) as service:
        service.wait_line(lambda line: line == "serving", PATIENCE_S)
        service.signal(signal.SIGINT)
        ends(service, 130, "serving")
        assert "Traceback" not in service.text, service.tail()


def test_python_without_the_library_says_where_it_is_looked_for():
    for library in [None, "/no/such/libtombolo.so"]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "bindings/python"), **({"TOMBOLO_LIBRARY": library} if library else {})}
        found = subprocess.run(["python3", "-c", "import tombolo"], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        last = found.stderr.splitlines()[-1]
        assert found.returncode == 1 and last.startswith("ImportError") and "target/release/libtombolo.so" in last, found.stderr


def test_what_a_calculator_is_asked_wrongly_is_told_with_what_it_expects():
    for language in ["rust", "c", "c++"]:
        with services() as environment, calculator(language, "--bogus", environment=environment) as client:
            found = client.wait(PATIENCE_S)
            assert found == 2 and "--bogus: expected [--name NAME]" in client.text, f"{language}: {client.tail()}"


def test_the_static_library():
    with services() as environment, Process([BUILT / "calculator-c-static"], env=environment) as service:
        service.wait_line(lambda line: line == "serving", PATIENCE_S)
        with calculator("rust", "6 * 7", *IN_TIME, environment=environment) as client:
            ends(client, 0, "42")


def test_the_library_exports_what_the_header_declares():
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "bindings/include/tombolo.h").read_text(), flags=re.S)
    declared = set(re.findall(r"\b(tombolo_\w+)\([^()]*\);", header))
    symbols = subprocess.run(["nm", "-D", "--defined-only", BUILT / "libtombolo.so"], check=True, stdout=subprocess.PIPE, text=True).stdout
    exported = {line.split()[-1] for line in symbols.splitlines()}
    assert len(declared) > 25 and exported == declared, f"only in the header: {declared - exported}; only exported: {exported - declared}"


@timeout(600)
def test_memory_from_c():
    with scratch() as folder:
        subprocess.run([BUILT / "memory", folder], check=True, timeout=120)


@timeout(600)
def test_the_cpp_wrapper():
    with scratch() as folder:
        subprocess.run([BUILT / "wrapper", folder], check=True, timeout=120)


@timeout(600)
def test_the_python_module():
    with services() as environment:
        command = [PYTHON, ROOT / "bindings/tests/module.py", "-v", ROOT / "bindings/include/tombolo.h"]
        # From elsewhere, and isolated: what is tested is what the wheel installed.
        subprocess.run([*command[:1], "-I", *command[1:]], check=True, timeout=120, cwd=environment["TOMBOLO_RUNTIME"], env={**os.environ, **environment})
