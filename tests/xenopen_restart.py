"""A backend that comes back with fewer queues. Not a part of `./x xen`: on a quiet machine the download does not go on (docs/xen.md, "Open").

`python3 tests/run.py xenopen` runs it.
"""

from lib import timeout
from lib.xen import CELL, fetch, host
from xen_cells import restart_backend


@timeout(600)
def test_a_backend_comes_back_with_one_queue_in_the_middle_of_a_download():
    with host("httpd") as xen:
        xen.run("echo 4 >/sys/module/xen_netback/parameters/max_queues")
        xen.create("web", "httpd", f"ip={CELL}/24 queues=4 verbose")
        assert "queues 4" in xen.wait_console("web", "net up")
        number = xen.run("xl domid web").text.strip()
        xen.run("echo 1 >/sys/module/xen_netback/parameters/max_queues")
        fetch(xen, 20_000_001, meanwhile=lambda: restart_backend(xen))
        queues = xen.run(f"ls -d /sys/class/net/vif{number}.0/queues/tx-* | wc -l").text.strip()
        assert queues == "1", queues
