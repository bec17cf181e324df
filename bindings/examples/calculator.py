#!/usr/bin/env python3
"""A service that calculates, and its client, in Python. calculator.c describes the protocol and the arguments, which are the
same in all languages."""

import argparse
import re
import sys
import time

import tombolo

NOT_UNDERSTOOD = 1
DIVISION_BY_ZERO = 2
OPERATORS = {"+": float.__add__, "-": float.__sub__, "*": float.__mul__, "/": float.__truediv__}


def calculate(text):
    """The result in words; raises what the client gets as code and text."""
    words = text.split()
    # float alone would take "inf" and "1_0", too.
    fine = len(words) == 3 and words[1] in OPERATORS and all(re.fullmatch(r"[0-9.eE+-]+", word) for word in words[::2])
    try:
        a, b = (float(word) for word in words[::2]) if fine else (None, None)
    except ValueError:
        fine = False
    if not fine:
        raise tombolo.Failure(NOT_UNDERSTOOD, 'expected "A + B", with + - * or /')
    if words[1] == "/" and b == 0:
        raise tombolo.Failure(DIVISION_BY_ZERO, "division by zero")
    shown = f"{OPERATORS[words[1]](a, b):.6f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def serve(arguments):
    def handler(request):
        if arguments.delay_ms:
            print("working", flush=True)
            time.sleep(arguments.delay_ms / 1000)
        return calculate(request.data.decode(errors="replace"))

    with tombolo.Service(arguments.name, handler, workers=2, budget=50e-6, admission=True) as service:
        print("serving", flush=True)
        service.wait()


def call(arguments):
    with tombolo.Client(arguments.name) as client:
        reply = client.call(arguments.text, within=arguments.within_ms / 1000, timeout=arguments.timeout_ms / 1000)
    print(f"code {reply.code}: " if reply.code else "", reply.data.decode(), sep="")
    return 1 if reply.code else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="calculator")
    parser.add_argument("--delay-ms", type=int, default=0)
    parser.add_argument("--within-ms", type=int, default=5)
    parser.add_argument("--timeout-ms", type=int, default=30000)
    parser.add_argument("text", nargs="?")
    arguments = parser.parse_args()
    try:
        return serve(arguments) if arguments.text is None else call(arguments)
    except tombolo.Error as error:
        print(f"error: {error.status}")
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # What a shell says of a program that ^C ended.
        return 130


if __name__ == "__main__":
    sys.exit(main())
