//! How a function of the C ABI ends: a status, and the words for it, which are kept for the thread.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tombolo_ring::rpc::entry::Refusal;
use tombolo_rpc::client::{CallError, ConnectError};
use tombolo_rpc::folder::FolderError;
use tombolo_rpc::provider::RegisterError;
use tombolo_rpc::shared::AdoptError;

macro_rules! statuses {
    ($($variant:ident = $code:literal, $name:literal;)*) => {
        /// As `tombolo_status` of the header, which says what each means.
        #[repr(i32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Status {
            $($variant = $code,)*
        }

        impl Status {
            /// All of them, with their names as users see them.
            pub(crate) const ALL: &[(Status, &std::ffi::CStr)] = &[$((Status::$variant, $name),)*];
        }
    };
}

statuses! {
    Ok = 0, c"ok";
    Pending = 1, c"pending";
    Late = 2, c"late";
    Refused = 3, c"refused";
    Cancelled = 4, c"cancelled";
    Expired = 5, c"expired";
    Failed = 6, c"failed";
    ProviderGone = 7, c"provider-gone";
    Timeout = 8, c"timeout";
    Broken = 9, c"broken";
    Busy = 10, c"busy";
    Memory = 11, c"memory";
    Share = 12, c"share";
    Range = 13, c"range";
    Reclaimed = 14, c"reclaimed";
    ReplyMemory = 15, c"reply-memory";
    UnknownCall = 16, c"unknown-call";
    NoService = 17, c"no-service";
    Denied = 18, c"denied";
    Silent = 19, c"silent";
    ConnectGone = 20, c"connect-gone";
    Protocol = 21, c"protocol";
    Section = 22, c"section";
    Name = 23, c"name";
    NoPlace = 24, c"no-place";
    Running = 25, c"running";
    LongPath = 26, c"long-path";
    Option = 27, c"option";
    System = 28, c"system";
    Argument = 29, c"argument";
    UnknownHandle = 30, c"unknown-handle";
    NoRoom = 31, c"no-room";
    InHandler = 32, c"in-handler";
    Panic = 33, c"panic";
    ReplyTooLarge = 34, c"reply-too-large";
    DeadlineExceeded = 35, c"deadline-exceeded";
}

/// Why a function did not do what it is for.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    pub(crate) refusal: Option<Refusal>,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Failure {
        Failure { status, refusal: None, text: text.into() }
    }
}

impl From<CallError> for Failure {
    fn from(error: CallError) -> Failure {
        let status = match &error {
            CallError::DeadlineExceeded => Status::DeadlineExceeded,
            CallError::Late => Status::Late,
            CallError::Refused(_) => Status::Refused,
            CallError::Cancelled => Status::Cancelled,
            CallError::Expired => Status::Expired,
            CallError::Failed => Status::Failed,
            CallError::ProviderGone => Status::ProviderGone,
            CallError::Timeout => Status::Timeout,
            CallError::Broken(_) => Status::Broken,
            CallError::Busy(_) => Status::Busy,
            // Of links only, which have no C ABI.
            CallError::TooLong { .. } => Status::Range,
            CallError::Memory(_) => Status::Memory,
            CallError::Share { .. } => Status::Share,
            CallError::Range { .. } => Status::Range,
            CallError::Reclaimed => Status::Reclaimed,
            CallError::ReplyMemory => Status::ReplyMemory,
            CallError::ReplyTooLarge { .. } => Status::ReplyTooLarge,
            CallError::Unknown => Status::UnknownCall,
        };
        let refusal = if let CallError::Refused(reason) = error { Some(reason) } else { None };
        Failure { status, refusal, text: error.to_string() }
    }
}

fn folder(error: &FolderError) -> Status {
    match error {
        FolderError::Name(_) => Status::Name,
        FolderError::NoPlace => Status::NoPlace,
        FolderError::Running(_) => Status::Running,
        FolderError::LongPath(_) => Status::LongPath,
        FolderError::System { .. } => Status::System,
    }
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Failure {
        let status = match &error {
            ConnectError::Folder(error) => folder(error),
            ConnectError::NoService { .. } => Status::NoService,
            ConnectError::Refused(_) => Status::Denied,
            ConnectError::Silent(_) => Status::Silent,
            ConnectError::Gone => Status::ConnectGone,
            ConnectError::Protocol(_) => Status::Protocol,
            ConnectError::Section(_) => Status::Section,
            ConnectError::Memory(_) => Status::Memory,
            ConnectError::Broken(_) => Status::Broken,
            ConnectError::Geometry { .. } => Status::Option,
            ConnectError::System { .. } => Status::System,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<RegisterError> for Failure {
    fn from(error: RegisterError) -> Failure {
        let status = match &error {
            RegisterError::Folder(error) => folder(error),
            RegisterError::Option { .. } => Status::Option,
            RegisterError::System { .. } => Status::System,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<AdoptError> for Failure {
    fn from(error: AdoptError) -> Failure {
        let status = if let AdoptError::Memory(_) = error { Status::Memory } else { Status::Section };
        Failure::new(status, error.to_string())
    }
}

/// The last failure of a thread.
#[derive(Default)]
pub(crate) struct Last {
    pub(crate) text: CString,
    pub(crate) refusal: Option<Refusal>,
}

thread_local! {
    pub(crate) static LAST: RefCell<Last> = RefCell::default();
}

fn remember(failure: Failure) -> i32 {
    let text: Vec<u8> = failure.text.into_bytes().into_iter().filter(|byte| *byte != 0).collect();
    // In a thread that is ending no caller is left to ask for it.
    let _ = LAST.try_with(|last| {
        *last.borrow_mut() = Last { text: CString::new(text).unwrap_or_default(), refusal: failure.refusal };
    });
    failure.status as i32
}

fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a word")
}

/// Runs an export's body: its end as a status, its failure remembered, a panic caught.
pub(crate) fn guard(body: impl FnOnce() -> Result<Status, Failure>) -> i32 {
    // Nothing that a panic may have left halfway is looked at again: what an export changes is
    // behind locks that recover.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => status as i32,
        Ok(Err(failure)) => remember(failure),
        Err(panic) => remember(Failure::new(Status::Panic, format!("a bug of this library's: {}", words(&*panic)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status_with_its_words() {
        assert_eq!(guard(|| panic!("as {}", "meant")), Status::Panic as i32);
        let text = LAST.with_borrow(|last| last.text.to_str().unwrap().to_owned());
        assert!(text.ends_with("as meant"), "{text}");
        assert_eq!(guard(|| Ok(Status::Pending)), 1);
    }

    #[test]
    fn a_text_with_a_zero_keeps_its_other_bytes() {
        guard(|| Err(Failure::new(Status::Name, "\0a\0b")));
        assert_eq!(LAST.with_borrow(|last| last.text.clone()), c"ab".to_owned());
    }
}
