//! Tasks: futures that the main loop polls when they are woken. One processor, no threads, no
//! preemption.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::task::Wake;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::future::Future;
use core::pin::Pin;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use core::task::{Context, Poll, Waker};
use spinning_top::Spinlock;

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// Which tasks were woken. Wakers must be `Send`, so there is a lock; nothing ever contends for it.
#[derive(Default)]
struct Ready(Spinlock<VecDeque<usize>>);

struct TaskWaker {
    index: usize,
    queued: AtomicBool,
    ready: Arc<Ready>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Relaxed: one processor, and interrupts run no Rust.
        if !self.queued.swap(true, Relaxed) {
            self.ready.0.lock().push_back(self.index);
        }
    }
}

struct TaskSlot {
    /// None while the task runs, or after it has ended.
    task: Option<Task>,
    state: Arc<TaskWaker>,
    waker: Waker,
}

/// All tasks of the cell.
#[derive(Default)]
pub(crate) struct Executor {
    slots: RefCell<Vec<TaskSlot>>,
    free: RefCell<Vec<usize>>,
    ready: Arc<Ready>,
}

impl Executor {
    /// Adds a task, to be polled in the next round.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let task: Task = Box::pin(task);
        let mut slots = self.slots.borrow_mut();
        let index = match self.free.borrow_mut().pop() {
            Some(index) => {
                slots[index].task = Some(task);
                index
            }
            None => {
                let index = slots.len();
                let state = Arc::new(TaskWaker { index, queued: AtomicBool::new(false), ready: self.ready.clone() });
                slots.push(TaskSlot { task: Some(task), waker: state.clone().into(), state });
                index
            }
        };
        slots[index].waker.wake_by_ref();
    }

    /// Whether a task was woken.
    pub(crate) fn is_ready(&self) -> bool {
        !self.ready.0.lock().is_empty()
    }

    /// Polls each task that was woken before this call, once: a task that wakes itself waits for
    /// the next round, so none keeps the others or the network from their turn.
    pub(crate) fn run_round(&self) {
        let round = self.ready.0.lock().len();
        for _ in 0..round {
            let Some(index) = self.ready.0.lock().pop_front() else { return };
            let (task, waker) = {
                let slot = &mut self.slots.borrow_mut()[index];
                slot.state.queued.store(false, Relaxed);
                (slot.task.take(), slot.waker.clone())
            };
            let Some(mut task) = task else { continue };
            match task.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Pending => self.slots.borrow_mut()[index].task = Some(task),
                Poll::Ready(()) => {
                    drop(task);
                    self.free.borrow_mut().push(index);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::future::{pending, poll_fn};
    use std::rc::Rc;

    #[test]
    fn tasks_that_wake_themselves_take_turns_and_ended_ones_make_room() {
        let executor = Rc::new(Executor::default());
        let log = Rc::new(RefCell::new(Vec::new()));
        for name in 0..3 {
            let log = log.clone();
            let mut left = 3;
            executor.spawn(poll_fn(move |cx| {
                log.borrow_mut().push(name);
                left -= 1;
                if left == 0 {
                    return Poll::Ready(());
                }
                cx.waker().wake_by_ref();
                cx.waker().wake_by_ref();
                Poll::Pending
            }));
        }
        let mut rounds = 0;
        while executor.is_ready() {
            executor.run_round();
            rounds += 1;
        }
        assert_eq!(*log.borrow(), [0, 1, 2, 0, 1, 2, 0, 1, 2]);
        assert_eq!(rounds, 3);
        executor.spawn(pending());
        assert_eq!(executor.slots.borrow().len(), 3);
    }

    #[test]
    fn a_task_may_spawn_another() {
        let executor = Rc::new(Executor::default());
        let done = Rc::new(RefCell::new(false));
        let (inner, flag) = (executor.clone(), done.clone());
        executor.spawn(async move {
            inner.spawn(async move { *flag.borrow_mut() = true });
        });
        executor.run_round();
        assert!(!*done.borrow());
        executor.run_round();
        assert!(*done.borrow() && !executor.is_ready());
    }
}
