//! Which threads a message wakes. It has a process of its own, since it counts how often the
//! process' threads sleep.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use tombolo_remote::{CallOptions, Calls, Response, ServeOptions};

const SOON: Duration = Duration::from_secs(20);

/// How often the threads that serve have gone to sleep so far.
fn sleeps() -> u64 {
    let mut sleeps = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().to_owned();
        if value("Name:") == "tombolo-calls" {
            sleeps += value("voluntary_ctxt_switches:").parse::<u64>().unwrap();
        }
    }
    sleeps
}

#[test]
fn a_request_wakes_one_of_the_threads_that_serve() {
    const CALLS: u64 = 500;
    let options = ServeOptions { workers: 8, ..ServeOptions::default() };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let (a, b) = std::thread::scope(|scope| {
        let a = scope.spawn(|| Calls::over(TcpStream::connect(to).unwrap(), SOON, &options).unwrap());
        let b = Calls::over(listener.accept().unwrap().0, SOON, &options).unwrap();
        (a.join().unwrap(), b)
    });
    let _serves = b.serve(|request| Response::new(request.bytes.clone())).unwrap();
    let call = || (0..CALLS).for_each(|_| _ = a.call(b"1", &CallOptions::within(SOON)).unwrap());
    // By then all of them wait.
    call();
    let before = sleeps();
    call();
    let sleeps = sleeps() - before;
    // The one that answers sleeps again afterwards. It sleeps once more where its lock was held.
    assert!(sleeps < 3 * CALLS, "{sleeps} sleeps for {CALLS} calls");
}
