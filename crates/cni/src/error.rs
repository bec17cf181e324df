//! Why a command of CNI failed, with the codes of the specification (CNI 1.1, "Error").

use serde_json::{Value, json};

/// A failed command. The text says what to do.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub(crate) enum CniError {
    /// The configuration is of a version that this plugin does not have.
    #[error("cniVersion {found:?} is not supported: use one of 0.3.1, 0.4.0, 1.0.0 and 1.1.0")]
    Version { found: String },
    /// A command that the version of the configuration does not have.
    #[error("CNI_COMMAND={command} needs cniVersion {since} or later; the configuration has {found}")]
    TooOld { command: &'static str, since: &'static str, found: String },
    /// A key that is given and cannot be carried out.
    #[error("{0}")]
    Unsupported(String),
    /// The environment lacks a variable, or has one that cannot be right.
    #[error("{name}: {what}; the container runtime sets it")]
    Environment { name: &'static str, what: String },
    /// Standard input is no JSON, or not what is expected.
    #[error("the network configuration cannot be decoded: {0}")]
    Decode(String),
    /// A value of the configuration is wrong.
    #[error("the network configuration is wrong: {0}")]
    Config(String),
    /// A file or device that could not be used.
    #[error("{0}")]
    System(String),
    /// There is no daemon.
    #[error("{0}")]
    Away(String),
    /// The daemon is there and did not answer, or another call for the same attachment is under
    /// way.
    #[error("{0}")]
    Again(String),
    /// The daemon is there and does something else: what was asked for was not done.
    #[error("{0}")]
    Busy(String),
    /// For STATUS: no container can be added now.
    #[error("{0}")]
    NotAvailable(String),
    /// CHECK found a difference.
    #[error("{what}; delete the container's network and add it again")]
    Differs { what: String },
    /// The fabric refused.
    #[error("{0}")]
    Refused(String),
}

impl CniError {
    /// 1 to 99 are the specification's, 100 and more are this plugin's.
    pub(crate) fn code(&self) -> u32 {
        match self {
            CniError::Version { .. } | CniError::TooOld { .. } => 1,
            CniError::Unsupported(_) => 2,
            CniError::Environment { .. } => 4,
            CniError::System(_) => 5,
            CniError::Decode(_) => 6,
            CniError::Config(_) => 7,
            CniError::Away(_) | CniError::Again(_) | CniError::Busy(_) => 11,
            CniError::NotAvailable(_) => 50,
            CniError::Refused(_) => 100,
            CniError::Differs { .. } => 101,
        }
    }

    /// The error object. It is written to standard output.
    pub(crate) fn object(&self, version: &str) -> Value {
        json!({ "cniVersion": version, "code": self.code(), "msg": self.to_string() })
    }
}
