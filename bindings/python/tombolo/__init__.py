"""Calls with deadlines between processes of one machine, over shared memory.

    with tombolo.Service("calculator", lambda request: answer_to(request.data), workers=2) as service:
        service.wait()

    with tombolo.Client("calculator") as client:
        reply = client.call("6 * 7", within=0.005)
        print(reply.code, reply.data)

What does not end well raises `tombolo.Error`, or the class of its status: Late, Refused, Cancelled, Expired, Failed, ProviderGone, Timeout…
A call that waits lets other threads of Python run. A connection and a service do not survive `os.fork`: the child
connects again, and what it drops of its parent's stays the parent's.
"""

from . import errors
from .client import Buffer, Client, Loan, Reply, now_ns, report
from .errors import *  # noqa: F403
from .service import Failure, Request, Service

__all__ = ["Buffer", "Client", "Failure", "Loan", "Reply", "Request", "Service", "now_ns", "report", *errors.__all__]
