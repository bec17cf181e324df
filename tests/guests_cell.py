"""Cells at a tap, as their users meet them: many neighbours, many connections, slow readers."""

import select
import socket
import time

from lib import CellGuest, Namespace, Net, http_get, timeout
from lib.http import socket_in

PREFIX = "10.79.0"
CELL = f"{PREFIX}.10"
MAC = "02:00:00:00:79:0a"
NEIGHBOURS = 8


class Standing:
    """A cell at a tap of a namespace that knows its address beforehand; `addresses` is how many the namespace has."""

    def __init__(self, app="httpd", addresses=1, **others):
        self.space = Namespace()
        self.app, self.addresses, self.others = app, addresses, others

    def __enter__(self):
        self.space.__enter__()
        self.space.tap("tap0", f"{PREFIX}.101/24")
        for number in range(1, self.addresses):
            self.space.ip("address", "add", f"{PREFIX}.{101 + number}/24", "dev", "tap0")
        self.space.ip("neigh", "replace", CELL, "lladdr", MAC, "dev", "tap0", "nud", "permanent")
        card = Net.tap("tap0").with_mac(MAC)
        self.guest = CellGuest(self.app, net=card, append=f"ip={CELL}/24", netns=self.space, **self.others).__enter__()
        self.guest.wait_line(lambda line: "net up" in line, 20)
        return self

    def __exit__(self, *_):
        self.guest.kill()
        self.space.__exit__()


@timeout(60)
def test_a_cell_answers_all_its_neighbours_at_once():
    """A restarted cell knows nobody, and whoever still knows it does not ask first: all of them are answered at once."""
    with Standing(addresses=NEIGHBOURS) as standing:
        begun = time.monotonic()
        waiting = {}
        for number in range(NEIGHBOURS):
            connection = socket_in(standing.space.name)
            connection.bind((f"{PREFIX}.{101 + number}", 0))
            connection.setblocking(False)
            connection.connect_ex((CELL, 80))
            waiting[connection.fileno()] = connection
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLOUT)
        taken = []
        while waiting and time.monotonic() < begun + 20:
            for fd, _ in poll.poll(1000):
                connection = waiting.pop(fd)
                poll.unregister(fd)
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
                taken.append(time.monotonic() - begun)
                connection.close()
        # One a second is what one limit for all of them would make of it.
        assert len(taken) == NEIGHBOURS and taken[-1] < 0.9, f"seconds to each connection: {[f'{t:.3f}' for t in taken]}"
