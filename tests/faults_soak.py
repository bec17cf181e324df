"""A short soak: faults in turn under checked traffic on every attachment. `./x soak MINUTES` is the long one."""

from lib import need_program, need_root, timeout
from lib.soak import Soak

# In this order each fault also meets what the one before left. A machine's boot bounds recovery
# here, several times slower on a busy machine; what must not happen is that a fault needs a person.
FAULTS = ("kill_passt", "kill_machine", "kill_daemon", "pause_daemon", "kill_store", "kill_daemon", "delete_socket", "restart_machine")


@timeout(900)
def test_faults_in_turn_need_no_person():
    need_root()
    need_program("passt")
    with Soak(seed=20261122, linux=False) as soak:
        for fault in FAULTS:
            soak.inject(fault)
        print(soak.table())
        assert soak.manual == 0, "a fault needed a person"
        assert soak.corrupt() == 0, "data was corrupted"
        assert not soak.leaks(), soak.leaks()
