"""What does not end well: one class for each status, all of them Error."""

from ._library import REFUSALS, STATUSES, lib


class Error(Exception):
    """Base of all; `status` is its name, the same in all languages."""

    status = "unknown"


class Refused(Error):
    """The service did not accept the call; `reason` is why: queue-full, admission, memory, reply-memory or stopping."""

    status = "refused"
    reason = "none"


def _class(status):
    name = "".join(word.capitalize() for word in status.split("-"))
    # Callers that know nothing of this module catch what Python itself has for the same.
    also = {
        "timeout": (TimeoutError,),
        "deadline-exceeded": (TimeoutError,),
        "provider-gone": (ConnectionError,),
        "no-service": (ConnectionError,),
    }.get(status, ())
    return type(name, (Error, *also), {"status": status, "__doc__": f"The status `{status}` of docs/rpc-languages.md.", "__module__": __name__})


CLASSES = {status: Refused if status == "refused" else _class(status) for status in STATUSES[2:]}
globals().update({kind.__name__: kind for kind in CLASSES.values()})
__all__ = ["Error", *sorted(kind.__name__ for kind in CLASSES.values())]


def check(status):
    """Raises what a status of C's means, unless that is ok."""
    if status == 0:
        return
    kind = CLASSES.get(STATUSES[status] if 0 <= status < len(STATUSES) else "", Error)
    error = kind(lib.tombolo_error_text().decode(errors="replace"))
    if kind is Refused:
        error.reason = REFUSALS[lib.tombolo_error_refusal()]
    raise error
