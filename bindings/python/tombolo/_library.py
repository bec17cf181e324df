"""libtombolo.so through ctypes: the functions and structs of tombolo.h, by the names that they have there.

ctypes gives Python's lock back while such a function runs, and takes it for a handler. A test compares what stands here with the header.
"""

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

ABI_VERSION = 1
NONE = 2**64 - 1

# tombolo_status, in the order of its values.
STATUSES = (
    "ok pending late refused cancelled expired failed provider-gone timeout broken busy memory share range reclaimed reply-memory unknown-call "
    "no-service denied silent connect-gone protocol section name no-place running long-path option system argument unknown-handle no-room "
    "in-handler panic reply-too-large deadline-exceeded"
).split()
STATUS = {name: value for value, name in enumerate(STATUSES)}
# tombolo_refusal
REFUSALS = ("none", "queue-full", "admission", "memory", "reply-memory", "stopping")


class Sized(ctypes.Structure):
    """Options, which begin with their size."""

    def __init__(self, **fields):
        super().__init__(size=ctypes.sizeof(self), **fields)


class ConnectOptions(Sized):
    """tombolo_connect_options"""

    _fields_ = [
        ("size", c_uint32),
        ("entries", c_uint32),
        ("arena_bytes", c_uint64),
        ("max_shared_bytes", c_uint64),
        ("patience_ns", c_uint64),
        ("polling", c_uint32),
        ("reserved", c_uint32),
        ("folder", c_char_p),
    ]


class CallOptions(Sized):
    """tombolo_call_options"""

    _fields_ = [
        ("size", c_uint32),
        ("deadline_kind", c_uint32),
        ("deadline_ns", c_uint64),
        ("timeout_ns", c_uint64),
        ("ttl_ns", c_uint64),
        ("trace", c_uint64),
        ("wait_late_ns", c_uint64),
    ]


class ReplyInfo(ctypes.Structure):
    """tombolo_reply_info"""

    _fields_ = [
        ("data", c_void_p),
        ("len", c_uint64),
        ("queued_ns", c_uint64),
        ("service_ns", c_uint64),
        ("code", c_uint32),
        ("late", c_uint32),
    ]


class ServiceOptions(Sized):
    """tombolo_service_options"""

    _fields_ = [
        ("size", c_uint32),
        ("workers", c_uint32),
        ("worker_class", c_uint32),
        ("fifo_priority", c_uint32),
        ("budget_ns", c_uint64),
        ("period_ns", c_uint64),
        ("queue_bound", c_uint64),
        ("late_policy", c_uint32),
        ("admission", c_uint32),
        ("uids", POINTER(c_uint32)),
        ("uid_count", c_size_t),
        ("gids", POINTER(c_uint32)),
        ("gid_count", c_size_t),
        ("everybody", c_uint32),
        ("polling", c_uint32),
        ("max_clients", c_uint32),
        ("max_entries", c_uint32),
        ("max_arena_bytes", c_uint64),
        ("reply_arena_bytes", c_uint64),
        ("max_shared_bytes", c_uint64),
        ("ttl_ns", c_uint64),
        ("reply_ttl_ns", c_uint64),
        ("slow_ns", c_uint64),
        ("order", c_uint32),
        ("max_clients_per_uid", c_uint32),
        ("max_bytes_per_uid", c_uint64),
        ("max_entries_per_uid", c_uint64),
        ("folder", c_char_p),
    ]


class End(ctypes.Structure):
    """tombolo_end"""

    _fields_ = [("status", c_int32), ("refusal", c_int32), ("reply", c_uint64)]


class RequestInfo(ctypes.Structure):
    """tombolo_request"""

    _fields_ = [
        ("data", c_void_p),
        ("len", c_uint64),
        ("deadline_ns", c_uint64),
        ("trace", c_uint64),
        ("queued_ns", c_uint64),
        ("pid", c_uint32),
        ("uid", c_uint32),
        ("gid", c_uint32),
        ("reserved", c_uint32),
    ]


class Stats(Sized):
    """tombolo_stats"""

    _fields_ = [("size", c_uint32), ("reserved", c_uint32)] + [
        (name, c_uint64)
        for name in (
            "uptime_ns clients broken_clients refused_connections pending served overran late refused_queue_full refused_admission "
            "refused_memory refused_reply_memory refused_stopping cancelled expired failed abandoned reclaimed_replies queued_p50_ns "
            "queued_p99_ns queued_max_ns service_p50_ns service_p99_ns service_max_ns"
        ).split()
    ]


