//! Work that may block, on threads beside the async runtime.
//!
//! The control plane is one thread, which must not wait for a process, a disk or another program.
//! Tokio's `spawn_blocking` panics where the system gives no further thread (`TasksMax` of a
//! service, `ulimit -u`, too little memory), and would end the daemon while its machines run on.
//! Here that is an error (`spawn`), or the work is done in line: at once (`spawn_or_run`), or after a
//! few more tries (`insist`). [`on_threads`] does several pieces of work side by side.
//!
//! # Invariants
//! - The work starts when the function is called, and not when its result is awaited (`insist` is the
//!   exception).
//! - The work may use the runtime that it was started from: spawn tasks and make timers.
//! - A panic of the work is caught, and is an error as well.
//! - Each piece of work has a thread of its own. A runtime that ends does not wait for it.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, ScopedJoinHandle};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// How often a thread is asked for, and how long between. A full limit is often over in a second.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_secs(1);

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BlockingError {
    /// The system gives no further thread, and the work was not begun.
    #[error("no thread could be started: {0}; check the limits on tasks (TasksMax of its service, ulimit -u)")]
    Thread(io::Error),
    /// The work panicked; the log has the place.
    #[error("it ended halfway, which is a bug")]
    Panicked,
}

impl From<BlockingError> for io::Error {
    fn from(error: BlockingError) -> io::Error {
        io::Error::other(error)
    }
}

/// Runs `work` here; `None` if it panicked.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}

/// Starts `work` on a thread of its own. Its result is what the future gives.
pub(crate) fn spawn<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, BlockingError>> + Send + 'static {
    let begun = on(Builder::new(), work).map_err(|(error, _)| BlockingError::Thread(error));
    async { begun?.await.map_err(|_| BlockingError::Panicked) }
}

/// The same. Where no thread can be started, the work is done in line, and all that the runtime does
/// waits for it: for what must be done, above all as a fabric ends.
pub(crate) fn spawn_or_run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, BlockingError>> + Send + 'static {
    on_or_here(Builder::new(), work)
}

/// Does `work` on a thread of its own. Where none can be started, it tries again for some seconds,
/// and then does the work in line: for what must be done, and may wait.
pub(crate) async fn insist<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, BlockingError> {
    insist_on(Builder::new, PAUSE, work).await
}

async fn insist_on<T: Send + 'static>(
    thread: impl Fn() -> Builder,
    pause: Duration,
    mut work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, BlockingError> {
    for _ in 0..TRIES {
        match on(thread(), work) {
            Ok(done) => return done.await.map_err(|_| BlockingError::Panicked),
            Err((_, Some(kept))) => work = kept,
            // The work is kept where no thread took it.
            Err((error, None)) => return Err(BlockingError::Thread(error)),
        }
        tokio::time::sleep(pause).await;
    }
    caught(work).ok_or(BlockingError::Panicked)
}

fn on_or_here<T: Send + 'static>(
    thread: Builder,
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, BlockingError>> + Send + 'static {
    let begun = on(thread, work).map_err(|(_, work)| work.and_then(caught));
    async {
        match begun {
            Ok(done) => done.await.ok(),
            Err(done) => done,
        }
        .ok_or(BlockingError::Panicked)
    }
}

/// Does `work` for all of them at once, each on a thread of its own, and waits for the last. Where
/// the system gives no further thread, the rest is done one after the other. `None` stands for work
/// that panicked.
pub fn on_threads<I: Copy + Send, T: Send>(
    thread: impl Fn() -> Builder,
    all: &[I],
    work: impl Fn(I) -> T + Sync,
) -> Vec<(I, Option<T>)> {
    let work = &work;
    std::thread::scope(|scope| {
        let started: Vec<_> =
            all.iter().map(|&item| (item, thread().spawn_scoped(scope, move || work(item)))).collect();
        let end = |(item, thread): (I, io::Result<ScopedJoinHandle<'_, T>>)| match thread {
            Ok(thread) => (item, thread.join().ok()),
            Err(_) => (item, caught(|| work(item))),
        };
        started.into_iter().map(end).collect()
    })
}

/// Starts `work` on a thread. Where there is none, gives it back.
fn on<T: Send + 'static, F: FnOnce() -> T + Send + 'static>(
    thread: Builder,
    work: F,
) -> Result<oneshot::Receiver<T>, (io::Error, Option<F>)> {
    let (tell, told) = oneshot::channel();
    // What a thread that could not be started was to run is lost, so it is kept here as well.
    let kept = Arc::new(Mutex::new(Some(work)));
    let (theirs, runtime) = (kept.clone(), Handle::try_current());
    let run = move || {
        let _inside = runtime.as_ref().map(Handle::enter);
        // Apart, so that no lock is held while it runs. The result may be wanted no more.
        let work = theirs.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = work.map(|work| tell.send(work()));
    };
    match thread.name("blocking".into()).spawn(run) {
        Ok(_) => Ok(told),
        Err(error) => Err((error, kept.lock().unwrap_or_else(PoisonError::into_inner).take())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::ThreadId;

    /// A thread that the system refuses: no address space has room for its stack.
    fn refused() -> Builder {
        Builder::new().stack_size(1 << 60)
    }

    fn here() -> ThreadId {
        std::thread::current().id()
    }

    #[tokio::test]
    async fn work_is_done_beside_the_runtime_and_in_line_where_no_thread_can_be_started() {
        assert_ne!(spawn(here).await.unwrap(), here());
        assert_ne!(spawn_or_run(here).await.unwrap(), here());
        assert!(spawn(|| Handle::try_current().is_ok()).await.unwrap(), "it may spawn tasks");
        assert_eq!(on_or_here(refused(), here).await.unwrap(), here());
        let (error, work) = on(refused(), here).unwrap_err();
        assert_eq!(work.map(|work| work()), Some(here()), "it was not begun");
        let told = BlockingError::Thread(error).to_string();
        assert!(told.contains("no thread could be started") && told.contains("TasksMax"), "{told}");
    }

    #[tokio::test]
    async fn work_that_may_wait_has_a_few_tries_for_a_thread() {
        let tries = std::cell::Cell::new(0);
        let third = || {
            tries.set(tries.get() + 1);
            if tries.get() < 3 { refused() } else { Builder::new() }
        };
        assert_ne!(insist_on(third, Duration::ZERO, here).await.unwrap(), here());
        assert_eq!(tries.get(), 3);
        assert_eq!(insist_on(refused, Duration::ZERO, here).await.unwrap(), here());
    }

    #[tokio::test]
    async fn a_panic_of_the_work_ends_nothing_else() {
        fn panics() -> u8 {
            panic!("on purpose")
        }
        assert!(matches!(spawn(panics).await, Err(BlockingError::Panicked)));
        assert!(matches!(on_or_here(refused(), panics).await, Err(BlockingError::Panicked)));
    }

    #[tokio::test]
    async fn work_starts_at_once_and_goes_on_where_nobody_awaits_it() {
        let (tell, told) = std::sync::mpsc::channel();
        drop(spawn(move || tell.send(7)));
        assert_eq!(told.recv_timeout(std::time::Duration::from_secs(60)), Ok(7));
    }
}
