//! How a typed call ends, if not with a message: a code that all languages of gRPC know, and words.

use tombolo_ring::rpc::entry::Refusal;
use tombolo_rpc::client::CallError;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal,)*) => {
        /// The codes of gRPC, with their values there.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Code {
            $($(#[$doc])* $name = $value,)*
        }

        impl Code {
            /// The code of a number; an unknown number is [`Code::Unknown`].
            pub fn from_number(number: u32) -> Code {
                match number {
                    $($value => Code::$name,)*
                    _ => Code::Unknown,
                }
            }
        }
    };
}

codes! {
    /// The call was carried out.
    Ok = 0,
    /// The caller took it back.
    Cancelled = 1,
    /// An error without a code of its own.
    Unknown = 2,
    /// The request makes no sense, regardless of the state of the service.
    InvalidArgument = 3,
    /// Too late, or not in time.
    DeadlineExceeded = 4,
    /// What was asked for is not there.
    NotFound = 5,
    /// What was to be made is there.
    AlreadyExists = 6,
    /// The caller may not.
    PermissionDenied = 7,
    /// A queue, a quota or a memory is full.
    ResourceExhausted = 8,
    /// Not in this state of things.
    FailedPrecondition = 9,
    /// Somebody else's change came between.
    Aborted = 10,
    /// Beyond what there is.
    OutOfRange = 11,
    /// The service has no method of that name.
    Unimplemented = 12,
    /// The service is broken.
    Internal = 13,
    /// The service is not there, or ending.
    Unavailable = 14,
    /// Bytes were lost or spoiled.
    DataLoss = 15,
    /// Who calls is not known.
    Unauthenticated = 16,
}

/// Why a method did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code:?}: {message}")]
pub struct Status {
    code: Code,
    message: String,
}

impl Status {
    /// A status; [`Code::Ok`] is none, and becomes [`Code::Unknown`].
    pub fn new(code: Code, message: impl Into<String>) -> Status {
        let code = if code == Code::Ok { Code::Unknown } else { code };
        Status { code, message: message.into() }
    }

    /// The code; never [`Code::Ok`].
    pub fn code(&self) -> Code {
        self.code
    }

    /// What the service says.
    pub fn message(&self) -> &str {
        &self.message
    }
}

/// The code that fits how a call ended.
pub(crate) fn code_of(error: &CallError) -> Code {
    match error {
        CallError::DeadlineExceeded | CallError::Late | CallError::Expired | CallError::Timeout => {
            Code::DeadlineExceeded
        }
        CallError::Refused(Refusal::Stopping) | CallError::ProviderGone => Code::Unavailable,
        CallError::Refused(_)
        | CallError::Busy(_)
        | CallError::Memory(_)
        | CallError::Share { .. }
        | CallError::ReplyTooLarge { .. } => Code::ResourceExhausted,
        CallError::Cancelled => Code::Cancelled,
        CallError::Failed | CallError::Broken(_) => Code::Internal,
        CallError::Range { .. } | CallError::TooLong { .. } => Code::OutOfRange,
        CallError::Reclaimed | CallError::ReplyMemory => Code::DataLoss,
        CallError::Unknown => Code::FailedPrecondition,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_grpc() {
        for number in 0..17 {
            assert_eq!(Code::from_number(number) as u32, number);
        }
        assert_eq!((Code::from_number(17), Code::from_number(u32::MAX)), (Code::Unknown, Code::Unknown));
        assert_eq!(Status::new(Code::Ok, "").code(), Code::Unknown);
    }
}