HANDLER = ctypes.CFUNCTYPE(c_int32, c_void_p, POINTER(RequestInfo), c_void_p)
# A handle is a struct of one u64, which crosses as that does on every machine that this library
# runs on.
_HANDLE, _OUT = c_uint64, POINTER(c_uint64)
_CALL, _SIZE, _POINTER = POINTER(CallOptions), POINTER(c_size_t), POINTER(c_void_p)

# Arguments by function; each returns a status.
FUNCTIONS = {
    "tombolo_connect": (c_char_p, POINTER(ConnectOptions), _OUT),
    "tombolo_close": (_HANDLE,),
    "tombolo_call": (_HANDLE, c_void_p, c_size_t, _CALL, _OUT),
    "tombolo_submit": (_HANDLE, c_void_p, c_size_t, _CALL, _OUT),
    "tombolo_poll": (_HANDLE, c_uint64, _OUT),
    "tombolo_wait": (_HANDLE, c_uint64, c_uint64, _OUT),
    "tombolo_wait_any": (_HANDLE, _OUT, c_size_t, c_uint64, _SIZE),
    "tombolo_wait_all": (_HANDLE, _OUT, c_size_t, c_uint64, POINTER(End)),
    "tombolo_cancel": (_HANDLE, c_uint64),
    "tombolo_loan_new": (_HANDLE, c_uint64, _OUT, _POINTER),
    "tombolo_loan_submit": (_HANDLE, _HANDLE, _CALL, _OUT),
    "tombolo_loan_free": (_HANDLE,),
    "tombolo_buffer_new": (c_uint64, c_int32, _OUT, _POINTER),
    "tombolo_buffer_of_memfd": (c_int32, _OUT, _POINTER, POINTER(c_uint64), POINTER(c_int32)),
    "tombolo_buffer_submit": (_HANDLE, _HANDLE, c_uint64, c_uint64, _CALL, _OUT),
    "tombolo_buffer_free": (_HANDLE,),
    "tombolo_reply_get": (_HANDLE, POINTER(ReplyInfo)),
    "tombolo_reply_check": (_HANDLE,),
    "tombolo_reply_copy": (_HANDLE, c_void_p, c_size_t, _SIZE),
    "tombolo_reply_free": (_HANDLE,),
    "tombolo_report": (c_char_p, POINTER(ConnectOptions), c_void_p, c_size_t, _SIZE),
    "tombolo_answer_write": (c_void_p, c_void_p, c_size_t),
    "tombolo_answer_loan": (c_void_p, c_uint64, _POINTER),
    "tombolo_answer_share": (c_void_p, _HANDLE, c_uint64, c_uint64),
    "tombolo_answer_code": (c_void_p, c_uint32),
    "tombolo_register": (c_char_p, POINTER(ServiceOptions), HANDLER, c_void_p, _OUT),
    "tombolo_stop": (_HANDLE,),
    "tombolo_service_stats": (_HANDLE, POINTER(Stats)),
}
# Functions that return something else.
OTHERS = {
    "tombolo_abi_version": (c_uint32, ()),
    "tombolo_status_name": (c_char_p, (c_int32,)),
    "tombolo_error_text": (c_char_p, ()),
    "tombolo_error_refusal": (c_int32, ()),
    "tombolo_now_ns": (c_uint64, ()),
}


def _load():
    path = os.environ.get("TOMBOLO_LIBRARY") or Path(__file__).with_name("libtombolo.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"{error}; expected libtombolo.so beside the module, where `pip install bindings/python` puts it, or at the path that "
            "TOMBOLO_LIBRARY names, such as target/release/libtombolo.so after `./x build`"
        ) from None
    for name, arguments in FUNCTIONS.items():
        OTHERS[name] = (c_int32, arguments)
    for name, (result, arguments) in OTHERS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    found = library.tombolo_abi_version()
    if found != ABI_VERSION:
        raise ImportError(f"{path}: its ABI has version {found}, expected {ABI_VERSION}; install the wheel again")
    return library


lib = _load()
