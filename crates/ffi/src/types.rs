//! The structs of the header, and what their options mean. Field for field as there; `header`
//! compares the layouts.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use tombolo_rpc::client::{CallOptions, ConnectOptions};
use tombolo_rpc::deadline::Deadline;
use tombolo_rpc::poll::Polling;
use tombolo_rpc::provider::{Access, Options, Report, WorkerClass};
use tombolo_rpc::schedule::{Late, Order};

use crate::status::{Failure, Status};

/// `TOMBOLO_NONE`.
pub(crate) const NONE: u64 = u64::MAX;

/// Defines structs of the header.
macro_rules! c_structs {
    ($($(#[$mark:meta])* $name:ident { $($field:ident: $kind:ty,)* })*) => {
        $(
            $(#[$mark])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name {
                $(pub(crate) $field: $kind,)*
            }

            #[cfg(test)]
            impl $name {
                /// Name, size and alignment, and each field's name and offset.
                pub(crate) fn layout() -> (usize, usize, Vec<(&'static str, usize)>) {
                    let fields = vec![$((stringify!($field), std::mem::offset_of!($name, $field)),)*];
                    (size_of::<$name>(), align_of::<$name>(), fields)
                }
            }
        )*
    };
}

c_structs! {
    /// `tombolo_client`, and as that the other handles.
    Handle { id: u64, }
    /// `tombolo_connect_options`
    ConnectSettings {
        size: u32,
        entries: u32,
        arena_bytes: u64,
        max_shared_bytes: u64,
        patience_ns: u64,
        polling: u32,
        reserved: u32,
        folder: *const c_char,
    }
    /// `tombolo_call_options`
    CallSettings {
        size: u32,
        deadline_kind: u32,
        deadline_ns: u64,
        timeout_ns: u64,
        ttl_ns: u64,
        trace: u64,
        wait_late_ns: u64,
    }
    /// `tombolo_reply_info`
    ReplyInfo {
        data: *const c_void,
        len: u64,
        queued_ns: u64,
        service_ns: u64,
        code: u32,
        late: u32,
    }
    /// `tombolo_end`
    End {
        status: i32,
        refusal: i32,
        reply: Handle,
    }
    /// `tombolo_service_options`
    ServiceSettings {
        size: u32,
        workers: u32,
        worker_class: u32,
        fifo_priority: u32,
        budget_ns: u64,
        period_ns: u64,
        queue_bound: u64,
        late_policy: u32,
        admission: u32,
        uids: *const u32,
        uid_count: usize,
        gids: *const u32,
        gid_count: usize,
        everybody: u32,
        polling: u32,
        max_clients: u32,
        max_entries: u32,
        max_arena_bytes: u64,
        reply_arena_bytes: u64,
        max_shared_bytes: u64,
        ttl_ns: u64,
        reply_ttl_ns: u64,
        slow_ns: u64,
        order: u32,
        max_clients_per_uid: u32,
        max_bytes_per_uid: u64,
        max_entries_per_uid: u64,
        folder: *const c_char,
    }
    /// `tombolo_request`
    RequestInfo {
        data: *const c_void,
        len: u64,
        deadline_ns: u64,
        trace: u64,
        queued_ns: u64,
        pid: u32,
        uid: u32,
        gid: u32,
        reserved: u32,
    }
    /// `tombolo_stats`
    Stats {
        size: u32,
        reserved: u32,
        uptime_ns: u64,
        clients: u64,
        broken_clients: u64,
        refused_connections: u64,
        pending: u64,
        served: u64,
        overran: u64,
        late: u64,
        refused_queue_full: u64,
        refused_admission: u64,
        refused_memory: u64,
        refused_reply_memory: u64,
        refused_stopping: u64,
        cancelled: u64,
        expired: u64,
        failed: u64,
        abandoned: u64,
        reclaimed_replies: u64,
        queued_p50_ns: u64,
        queued_p99_ns: u64,
        queued_max_ns: u64,
        service_p50_ns: u64,
        service_p99_ns: u64,
        service_max_ns: u64,
    }
}

/// `tombolo_answer`, an opaque type.
#[repr(C)]
pub struct AnswerMark {
    _opaque: [u8; 0],
}

/// A value, or the default where it is 0.
fn or<T: Default + PartialEq>(value: T, default: T) -> T {
    if value == T::default() { default } else { value }
}

/// A duration, or the default where it is 0.
fn duration(ns: u64, default: Duration) -> Duration {
    or(Duration::from_nanos(ns), default)
}

/// Bytes: the default where they are 0, and 0 where they are none.
fn bytes(value: u64, default: u64) -> u64 {
    if value == NONE { 0 } else { or(value, default) }
}

fn wrong<T>(option: &str, found: u64, expected: &str) -> Result<T, Failure> {
    Err(Failure::new(Status::Option, format!("option {option}: {found}, expected {expected}")))
}

fn polling(value: u32) -> Result<Polling, Failure> {
    match value {
        0 => Ok(Polling::Adaptive),
        1 => Ok(Polling::Never),
        2 => Ok(Polling::Always),
        other => wrong("polling", other.into(), "a tombolo_polling, 0 to 2"),
    }
}

impl ConnectSettings {
    /// With the folder already read.
    pub(crate) fn options(&self, folder: Option<&str>) -> Result<ConnectOptions, Failure> {
        let default = ConnectOptions::default();
        Ok(ConnectOptions {
            entries: or(self.entries, default.entries),
            arena_bytes: bytes(self.arena_bytes, default.arena_bytes),
            max_shared_bytes: bytes(self.max_shared_bytes, default.max_shared_bytes),
            timeout: duration(self.patience_ns, default.timeout),
            polling: polling(self.polling)?,
            folder: folder.map(Into::into),
        })
    }
}

impl CallSettings {
    pub(crate) fn options(&self) -> Result<CallOptions, Failure> {
        let deadline = match self.deadline_kind {
            0 => Deadline::Inherit,
            1 => Deadline::In(Duration::from_nanos(self.deadline_ns)),
            2 => Deadline::At(self.deadline_ns),
            other => return wrong("deadline_kind", other.into(), "a tombolo_deadline, 0 to 2"),
        };
        let timeout = match deadline {
            Deadline::In(left) => CallOptions::within(left).timeout,
            _ => CallOptions::TIMEOUT,
        };
        Ok(CallOptions {
            deadline,
            wait_late: Duration::from_nanos(self.wait_late_ns),
            timeout: duration(self.timeout_ns, timeout),
            ttl: (self.ttl_ns != 0).then_some(Duration::from_nanos(self.ttl_ns)),
            trace: self.trace,
        })
    }
}

impl ServiceSettings {
    /// With the folder and the lists already read.
    pub(crate) fn options(&self, folder: Option<&str>, uids: &[u32], gids: &[u32]) -> Result<Options, Failure> {
        let default = Options::default();
        let class = match (self.worker_class, u8::try_from(self.fifo_priority)) {
            (0, _) => WorkerClass::Normal,
            (1, Ok(priority)) => WorkerClass::Fifo(priority),
            (1, Err(_)) => return wrong("fifo_priority", self.fifo_priority.into(), "1 to 99"),
            (2, _) => WorkerClass::Deadline,
            (other, _) => return wrong("worker_class", other.into(), "a tombolo_worker_class, 0 to 2"),
        };
        let late = match self.late_policy {
            0 => Late::Refuse,
            1 => Late::BestEffort,
            other => return wrong("late_policy", other.into(), "a tombolo_late_policy, 0 or 1"),
        };
        let order = match self.order {
            0 => Order::Edf,
            1 => Order::Fifo,
            2 => Order::DeadlineMonotonic,
            other => return wrong("order", other.into(), "a tombolo_order, 0 to 2"),
        };
        Ok(Options {
            workers: or(self.workers, default.workers),
            class,
            budget: duration(self.budget_ns, default.budget),
            period: duration(self.period_ns, default.period),
            queue_bound: or(usize::try_from(self.queue_bound).unwrap_or(usize::MAX), default.queue_bound),
            order,
            late,
            admission: self.admission != 0,
            shares: default.shares,
            access: Access { uids: uids.into(), gids: gids.into(), everybody: self.everybody != 0 },
            max_clients: or(self.max_clients as usize, default.max_clients),
            max_clients_per_uid: or(self.max_clients_per_uid as usize, default.max_clients_per_uid),
            max_bytes_per_uid: or(self.max_bytes_per_uid, default.max_bytes_per_uid),
            max_entries_per_uid: or(self.max_entries_per_uid, default.max_entries_per_uid),
            max_entries: or(self.max_entries, default.max_entries),
            max_arena_bytes: or(self.max_arena_bytes, default.max_arena_bytes),
            reply_arena_bytes: bytes(self.reply_arena_bytes, default.reply_arena_bytes),
            max_shared_bytes: bytes(self.max_shared_bytes, default.max_shared_bytes),
            ttl: duration(self.ttl_ns, default.ttl),
            reply_ttl: duration(self.reply_ttl_ns, default.reply_ttl),
            slow: duration(self.slow_ns, default.slow),
            polling: polling(self.polling)?,
            folder: folder.map(Into::into),
            machines: default.machines,
        })
    }
}

impl Stats {
    pub(crate) fn new(report: &Report) -> Stats {
        let answers = &report.answers;
        Stats {
            size: size_of::<Stats>() as u32,
            reserved: 0,
            uptime_ns: (report.uptime_s * 1e9) as u64,
            clients: report.clients,
            broken_clients: report.broken_clients,
            refused_connections: report.refused_connections,
            pending: report.pending,
            served: answers.served,
            overran: answers.overran,
            late: answers.late,
            refused_queue_full: answers.refused_queue_full,
            refused_admission: answers.refused_admission,
            refused_memory: answers.refused_memory,
            refused_reply_memory: answers.refused_reply_memory,
            refused_stopping: answers.refused_stopping,
            cancelled: answers.cancelled,
            expired: answers.expired,
            failed: answers.failed,
            abandoned: answers.abandoned,
            reclaimed_replies: report.reclaimed_replies,
            queued_p50_ns: report.queued.p50_ns,
            queued_p99_ns: report.queued.p99_ns,
            queued_max_ns: report.queued.max_ns,
            service_p50_ns: report.service.p50_ns,
            service_p99_ns: report.service.p99_ns,
            service_max_ns: report.service.max_ns,
        }
    }
}
