"""The stock Linux guest itself, on both machine types, without our network: the basis of every other guest test."""

from lib import LinuxGuest, Net, Namespace, http_get, need_root, timeout


def check(machine):
    need_root()
    with Namespace() as space:
        tap = space.tap(address="10.77.0.1/24")
        with LinuxGuest(net=Net.tap(tap), machine=machine, hostname="lin", address="10.77.0.2/24,10.77.0.1", serve="http,iperf",
                        netns=space) as guest:
            assert guest.wait_address() == "10.77.0.2"
            guest.wait_control()
            assert guest.run("hostname").text == "lin"
            assert guest.run("exit 3", check=False).code == 3
            assert guest.ping("10.77.0.1") == 1.0
            page = http_get("10.77.0.2", netns=space)
            assert page.status == 200 and b"stock Linux guest" in page.body
            assert len(http_get("10.77.0.2", "/bytes/1048576", netns=space).body) == 1 << 20
            report = space.run("iperf", "-c", "10.77.0.2", "-t", "1").stdout
            assert "bits/sec" in report, report
            # Two commands at once keep their output apart.
            first = guest.start("for i in 1 2 3; do echo a$i; usleep 20000; done")
            second = guest.start("for i in 1 2 3; do echo b$i; usleep 20000; done; false")
            assert guest.finish(second, check=False) == (1, "b1\nb2\nb3")
            assert guest.finish(first) == (0, "a1\na2\na3")
            assert guest.poweroff() == 0


@timeout(300)
def test_microvm():
    check("microvm")


@timeout(300)
def test_q35():
    check("q35")
